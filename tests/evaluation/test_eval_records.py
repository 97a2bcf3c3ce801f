"""Suites over records of published benchmarks: small files of the real data sets' schemas."""

import itertools
import json

import pytest
from hypothesis import given, settings, strategies

from kvfold.cli import main
from kvfold.errors import KVFoldError
from kvfold.evaluation.suites import PAPERS, Options, Outcome, infinitebench, longbench, make, metrics
from kvfold.evaluation.suites.base import answers_of
from kvfold.evaluation.suites.lm_tasks import LmEval, _main
from kvfold.evaluation.suites.math_problems import boxed, number, plain, same
from kvfold.evaluation.summary import average
from kvfold.evaluation.windows import load_domain
from test_evaluation import break_encoding
from tiny_model import byte_tokenizer, save

TOKENIZER = byte_tokenizer()
FILLER = "The quick brown fox jumps over the lazy dog and sees that nobody watches. " * 12
GOOD = "kivi:bits=8,sink=0,recent=0"


def jsonl(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def long_record(task, i=0):
    """As LongBench's files have them."""
    return {
        "input": f"What does it see, {i}?",
        "context": FILLER,
        "answers": ["the fox", "nobody"],
        "length": 168,
        "dataset": task,
        "language": "en",
        "all_classes": ["the fox", "a dog"] if task == "trec" else None,
        "_id": f"{task}{i}",
    }


def infinite_record(task, i=0):
    """As InfiniteBench's files have them."""
    held = {"id": i, "context": FILLER, "input": f"What is it, {i}?", "answer": ["31"], "options": []}
    if infinitebench.TASKS[task].options:
        held |= {"options": ["fox", "dog", "cat", "hen"], "answer": ["dog"]}
    return held


@pytest.fixture
def data(tmp_path):
    """A folder with two records of every task."""
    for task in longbench.TASKS:
        jsonl(tmp_path / "data" / f"{task}.jsonl", [long_record(task, i) for i in range(2)])
    for task in infinitebench.TASKS:
        jsonl(tmp_path / "data" / f"{task}.jsonl", [infinite_record(task, i) for i in range(2)])
    jsonl(
        tmp_path / "data" / "math.jsonl",
        [{"problem": "What is 1/2 of 3?", "solution": "It is $\\boxed{\\frac{3}{2}}$."}],
    )
    jsonl(tmp_path / "data" / "gsm8k.jsonl", [{"question": "1+1?", "answer": "#### 2"}])
    jsonl(
        tmp_path / "data" / "gsm8k-train.jsonl", [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(6)]
    )
    return str(tmp_path / "data")


def suite(name, **options):
    (found,) = make([name], TOKENIZER, Options(**options))
    return found


def text_of(prompt):
    return TOKENIZER.decode(prompt.ids[0])


@pytest.mark.parametrize("name", ["longbench", "infinitebench"])
@pytest.mark.parametrize("raw", [False, True], ids=["chat", "plain"])
def test_every_task_asks_within_the_length_and_cuts_before_the_question(data, name, raw):
    some = suite(name, data=data, raw=raw)
    items = some.items([4000], 5, 1)
    assert len(items) == 2 * len(some.table) and {item.task for item in items} == set(some.table)
    for item in items:
        prompt, task = some.prompt(item), some.table[item.task]
        held = text_of(prompt)
        assert FILLER.strip() in held and held.endswith(task.lead or "")
        assert prompt.new_tokens == task.new_tokens and 0 < prompt.prefilled < prompt.ids.shape[1]
        assert prompt.ids.shape[1] + prompt.new_tokens <= item.length
        before = TOKENIZER.decode(prompt.ids[0, : prompt.prefilled])
        assert task.plain or (f"it, {item.index}" not in before and f"see, {item.index}" not in before)


def test_examples_end_before_what_is_asked(data):
    """As in LongBench, whose contexts end without an end of line."""
    some = suite("longbench", data=data, tasks=("trec", "triviaqa", "samsum"))
    for item in some.items([4000], 1, 1):
        assert f"{FILLER}\n{'' if item.task == 'trec' else chr(10)}What does it see" in text_of(some.prompt(item))


def test_lines_of_json_end_where_lines_of_json_end(tmp_path):
    record = {**long_record("lcc"), "context": f"one\u2028two\x85three\x0c{FILLER}"}
    held = tmp_path / "lcc.jsonl"
    held.write_text(json.dumps(record, ensure_ascii=False) + "\n\n", encoding="utf-8")
    some = suite("longbench", data=str(held), tasks=("lcc",))
    assert some.by_task["lcc"] == [record]
    assert "one\u2028two" in load_domain("lcc", str(held)).text


@pytest.mark.parametrize("held", [[], "", [" "], [None], {"text": ["x"]}, True], ids=str)
def test_records_without_an_answer_are_refused(tmp_path, held):
    """Before a model reads one: of a blank answer each would be right, of SQuAD's objects none."""
    with pytest.raises(KVFoldError, match=r"^data: .*(has no answers but|are no answers; give a text or a number)"):
        held_in = jsonl(tmp_path / "a" / "q.jsonl", [{**long_record("lcc"), "answers": held}])
        suite("longbench", data=held_in, tasks=("lcc",))
    with pytest.raises(KVFoldError, match=r"^data: .*(has no answers but|are no answers; give a text or a number)"):
        record = {"question": "?", "context": "c", "answers": held}
        suite("ruler", tasks=("qa",), data=jsonl(tmp_path / "a" / "r.jsonl", [record]))
    assert answers_of(["", "fox", 31]) == ("fox", "31")


@pytest.mark.parametrize("name", ["longbench", "infinitebench"])
def test_what_is_too_long_loses_its_middle(data, name):
    some = suite(name, data=data)
    for task in some.table:
        length = some.table[task].new_tokens + 700
        (item,) = (item for item in some.items([length], 1, 1) if item.task == task)
        prompt = some.prompt(item)
        assert length - some.table[task].new_tokens - 20 <= prompt.ids.shape[1] <= length - some.table[task].new_tokens
        assert some.table[task].begin.strip() in text_of(prompt) and FILLER.strip() not in text_of(prompt)


def test_a_right_answer_has_full_marks_and_a_wrong_one_none(data):
    right = {"trec": "the fox", "passage_count": "nobody 4"}
    for name in ("longbench", "infinitebench"):
        some = suite(name, data=data)
        for item in some.items([4000], 1, 1):
            prompt = some.prompt(item)
            given = right.get(item.task, prompt.expected[0])
            if item.task in ("passage_count", "passage_retrieval_en"):
                continue  # of numbers: below
            assert some.graded(item, prompt, Outcome(text=f"{given}\nmore")).get("score") > 0.3, item.task
            wrong = some.graded(item, prompt, Outcome(text="@ %\n"))
            assert wrong["score"] < 0.3 and set(wrong) == {"score", "tokens"}, item.task


def test_grades():
    assert metrics.f1("The Fox!", "fox") == 1 and metrics.f1("a fox runs", "fox") == pytest.approx(2 / 3)
    assert metrics.f1("dog", "fox") == 0 and metrics.f1("\u72d0\u72f8", "\u72d0") == pytest.approx(2 / 3)
    assert metrics.rouge_l("the fox sees", "the dog sees") == pytest.approx(2 / 3) and metrics.rouge_l("", "a") == 0
    assert metrics.among_classes("It is a city", "city", ["city", "state"]) == 1
    assert metrics.among_classes("city or state", "city", ["city", "state"]) == 0.5
    assert metrics.among_classes("other city", "other city", ["city", "other city"]) == 1
    assert metrics.among_classes("state", "city", ["city", "state"]) == 0
    assert metrics.numbers_right("Paragraph 12", "Paragraph 12") == 1 and metrics.numbers_right("3 or 4", "4") == 0.5
    assert metrics.numbers_right("none", "4") == 0
    assert metrics.first_number("31.0 and 7", "31") == 1 and metrics.first_number("x", "31") == 0
    assert metrics.similar_line("```\n# no\nx = 1\ny = 2", "x = 1") == 1
    assert metrics.choice("The answer is B.", "B") == 1 and metrics.choice("Because C", "B") == 0
    assert metrics.choice("A", "A") == 1
    assert metrics.f1("\u5317\u4eac\u3002", "\u5317\u4eac") == 1  # a full stop is no word
    assert metrics.numbers_right("Paragraph-7", "Paragraph 7") == 1
    assert metrics.first_digits("is 0022.", "0022") == 1 and metrics.first_digits("is 22", "0022") == 0
    assert metrics.first_digits("00220022", "0022") == 0  # InfiniteBench takes the first run of digits whole


def test_math_compares_what_is_in_the_box():
    assert boxed(r"so \boxed{1} or \boxed{\frac{3}{2}}.") == r"\frac{3}{2}" and boxed("none") is None
    assert boxed(r"\boxed{1") is None and boxed(r"\boxed{1} then \boxed{") is None
    assert boxed(r"\boxed{\left\{x\right.}") == r"\left\{x\right." and boxed(r"\boxed {5}") == boxed(r"\fbox{5}") == "5"
    assert boxed(r"So $\boxed 5$.") == "5" and boxed(r"\boxed{5}, in \boxed form") == "5"
    for group in MATH_ALIKE:
        for a in group:
            assert all(same(a, b) for b in group), (a, [plain(b) for b in group])
    for a, b in itertools.combinations([group[0] for group in MATH_ALIKE], 2):
        assert not same(a, b), (a, b)


MATH_ALIKE = (  # every way of writing is another's, none is that of another line
    (r"\dfrac{3}{2}", r"\frac32", r"\frac 32", "3/2", "1.5", r"1\frac{1}{2}", "$1.50$", r"\cfrac{3}{2}", "+1.5"),
    (r"-\frac{3}{8}", r"\frac{-3}{8}", "-.375", "-3/8", "\u22123/8"),
    ("11,\\! 111,\\! 100", "11,111,100", "11111100", "11{,}111{,}100"),
    (r"\$18.90", "18.9", r"18.90 \text{ dollars}"),
    (r"864 \mbox{ inches}^2", "864", r"864^\circ", r"864\%", "864\u00b0"),
    (r"\left( 1, 2 \right)", "(1,2)"),
    ("(2,1)",),
    ("[1,2]", r"x \in [1, 2]"),
    ("(1,100)",),
    ("1100", "1,100"),
    (r"\text{(C)}", "(C)", "C"),
    (r"\text{(B)}", r"\textbf{(B)}"),
    (r"\text{Evelyn}", "Evelyn", r"\text{ evelyn}."),
    (r"\text{odd}",),
    ("4210_{5}", "4210_5"),
    ("4210",),
    (r"11\sqrt2", r"11 \sqrt{2}"),
    ("y = 2x + 3", "2x+3"),
    (r"\begin{pmatrix} 1/3 \\ 2 \end{pmatrix}", r"\begin{pmatrix}\frac{1}{3}\\2\end{pmatrix}"),
    (r"-\frac{\pi}{6}", r"-\pi/6"),
    (r"\frac{3\sqrt{2}}{4}", r"3\sqrt{2}/4", r"\frac{3\sqrt{2}}4"),
    (r"\frac{x}{y}", "x/y"),
    (r"\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}", r"\begin{bmatrix}-\frac{1}{3}\\2\end{bmatrix}"),
    (r"\frac{1}{0}",),
)


NUMBERS = strategies.fractions(max_denominator=999).filter(lambda value: abs(value) < 10**9)


@given(NUMBERS, NUMBERS)
@settings(max_examples=60, deadline=None)
def test_a_number_of_math_is_itself_however_it_is_written(one, other):
    top, below = abs(one.numerator), one.denominator
    sign = "-" if one < 0 else ""
    whole, left = divmod(top, below)
    ways = [
        f"{sign}\\frac{{{top}}}{{{below}}}",
        f"{sign}{top}/{below}",
        rf"\dfrac{{{sign}{top}}}{{{below}}}",
        f"${one}$",
    ]
    ways += [f"{sign}{whole}\\frac{{{left}}}{{{below}}}"] if whole else []
    ways += [f"{sign}{top:,}", f"{sign}{top}.0", f"{sign}{top} \\text{{ cm}}", f"x = {sign}{top}"] if below == 1 else []
    for way in ways:
        assert boxed(f"So \\boxed{{{way}}}.") == way and number(plain(way)) == one, way
        assert same(way, f"\\frac{{{other.numerator}}}{{{other.denominator}}}") == (one == other), way


@given(strategies.text("ab {}\\\\$1/,.()^_", max_size=20))
@settings(max_examples=80, deadline=None)
def test_any_answer_to_math_is_itself_and_none_stops_it(text):
    assert same(text, text) and same(plain(text), text) >= (plain(plain(text)) == plain(text))
    assert boxed(text) is None or isinstance(boxed(f"\\boxed{{{text}}}"), str | None)


def test_math_grades_its_answers(data):
    some = suite("math", data=data)
    prompt = some.prompt(some.items([], 5, 1)[0])
    assert some.grade(prompt, Outcome(text=r"Thus \boxed{\dfrac32}."))["exact"] == 1
    assert some.grade(prompt, Outcome(text=r"Thus \boxed{3}."))["exact"] == 0
    assert some.grade(prompt, Outcome(text="3/2"))["exact"] == 0


def test_data_that_are_not_there_are_told_of(tmp_path, data):
    with pytest.raises(
        KVFoldError, match=r"^data: longbench needs its records; get them from https://huggingface.co/.*LongBench"
    ):
        suite("longbench")
    (tmp_path / "data" / "qasper.jsonl").unlink()
    with pytest.raises(KVFoldError, match=r"has no qasper.jsonl, which longbench needs; get it from https"):
        suite("longbench", data=data)
    mixed = jsonl(tmp_path / "mixed" / "two.jsonl", [long_record("trec"), long_record("lcc")])
    assert {i.task for i in suite("longbench", data=mixed, tasks=("lcc",)).items([4000], 5, 1)} == {"lcc"}
    with pytest.raises(KVFoldError, match=r"has no records of qasper, which longbench needs; it has lcc, trec"):
        suite("longbench", data=mixed, tasks=("qasper",))
    with pytest.raises(KVFoldError, match=r"^data: line 1 of .* has no context"):
        suite("longbench", data=jsonl(tmp_path / "bad" / "lcc.jsonl", [{"input": "", "answers": []}]), tasks=("lcc",))
    with pytest.raises(KVFoldError, match=r"^tasks: 'x' is no task of infinitebench; allowed: passkey"):
        suite("infinitebench", data=data, tasks=("x",))
    record = {**infinite_record("code_debug"), "answer": ["cow"]}
    with pytest.raises(KVFoldError, match=r"^data: the answer 'cow' is none of the record's options"):
        suite("infinitebench", data=jsonl(tmp_path / "odd" / "o.jsonl", [record]), tasks=("code_debug",))


@pytest.mark.parametrize(
    ("name", "task", "record", "says"),
    [
        ("gsm8k", "", {"question": "q", "answer": 5}, "^data: answer 5 is no text"),
        ("gsm8k", "", {"question": None, "answer": "#### 5"}, "^data: question None is no text"),
        ("math", "", {"problem": 5, "answer": "5"}, "^data: problem 5 is no text"),
        ("math", "", {"problem": "p", "answer": None}, "^data: 'p' has neither an answer nor"),
        ("math", "", {"problem": "p", "answer": ""}, "^data: 'p' has neither an answer nor"),
        ("longbench", "qasper", {**long_record("qasper"), "context": None}, "^data: record 0 of qasper has no context"),
        (
            "longbench",
            "lcc",
            {**long_record("lcc"), "context": "", "input": ""},
            "^data: record 0 of lcc has no text to",
        ),
        (
            "infinitebench",
            "code_debug",
            {"input": "i", "context": "c", "answer": "A"},
            "^data: options None of a record",
        ),
    ],
)
def test_records_that_cannot_be_asked_are_refused_in_a_line(tmp_path, name, task, record, says):
    """None of them used to be: a traceback, or the word None was asked for, and expected."""
    with pytest.raises(KVFoldError, match=says):
        some = suite(name, data=jsonl(tmp_path / "odd" / "o.jsonl", [record]), tasks=(task,) if task else ())
        some.prompt(some.items([4000], 1, 1)[0])


def test_a_file_of_records_that_is_not_there_is_told_of_as_data(tmp_path):
    with pytest.raises(KVFoldError, match=r"^data: cannot read '.*nowhere.jsonl'"):
        suite("math", data=str(tmp_path / "nowhere.jsonl"))


def test_a_data_set_of_the_hub_is_read_by_its_package(monkeypatch):
    import datasets

    asked = []

    def load_dataset(repository, task, split):
        asked.append((repository, task, split))
        return datasets.Dataset.from_list([long_record(task)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    some = suite("longbench", data="hf:somebody/LongBench", tasks=("lcc", "trec"))
    assert asked == [("somebody/LongBench", "lcc", "test"), ("somebody/LongBench", "trec", "test")]
    assert len(some.items([4000], 5, 1)) == 2 and all(len(digest) == 64 for digest in some.texts().values())
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(KVFoldError, match=r"^data: the hub does not give lcc of a/b \(division by zero\)"):
        suite("longbench", data="hf:a/b", tasks=("lcc",))


# ---- papers ----------------------------------------------------------------------------------------------------------


def test_papers_have_their_tasks_and_their_averages(data):
    counts = {name: {what: len(weights) for what, weights in paper.averages.items()} for name, paper in PAPERS.items()}
    assert counts["paper:kivi"] == {"LongBench": 8}
    assert counts["paper:squat"] == {"lm-eval": 6, "LongBench": 8}  # its Tables 1 and 2
    assert counts["paper:commvq"] == {"LongBench": 8, "InfiniteBench": 9}  # its Tables 1 and 2
    averages = [weights for paper in PAPERS.values() for weights in paper.averages.values()]
    assert all(sum(weights.values()) == pytest.approx(1) for weights in averages)
    assert "math" in PAPERS["paper:squat"].suites  # appendix E.4; CommVQ has no such experiment
    (kivi,) = make(["paper:kivi"], TOKENIZER, Options(data=data))
    assert len(kivi.by_task) == 8
    names = [some.name for some in make(["paper:commvq"], TOKENIZER, Options(data=data))]
    assert names == ["longbench", "infinitebench", "gsm8k"]
    (gsm8k,) = make(["paper:innerq"], TOKENIZER, Options(data=data))
    assert gsm8k.shots == 5 and set(gsm8k.hashes) == {"problems", "examples"}


class OfTask:
    """A cell with one number."""

    length, method, suite = None, "kivi", "lm-eval"

    def __init__(self, task, mean):
        self.task, self.estimates = task, {"score": type("Estimate", (), {"mean": mean})}


def test_the_average_of_squat_weighs_the_halves_of_mmlu_pro():
    tasks = {"gsm8k": 1.0, "mmlu_pro_math": 1.0, "mmlu_pro_law": 0.0, "ifeval": 0.0, "gpqa_main_cot_zeroshot": 0.0}
    cells, weights = [OfTask(*pair) for pair in tasks.items()], PAPERS["paper:squat"].averages["lm-eval"]
    assert average(weights, cells, "kivi") is None
    cells += [OfTask("bbh_one", 1.0), OfTask("bbh_two", 0.0)]
    assert average(weights, cells, "kivi") == pytest.approx(0.2 + 0.1 + 0.1)
    cells[-1].estimates = {"tokens": cells[0].estimates["score"]}  # a second measure is no score
    assert average(weights, cells, "kivi") is None


# ---- lm-eval ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.mark.slow
def test_tasks_of_lm_eval_are_rows_and_a_broken_quantizer_ruins_them(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: NOTHING of kvfold[lm-eval] is tested")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    prompts = [f"{i}. {FILLER[i * 7 : i * 7 + 400]}" for i in range(4)]
    rows = [{"p": prompt, "c": [" one", " two", " six"], "g": 0, "a": "x"} for prompt in prompts]
    held = jsonl(tmp_path / "docs.jsonl", rows)
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": held}}, "test_split": "test"}
    shared |= {"doc_to_text": "{{p}}", "target_delimiter": ""}
    (tmp_path / "yaml").mkdir()
    choose = {
        "task": "tiny_choose",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{c}}",
        "doc_to_target": "{{g}}",
    }
    write = {"task": "tiny_write", "output_type": "generate_until", "doc_to_target": "{{a}}"}
    write["generation_kwargs"] = {"until": [], "max_gen_toks": 4, "do_sample": False}
    (tmp_path / "yaml" / "choose.yaml").write_text(json.dumps({**shared, **choose, "metric_list": [{"metric": "acc"}]}))
    (tmp_path / "yaml" / "write.yaml").write_text(
        json.dumps({**shared, **write, "metric_list": [{"metric": "exact_match"}]})
    )

    def run(out, *more):
        arguments = ["--model", folder, "--methods", GOOD, "--own-windows", "--raw", "--data", str(tmp_path / "yaml")]
        arguments += ["--suite", "lm-eval:tiny_choose", "lm-eval:tiny_write", "--limit", "3", "--out", str(out), *more]
        status = main(["eval", *arguments])
        found = capsys.readouterr()
        assert status == 0, found.err
        (file,) = out.glob("lm-eval-*.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines() if '"method"' in line]
        return {(row["method"], row["item"]): row for row in rows}, found

    good, said = run(tmp_path / "good")
    assert len(good) == 2 * 2 * 3 and "tiny_choose" in said.out
    none = {item: row for (method, item), row in good.items() if method == "none"}
    mine = {item: row for (method, item), row in good.items() if method == GOOD}
    assert all(row["tested"] == row["read"] > 0 and 8 < row["effective_bits"] < 10 for row in mine.values())
    assert all(row["answer"] == none[item]["answer"] for item, row in mine.items())
    assert {row["scores"]["acc"] for item, row in mine.items() if "choose" in item} <= {0.0, 1.0}
    _, said = run(tmp_path / "good")
    assert "12 of 12 rows taken over" in said.err
    break_encoding(monkeypatch)
    broken, _ = run(tmp_path / "broken")
    written = [item for item in mine if "write" in item]
    assert all(broken[GOOD, item]["answer"] != none[item]["answer"] for item in written)
    assert main(["eval", "--model", folder, "--suite", "lm-eval:nothing_such", "--out", str(tmp_path / "x")]) == 2
    assert "suite: lm-eval does not give nothing_such" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def made_of(tmp_path, monkeypatch, chat=False, **fields):
    """A task of lm-eval over twelve documents with three examples drawn from others."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: NOTHING of kvfold[lm-eval] is tested")
    import datasets

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    held = jsonl(tmp_path / "rows" / "docs.jsonl", [{"p": f"Number {i} is", "a": f" {i}"} for i in range(12)])
    task = {
        "task": "tiny_shots",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": held, "train": held}},
    }
    task |= {"test_split": "test", "fewshot_split": "train", "num_fewshot": 3, "output_type": "loglikelihood"}
    task |= {"doc_to_text": "{{p}}", "doc_to_target": "{{a}}", **fields}
    (tmp_path / "rows" / "shots.yaml").write_text(json.dumps(task))
    return LmEval(TOKENIZER, ("tiny_shots",), str(tmp_path / "rows"), chat)


def test_examples_of_lm_eval_are_the_same_in_every_run(tmp_path, monkeypatch):
    """Drawn anew, no row of an earlier run, another part or another method would be of the same prompt."""
    first, second = ([some.prompt(item).ids for item in some.items([], 5, 1)] for some in (
        made_of(tmp_path, monkeypatch) for _ in range(2)
    ))  # fmt: skip
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def test_an_answer_that_a_task_begins_is_gone_on_with(tmp_path, monkeypatch):
    """``gen_prefix`` is the last message's beginning: a template that closes it would have the model answer its own answer."""
    some = made_of(tmp_path, monkeypatch, True, output_type="generate_until", gen_prefix="The number is")
    requests = some._requests[some.items([], 1, 1)[0].task, 0]
    assert requests[0].args[0].endswith("<assistant>The number is") and "Number 0" in requests[0].args[0]
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ raise_exception('no') }}")
    with pytest.raises(KVFoldError, match=r"^model: its chat template refuses a task of lm-eval \(no\); give --raw"):
        some._rendered([{"role": "user", "content": "x"}])


def test_the_score_of_a_task_is_its_accuracy_where_its_first_metric_is_a_likelihood(tmp_path, monkeypatch):
    """As lambada's, of which QJL's paper reports the accuracy."""
    metrics = [{"metric": "perplexity"}, {"metric": "acc"}]
    (task,) = made_of(tmp_path, monkeypatch, metric_list=metrics)._found.values()
    graded = task.process_results({}, [(-3.5, True)])
    assert graded == {"perplexity": -3.5, "acc": 1} and _main(task, graded) == 1
    with pytest.raises(KVFoldError, match=r"tiny_shots of lm-eval has no metric .* it has perplexity$"):
        _main(task, {"perplexity": -3.5})
