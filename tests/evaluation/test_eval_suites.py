import dataclasses
import json
import random
import re
from decimal import Decimal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvfold.errors import KVFoldError
from kvfold.evaluation.lists import FORMS
from kvfold.evaluation.suites import REGISTRY, Options, Outcome, make
from kvfold.evaluation.suites.base import Form, Haystack, Item, inserted, pieces_of
from kvfold.evaluation.suites.gsm8k import NUMBER, STRICT, number_of
from kvfold.evaluation.suites.ruler import COMMON, HOPS, TASKS, VALUES
from kvfold.evaluation.text import Text, load_text
from kvfold.evaluation.windows import library_source
from kvfold.evaluation.words import THINGS, whole
from tiny_model import byte_tokenizer

TOKENIZER = byte_tokenizer()
OF_RECORDS = ("math", "longbench", "infinitebench", "lm-eval")
"""Suites of records of their own: see test_eval_records."""
PROBLEMS = [
    {
        "question": f"Ann has {i} eggs and buys {i}. How many? ",
        "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}",
    }
    for i in range(1, 9)
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Beginnings of the built-in texts: the byte tokenizer is slow on all of them."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prose.txt").write_text(load_text().text[:20_000])
    (folder / "code.txt").write_text(library_source().text[:20_000])
    return {name: str(folder / f"{name}.txt") for name in ("prose", "code")}


def suite(name, **options):
    (found,) = make([name], TOKENIZER, Options(**options))
    return found


def text_of(prompt):
    return TOKENIZER.decode(prompt.ids[0])


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def gsm8k(tmp_path):
    data, examples = jsonl(tmp_path / "test.jsonl", PROBLEMS[:3]), jsonl(tmp_path / "train.jsonl", PROBLEMS[3:])
    return lambda **options: suite("gsm8k", **{"data": data, "examples": examples, "shots": 2, **options})


def every_suite(tmp_path, texts):
    given = {"gsm8k": {"data": jsonl(tmp_path / "p.jsonl", PROBLEMS)}, "needle": {"depths": (30,)}}
    return [suite(name, texts=texts, **given.get(name, {})) for name in REGISTRY if name not in OF_RECORDS]


NOT_DRAWN = ("compare", "domains")
"""Suites whose items depend on how many there are, and on the longest; their names say so."""


def drawn(tmp_path, texts):
    return [some for some in every_suite(tmp_path, texts) if some.name not in NOT_DRAWN]


def test_every_item_asks_the_same_however_many_there_are(tmp_path, texts):
    for some in drawn(tmp_path, texts):
        few = {item.name: item for item in some.items([1400], 1, 1)}
        many = {item.name: item for item in some.items([1300, 1400], 2, 2)}
        assert set(few) < set(many) and len(few) == len(some.items([1400], 1, 1))
        again = dataclasses.replace(some)  # nothing made yet
        for name, item in few.items():
            prompt = some.prompt(item)
            assert prompt.ids.tolist() == again.prompt(many[name]).ids.tolist()
            assert 0 < prompt.prefilled < prompt.ids.shape[1]
        assert json.dumps(some.options()) and all(len(digest) == 64 for digest in some.texts().values())


def test_prompts_have_the_length_that_was_asked_for(tmp_path, texts):
    for some in every_suite(tmp_path, texts):
        for item in some.items([1000, 1500], 1, 1):
            if item.length is None:
                continue
            prompt = some.prompt(item)
            held = prompt.ids.shape[1] if prompt.new_tokens else prompt.prefilled
            slack = 400 if some.name in ("needle", "ruler") else 80
            over = 16 if "retrieval" in (some.name, item.task) else 0  # its last line, in bytes
            assert item.length - slack <= held <= item.length + over, (some.name, item.name)


def test_items_that_are_not_drawn_say_of_how_many_they_are(texts):
    for some in (suite(name, texts=texts) for name in NOT_DRAWN):
        few, many = some.items([1000], 1, 1), some.items([800, 1000], 2, 1)
        assert {item.name for item in few}.isdisjoint(item.name for item in some.items([1000, 1200], 2, 1))
        again = dataclasses.replace(some)  # nothing made yet
        assert [some.prompt(item).ids.tolist() for item in many] == [again.prompt(item).ids.tolist() for item in many]


def test_seeds_and_indices_draw_other_items(tmp_path, texts):
    for some in drawn(tmp_path, texts):
        items = [item for item in some.items([1400], 2, 2) if item.task == some.items([1400], 1, 1)[0].task]
        assert len({tuple(some.prompt(item).ids[0].tolist()) for item in items}) == (2 if some.name == "gsm8k" else 4)


def test_the_same_tokens_are_scored_at_every_length(texts):
    some = suite("divergence", tokens=64, texts=texts)
    short, long = (some.prompt(item) for item in some.items([200, 800], 1, 1) if item.task == "prose")
    assert short.ids[0, -65:].tolist() == long.ids[0, -65:].tolist()
    assert (short.prefilled, long.prefilled) == (200, 800)


def test_a_text_that_is_too_short_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text("A short text. " * 30)
    for name in ("divergence", "ppl", "needle", "ruler", "code"):
        key = "code" if name == "code" else "novel"
        some = suite(name, texts={key: str(tmp_path / "t.txt")})
        with pytest.raises(KVFoldError, match=r"^text: .*(longer text|no lines)"):
            some.prompt(next(i for i in some.items([1400], 1, 1) if i.task != "aggregation"))


def test_a_length_that_holds_no_prompt_is_refused(texts):
    for name in ("needle", "ruler"):
        some = suite(name, texts=texts)
        for item in some.items([64], 1, 1):
            with pytest.raises(KVFoldError, match=r"^lengths: 64 tokens hold no .*; give at least \d+"):
                some.prompt(item)


# ---- hiding ----------------------------------------------------------------------------------------------------------


def test_pieces_are_the_text():
    text = "One. Two! Three?\n\nFour " + "five " * 200 + 'six." Seven'
    pieces = pieces_of(text)
    assert "".join(pieces) == text and max(map(len, pieces)) <= 400
    assert pieces[:3] == ["One. ", "Two! ", "Three?\n\n"]


def test_needles_lie_at_their_places_and_in_their_order():
    pieces = [f"s{i}. " for i in range(10)]
    found = inserted(pieces, ["B.", "A.", "C."], [0.5, 0.5, 1.0])
    assert found.split() == "s0. s1. s2. s3. s4. B. A. s5. s6. s7. s8. s9. C.".split()
    assert inserted(["no space", "here"], ["N."], [0.5]).strip() == "no space N. here"
    assert inserted([], ["N."], [0.3]).strip() == "N."


def test_a_needle_lies_at_its_depth_before_the_cut_and_only_there(texts):
    some = suite("needle", texts=texts, depths=(0, 50, 100))
    places = []
    for item in some.items([1000], 1, 1):
        prompt = some.prompt(item)
        text, (number,) = text_of(prompt), prompt.expected
        assert text.count(number) == 1
        before = TOKENIZER.decode(prompt.ids[0, : prompt.prefilled])
        assert number in before and "What is the secret number" not in before
        hay = before.index("in it.\n\n") + 8
        places.append((before.index(number) - hay) / (len(before) - hay))
    assert places[0] < 0.1 and 0.3 < places[1] < 0.7 and places[2] > 0.85


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no users') }}", "refuses a question .*no users.*; give --raw"),
        ("{{ messages[0]['content'] | upper }}", "rewrites the question; give --raw"),
    ],
)
def test_chat_templates_that_do_not_fit_are_refused(texts, template, says):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    for raw in (False, True):
        (some,) = make(["needle"], tokenizer, Options(texts=texts, raw=raw))
        (item, *_) = some.items([1000], 1, 1)
        if raw:
            assert TOKENIZER.decode(some.prompt(item).ids[0]).endswith(" is")
            continue
        with pytest.raises(KVFoldError, match=f"^model: its chat template {says}"):
            some.prompt(item)


def test_a_haystack_goes_round():
    hay = Haystack(Text("".join(f"Sentence {i}. " for i in range(30)), "t"), TOKENIZER)
    form = Form(TOKENIZER, chat=False)

    class Late:
        def randrange(self, n):
            return n - 2

    pieces = hay.fill(form, 120, Late(), lambda pieces: ("".join(pieces), "?", ""))
    assert pieces[:3] == ["Sentence 28. ", "Sentence 29. ", "Sentence 0. "]
    assert 120 - 14 < len(form.ids(form.text("".join(pieces), "?", ""))) <= 120


def test_a_haystack_fills_a_prompt_where_pieces_in_a_row_have_fewer_tokens():
    """As words of most tokenizers begin with their space: prompts of 16,384 tokens had 15,800, and each its own number."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "\u0120S"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("\u0120", "S")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    form = Form(PreTrainedTokenizerFast(tokenizer_object=made), chat=False)
    hay = Haystack(Text("".join(f"Sentence {i:03}. " for i in range(400)), "here"), form.tokenizer)
    for length in (500, 2000, 5190):
        pieces = hay.fill(form, length, random.Random(0), lambda pieces: ("".join(pieces), "?", ""))
        assert length - 14 < len(form.ids(form.text("".join(pieces), "?", ""))) <= length
    with pytest.raises(KVFoldError, match=r"^text: here has 5201 tokens, and a prompt of 5400 needs 5398"):
        hay.fill(form, 5400, random.Random(0), lambda pieces: ("".join(pieces), "?", ""))


# ---- ruler -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ruler(texts):
    def ruler(task, length=1000, **options):
        some = suite("ruler", tasks=(task,), texts=texts, **options)
        return some, some.prompt(some.items([length], 1, 1)[0])

    return ruler


def test_multikey_asks_for_one_of_many(ruler):
    _, prompt = ruler("multikey", 1400)
    text = text_of(prompt)
    pairs = dict(re.findall(r"The secret number of the (\w+) is (\d{7})\.", text))
    (key,) = re.findall(r"What is the secret number of the (\w+)", text)
    assert len(pairs) == 16 and prompt.expected == (pairs[key],)


def test_multivalue_asks_for_all_of_one_key(ruler):
    some, prompt = ruler("multivalue", 1400)
    text = text_of(prompt)
    (key,) = re.findall(rf"all {VALUES} secret numbers of the (\w+)", text)
    found = re.findall(rf"One of the secret numbers of the {key} is (\d+)\.", text)
    assert sorted(found) == sorted(prompt.expected) and len(found) == VALUES
    half = Outcome(text=", ".join(prompt.expected[:2]))
    assert some.grade(prompt, half) == {"share": 0.5, "exact": 0.0}
    assert some.grade(prompt, Outcome(text=" and ".join(prompt.expected))) == {"share": 1.0, "exact": 1.0}


def test_tracking_is_solved_by_running_the_text(ruler):
    _, prompt = ruler("tracking", 1200)
    text = text_of(prompt)
    values = {}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        values[name] = values.get(value, value)  # assigned before it is read
    (asked,) = re.findall(r"variables have the value (\d+)", text)
    assert sorted(k for k, v in values.items() if v == asked) == sorted(prompt.expected)
    assert len(prompt.expected) == HOPS + 1 and len(values) == 2 * (HOPS + 1)


def test_aggregation_is_solved_by_counting(ruler):
    _, prompt = ruler("aggregation", 1000)
    words = re.findall(r"\d+\. (\w+)", text_of(prompt))
    by_count = sorted(set(words), key=lambda w: -words.count(w))
    assert set(by_count[:COMMON]) == set(prompt.expected)
    assert words.count(by_count[COMMON - 1]) >= 3 * words.count(by_count[COMMON])


def test_qa_without_data_asks_for_the_words_that_follow(ruler):
    _, prompt = ruler("qa", 1400)
    text = " ".join(text_of(prompt).split())
    begun = text.rsplit("<assistant>", 1)[1].strip()
    assert len(begun.split()) == 6 and f"{begun} {prompt.expected[0]}" in text


def test_qa_with_data_has_the_passage_and_takes_any_answer(tmp_path, ruler):
    records = [
        {
            "question": f"Who owns house {i}?",
            "context": f"House {i} is old. " * 3 + f"Owner {i}x lives there.",
            "answers": [f"Owner {i}x", f"{i}x"],
        }
        for i in range(20)
    ]
    some, prompt = ruler("qa", 800, data=jsonl(tmp_path / "q.jsonl", records))
    text = text_of(prompt)
    assert "Owner 0x lives there" in text and 4 < text.count("Passage") < 20 and prompt.any_of
    assert some.grade(prompt, Outcome(text=" It is 0x.")) == {"share": 1.0, "exact": 1.0}
    assert some.grade(prompt, Outcome(text=" It is 10x."))["exact"] == 0
    with pytest.raises(KVFoldError, match=r"^data: its passages fill \d+ tokens, not 8000"):
        ruler("qa", 8000, data=jsonl(tmp_path / "q.jsonl", records))
    with pytest.raises(KVFoldError, match=r"^data: line 1 of .* has no answers"):
        suite("ruler", data=jsonl(tmp_path / "q.jsonl", [{"question": "?", "context": "c"}]))


def test_things_are_different_words():
    assert len(set(THINGS)) == len(THINGS) > 100 and all(word.isalpha() for word in THINGS)
    assert (
        whole("123", "it is 123.")
        and not whole("123", "1234")
        and not whole("cat", "catalog")
        and whole("Cat", "a cat")
        and whole("so the", "And so\nthe end")  # a copy of a text whose lines are broken
        and not whole("", "anything")
    )


# ---- gsm8k -----------------------------------------------------------------------------------------------------------


def test_gsm8k_shows_solved_examples_and_cuts_before_the_problem(gsm8k):
    some = gsm8k()
    items = some.items([1024], 10, 2)
    assert len(items) == 6 and items[0].length is None
    prompt = some.prompt(items[1])
    text = text_of(prompt)
    assert text.count("Question:") == 3 and "<<" not in text and text.endswith("Answer:")
    assert prompt.expected == ("4",)
    before = TOKENIZER.decode(prompt.ids[0, : prompt.prefilled])
    assert before.count("Question:") == 2 and "Ann has 2 eggs" not in before
    shown = [re.findall(r"Ann has (\d) eggs", text_of(some.prompt(item)))[:-1] for item in items]
    assert shown[0] == shown[1] == shown[2] and shown[3] == shown[4]


def test_gsm8k_is_graded_strictly_and_flexibly(gsm8k):
    some = gsm8k()
    prompt = dataclasses.replace(some.prompt(some.items([], 1, 1)[0]), expected=("1200",))
    for answer, strict, flexible in (
        (" She has $1,200.\n#### 1,200", 1, 1),
        (" so it is 1200.00.", 0, 1),
        (" #### 12\nthen 1200", 0, 1),
        (" #### 1200\nQ 5", 1, 0),
        (" no idea", 0, 0),
    ):
        grade = some.grade(prompt, Outcome(text=answer, new_tokens=7, capped=True))
        assert (grade["strict"], grade["flexible"]) == (strict, flexible), answer
        assert (grade["tokens"], grade["capped"]) == (7, 1)


def test_numbers_are_compared_as_numbers():
    for text, number in (
        ("#### -3", "-3"),
        ("#### 1,000.50", "1000.5"),
        ("#### $7.", "7"),
        ("####0", "0"),
        ("#### -$3", "-3"),
        ("#### $-.50", "-0.5"),
        ("#### \u22123", "-3"),
        ("#### -0.0", "0"),
        ("#### 007", "7"),
        ("# 5", None),
    ):
        assert number_of(STRICT, text) == number, text
    assert number_of(NUMBER, "6, then -4.", last=True) == "-4" and number_of(NUMBER, "none") is None
    assert number_of(NUMBER, "half, .5", last=True) == "0.5" and number_of(NUMBER, "wait...5", last=True) == "5"


@given(st.decimals(allow_nan=False, min_value=-(10**9), max_value=10**9, places=3))
@settings(max_examples=60, deadline=None)
def test_a_number_is_itself_however_it_is_written(value):
    plain = number_of(STRICT, f"#### {value}")
    assert Decimal(plain) == value
    for way in (f"{value:,}", f"${value}", f"{value}.", f"{value}00", f"{value:,} apples", f"{value}**"):
        assert number_of(STRICT, f"9 so\n#### {way}\nQ 7") == plain, way
        assert number_of(NUMBER, f"9 and 8 make {way}", last=True) == plain, way


def test_gsm8k_without_examples_asks_for_steps_and_bad_files_are_refused(tmp_path, gsm8k):
    some = gsm8k(examples=None, shots=None)
    assert len(some.items([], 3, 4)) == 3  # seeds draw examples: without them they would ask the same again
    assert "step by step" in text_of(some.prompt(some.items([], 1, 1)[0]))
    with pytest.raises(KVFoldError, match=r"^shots: 9 of 5 examples"):
        gsm8k(shots=9)
    with pytest.raises(KVFoldError, match=r"^shots: 3 of 2 examples that are not among the problems"):
        gsm8k(examples=jsonl(tmp_path / "both.jsonl", PROBLEMS[:5]), shots=3)  # a problem's answer would be shown
    with pytest.raises(KVFoldError, match=r"^data: gsm8k needs"):
        suite("gsm8k")
    with pytest.raises(KVFoldError, match=r"^data: the answer to 'q' does not end"):
        suite("gsm8k", data=jsonl(tmp_path / "x.jsonl", [{"question": "q", "answer": "4"}]))
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(KVFoldError, match=r"^data: line 1 of .* has no question, answer"):
        suite("gsm8k", data=str(tmp_path / "x.jsonl"))


# ---- code, names -----------------------------------------------------------------------------------------------------


def test_code_asks_for_the_line_that_follows(texts):
    some = suite("code", texts=texts)
    for item in some.items([500], 3, 1):
        prompt = some.prompt(item)
        (line,) = prompt.expected
        assert text_of(prompt) + line in some.text.text and prompt.ids.shape[1] == 500
        assert some.grade(prompt, Outcome(text=f"{line}\nmore")) == {"similarity": 1.0, "exact": 1.0}
        assert some.grade(prompt, Outcome(text="@"))["similarity"] < 0.3


def test_unknown_names_say_what_is_known():
    with pytest.raises(KVFoldError, match=r"^suite: 'mmlu' is unknown; known: divergence, ppl, layers"):
        make(["mmlu"], TOKENIZER, Options())
    with pytest.raises(KVFoldError, match=r"^tasks: 'x' is no task of ruler; allowed: multikey"):
        suite("ruler", tasks=("x",))
    with pytest.raises(KVFoldError, match=r"^depths: 101"):
        suite("needle", depths=(101,))
    with pytest.raises(KVFoldError, match=r"^tokens: 31"):
        Options(tokens=31)
    assert set(TASKS) == {item.task for item in suite("ruler").items([1400], 1, 1)}
    assert Item("a", None, 0, 1, (("depth", 5),)).name == "a/depth=5/0.1"


@pytest.mark.parametrize("form", FORMS)
def test_a_list_of_any_form_asks_for_what_it_lists(form):
    asking = suite("retrieval", tokens=512, forms=(form,))
    (item,) = asking.items([2048], 1, 1)
    prompt = asking.prompt(item)
    ids = prompt.ids[0]
    assert item.task == form and prompt.prefilled > 1900 and prompt.answers
    for (first, stop), listed in zip(prompt.answers, prompt.listed, strict=True):
        at = prompt.prefilled + 1 + first
        assert (
            torch.equal(ids[listed : listed + stop - first], ids[at : at + stop - first]) and listed < prompt.prefilled
        )


def test_an_unknown_form_of_a_list_is_refused():
    with pytest.raises(
        KVFoldError, match=r"^forms: 'poems' is no form of a list; allowed: pairs, records, identifiers"
    ):
        suite("retrieval", forms=("poems",))
