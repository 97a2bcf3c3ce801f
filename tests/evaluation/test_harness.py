"""kvfold as a model of lm-eval: what it scores and generates has read the folded cache."""

import functools
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import kvfold
from kvfold import methods
from kvfold.cli import main
from kvfold.commands import registering
from kvfold.errors import KVFoldError
from test_evaluation import break_encoding
from tiny_model import byte_tokenizer, save, tiny_llama

pytest.importorskip("lm_eval", reason="lm-eval is not installed: NOTHING of kvfold[lm-eval] is tested")

import lm_eval.tasks
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from kvfold.evaluation.harness import KVFoldLM, _generation, _spec

GOOD = "kivi:bits=8,sink=0,recent=0"
TEXT = ("In the beginning there were many words, and every one of them had a place. " * 5).strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def make(folder):
    def make(method=GOOD, **options):
        return KVFoldLM(folder, method, dtype="float32", device="cpu", **options)

    return make


def asked(kind, *arguments):
    return [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]


def plain(ids, count):
    """Log-probabilities of the last tokens by the model alone, with no cache."""
    with torch.inference_mode():
        logits = torch.log_softmax(tiny_llama()(torch.tensor([ids])).logits[0].float(), -1)
    rows = logits[len(ids) - count - 1 : len(ids) - 1]
    return rows.gather(-1, torch.tensor(ids[-count:])[:, None])[:, 0], rows.argmax(-1)


# ---- requests --------------------------------------------------------------------------------------------------------


def test_it_is_registered():
    assert get_model("kvfold") is KVFoldLM


@pytest.mark.parametrize("context", [TEXT, "A", ""], ids=["long", "one token", "none"])
def test_full_precision_scores_are_those_of_the_model(make, context):
    continuation = " and then"
    lm = make("none")
    ((total, likeliest),) = lm.loglikelihood(asked("loglikelihood", (context, continuation)), disable_tqdm=True)
    before = lm.tok_encode(context) or [lm.prefix_token_id]
    expected, first = plain([*before, *lm.tok_encode(continuation)], len(continuation))
    assert total == pytest.approx(float(expected.sum()), abs=1e-3)
    assert likeliest is bool((first == torch.tensor(lm.tok_encode(continuation))).all())


def test_full_precision_is_scored_and_answers_as_by_lm_evals_own_model():
    """Any texts: contexts that are empty, end in spaces or are too long, stop strings, special tokens."""
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, draw = tiny_llama(), byte_tokenizer(), random.Random(0)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1, max_length=200)
    ours = KVFoldLM.of(model, tokenizer, methods.get("none"))
    ours.max_length = 200

    def text(count):
        return "x" + "".join(draw.choice("abc de.\n f\u00e9\U0001f98a ") for _ in range(count))

    def both(kind, *arguments):
        return [getattr(lm, kind)(asked(kind, *arguments), disable_tqdm=True) for lm in (theirs, ours)]

    pairs = [
        (draw.choice(["", text(1), text(50) + "  ", text(400)]), text(draw.choice([1, 20, 90]))) for _ in range(24)
    ]
    for a, b in zip(*both("loglikelihood", *pairs), strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-2) and a[1] == b[1]
    a, b = both("loglikelihood_rolling", *((text(count),) for count in (1, 199, 200, 201, 401)))
    assert a == pytest.approx(b, abs=0.1)
    stops = [[], ["\n"], ["a", "b"], [" "], "\u00e9", ["<pad>"]]
    asks = [(text(n), {"until": until, "max_gen_toks": 16, "do_sample": False}) for until in stops for n in (30, 400)]
    a, b = both("generate_until", *asks)
    assert a == b


def test_the_likeliest_continuation_is_said_to_be(make):
    lm = make("none")
    ids = lm.tok_encode(TEXT)
    _, first = plain([*ids, 0], 1)
    pairs = [(("", ""), ids, [int(first)]), (("", ""), ids, [(int(first) + 1) % 250])]
    assert [likeliest for _, likeliest in lm._loglikelihood_tokens(pairs, disable_tqdm=True)] == [True, False]


def test_a_long_text_is_rolled_over_once_per_token(make):
    lm = make("none", max_length=64)
    (total,) = lm.loglikelihood_rolling(asked("loglikelihood_rolling", (TEXT[:150],)), disable_tqdm=True)
    ids, expected = lm.tok_encode(TEXT[:150]), 0.0
    expected = float(plain([lm.prefix_token_id, *ids[:64]], 64)[0].sum())
    expected += float(plain(ids[63:128], 64)[0].sum()) + float(plain(ids[150 - 65 :], 22)[0].sum())
    assert total == pytest.approx(expected, abs=0.01)
    assert lm.read == 150


def test_every_token_of_a_continuation_reads_the_cache(make):
    lm = make()
    lm.loglikelihood(asked("loglikelihood", (TEXT, " and then")), disable_tqdm=True)
    assert (lm.tested, lm.read) == (9, 9)
    lm.generate_until(asked("generate_until", (TEXT, {"until": [], "max_gen_toks": 5})), disable_tqdm=True)
    assert (lm.tested, lm.read) == (9 + 6, 9 + 6)  # the prompt's last token too
    assert lm.get_model_info()["kvfold_tokens_tested"] == 15


def test_prompts_within_the_windows_are_said_to_test_nothing(make, caplog):
    lm = make("fold")
    lm.loglikelihood(asked("loglikelihood", ("short", " and then")), disable_tqdm=True)
    assert (lm.tested, lm.read) == (0, 9)
    assert "0 of 9 tokens so far read something packed (32 + 96 tokens are in full precision)" in caplog.text


def test_stop_strings_and_long_prompts(make):
    lm = make("none", max_length=128)
    ids = torch.tensor([lm.tok_encode(TEXT)[-(128 - 20) :]])
    model, cache = tiny_llama(), DynamicCache()
    expected = []
    with torch.inference_mode():
        token = ids
        while len(expected) < 20:
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            expected.append(int(token))
    whole = byte_tokenizer().decode(expected)
    (stop, *_) = re.findall("[ -~]", whole)
    answers = lm.generate_until(
        asked("generate_until", (TEXT, {"until": [], "max_gen_toks": 20}), (TEXT, {"until": stop, "max_gen_toks": 20})),
        disable_tqdm=True,
    )
    assert answers == [whole, whole[: whole.index(stop)]]


def test_a_stop_string_ends_an_answer_that_has_not_begun(make, monkeypatch):
    lm = make("none")
    monkeypatch.setattr(type(lm.tokenizer), "decode", lambda self, ids, **_: "\n" * len(ids))
    (text,) = lm.generate_until(
        asked("generate_until", (TEXT, {"until": ["\n\n"], "max_gen_toks": 9})), disable_tqdm=True
    )
    assert text == ""


# ---- whole tasks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tasks(tmp_path, monkeypatch, make):
    """A task that generates and one that chooses; their answers are what full precision gives."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    lm = make("none")
    prompts = [f"{i}. {TEXT[i * 7 :]}" for i in range(4)]
    answers = lm.generate_until(
        asked("generate_until", *[(p, {"until": [], "max_gen_toks": 4}) for p in prompts]), disable_tqdm=True
    )
    choices = [" one", " two", " six"]
    scores = lm.loglikelihood(asked("loglikelihood", *[(p, c) for p in prompts for c in choices]), disable_tqdm=True)
    gold = [max(range(3), key=lambda j, i=i: scores[3 * i + j][0]) for i in range(len(prompts))]
    data = tmp_path / "data.jsonl"
    rows = zip(prompts, answers, gold, strict=True)
    data.write_text("".join(json.dumps({"p": p, "a": a, "c": choices, "g": g}) + "\n" for p, a, g in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{p}}",
    }
    return [
        {
            **shared,
            "task": "tiny_generate",
            "output_type": "generate_until",
            "doc_to_target": "{{a}}",
            "target_delimiter": "",
            "generation_kwargs": {"until": [], "max_gen_toks": 4, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
        {
            **shared,
            "task": "tiny_choose",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{c}}",
            "doc_to_target": "{{g}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    ]


def shares(lm, tasks):
    found = simple_evaluate(lm, tasks=tasks, bootstrap_iters=0, task_manager=TaskManager(include_defaults=False))
    (exact,) = (v for k, v in found["results"]["tiny_generate"].items() if k.startswith("exact_match,"))
    return exact, found["results"]["tiny_choose"]["acc,none"], found["config"]


def test_a_broken_quantizer_ruins_both_kinds_of_tasks(make, tasks, monkeypatch):
    exact, right, said = shares(make(), tasks)
    assert (exact, right) == (1.0, 1.0)
    assert said["kvfold_method"] == GOOD and said["kvfold_tokens_tested"] == said["kvfold_tokens_read"] > 0
    break_encoding(monkeypatch)
    exact, right, _ = shares(make(), tasks)
    assert exact <= 0.25 and right <= 0.5


@pytest.fixture
def no_other_tasks(monkeypatch):
    """Thousands of files of lm-eval's own are not read."""
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", functools.partial(TaskManager, include_defaults=False))


@pytest.mark.usefixtures("no_other_tasks")
def test_the_command_line_runs_a_task(folder, tasks, tmp_path, capsys, monkeypatch):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choose.yaml").write_text(json.dumps(tasks[1]))  # JSON is YAML
    status = main(
        [
            *("lm-eval", "--model", "kvfold", "--model_args", f"pretrained={folder}", f"method={GOOD}"),
            *("--device", "cpu", "--tasks", "tiny_choose", "--include_path", str(tmp_path / "tasks")),
            *("--output_path", str(tmp_path / "out")),
        ]
    )
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "tiny_choose" in out
    (written,) = (os.path.join(root, f) for root, _, files in os.walk(tmp_path / "out") for f in files)
    result = json.loads(open(written).read())
    assert result["results"]["tiny_choose"]["acc,none"] == 1.0
    assert result["config"]["kvfold_method"] == GOOD


# ---- lm-eval's own command -------------------------------------------------------------------------------------------

BREAK = """
import functools
import lm_eval.tasks
import pytest
from test_evaluation import break_encoding

break_encoding(pytest.MonkeyPatch())
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
"""
"""As sitecustomize, which Python imports when it starts. Reading thousands of lm-eval's own tasks is seconds."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Python of an environment of its own, which sees our packages but has none of our files."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def run(environment, *arguments, path=(), status=0):
    """What an environment's Python says, with the paths of this one and others before them."""
    here = [*path, Path(kvfold.__file__).parents[1], *(p for p in sys.path if p.endswith("-packages"))]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, here)),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    done = subprocess.run([environment, *arguments], env=variables, capture_output=True, text=True)
    assert done.returncode == status, done.stderr[-2000:]
    return done.stdout, done.stderr


def scores(environment, folder, tasks, tmp_path, first=(), path=()):
    """Both tasks by ``lm_eval --model kvfold``: exact match, accuracy."""
    where, out = tmp_path / "tasks", tmp_path / "out"
    where.mkdir()
    for task in tasks:
        (where / f"{task['task']}.yaml").write_text(json.dumps(task))
    script = Path(lm_eval.__file__).parent / "__main__.py"
    names = [*first, *(task["task"] for task in tasks)]
    _, said = run(
        environment,
        *(script, "--model", "kvfold", "--model_args", f"pretrained={folder},method={GOOD},dtype=float32"),
        *("--tasks", ",".join(map(str, names)), "--include_path", where, "--output_path", out),
        path=path,
    )
    (written,) = out.rglob("*.json")
    found = json.loads(written.read_text())
    assert found["config"]["kvfold_method"] == GOOD
    exact = found["results"]["tiny_generate"]
    return exact["exact_match,none"], found["results"]["tiny_choose"]["acc,none"], said


def test_lm_evals_own_command_finds_the_model_after_registering(environment, folder, tasks, tmp_path):
    said, _ = run(environment, "-m", "kvfold", "lm-eval", "--register")
    (file,) = environment.parents[1].rglob("kvfold-lm-eval.pth")
    assert str(file) in said
    started, _ = run(environment, "-c", "import sys; print({'kvfold', 'lm_eval', 'torch'} & set(sys.modules))")
    assert started == "set()\n"  # the file's line imports nothing
    exact, right, said = scores(environment, folder, tasks, tmp_path)
    assert (exact, right) == (1.0, 1.0)
    assert "asked for cuda:0, and there is no GPU: on the CPU" in said or torch.cuda.is_available()
    assert str(file) in run(environment, "-m", "kvfold", "lm-eval", "--unregister")[0] and not file.exists()
    run(environment, "-c", registering.CHECK, status=1)
    assert "nothing was registered" in run(environment, "-m", "kvfold", "lm-eval", "--unregister")[0]


def test_a_broken_quantizer_ruins_both_through_lm_evals_own_command(environment, folder, tasks, tmp_path):
    """Found by the task file, which needs no registration."""
    (tmp_path / "sitecustomize.py").write_text(BREAK)
    file, _ = run(environment, "-m", "kvfold", "lm-eval", "--task-file")
    here = Path(__file__).parent
    exact, right, _ = scores(environment, folder, tasks, tmp_path, [file.strip()], [tmp_path, here, here.parent])
    assert exact <= 0.25 and right <= 0.5


def test_what_does_not_take_the_model_is_left_as_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registering, "place", lambda: tmp_path / registering.NAME)
    assert main(["lm-eval", "--register"]) == 2  # this folder is none that Python looks into
    assert "error: register: lm-eval " in capsys.readouterr().err and not list(tmp_path.iterdir())
    monkeypatch.setattr(registering, "place", lambda: tmp_path / "none" / registering.NAME)
    assert main(["lm-eval", "--register"]) == 1
    assert "error: register: cannot write " in capsys.readouterr().err
    assert main(["lm-eval", "--task-file", "--limit", "3"]) == 2
    assert "task-file: it stands alone" in capsys.readouterr().err


@pytest.mark.usefixtures("no_other_tasks")
def test_the_command_line_names_tasks_that_lm_eval_lacks(folder, capsys):
    assert (
        main(["lm-eval", "--model", "kvfold", "--model_args", f"pretrained={folder}", "--tasks", "no_such_task"]) == 2
    )
    said = capsys.readouterr().err
    assert "error: tasks: lm-eval has no no_such_task" in said and "Traceback" not in said


def test_without_lm_eval_the_command_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["lm-eval", "--tasks", "a", "b"]) == 2
    assert capsys.readouterr().err.endswith('error: lm-eval: it is not installed; pip install "kvfold[lm-eval]"\n')


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_method_is_put_together_again():
    assert _spec("fold", {}) == "fold"
    assert _spec("fold", {"bits": 2}) == "fold:bits=2"
    assert _spec("innerq:bits=2", {"recent": 32, "paper": True}) == "innerq:bits=2,recent=32,paper=true"
    with pytest.raises(
        KVFoldError, match=r"^model_args: 1 follows a comma of method=fold\+keep=0; give model_args as JSON"
    ):
        _spec("fold+keep=0", {"1": ""})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "kiwi"}, "'kiwi' is not known"),
        ({"bites": 2}, "option 'bites' is not known"),
        ({"batch_size": 4}, "batch_size: 4"),
        ({"chunk": 0}, "chunk: 0"),
        ({"max_length": 5000}, "max_length: 5000; give 2 to 1024"),
    ],
)
def test_wrong_arguments_are_refused(make, options, said):
    with pytest.raises(KVFoldError, match=said):
        make(**{"method": "fold", **options})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"do_sample": True, "temperature": 0.7}, "do_sample=true"),
        ({"temperature": 0.7}, "temperature=0.7 samples"),
        ({"num_beams": 4}, "num_beams is not known"),
        ({"max_gen_toks": 0}, "max_gen_toks: 0"),
    ],
)
def test_what_cannot_be_generated_is_refused(given, said):
    with pytest.raises(KVFoldError, match=said):
        _generation(given)


def test_generation_settings():
    assert _generation({"until": "\n", "max_new_tokens": 3, "do_sample": False, "temperature": 0.0}) == (3, ("\n",))
    assert _generation({"until": ["a", ""]}) == (256, ("a",))
