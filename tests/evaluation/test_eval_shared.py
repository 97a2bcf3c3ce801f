import pytest
import torch

import kvfold
from kvfold.cli import main
from kvfold.engines.transformers.shared import SharedPrompt
from kvfold.errors import KVFoldError
from kvfold.evaluation import loop
from kvfold.evaluation.perplexity import score
from kvfold.evaluation.report import sources
from kvfold.evaluation.suites import Options, make
from kvfold.evaluation.suites.base import TAIL
from kvfold.evaluation.suites.gsm8k import Gsm8k
from kvfold.models import ModelInfo
from tiny_model import byte_tokenizer, tiny_llama

METHODS = [
    "fold",
    "kivi",
    "squat",
    "squat_pre",
    "innerq:mode=hybrid_prefill",
    "qjl",
    "turboquant",
    "gear",
    "zipcache",
    "kivi:recent=40,sink=0",
    "squat:paper=true",
    "fold:bits=2+keep=0",
]


@pytest.fixture(scope="module")
def tiny():
    return tiny_llama()


def scored(model, method, ids, shared):
    cache = kvfold.fold(model, method)
    try:
        return score(model, ids, 400, cache, 16, shared=shared), cache.nbytes()
    finally:
        kvfold.unfold(model)


@pytest.mark.parametrize("method", METHODS)
def test_what_was_shared_is_what_the_model_gives(tiny, method):
    ids = torch.randint(0, tiny.config.vocab_size, (1, 481), generator=torch.Generator().manual_seed(0))
    shared, calls = SharedPrompt(), []
    scored(tiny, "none", ids, shared)
    hook = tiny.register_forward_hook(lambda module, args, out: calls.append(1))
    found = scored(tiny, method, ids, shared)
    hook.remove()
    assert len(calls) == 5, "the model ran the prompt again"
    alone = scored(tiny, method, ids, None)
    assert torch.equal(found[0].nll, alone[0].nll) and found[0].tested == alone[0].tested
    assert found[1] == alone[1]


def test_parts_are_all_items_and_share_none(tiny, tmp_path):
    info = ModelInfo("tiny", "float32", "cpu", 1024, 1)
    suites = make(["retrieval"], byte_tokenizer(), Options(tokens=64))

    def items(part):
        planned = loop.plan(tiny, info, ["kivi"], suites, lengths=[300, 400], limit=3, part=part)
        return [item.name for _, found in planned.suites for item in found]

    whole, parts = items((1, 1)), [items((i, 4)) for i in range(1, 5)]
    assert sorted(name for part in parts for name in part) == sorted(whole) and len(set(whole)) == 6
    with pytest.raises(KVFoldError, match="part: 5/4"):
        items((5, 4))


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b", "1/"])
def test_the_command_says_what_a_part_is(part, tmp_path, capsys):
    assert main(["eval", "--part", part, "--out", str(tmp_path / "out")]) == 2
    assert "part: " in capsys.readouterr().err and not (tmp_path / "out").exists()


WORDS = (
    "a quick brown fox jumps over the lazy dog while nobody in the village looks at what the old clock says ".split()
)


@pytest.mark.parametrize("method", ["kivi:recent=32,sink=0", "fold:recent=40,sink=8", "squat:recent=32,sink=0"])
def test_answers_of_a_batch_are_those_of_one_at_a_time(tiny, tmp_path, method):
    """Questions of several lengths: what lies before the shorter ones is padding, and nothing else changes."""
    tokenizer = byte_tokenizer()
    examples = [{"question": " ".join(reversed(WORDS)), "answer": f"It is {i}.\n#### {i}"} for i in range(3)]
    problems = [{"question": " ".join(WORDS[: 2 + 5 * i]), "answer": f"#### {i}"} for i in range(5)]
    suite = Gsm8k(tokenizer, tuple(problems), tuple(examples), 3, {}, False, new_tokens=40)
    info = ModelInfo("tiny", "float32", "cpu", 1024, 1)

    def rows(batch):
        planned = loop.plan(tiny, info, [method], [suite], baseline=method, limit=5, batch=batch, chunk=200)
        (file,) = loop.run(tiny, tokenizer, info, planned, tmp_path / str(batch))
        return file.rows

    alone, together = rows(1), rows(3)
    assert len(alone) == 5 and set(alone) == set(together)
    for key, row in alone.items():
        other = together[key]
        assert (row.answer, row.scores, row.read, row.tested) == (other.answer, other.scores, other.read, other.tested)
    assert len({row.answer for row in alone.values()}) > 1


def test_families_of_one_length_are_answered_in_batches(tiny, tmp_path):
    """As many tokens of each prompt are prefilled; families with other answers are other batches."""
    (tmp_path / "hay.txt").write_text("".join(f"Line {i} of it.\n" for i in range(300)))
    options = Options(texts={"hay": str(tmp_path / "hay.txt")}, tasks=("multikey", "aggregation"))
    (suite,) = make(["ruler"], byte_tokenizer(), options)
    items = suite.items([1100], 3, 1)
    assert {suite.prompt(item).prefilled for item in items} == {1100 - TAIL}
    info = ModelInfo("tiny", "float32", "cpu", 2048, 1)

    def rows(batch):
        planned = loop.plan(
            tiny, info, ["kivi"], [suite], baseline="kivi", lengths=[1100], limit=3, batch=batch, chunk=TAIL
        )
        (file,) = loop.run(tiny, byte_tokenizer(), info, planned, tmp_path / str(batch))
        return {key: (row.answer, row.scores, row.tested) for key, row in file.rows.items()}

    assert len(rows(1)) == 6 and rows(1) == rows(3)
    groups = list(loop._groups(suite, items, 3, None))
    assert [{asked.item.task for asked in group} for group in groups] == [{"multikey"}, {"aggregation"}]


def test_a_report_puts_parts_together(tiny, tmp_path):
    tokenizer, info = byte_tokenizer(), ModelInfo("tiny", "float32", "cpu", 1024, 1)
    suites = make(["retrieval"], tokenizer, Options(tokens=64))

    def run(folder, part):
        planned = loop.plan(tiny, info, ["kivi"], suites, lengths=[300], limit=4, part=part)
        (file,) = loop.run(tiny, tokenizer, info, planned, tmp_path / folder)
        return file

    whole, (one, two) = run("whole", (1, 1)), (run(f"parts/{i}", (i, 2)) for i in (1, 2))
    assert one.path.name == two.path.name == whole.path.name
    (source,) = sources.read([tmp_path / "parts"]).sources
    assert set(source.found.rows) == set(whole.rows) and len(source.found.rows) == 8
    assert [run["run"] for run in source.found.runs] == [0, 1]
    assert {row.run for key, row in source.found.rows.items() if key in two.rows} == {1}
    scores = {key: row.scores for key, row in whole.rows.items()}
    assert {key: row.scores for key, row in source.found.rows.items()} == scores
    assert len(sources.read([tmp_path]).sources[0].found.rows) == 8
