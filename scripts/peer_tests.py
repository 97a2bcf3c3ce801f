"""Run Transformers' own tests of tiny models on folded caches, and say which end otherwise than unfolded.

    python scripts/peer_tests.py --checkout TRANSFORMERS --out results/
    python scripts/peer_tests.py --checkout TRANSFORMERS --out results/ --models llama gemma2 --methods none --json rows.json

TRANSFORMERS is a checkout of its repository, of the release that is installed; the tests are not in its wheel. They ask for
``parameterized`` and ``pytest-timeout``. This file is a plugin of pytest, too: it has ``kvfold.fold(model, METHOD,
always=True)`` called on every model that a test builds or loads. It changes two things of the tests, folded or not: inputs have
``--tokens`` tokens, so that blocks are packed, and a folded cache is asked for its length where they ask for its keys' shapes.

A test ends as one that is run unfolded does, or otherwise for a reason in REASONS; anything else is an exit status of 1. What
is in ``--out`` is not run again.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

FAMILIES = (
    "llama qwen2 qwen3 gemma2 gemma3 mistral phi3 gpt_oss olmo2 smollm3 cohere2 qwen3_moe granite"  # in this order
).split()
METHODS = ("none", "fold:sink=0,recent=0")
TESTS = (
    "generat assisted prompt_lookup beam past_key padding position_ids logits_to_keep 4d batching attention_outputs "
    "hidden_states equivalence inputs_embeds save_load training gradient_checkpointing set_attention export sliding offload"
).split()
"""What is in the names of the tests that meet a cache, or a model's attention. Those of ``torch.compile``, which take minutes
each, are not among them: ``--models llama --tests compil``."""
TOKENS = 40
"""More than a block of 32."""
UNFOLDED = "unfolded"
ROOT = Path(__file__).resolve().parents[1]
PAGE, ROWS = ROOT / "docs" / "models.md", ROOT / "benchmarks" / "peers"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
SETTINGS = "KVFOLD_PEER_TESTS"
"""The environment variable by which the plugin is told what to do."""


@dataclass(frozen=True)
class Reason:
    """Why a test ends otherwise on a folded cache: regular expressions that its name and its error hold, and a sentence."""

    test: str
    error: str
    why: str


REASONS = (
    Reason(
        "with_static_cache|static_cache_no_recompile",
        "cache_implementation: 'static' is asked for",
        "refused by name: with `always=True` a model makes folded caches; a static one can be passed",
    ),
    Reason(
        "can_set_attention_dynamically",
        "AssertionError: False is not true",
        "asserts the name of the attention function, which is kvfold's",
    ),
    Reason(
        "compile_model_forward_fullgraph",
        "AssertionError: False is not true",
        "asserts that the cache is a DynamicCache",
    ),
    Reason(
        "compilation_all_outputs",
        "AssertionError: False is not true",
        "asserts that a static cache was compiled for; a model's own choice of one is replaced, with a warning",
    ),
    Reason(
        "attention_outputs",
        "`output_attentions` attribute is not supported when using the `attn_implementation` set to kvfold",
        "Transformers refuses `config.output_attentions = True` after folding; set before, or as an argument, it is served",
    ),
)


@dataclass
class Outcome:
    """How a test ended.

    Attributes
    ----------
    test
        Its address, ``tests/models/llama/test_modeling_llama.py::LlamaModelTest::test_x``.
    ended
        "passed", "failed" or "skipped".
    error
        The first words of what it failed or was skipped for.
    folded, packed
        Whether a folded cache got tokens, and whether it packed any.
    refused
        Why kvfold did not fold the models that it refused, by class.
    """

    test: str
    ended: str = "skipped"
    error: str = ""
    folded: bool = False
    packed: bool = False
    refused: dict[str, str] | None = None

    @property
    def family(self) -> str:
        return self.test.split("/")[2]

    @property
    def name(self) -> str:
        return self.test.split("::")[-1]


def asked(name: str, parts: Iterable[str]) -> bool:
    """Whether a test's name has one of these parts; tests of ``torch.compile`` only if they are asked for by name."""
    return any(part in name and ("compil" not in name or "compil" in part) for part in parts)


# ---- the plugin ------------------------------------------------------------------------------------------------------


class Folding:
    """The plugin: folds models as they are built, and writes how each test ended."""

    RANKS = ("skipped", "passed", "failed")
    """Of the parts of a test, the last of these that occurs is how it ended."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.method, self.tests, self.tokens = settings["method"], settings["tests"], settings["tokens"]
        self.path = Path(settings["path"])
        self.now = Outcome("")
        self.here = threading.local()

    def pytest_configure(self) -> None:
        from transformers import testing_utils

        if hasattr(
            testing_utils, "_TEXT_MODEL_TESTER_DEFAULTS"
        ):  # not in all releases; `lengthened` does the same later
            testing_utils._TEXT_MODEL_TESTER_DEFAULTS["seq_length"] = self.tokens
        testing_utils.is_flaky = self.with_parentheses(testing_utils.is_flaky)
        if self.method != UNFOLDED:
            self.fold_what_is_built()
            self.watch_caches()

    def pytest_collection_modifyitems(self, items: list[Any], config: Any) -> None:
        """Only what was asked for and has not ended yet."""
        done = {outcome.test for outcome in read(self.path)}
        left = [item for item in items if item.nodeid not in done and asked(item.name, self.tests)]
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left
        for cls in {item.cls for item in items if hasattr(item.cls, "setUp")}:
            cls.setUp = self.lengthened(cls.setUp)
        if self.method != UNFOLDED:
            self.ask_for_lengths()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.now = Outcome(nodeid)

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        self.now.error = call.excinfo.exconly()[:400]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self.now.ended = max(self.now.ended, report.outcome, key=self.RANKS.index)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.now.error = report.longrepr[2]

    def pytest_runtest_logfinish(self) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self.now)) + "\n")

    # ---- what is patched ----

    def with_parentheses(self, flaky: Callable[..., Any]) -> Callable[..., Any]:
        """A decorator that some tests forget to call: what it makes of them then returns at once, and passes."""
        return lambda *args, **kwargs: flaky()(args[0]) if args and callable(args[0]) else flaky(*args, **kwargs)

    def lengthened(self, set_up: Callable[[Any], None]) -> Callable[[Any], None]:
        """A test's `setUp`, whose inputs have as many tokens as were asked for, all of them real: with the testers' own
        masks the first sequence has one token, the second two, and no block is ever full."""

        @functools.wraps(set_up)
        def setting_up(test: Any) -> None:
            set_up(test)
            tester = getattr(test, "model_tester", None)
            if not hasattr(tester, "prepare_config_and_inputs_for_common"):
                return
            for name in ("seq_length", "encoder_seq_length"):
                if getattr(tester, name, self.tokens) < self.tokens:
                    setattr(tester, name, self.tokens)
            prepare = tester.prepare_config_and_inputs_for_common

            def unpadded() -> tuple[Any, dict[str, Any]]:
                config, inputs = prepare()
                if inputs.get("attention_mask") is not None:
                    inputs["attention_mask"] = inputs["attention_mask"].new_ones(inputs["attention_mask"].shape)
                return config, inputs

            tester.prepare_config_and_inputs_for_common = unpadded

        return setting_up

    def fold(self, model: Any) -> None:
        """Fold a model, once; one that is refused stays as it is."""
        import kvfold
        from kvfold.errors import KVFoldError

        if "_peer_seen" in vars(model) or any(weight.is_meta for weight in model.parameters()):
            return
        vars(model)["_peer_seen"] = True
        try:
            kvfold.fold(model, self.method, always=True)
        except KVFoldError as error:
            self.now.refused = (self.now.refused or {}) | {type(model).__name__: str(error)}

    def outermost(
        self, function: Callable[..., Any], built: Callable[[tuple[Any, ...], Any], Any]
    ) -> Callable[..., Any]:
        """A function that builds a model, which is folded when the outermost of such functions has returned."""

        @functools.wraps(function)
        def building(*args: Any, **kwargs: Any) -> Any:
            self.here.depth = getattr(self.here, "depth", 0) + 1
            try:
                out = function(*args, **kwargs)
            finally:
                self.here.depth -= 1
            if not self.here.depth:
                self.fold(built(args, out))
            return out

        return building

    def fold_what_is_built(self) -> None:
        """`__init__` of every model class, those to come too, and `from_pretrained`."""
        from transformers import PreTrainedModel

        def folding(cls: type) -> None:
            if "__init__" in vars(cls):
                cls.__init__ = self.outermost(cls.__init__, lambda args, out: args[0])  # type: ignore[misc]

        def subclasses(cls: type) -> Iterator[type]:
            for sub in cls.__subclasses__():
                yield sub
                yield from subclasses(sub)

        for cls in set(subclasses(PreTrainedModel)):
            folding(cls)
        before = PreTrainedModel.__init_subclass__.__func__

        def __init_subclass__(cls: type, **kwargs: Any) -> None:
            before(cls, **kwargs)
            folding(cls)

        PreTrainedModel.__init_subclass__ = classmethod(__init_subclass__)
        loading = self.outermost(
            PreTrainedModel.from_pretrained.__func__, lambda args, out: out[0] if isinstance(out, tuple) else out
        )
        PreTrainedModel.from_pretrained = classmethod(loading)

    def watch_caches(self) -> None:
        """Note which tests give a folded cache tokens."""
        from kvfold import FoldedCache

        update = FoldedCache.update

        @functools.wraps(update)
        def watched(cache: Any, *args: Any, **kwargs: Any) -> Any:
            out = update(cache, *args, **kwargs)
            self.now.folded = True
            self.now.packed |= any(any(layer.packed) for layer in cache.folded)
            return out

        FoldedCache.update = watched

    def ask_for_lengths(self) -> None:
        """A folded cache has no `keys` whose shapes could be asked for; its length can be."""
        from tests.generation.test_utils import GenerationTesterMixin as Tests

        from kvfold import FoldedCache

        check = Tests._check_past_key_values_for_generate

        def lengths(test: Any, batch_size: int, past_key_values: Any, seq_length: int, config: Any) -> None:
            if not isinstance(past_key_values, FoldedCache):
                return check(test, batch_size, past_key_values, seq_length, config)
            test.assertEqual(past_key_values.get_seq_length(), seq_length)

        Tests._check_past_key_values_for_generate = lengths


def pytest_configure(config: Any) -> None:
    plugin = Folding(json.loads(os.environ[SETTINGS]))
    config.pluginmanager.register(plugin)


# ---- the command -----------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Outcome]:
    """What a run wrote; of one that was killed the last line may be cut, and is taken away."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]), encoding="utf-8")
    return [Outcome(**json.loads(line)) for line in lines if line.endswith("\n")]


@dataclass
class Difference:
    """A test that ends otherwise folded than unfolded, and why; an empty ``why`` is one that nobody has explained."""

    test: str
    unfolded: str
    folded: str
    error: str
    why: str


def why(outcome: Outcome, reasons: Iterable[Reason] = REASONS) -> str:
    """The reason that a test's name and its error have in REASONS."""
    return next(
        (r.why for r in reasons if re.search(r.test, outcome.name) and re.search(r.error, outcome.error, re.S)), ""
    )


def differences(
    unfolded: list[Outcome], folded: list[Outcome], reasons: Iterable[Reason] = REASONS
) -> list[Difference]:
    """The tests of both runs that do not end alike."""
    before = {outcome.test: outcome.ended for outcome in unfolded}
    return [
        Difference(outcome.test, before[outcome.test], outcome.ended, outcome.error, why(outcome, reasons))
        for outcome in folded
        if before.get(outcome.test, outcome.ended) != outcome.ended
    ]


def counts(run: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """A line of the table."""
    ended = Counter(outcome.ended for outcome in outcomes)
    used = {"folded": sum(o.folded for o in outcomes), "packed": sum(o.packed for o in outcomes)}
    return {"run": run, "passed": ended["passed"], "failed": ended["failed"], "skipped": ended["skipped"]} | used


def refusals(outcomes: Iterable[Outcome]) -> dict[str, str]:
    """What kvfold said of the classes that it did not fold."""
    return dict(sorted(pair for outcome in outcomes for pair in (outcome.refused or {}).items()))


def grouped(found: dict[str, list[Difference]]) -> list[dict[str, Any]]:
    """Differences that are alike in test, ends and reason as one, with its methods and families; ``error`` if none is known."""
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for method, all_of_them in found.items():
        for one in all_of_them:
            outcome = Outcome(one.test)
            error = "" if one.why else (one.error.splitlines() or ["no error"])[0]
            key = (re.sub(r"_\d+_.*", "", outcome.name), one.unfolded, one.folded, one.why, error)
            groups.setdefault(key, []).append((method, outcome.family))
    names = ("test", "unfolded", "folded", "why", "error")
    return [
        dict(zip(names, key, strict=True))
        | {"tests": len(of), "methods": list(dict.fromkeys(m for m, _ in of)), "families": sorted({f for _, f in of})}
        for key, of in sorted(groups.items())
    ]


def report(told: dict[str, Any]) -> str:
    """Tables in Markdown: counts, what ends otherwise and why, what kvfold refused to fold."""
    families = sorted(told["families"])
    text = f"Transformers {told['transformers']}, {len(families)} families ({', '.join(families)}):\n\n"
    text += table([row | {"run": f"`{row['run']}`"} for row in told["rows"]])
    differ = [
        {
            "test": f"`{one['test']}`",
            "ends": f"{one['unfolded']} -> {one['folded']}",
            "times": one["tests"],
            "families": "all" if one["families"] == families else ", ".join(one["families"]),
            "why": one["why"] or f"**unexplained**: {one['error']}",
        }
        for one in told["differences"]
    ]
    text += "\n" + table(differ) if differ else "\nAll tests end alike.\n"
    for method, classes in told["refused"].items():
        for said in sorted(set(classes.values())):
            of = ", ".join(f"`{name}`" for name, why in classes.items() if why == said)
            text += f"\nNot folded by `{method}`, so that the tests ran unfolded: {of} ({said}).\n"
    return text


def table(lines: list[dict[str, Any]]) -> str:
    """Rows of equal keys in Markdown; columns of numbers stand on the right."""
    rule = ["---:" if isinstance(cell, int) else "---" for cell in lines[0].values()]
    cells = [list(lines[0]), rule, *([str(cell).replace("|", "\\|") for cell in line.values()] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def section() -> str:
    """What the page says: a report of each release's rows; releases whose rows are alike have one."""
    releases: dict[str, dict[str, Any]] = {}
    for path in sorted(ROWS.glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        release = told.pop("transformers")
        alike = releases.setdefault(json.dumps(told), told | {"transformers": release})
        if alike["transformers"] != release:
            alike["transformers"] += f" and {release}"
    return "\n".join(map(report, releases.values()))


def written(page: str) -> str:
    """The page with its section as the rows have it."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{section()}{END}{rest.split(END)[1]}"


def run(given: argparse.Namespace, method: str, families: list[str]) -> list[Outcome]:
    """Run what a method's file does not have yet, and return what it has of these families."""
    folder = given.out / f"{version('transformers')}-{given.tokens}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub('[^a-z0-9]+', '-', method)}.jsonl"
    settings = {"method": method, "tests": given.tests, "tokens": given.tokens, "path": str(path.resolve())}
    paths = [str(ROOT / "scripts"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        SETTINGS: json.dumps(settings),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += ["-o", "log_cli=0", *(str(module(family)) for family in families)]
    with path.with_suffix(".log").open("a", encoding="utf-8") as log:
        done = subprocess.run(command, cwd=given.checkout, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode not in (0, 1, 5):  # all passed, some failed, none was left to run
        raise SystemExit(f"pytest ended with {done.returncode}; {path.with_suffix('.log')} says why")
    ended = [one for one in read(path) if one.family in families and asked(one.name, given.tests)]
    if missing := set(families) - {one.family for one in ended}:
        raise SystemExit(f"no tests of {', '.join(sorted(missing))} ran; {path.with_suffix('.log')} says why")
    return ended


def module(family: str) -> Path:
    return Path("tests", "models", family, f"test_modeling_{family}.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=FAMILIES, metavar="FAMILY", help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD", help="default: %(default)s")
    parser.add_argument(
        "--tests", nargs="+", default=TESTS, metavar="PART", help="parts of names; default: %(default)s"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--write", action="store_true", help="keep the rows in benchmarks/peers, and write docs/models.md"
    )
    given = parser.parse_args()
    if missing := [family for family in given.models if not (given.checkout / module(family)).exists()]:
        parser.error(f"--models: {given.checkout} has no tests of {', '.join(missing)}")
    unfolded, *folded = (run(given, method, given.models) for method in (UNFOLDED, *given.methods))
    found = {method: differences(unfolded, outcomes) for method, outcomes in zip(given.methods, folded, strict=True)}
    runs = zip((UNFOLDED, *given.methods), (unfolded, *folded), strict=True)
    told = {
        "transformers": version("transformers"),
        "tokens": given.tokens,
        "families": given.models,
        "rows": [counts(method, outcomes) for method, outcomes in runs],
        "differences": grouped(found),
        "refused": {method: refusals(outcomes) for method, outcomes in zip(given.methods, folded, strict=True)},
    }
    print(report(told))
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if given.write:
        ROWS.mkdir(exist_ok=True)
        (ROWS / f"{told['transformers']}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return int(any(not one["why"] for one in told["differences"]))


if __name__ == "__main__":
    sys.exit(main())
