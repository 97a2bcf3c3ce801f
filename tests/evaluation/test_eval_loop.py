import dataclasses
import json
import re
from statistics import fmean

import pytest
import torch
from transformers import DynamicCache

import kvfold
from books_case import artefact
from kvfold import models
from kvfold.cli import main
from kvfold.commands.eval import SUITES
from kvfold.errors import KVFoldError
from kvfold.evaluation import compare, domains, loop, windows
from kvfold.evaluation.answer import _ended, _text, answer
from kvfold.evaluation.compare import row_of
from kvfold.evaluation.results import ResultFile
from kvfold.evaluation.suites import KNOWN, REGISTRY, Options, Prompt, make
from kvfold.evaluation.summary import summarize
from kvfold.evaluation.text import Text, load_text
from test_evaluation import break_encoding
from tiny_model import byte_tokenizer, save, tiny_llama

TOKENIZER = byte_tokenizer()
OF_RECORDS = ("math", "longbench", "infinitebench", "lm-eval")
"""Suites of records of their own: see test_eval_records."""
INFO = models.ModelInfo("tiny", "float32", "cpu", 1024, 1)


@pytest.fixture(scope="module")
def tiny():
    return tiny_llama()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", autouse=True)
def short_texts():
    """Beginnings of the built-in texts: the byte tokenizer is slow on all of them."""
    prose, code = load_text(), windows.library_source()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            windows, "load_text", lambda path=None: load_text(path) if path else Text(prose.text[:8000], "prose")
        )
        patch.setattr(windows, "library_source", lambda: Text(code.text[:8000], "code"))
        yield


@pytest.fixture
def run(capsys):
    def run(*arguments):
        capsys.readouterr()
        status = main(["eval", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def planned(tiny, names=("divergence",), methods=("kivi:recent=32,sink=0",), options=None, **how):
    options = options or Options(tokens=32, tasks=("multivalue", "aggregation"), depths=(50,))
    how = {"lengths": [600], "limit": 1, **how}
    return loop.plan(tiny, INFO, methods, make(names, TOKENIZER, options), **how)


def rows_of(tiny, out, *args, **how):
    return loop.run(tiny, TOKENIZER, INFO, planned(tiny, *args, **how), out)


# ---- answers ---------------------------------------------------------------------------------------------------------


def greedy(model, ids, count, cut):
    """With the model's own cache, in the same calls."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :cut], past_key_values=cache)
        token = model(ids[:, cut:], past_key_values=cache).logits[:, -1:].argmax(-1)
        found = [int(token)]
        while len(found) < count:
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            found.append(int(token))
    return found


def ask(model, prompt, method, chunk=32):
    cache = kvfold.fold(model, method)
    try:
        return *answer(model, TOKENIZER, prompt, cache, chunk), cache
    finally:
        kvfold.unfold(model)


def test_full_precision_answers_as_the_model_does(tiny):
    ids = torch.randint(0, 250, (1, 300), generator=torch.Generator().manual_seed(0))
    expected = greedy(tiny, ids, 12, 250)
    for chunk in (1000, 7):
        outcome, tested, _ = ask(tiny, Prompt(ids, 250, 12), "none", chunk)
        assert outcome.text == TOKENIZER.decode(expected) and outcome.new_tokens == 12 and outcome.capped
        assert tested == 50 + 12


def test_an_answer_ends_at_its_end_token_and_at_a_stop_string(tiny, monkeypatch):
    ids = torch.randint(0, 250, (1, 300), generator=torch.Generator().manual_seed(0))
    tokens = greedy(tiny, ids, 12, 250)
    at = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    monkeypatch.setattr(tiny.generation_config, "eos_token_id", tokens[at])
    outcome, _, cache = ask(tiny, Prompt(ids, 250, 12), "none")
    assert outcome.new_tokens == at + 1 and not outcome.capped and outcome.text == TOKENIZER.decode(tokens[:at])
    assert cache.get_seq_length() == 300 + at
    monkeypatch.undo()
    whole = TOKENIZER.decode(tokens)
    stop = whole.strip()[4:6]
    outcome, _, _ = ask(tiny, Prompt(ids, 250, 12, stop=(stop,)), "none")
    assert outcome.text == whole[: whole.index(stop, len(whole) - len(whole.lstrip()))] and not outcome.capped


def test_an_answer_is_cut_as_the_model_wrote_it():
    """Whatever the tokenizer is set to do with spaces before full stops."""

    class Tidy:
        def decode(self, tokens, skip_special_tokens=False, clean_up_tokenization_spaces=True):
            text = TOKENIZER.decode(tokens, skip_special_tokens=skip_special_tokens)
            return text.replace(" .", ".") if clean_up_tokenization_spaces else text

    prompt = Prompt(torch.zeros(1, 2), 1, 9, stop=(" .",))
    tokens = TOKENIZER("a b . c").input_ids
    assert _ended(Tidy(), tokens, set(), prompt) == (tokens[:5], True)
    assert _text(Tidy(), tokens[:5], set(), prompt) == "a b"
    prompt = dataclasses.replace(
        prompt, stop=("<pad>",)
    )  # special tokens end answers and are not in them, as in lm-eval
    tokens = TOKENIZER("a b<pad> c").input_ids
    assert _ended(Tidy(), tokens, set(), prompt) == (tokens[:4], True)
    assert _text(Tidy(), tokens[:4], set(), prompt) == "a b"


def test_question_and_answer_read_the_folded_cache(tiny, monkeypatch):
    """The first generated token already: a broken quantizer changes it, which a prefill of the whole prompt would hide."""
    ids = torch.randint(0, 250, (1, 400), generator=torch.Generator().manual_seed(0))
    prompt = Prompt(ids, 390, 1)
    good, tested, _ = ask(tiny, prompt, "kivi:bits=8,sink=0,recent=0")
    assert tested == 11 and good.text == ask(tiny, prompt, "none")[0].text
    break_encoding(monkeypatch)
    assert ask(tiny, prompt, "kivi:bits=8,sink=0,recent=0")[0].text != good.text


def test_tokens_that_read_nothing_packed_are_not_counted(tiny):
    ids = torch.randint(0, 250, (1, 120), generator=torch.Generator().manual_seed(0))
    assert ask(tiny, Prompt(ids, 100, 8), "kivi")[1] == 0  # 32 + 96 + 32 tokens until something is packed
    outcome, tested, _ = ask(tiny, Prompt(ids, 100, 48), "kivi")
    # the last token is not read; the first that finds something packed comes after the 160th
    assert outcome.new_tokens == 48 and tested == 120 + 48 - 1 - 160


def test_rows_say_what_attended_and_what_encoded(tiny, tmp_path, monkeypatch):
    from kvfold.engines.transformers import layer
    from kvfold.plan import choose_kernel

    (file,) = rows_of(tiny, tmp_path / "a")
    assert {(row.kernel, row.encoder) for row in file.rows.values()} == {("cpu", "torch")}
    insisted = lambda method, spec, device, name, dtype: choose_kernel(method, spec, device, "reference", dtype)  # noqa: E731
    monkeypatch.setattr(layer, "choose_kernel", insisted)
    (file,) = rows_of(tiny, tmp_path / "b")
    assert {row.kernel for row in file.rows.values()} == {"reference"}


# ---- the loop --------------------------------------------------------------------------------------------------------


def test_every_suite_makes_a_row_per_item_and_method(tiny, tmp_path):
    names = [name for name in REGISTRY if name not in OF_RECORDS]
    problem = {"question": "Ann has 3 eggs and " + "then again " * 40 + "buys 4. How many?", "answer": "#### 7"}
    (tmp_path / "problems").write_text(json.dumps(problem) + "\n")
    options = Options(
        tokens=32, tasks=("multivalue", "aggregation"), depths=(50,), data=str(tmp_path / "problems"), new_tokens=9
    )
    found = rows_of(tiny, tmp_path, names, limit=1, options=options)
    assert [file.settings.suite for file in found] == names
    for file in found:
        by_method = {}
        for row in file.rows.values():
            by_method.setdefault(row.method, []).append(row)
            assert row.tested > 0 and row.read >= row.tested and row.seconds > 0
            # pairs are asked for by the command compare alone
            asked = {m.name for m in REGISTRY[file.settings.suite].measures if not m.name.startswith("pairs_")}
            assert set(row.scores) == (asked - {"exact"} if row.task in ("prose", "code") else asked)
            assert all(value is not None for value in row.scores.values())
            assert row.cache_bytes > 0 and row.full_cache_bytes > 0
        none, kivi = by_method["none"], by_method["kivi:sink=0,recent=32"]
        assert len(none) == len(kivi) and [r.prompt_sha256 for r in none] == [r.prompt_sha256 for r in kivi]
        assert all(2 < row.effective_bits < 3.5 for row in kivi) and kivi[0].cache_bytes < none[0].cache_bytes
    rows = list(found[0].rows.values())
    assert all(row.scores["kld"] < 1e-6 and row.scores["top5"] == 1 for row in rows if row.method == "none")
    assert all(row.scores["kld"] > 1e-3 and len(row.series["kld"]) == 8 for row in rows if row.method != "none")
    assert ResultFile.read(next(tmp_path.glob("divergence-*.jsonl"))).settings.windows == (0, 32)


def test_rows_of_retrieval_say_what_came_of_each_question(tiny, tmp_path):
    (file,) = rows_of(tiny, tmp_path, ["retrieval"], options=Options(tokens=100), lengths=[400], limit=2)
    assert len(file.rows) == 4
    for row in ResultFile.read(file.path).rows.values():
        window = windows.retrieval_window(TOKENIZER, 400, 100, int(row.item[-1]))
        asked = row.questions
        assert set(asked) == {"place", "age", "exact", "nll"} and {len(column) for column in asked.values()} == {
            len(window.answers)
        }
        assert asked["place"] == list(window.listed) and row.prefilled == window.prefilled
        for place, age, (first, _) in zip(asked["place"], asked["age"], window.answers, strict=True):
            assert place + age == window.prefilled + 1 + first
        assert row.scores["exact"] == pytest.approx(fmean(asked["exact"])) and set(asked["exact"]) <= {0.0, 1.0}
        tokens = [stop - first for first, stop in window.answers]
        mean = sum(nll * n for nll, n in zip(asked["nll"], tokens, strict=True)) / sum(tokens)
        assert row.scores["nll"] == pytest.approx(mean)


def test_rows_of_compare_and_domains_are_those_of_the_commands(tiny, tmp_path):
    """The commands are the same suites in another schema."""
    how = {"lengths": [320, 400], "limit": 1, "methods": ["kivi"], "options": Options(tokens=64, new_tokens=4)}
    by_suite = {
        file.settings.suite: file.rows.values() for file in rows_of(tiny, tmp_path, ["compare", "domains"], **how)
    }
    text = windows.load_text()
    made = compare(tiny, TOKENIZER, INFO, ["none", "kivi"], text, prefix=[320, 400], tokens=64, new_tokens=4, pairs=0)
    assert [dataclasses.replace(row_of(row), **SPEEDS) for row in by_suite["compare"]] == [
        dataclasses.replace(row, **SPEEDS) for row in made.rows
    ]
    pieces = windows.make_windows(TOKENIZER, windows.load_texts(["prose", "code", "retrieval"], {}), [320, 400], 64, 1)
    _, rows = domains.run(tiny, INFO, ["none", "kivi"], pieces)
    found = {
        (row.method, row.task, row.length): (row.scores["kld"], row.scores.get("exact")) for row in by_suite["domains"]
    }
    assert found == {(row.method, row.domain, row.prefix): (row.kld, row.exact) for row in rows}
    with pytest.raises(KVFoldError, match="seeds: 2; windows of domains"):
        planned(tiny, ["domains"], seeds=2)


SPEEDS = dict.fromkeys(("seconds", "prefill_tokens_per_s", "decode_tokens_per_s"), 0.0)


def test_a_stopped_run_goes_on_and_a_larger_one_takes_the_rows_over(tiny, tmp_path):
    class Killed(Exception):
        pass

    def kill(suite, row, done, total):
        if done == 3:
            raise Killed

    plan = planned(tiny, ["ppl"], limit=2)
    with pytest.raises(Killed):
        loop.run(tiny, TOKENIZER, INFO, plan, tmp_path, on_row=kill)
    seen = []
    (file,) = loop.run(
        tiny, TOKENIZER, INFO, plan, tmp_path, on_start=lambda *a: seen.append(a), on_row=lambda *a: seen.append(a[2])
    )
    assert seen == [(3, 8), 4, 5, 6, 7, 8] and [row.run for row in file.rows.values()] == [0] * 3 + [1] * 5
    seen.clear()
    more = planned(tiny, ["ppl"], methods=["kivi:recent=32,sink=0", "squat:recent=32,sink=0"], limit=3)
    loop.run(tiny, TOKENIZER, INFO, more, tmp_path, on_start=lambda *a: seen.append(a))
    assert seen == [(8, 18)] and len(list(tmp_path.glob("*.jsonl"))) == 1
    seen.clear()
    loop.run(
        tiny, TOKENIZER, INFO, more, tmp_path, on_start=lambda *a: seen.append(a), on_row=lambda *a: seen.append(a)
    )
    assert seen == [(18, 18)]


def test_an_artefact_that_changed_under_its_name_is_refused(tiny, tmp_path):
    config = tiny.config
    shape = (tmp_path / "a.safetensors", config.num_key_value_heads, 64, config.num_hidden_layers)
    method = artefact("vqllm:sink=0,recent=32", *shape, config=config)
    plan = planned(tiny, ["ppl"], methods=[method], limit=1)
    (file,) = loop.run(tiny, TOKENIZER, INFO, plan, tmp_path / "rows")
    assert list(file.runs[0]["artefacts"]) == [str(shape[0])]
    loop.run(tiny, TOKENIZER, INFO, planned(tiny, ["ppl"], methods=[method], limit=2), tmp_path / "rows")
    assert artefact("vqllm:sink=0,recent=32", *shape, config=config, seed=1) == method
    with pytest.raises(
        KVFoldError, match=r"^artefact: .*a\.safetensors is another \(\w+\) than when ppl-\w+\.jsonl got rows"
    ):
        loop.run(tiny, TOKENIZER, INFO, plan, tmp_path / "rows")
    others = planned(tiny, ["ppl"], methods=["kivi:recent=32,sink=0"], limit=1)
    loop.run(tiny, TOKENIZER, INFO, others, tmp_path / "rows")


def test_rows_do_not_depend_on_what_else_is_run(tiny, tmp_path):
    (alone,) = rows_of(tiny, tmp_path / "a", ["divergence"], limit=1)
    (among,) = rows_of(
        tiny, tmp_path / "b", ["divergence"], ["squat:recent=32,sink=0", "kivi:recent=32,sink=0"], limit=2
    )
    for key, row in alone.rows.items():
        assert among.rows[key].scores == row.scores


def test_a_broken_quantizer_ruins_scored_and_generated_suites(tiny, tmp_path, monkeypatch):
    names, methods = ["divergence", "code"], ["kivi:bits=8,recent=32,sink=0"]
    how = {"limit": 2, "options": Options(tokens=32, new_tokens=2)}
    good = rows_of(tiny, tmp_path / "good", names, methods, **how)
    break_encoding(monkeypatch)
    bad = rows_of(tiny, tmp_path / "bad", names, methods, **how)
    kld = [[c.estimates["kld"].mean for c in summarize(f[0]) if c.method != "none"] for f in (good, bad)]
    assert min(kld[1]) > 50 * max(kld[0])
    for file, same in ((good[1], True), (bad[1], False)):
        answers = {}
        for row in file.rows.values():
            answers.setdefault(row.item, set()).add(row.answer)
        assert all(len(found) == 1 for found in answers.values()) is same


def test_unequal_windows_are_refused_unless_asked_for(tiny, tmp_path):
    with pytest.raises(
        KVFoldError, match=r"^methods: kivi keeps 32 \+ 96 .* squat:recent=32 32 \+ 32; .*--own-windows"
    ):
        planned(tiny, methods=["kivi", "squat:recent=32"])
    assert planned(tiny, methods=["kivi", "squat:recent=32"], own_windows=True).windows is None
    assert planned(tiny, methods=["kivi", "squat"]).windows == (32, 96)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"limit": 0}, "^limit: 0; give at least 1"),
        ({"seeds": 0}, "^seeds: 0"),
        ({"chunk": 0}, "^chunk: 0"),
        ({"lengths": [63]}, "^lengths: 63; give at least 64"),
        ({"lengths": [2048]}, "^lengths: 2048 is beyond the model's context of 1024"),
        ({"names": ["retrieval"], "lengths": [64]}, "^prefix: 64 tokens hold no pair of the retrieval text"),
        ({"lengths": [1020]}, "^lengths: divergence's .* beyond the model's context of 1024; give smaller --lengths"),
    ],
)
def test_plans_that_cannot_be_run_are_refused(tiny, how, says):
    with pytest.raises(KVFoldError, match=says):
        planned(tiny, **how)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_means_and_verdicts_and_goes_on(run, folder, tmp_path):
    arguments = [
        "--model",
        folder,
        "--methods",
        "kivi:recent=32,sink=0",
        "--suite",
        "ppl",
        "needle",
        "--lengths",
        "600",
    ]
    arguments += ["--depths", "50", "--limit", "2", "--tokens", "32", "--out", str(tmp_path / "r")]
    status, out, err = run(*arguments)
    assert status == 0, err
    assert "kvfold: [1/12] ppl prose/600/0.0: none: nll" in err and "too few items" in out
    assert re.search(r"prose +600 +none", out) and "windows: 0 + 32 tokens" in out and "ppl against none" in out
    status, text, err = run(*arguments, "--json", "-")
    assert status == 0 and "12 of 12 rows taken over" in err
    result = json.loads(text)
    assert {cell["suite"] for cell in result["cells"]} == {"ppl", "needle"} and len(result["settings"]) == 2
    (cell,) = (c for c in result["cells"] if c["task"] == "code" and c["method"] != "none")
    assert cell["differences"]["nll"]["verdict"] == "too few items" and cell["items"] == 2
    assert result["baseline"] == "none" and len(result["runs"]) == 2


def test_the_command_says_what_is_not_compared_and_what_an_interrupt_keeps(run, folder, tmp_path, monkeypatch):
    arguments = [
        "--model",
        folder,
        "--methods",
        "kivi:recent=32,sink=0",
        "--suite",
        "ppl",
        "--lengths",
        "400",
        "--limit",
        "1",
    ]
    arguments += ["--out", str(tmp_path), "--tokens"]
    assert run(*arguments, "32")[0] == 0
    status, out, _ = run(*arguments, "48")
    (line,) = (line for line in out.splitlines() if "not compared" in line)
    assert status == 0 and re.fullmatch(r"not compared with ppl-\w{8}\.jsonl: options tokens 48 and 32", line)
    measure = loop.measure

    def interrupted(model, tokenizer, suite, group, *args):
        if group[0].item.task == "code":
            raise KeyboardInterrupt
        return measure(model, tokenizer, suite, group, *args)

    monkeypatch.setattr(loop, "measure", interrupted)
    status, out, err = run(*arguments, "64")
    assert status == 130 and "2 of 4 rows are kept; the same command goes on from there" in err
    monkeypatch.undo()
    (tmp_path / "ppl-mine.jsonl").write_text("notes\n")
    status, out, err = run(*arguments, "64")
    assert status == 0 and "2 of 4 rows taken over" in err
    assert "not compared with ppl-mine.jsonl: results: line 1 of" in out


def test_the_command_says_where_nothing_was_tested(run, folder, tmp_path):
    arguments = ["--model", folder, "--methods", "kivi", "--suite", "ppl", "--lengths", "64", "--limit", "1"]
    status, out, err = run(*arguments, "--tokens", "32", "--out", str(tmp_path))
    assert status == 0, err
    assert "not tested" in out and "in 1 of 1 items no token read anything packed" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "mmlu"], "suite: 'mmlu' is unknown; known: divergence"),
        (["--suite", "gsm8k"], "data: gsm8k needs its records"),
        (["--data", "x.jsonl"], "data: none of the suites divergence uses it; it is for ruler, gsm8k, math"),
        (["--suite", "paper:kivi"], "data: paper:kivi needs its records"),
        (["--suite", "lm-eval:"], "suite: 'lm-eval:' is unknown"),
        (
            ["--tasks", "qasper"],
            "tasks: none of the suites divergence uses it; it is for ruler, longbench, infinitebench",
        ),
        (["--shots", "2"], "shots: none of the suites"),
        (["--depths", "101"], "depths: none of the suites divergence uses it; it is for needle"),
        (["--text", "x.txt"], "text: 'x.txt' is not NAME=FILE"),
        (["--text", "a=/nowhere/x.txt"], "text: cannot read '/nowhere/x.txt'"),
        (["--methods", "abacus"], "abacus"),
        (["--baseline", "abacus"], "abacus"),
        (["--tokens", "3"], "tokens: 3; give at least 32"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(run, folder, tmp_path, arguments, says):
    status, out, err = run("--model", folder, "--lengths", "600", "--out", str(tmp_path / "r"), *arguments)
    (line,) = (line for line in err.splitlines() if "loading" not in line)
    assert (status, out) == (2, "") and line.startswith("kvfold: error: ") and says in line
    assert not list(tmp_path.glob("r/*"))


def test_help_names_every_suite():
    assert SUITES == KNOWN
