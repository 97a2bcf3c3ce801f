"""Tables of docs/evidence.md: what the committed rows show of the papers' claims, and who wins at equal bytes.

``tables.py`` writes them. Rows are those of ``kvfold eval`` in benchmarks/evidence/grid/, which has every method on the same
windows of three models, taken by one command. What the grid lacks comes from older rows in benchmarks/evidence/, and from those
of ``kvfold domains`` in benchmarks/lengths/ and benchmarks/learned/. Methods are paired within one run only: of the same model,
text, windows and tokens per call.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterable

from kvfold.evaluation.domains import read_rows
from kvfold.evaluation.results import ResultFile, content, files_in
from kvfold.evaluation.statistics import paired
from kvfold.methods import canonical

ROOT = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
MODELS = {
    "Qwen2.5-Coder-1.5B": ("1.5B", "qwen2.5-coder-1.5b"),
    "Qwen2.5-Coder-0.5B": ("0.5B", "qwen2.5-coder-0.5b"),
    "SmolLM2-135M": ("135M", "smollm2-135m"),
}
"""Short names, and beginnings of files' names."""
BUDGETS = (1.0, 1.3, 2.0, 2.3, 2.8, 3.0, 4.0, 5.0)
"""Effective bits of heads of 128 channels that methods are compared at."""
SLACK = 0.05
"""Of a bit, by which a method may be beyond a budget."""
LEAST_SLACK = 0.13
"""The same where no method is within ``SLACK``: the smallest have 1.08 to 1.12 bits."""
BASE, NOTHING = "kivi", "none"
BEST_BASE = "kivi:k_bits=3,v_bits=2,group=64"
"""KIVI with the bytes of its default, spent best of what was tried: three bits for keys, paid by groups of 64."""
GRID = "evidence/grid/"
"""Beginning of the sources of rows that count alone where they have both methods of a pair."""
TINY = 1e-9
"""Divergences below are noise; they have a logarithm."""

Item = tuple[str, ...]
Measured = dict[Item, dict[int, float]]
"""Divergence by what was scored, and by the tokens before it."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Rows that may be paired.

    Attributes
    ----------
    model, device, source
        ``source``: a file or folder of benchmarks/.
    bits
        Effective bits by method, at the longest length, without the tables that all sequences share.
    by_method
    """

    model: str
    device: str
    source: str
    bits: dict[str, float]
    by_method: dict[str, Measured]

    @property
    def items(self) -> set[Item]:
        return {item for measured in self.by_method.values() for item in measured}

    @property
    def lengths(self) -> list[int]:
        return sorted({n for measured in self.by_method.values() for at in measured.values() for n in at})

    @property
    def rows(self) -> int:
        return sum(len(at) for measured in self.by_method.values() for at in measured.values())


@functools.cache
def runs() -> tuple[Run, ...]:
    """All of them, model by model; the grid's first, then the others of ``eval``."""
    found = []
    for model, (_, stem) in MODELS.items():
        for folder in (ROOT / GRID, ROOT / "evidence"):
            files = map(ResultFile.read, files_in(folder, "divergence-"))
            found += [of_eval(model, file) for file in files if file.settings.model.startswith(model)]
        found += [run for folder in ("lengths", "learned") if (run := _of_domains(model, stem, folder)) is not None]
    return tuple(found)


def of_eval(model: str, file: ResultFile) -> Run:
    """Rows of ``kvfold eval``."""
    by_method: dict[str, Measured] = {}
    bits: dict[str, tuple[int, float]] = {}
    for row in file.rows.values():
        kld, name = row.scores.get("kld"), plain(row.method)
        assert row.length is not None
        if kld is not None:
            item = (row.task, row.item.rsplit("/", 1)[-1])  # a window is the same one at every length
            by_method.setdefault(name, {}).setdefault(item, {})[row.length] = kld
        if row.bits_without_tables is not None:
            bits[name] = max(bits.get(name, (0, 0.0)), (row.length, row.bits_without_tables))
    source = file.path.relative_to(ROOT).as_posix()
    return Run(model, file.settings.device, source, {name: b for name, (_, b) in bits.items()}, by_method)


def model_of(file: ResultFile) -> str:
    """The name in :data:`MODELS`."""
    return next(name for name in MODELS if file.settings.model.startswith(name))


def _of_domains(model: str, stem: str, folder: str) -> Run | None:
    by_method: dict[str, Measured] = {}
    bits: dict[str, tuple[int, float]] = {}
    devices = []
    for path in files_in(ROOT / folder, stem, ".json"):
        held = json.loads(content(path))
        devices.append(str(held["header"]["device"]))
        for row in read_rows(held):
            name = plain(row.method)
            if row.kld is not None:
                at = by_method.setdefault(name, {}).setdefault((row.domain, str(row.window)), {})
                at[row.prefix] = row.kld
            if row.bits_without_tables is not None:
                bits[name] = max(bits.get(name, (0, 0.0)), (row.prefix, row.bits_without_tables))
    if not by_method:
        return None
    return Run(model, " and ".join(dict.fromkeys(devices)), folder, {n: b for n, (_, b) in bits.items()}, by_method)


def plain(spec: str) -> str:
    """A method, or a recipe of several, without the places of artefacts, which differ between machines; by today's name."""
    return canonical("+".join(_plain(part) for part in spec.split("+")))


def _plain(spec: str) -> str:
    name, _, options = spec.partition(":")
    kept = [option for option in options.split(",") if option and not option.startswith("artefact=")]
    return f"{name}{':' if kept else ''}{','.join(kept)}"


# ---- pairs -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    """One method's divergence over another's, on the same windows.

    Attributes
    ----------
    value, low, high
        Ratio of geometric means over all models' windows, and its 95% interval.
    items
        How many windows; one that was scored at several lengths is one.
    by_model
        Ratios by the model's name.
    p, verdict
        As of :class:`~kvfold.evaluation.statistics.Difference`, of the logarithms.
    """

    value: float
    low: float | None
    high: float | None
    items: int
    by_model: dict[str, float]
    verdict: str

    @property
    def worst(self) -> tuple[str, float]:
        """The model with the largest ratio."""
        return max(self.by_model.items(), key=lambda pair: pair[1])


def logs(run: Run, a: str, b: str) -> dict[Item, float]:
    """Logarithms of ratios by window, a mean over lengths for each that both have."""
    mine, theirs = run.by_method.get(a, {}), run.by_method.get(b, {})
    found = {}
    for item, at in mine.items():
        both = [(kld, theirs[item][n]) for n, kld in at.items() if n in theirs.get(item, {})]
        if both:
            found[item] = sum(math.log(max(x, TINY) / max(y, TINY)) for x, y in both) / len(both)
    return found


def by_window(a: str, b: str) -> dict[str, dict[Item, float]]:
    """By model, then by window: of the grid's runs that have both methods, or of all runs where none of the grid's has.

    Runs of ``eval`` share their windows: what two devices or types say of one is a mean.
    """
    found: dict[str, dict[Item, list[float]]] = {}
    whole = {run.model for run in runs() if run.source.startswith(GRID) and logs(run, a, b)}
    for run in runs():
        seen = found.get(run.model)
        if run.model in whole and not run.source.startswith(GRID):
            continue
        if run.source == "learned" and seen and "lengths" in sources(run.model, a, b):
            continue  # the same windows once more
        kind = "eval" if run.source.startswith("evidence/") else run.source
        for item, value in logs(run, a, b).items():
            found.setdefault(run.model, {}).setdefault((kind, *item), []).append(value)
    return {model: {item: sum(v) / len(v) for item, v in items.items()} for model, items in found.items()}


@functools.cache
def pair(a: str, b: str, model: str | None = None) -> Pair | None:
    """Of all models that have both, or of one; None: no run has."""
    by_model = {name: list(items.values()) for name, items in by_window(a, b).items() if model in (None, name)}
    values = [value for found in by_model.values() for value in found]
    if not values:
        return None
    means = {name: math.exp(sum(found) / len(found)) for name, found in by_model.items()}
    found = paired(values, [0.0] * len(values), higher_is_better=False)
    ends = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Pair(math.exp(found.mean), *ends, found.items, means, found.verdict)


def sources(model: str, a: str, b: str) -> set[str]:
    """Runs of a model that have both methods."""
    return {run.source for run in runs() if run.model == model and logs(run, a, b)}


def shown(found: Pair) -> str:
    """``0.19 [0.15, 0.24]``."""
    return f"{found.value:.2f}" + (
        "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    )


def models_of(found: Pair) -> str:
    """``1.5B: 0.18, 135M: 0.12``."""
    return ", ".join(f"{MODELS[name][0]}: {value:.2f}" for name, value in found.by_model.items())


# ---- tables ----------------------------------------------------------------------------------------------------------

NUMBERS = ("bits", "windows", "rows", "methods", "worst")
"""First words of columns that are aligned right."""


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table; words are aligned left."""
    marks = ["---:" if name.partition(" ")[0] in NUMBERS else "---" for name in head]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *rows))


def rows_there() -> str:
    """What was measured."""
    lines = []
    for run in runs():
        kinds = list(dict.fromkeys(item[0] for item in sorted(run.items)))
        tokens = ", ".join(f"{n:,}" for n in run.lengths)
        lines.append(
            [
                f"`{run.source}`",
                run.model,
                run.device,
                ", ".join(kinds),
                tokens,
                str(len(run.items)),
                str(len(run.by_method)),
                f"{run.rows:,}",
            ]
        )
    return markdown(
        ["file or folder", "model", "device", "texts", "tokens before", "windows", "methods", "rows"], lines
    )


def bits_of(name: str) -> float | None:
    """Effective bits, tables aside, of the model with heads of 128 channels."""
    return next((run.bits[name] for run in runs() if name in run.bits and run.model == next(iter(MODELS))), None)


def ranked() -> list[tuple[str, float, Pair]]:
    """Every method that the first model was run with, at equal windows: its bits and its ratio to KIVI-2."""
    names = dict.fromkeys(name for run in runs() for name in run.by_method)
    found = []
    for name in names:
        bits, ratio = bits_of(name), pair(name, BASE)
        if name not in (BASE, NOTHING) and "paper=true" not in name and bits is not None and ratio is not None:
            found.append((name, bits, ratio))
    return sorted(found, key=lambda entry: (entry[1], entry[0]))


LEARNED_KEYS = "tasq:bits=2,values=fold"
"""Keys of one method and values of another, which is ahead of both."""


def everything(of: Callable[[str], bool] = bool) -> str:
    """Every method at equal windows, by its bits: divergence as a multiple of KIVI-2's."""
    lines = []
    for name, bits, ratio in ranked():
        if not of(name):
            continue
        model, worst = ratio.worst
        lines.append(
            [
                f"`{name}`",
                f"{bits:.2f}",
                shown(ratio),
                str(ratio.items),
                models_of(ratio),
                f"{worst:.2f} ({MODELS[model][0]})",
                ratio.verdict,
            ]
        )
    head = ["method", "bits", "times KIVI-2's KL [95%]", "windows", "by model", "worst", "than KIVI-2"]
    return markdown(head, lines)


MAIN = (
    *(
        "fold",
        "fold:bits=2",
        "fold:bits=1",
        "fold:bits=4",
        "kivi:bits=4",
        "kivi:bits=1",
        "squat",
        "squat_pre",
        "innerq",
    ),
    *("turboquant:bits=3", "turboquant", "qjl", "gear", "zipcache", "kvarn", "commvq", "vqllm", "kvquant"),
    *("nova", "tasq", "tasq:bits=2", "gsrq", LEARNED_KEYS, BEST_BASE, "kivi:k_bits=4,v_bits=2,group=64"),
)
"""What the README shows."""


def main() -> str:
    """The README's table."""
    lines = [
        [f"`{name}`", f"{bits:.2f}", shown(ratio), str(ratio.items), f"{ratio.worst[1]:.2f}", ratio.verdict]
        for name, bits, ratio in ranked()
        if name in MAIN
    ]
    return markdown(["method", "bits", "times KIVI-2's KL [95%]", "windows", "worst model", "than KIVI-2"], lines)


KEYS_AND_VALUES = (
    *("tasq", "tasq:values=fold", "tasq:bits=2,v_bits=1,values=fold", "tasq:bits=2"),
    *(LEARNED_KEYS, "k=fold:bits=2,codebook=true+v=tasq:bits=2", "fold:bits=2,codebook=true", "fold"),
)


def learned_keys() -> str:
    """TaSQ's and fold's keys and values, together and apart."""
    return everything(KEYS_AND_VALUES.__contains__)


def family(name: str) -> str:
    """Methods of one idea: SQuat before RoPE is SQuat, and keys of one with values of another are neither's."""
    return "pairs" if "values=fold" in name else name.partition(":")[0].removesuffix("_pre")


def equal_bytes() -> str:
    """The method with the least divergence on its worst model, within each budget, and the best of another kind."""
    lines = []
    everybody = [*ranked(), (BASE, bits_of(BASE) or 0.0, Pair(1.0, None, None, 0, dict.fromkeys(MODELS, 1.0), ""))]
    for budget in BUDGETS:
        everywhere = [entry for entry in everybody if len(entry[2].by_model) == len(MODELS)]
        reach = (budget + slack for slack in (SLACK, LEAST_SLACK))
        fit = next((few for bits in reach if (few := [entry for entry in everywhere if entry[1] <= bits])), [])
        if not fit:
            lines.append([f"{budget:g}", "none is that small", "-", "-", "-", "-"])
            continue
        name, bits, ratio = min(fit, key=lambda entry: entry[2].worst[1])
        others = [entry for entry in fit if family(entry[0]) != family(name)]
        others = [entry for entry in others if pair(name, entry[0])] or others
        second = min(others, key=lambda entry: entry[2].worst[1], default=None)
        against = pair(name, second[0]) if second else None
        if second and against and against.verdict == "worse":  # on the windows that both have, over all models
            (name, bits, ratio), second = second, (name, bits, ratio)
            against = pair(name, second[0])
        lines.append(
            [
                f"{budget:g}",
                f"`{name}` ({bits:.2f})",
                models_of(ratio),
                "-" if second is None else f"`{second[0]}` ({second[1]:.2f})",
                "-" if second is None else models_of(second[2]),
                "not in one run"
                if against is None
                else f"{shown(against)}, {against.items} windows: {against.verdict}",
            ]
        )
    head = [
        "bits",
        "winner (its bits)",
        "times KIVI-2's KL",
        "best of another kind",
        "times KIVI-2's KL",
        "winner over it",
    ]
    return markdown(head, lines)


SPENT_BEST = (
    *(BEST_BASE, "kivi:k_bits=4,v_bits=2,group=64", "squat:k_bits=3,v_bits=2,group=64", "turboquant:k_bits=3,v_bits=2"),
    *("kvarn:k_bits=3,v_bits=2", "innerq", "qjl:k_bits=3", "gear", "zipcache"),
)
"""What learns nothing, each method in the setting with the least divergence around fold's bytes, of those that were tried."""


def at_their_best() -> str:
    """fold's divergence over that of rivals whose bits are spent as well as is known."""
    ours = bits_of("fold")
    lines = []
    for name in SPENT_BEST:
        found, bits = pair("fold", name), bits_of(name)
        assert found is not None and bits is not None
        said = [f"`{name}`", f"{bits:.2f}", shown(found), str(found.items), models_of(found)]
        lines.append([*said, f"**{found.verdict}**"])
    return markdown(["rival", "bits", f"`fold` ({ours:.2f}) over it [95%]", "windows", "by model", "`fold` is"], lines)


def texts() -> str:
    """Ratios to KIVI-2 by kind of text, all models and lengths together."""
    kinds = list(dict.fromkeys(item[0] for run in runs() for item in sorted(run.items)))
    lines = []
    for name in ("fold", "fold:bits=2", "squat", "innerq", "turboquant:bits=3", "qjl", "kvarn", "commvq", "vqllm"):
        cells = []
        for kind in kinds:
            values = [v for items in by_window(name, BASE).values() for item, v in items.items() if item[1] == kind]
            cells.append(f"{math.exp(sum(values) / len(values)):.2f}" if values else "-")
        lines.append([f"`{name}`", *cells])
    return markdown(["method", *kinds], lines)


BY_LENGTH = (
    *(
        "fold",
        BEST_BASE,
        "fold:bits=2",
        "fold:bits=2,codebook=true",
        "squat",
        "innerq",
        "turboquant:bits=3",
        "qjl",
        "kvarn",
    ),
    *("tasq", "tasq:bits=2", LEARNED_KEYS, "k=fold:bits=3+v=tasq:bits=2", "nova", "nova:values=codes", "gsrq"),
    *("vqllm", "commvq", "commvq:bits=1", "kvquant"),
)
"""Methods whose ratios are shown length by length; from the second line on what learns from a text."""


def lengths() -> str:
    """Ratios to KIVI-2 on the grid by the tokens before what is scored: of all models that reach so far, and the worst."""
    grid = [run for run in runs() if run.source.startswith(GRID)]
    where = sorted({n for run in grid for n in run.lengths})
    lines = []
    for name in BY_LENGTH:
        cells = []
        for n in where:
            by_model = {MODELS[run.model][0]: values for run in grid if (values := _logs_at(run, name, n))}
            worst, values = max(by_model.items(), key=lambda entry: sum(entry[1]) / len(entry[1]))
            every = [value for some in by_model.values() for value in some]
            mean, most = (math.exp(sum(some) / len(some)) for some in (every, values))
            cells.append(f"{mean:.2f}; {most:.2f} ({worst})" if len(by_model) > 1 else f"{most:.2f} ({worst})")
        lines.append([f"`{name}`", *cells])
    return markdown(["method", *(f"{n:,} tokens" for n in where)], lines)


def _logs_at(run: Run, name: str, n: int) -> list[float]:
    """Logarithms of a method's ratios to KIVI-2 after ``n`` tokens, of the windows that both have."""
    theirs = run.by_method[BASE]
    mine = run.by_method.get(name, {})
    return [math.log(at[n] / theirs[item][n]) for item, at in mine.items() if n in at and n in theirs.get(item, {})]
