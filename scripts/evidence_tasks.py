"""Tables of docs/evidence.md about tasks that are answered, and about what ``kvfold recommend`` proposes.

``tables.py`` writes them. Rows are those of ``kvfold eval`` in benchmarks/evidence/grid/ and benchmarks/evidence/ and, of
proposals, in benchmarks/evidence/recommend/. Methods are paired on the same items of one file only. Where a suite's prompts
have changed, claims rest on the newest version alone.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterable

import evidence
import evidence_claims
from evidence import BASE, BEST_BASE, GRID, LEARNED_KEYS, MODELS, NOTHING, ROOT, logs, markdown, of_eval, plain

from kvfold import methods
from kvfold.evaluation.results import Result, ResultFile, content, files_in
from kvfold.evaluation.statistics import LEAST, Difference, Estimate, estimate, paired
from kvfold.evaluation.suites import REGISTRY
from kvfold.methods.squat import SQuat

FEW = 10
"""Items of a method at least, for a line or a cell of its own."""
ENOUGH = 100
"""Items that a claim needs: cells with fewer have no mark, and claims with fewer no verdict."""
TASKS = ("needle", "ruler", "retrieval", "code")
"""Suites with lengths."""
CHAINS = ("gsm8k", "math")
"""Suites of chains of thought; they have a table of their own."""
MEASURES = {"gsm8k": "flexible"}
"""What verdicts are about, where it is not a suite's first measure: the model seldom writes the ``####`` of strict answers."""
POOLED = ("retrieval",)
"""Suites of which claims count earlier prompts as well, an item of each: there a key could stand twice, and no more differs."""
WORDS = {
    "needle": "needle",
    "ruler": "RULER",
    "retrieval": "key-value pairs",
    "code": "next line of code",
    "gsm8k": "GSM8K",
    "math": "MATH",
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """Rows of a suite and a model that may be paired; ``earlier``: of prompts that the suite no longer has."""

    suite: str
    model: str
    by_method: dict[str, dict[str, Result]]
    chat: bool = True
    earlier: bool = False

    def values(self, method: str, measure: str, length: int | None = None) -> dict[str, float]:
        """By item."""
        found = {}
        for item, row in self.by_method.get(method, {}).items():
            value = row.scores.get(measure)
            if value is not None and length in (None, row.length):
                found[item] = value
        return found

    def bits(self, method: str) -> float | None:
        """Effective bits, tables aside, at the longest length; mean over its rows."""
        rows = [r for r in self.by_method.get(method, {}).values() if r.bits_without_tables is not None]
        longest = max((r.length or 0 for r in rows), default=0)
        known = [r.bits_without_tables or 0.0 for r in rows if (r.length or 0) == longest]
        return sum(known) / len(known) if known else None

    @property
    def lengths(self) -> list[int]:
        return sorted({row.length for rows in self.by_method.values() for row in rows.values() if row.length})


@functools.cache
def asked() -> tuple[Asked, ...]:
    """Suite by suite, model by model."""
    found = []
    for suite in (*CHAINS, *TASKS):
        folders = (ROOT / GRID, ROOT / "evidence")
        files = [ResultFile.read(path) for folder in folders for path in files_in(folder, f"{suite}-")]
        newest = max((version(file) for file in files), default=0)
        for model in MODELS:
            for file in files:
                if file.settings.model.startswith(model):
                    by_method: dict[str, dict[str, Result]] = {}
                    for row in file.rows.values():
                        if suite == "retrieval" and row.task != "pairs":
                            continue
                        by_method.setdefault(plain(row.method), {})[row.item] = row
                    chat = bool(file.settings.options.get("chat"))
                    found.append(Asked(suite, model, by_method, chat, version(file) < newest))
    return tuple(found)


def version(file: ResultFile) -> int:
    """Of a suite's prompts."""
    return int(file.settings.options.get("version", 1))


def current(suite: str) -> list[Asked]:
    """Rows that claims rest on: of a suite's newest prompts, and of those in :data:`POOLED` of the earlier ones too."""
    return [one for one in asked() if one.suite == suite and (not one.earlier or suite in POOLED)]


def both(of: Iterable[Asked], a: str, b: str, measure: str, length: int | None = None) -> list[tuple[float, float]]:
    """Two methods on the items that both have, of several files. What was asked in two forms is one item, their mean."""
    found: dict[tuple[str, bool, str], list[tuple[float, float]]] = {}
    for one in of:
        x, y = one.values(a, measure, length), one.values(b, measure, length)
        for item in x.keys() & y.keys():
            found.setdefault((one.model, one.earlier, item), []).append((x[item], y[item]))
    return [(sum(x for x, _ in got) / len(got), sum(y for _, y in got) / len(got)) for _, got in sorted(found.items())]


def difference(
    of: Iterable[Asked], a: str, b: str, measure: str, higher: bool = True, length: int | None = None
) -> Difference | None:
    """A method minus another, as :func:`both` pairs them; None: there are no items."""
    pairs = both(of, a, b, measure, length)
    return paired([x for x, _ in pairs], [y for _, y in pairs], higher) if pairs else None


def percent(value: Estimate | Difference, signed: bool = False) -> str:
    """``61.5 [54.6, 67.9]``, or ``-2.5 [-6.0, 1.0]``."""
    sign = "+" if signed and value.mean > 0 else ""
    ends = "" if value.low is None or value.high is None else f" [{100 * value.low:.1f}, {100 * value.high:.1f}]"
    return f"{sign}{100 * value.mean:.1f}{ends}"


def cell(values: list[float], against: Difference | None, most: int) -> str:
    """A mean, marked where enough items show it to be better or worse than full precision; how many, if not ``most``."""
    known = against is not None and against.items >= ENOUGH
    mark = {"worse": " -", "better": " +"}.get(against.verdict, "") if known and against else ""
    few = f" ({len(values)})" if len(values) < 0.9 * most else ""
    return f"{100 * sum(values) / len(values):.1f}{mark}{few}"


def main_measure(suite: str) -> str:
    """What verdicts are about."""
    return MEASURES.get(suite, REGISTRY[suite].measures[0].name)


def _order(one: Asked) -> list[str]:
    """Methods with enough items: full precision first, then by bits."""
    many = [name for name, rows in one.by_method.items() if len(rows) >= FEW]
    return sorted(many, key=lambda name: (name != NOTHING, one.bits(name) or 0.0, name))


def chains() -> str:
    """Every method on the same problems."""
    lines = []
    for one in asked():
        if one.suite not in CHAINS:
            continue
        for name in _order(one):
            right = list(one.values(name, main_measure(one.suite)).values())
            strict, tokens, capped = (list(one.values(name, m).values()) for m in ("strict", "tokens", "capped"))
            against = [
                None if name == b else difference([one], name, b, main_measure(one.suite)) for b in (NOTHING, BASE)
            ]
            lines.append(
                [
                    f"{WORDS[one.suite]}, {'chat' if one.chat else 'plain'}",
                    f"`{name}`",
                    "16" if name == NOTHING else f"{one.bits(name) or 0.0:.2f}",
                    str(len(right)),
                    percent(estimate(right)),
                    f"{100 * sum(strict) / len(strict):.1f}" if strict else "-",
                    f"{sum(tokens) / len(tokens):.0f}",
                    f"{100 * sum(capped) / len(capped):.1f}",
                    *("-" if d is None else f"{percent(d, True)} ({d.items}): {d.verdict}" for d in against),
                ]
            )
    head = [
        "task, form",
        "method",
        "bits",
        "problems",
        "right, %",
        "strictly, %",
        "tokens",
        "cut off, %",
        "than full precision (problems of both)",
        "than KIVI-2",
    ]
    return markdown(head, lines)


def tasks() -> str:
    """Means by suite and length, and of all lengths; of full precision, and of every method."""
    found = [one for one in asked() if one.suite in TASKS]
    names = [name for one in found for name in _order(one)]
    bits = {name: max((one.bits(name) or 0.0 for one in found), default=0.0) for name in names}
    order = sorted(dict.fromkeys(names), key=lambda name: (name != NOTHING, bits[name], name))
    lines = []
    kinds = dict.fromkeys((one.suite, one.model, one.earlier) for one in found)
    for suite, model, earlier in sorted(kinds, key=lambda kind: (TASKS.index(kind[0]), kind[2])):
        of = [one for one in found if (one.suite, one.model, one.earlier) == (suite, model, earlier)]
        lengths = sorted({length for one in of for length in one.lengths})
        for length in (*lengths, *([None] if len(lengths) > 1 else [])):
            line = _means(of, order, main_measure(suite), length)
            if line is not None:
                where = "all" if length is None else f"{length:,}"
                lines.append([WORDS[suite] + ", earlier prompts" * earlier, MODELS[model][0], where, *line])
    return markdown(["task", "model", "tokens", "items", *(f"`{name}`" for name in order)], lines)


def of_items(of: Iterable[Asked], method: str, measure: str, length: int | None = None) -> list[float]:
    """A method on the items that full precision answered in the same file; what several files asked is one item, their mean."""
    found: dict[str, list[float]] = {}
    for one in of:
        full = one.values(NOTHING, measure, length)
        for item, value in one.values(method, measure, length).items():
            if item in full:
                found.setdefault(item, []).append(value)
    return [sum(values) / len(values) for _, values in sorted(found.items())]


def _means(of: list[Asked], order: list[str], measure: str, length: int | None) -> list[str] | None:
    """The number of items that full precision answered and a cell per method; None: there are few."""
    values = {name: of_items(of, name, measure, length) for name in order}
    most = max(map(len, values.values()), default=0)
    if most < FEW:
        return None
    cells = []
    for name in order:
        if len(values[name]) < max(most // 2, FEW):
            cells.append("-")
            continue
        against = None if name == NOTHING else difference(of, name, NOTHING, measure, length=length)
        cells.append(cell(values[name], against, most))
    return [str(most), *cells]


def families() -> str:
    """RULER's means by family, all lengths together."""
    found = current("ruler")
    names = list(dict.fromkeys(name for one in found for name in _order(one)))
    order = sorted(names, key=lambda name: (name != NOTHING, max(one.bits(name) or 0.0 for one in found)))
    lines = []
    for task in REGISTRY["ruler"].tasks:
        only = [dataclasses.replace(one, by_method=_of_task(one, task)) for one in found]
        measure, cells = main_measure("ruler"), []
        values = {name: of_items(only, name, measure) for name in order}
        most = max(map(len, values.values()))
        for name in order:
            against = None if name == NOTHING else difference(only, name, NOTHING, measure)
            cells.append(cell(values[name], against, most) if len(values[name]) >= FEW else "-")
        lines.append([task, str(most), *cells])
    return markdown(["family", "items", *(f"`{name}`" for name in order)], lines)


def _of_task(one: Asked, task: str) -> dict[str, dict[str, Result]]:
    return {name: {item: row for item, row in rows.items() if row.task == task} for name, rows in one.by_method.items()}


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says of a suite: that a method is ahead of another, or loses nothing against it."""

    paper: str
    says: str
    ours: str
    other: str
    suite: str
    alike: bool = False


CLAIMS = (
    Claim("SQuat", "more right answers than KIVI with the same storage", "squat", "kivi", "gsm8k"),
    Claim("SQuat", "no loss against full precision", "squat", "none", "gsm8k", True),
    Claim("InnerQ", "more right answers than KIVI", "innerq", "kivi", "gsm8k"),
    Claim("InnerQ", "no loss against full precision", "innerq", "none", "gsm8k", True),
    Claim("QJL", "no loss against full precision, at 2.66 bits", "qjl", "none", "gsm8k", True),
    Claim("KVarN", "no loss against full precision, at 2.38 bits", "kvarn", "none", "gsm8k", True),
    Claim("CommVQ", "no loss against full precision, at 2.05 bits", "commvq", "none", "gsm8k", True),
    Claim("CommVQ", "no loss against full precision, at 1.08 bits", "commvq:bits=1", "none", "gsm8k", True),
    Claim("TurboQuant", "no loss against full precision, at 3.28 bits", "turboquant:bits=3", "none", "gsm8k", True),
    Claim("kvfold", "`fold` at 2.78 bits: more right answers than KIVI at 3.00", "fold", "kivi", "gsm8k"),
    Claim("kvfold", "`fold` at 2.78 bits: no loss against full precision", "fold", "none", "gsm8k", True),
    Claim("kvfold", "`fold` at 2.28 bits: no loss against full precision", "fold:bits=2", "none", "gsm8k", True),
    Claim("CommVQ", "no loss against full precision, at 2.05 bits", "commvq", "none", "math", True),
    Claim("SQuat", "more right answers than KIVI with the same storage", "squat", "kivi", "math"),
    Claim("kvfold", "`fold` at 2.78 bits: no loss against full precision", "fold", "none", "math", True),
    Claim("kvfold", "`fold` at 2.28 bits: no loss against full precision", "fold:bits=2", "none", "math", True),
    *(
        claim
        for suite in TASKS
        for claim in (
            Claim("SQuat", "better than KIVI with the same storage", "squat", "kivi", suite),
            Claim("InnerQ", "better than KIVI", "innerq", "kivi", suite),
            Claim("QJL", "no loss against full precision", "qjl", "none", suite, True),
            Claim("TurboQuant", "3 bits: no loss against full precision", "turboquant:bits=3", "none", suite, True),
            Claim("kvfold", "`fold` at 2.78 bits: better than the best KIVI at 3.00", "fold", BEST_BASE, suite),
            Claim("kvfold", "`fold` at 2.78 bits: no loss against full precision", "fold", "none", suite, True),
            Claim(
                "kvfold", "learned keys at 2.19 bits: no loss against full precision", LEARNED_KEYS, "none", suite, True
            ),
            Claim("kvfold", "learned keys at 2.19 bits: better than `fold` at 2.78", LEARNED_KEYS, "fold", suite),
            Claim("kvfold", "`fold` at 2.28 bits: better than KIVI at 3.00", "fold:bits=2", "kivi", suite),
        )
    ),
)


def verdict(claim: Claim, found: Difference) -> str:
    """What the paired items say; that nothing is lost is never shown, only how much it may be."""
    if found.items < ENOUGH:
        return f"fewer than {ENOUGH} items"
    if found.verdict == "worse":
        return "does not hold here"
    if claim.alike and (found.high or 0.0) < 0:
        return f"not decided: a loss of {-100 * (found.low or 0.0):.1f} points at most"
    if claim.alike:
        most = -100 * (found.low or 0.0)
        return f"no loss shown, of {most:.1f} points at most" if most > 0 else "no loss shown"
    return "holds" if found.verdict == "better" else "no difference shown"


def claims() -> str:
    """Every claim that rows speak of."""
    lines = []
    for claim in CLAIMS:
        measure = main_measure(claim.suite)
        found = difference(current(claim.suite), claim.ours, claim.other, measure)
        if found is None or found.items < LEAST:
            continue
        cells = [WORDS[claim.suite], f"`{claim.ours}`", f"`{claim.other}`", percent(found, True), str(found.items)]
        lines.append([claim.paper, claim.says, *cells, f"**{verdict(claim, found)}**"])
    return markdown(["paper", "claim", "task", "method", "against", "points [95%]", "items", "verdict"], lines)


def published() -> str:
    """Methods as published, and what mends them, as multiples of KIVI-2's divergence in the same runs."""
    lines = []
    folders = (ROOT / GRID, ROOT / "evidence")
    files = [ResultFile.read(path) for folder in folders for path in files_in(folder, "divergence-")]
    own = [(evidence.model_of(file), file) for file in files if file.settings.windows is None]
    order = list(MODELS)
    for model, file in sorted(own, key=lambda one: order.index(one[0])):
        run = of_eval(model, file)
        for name in sorted(run.by_method, key=lambda name: (_plain_name(name), name)):
            found = logs(run, name, BASE)
            if name in (BASE, NOTHING) or not found:
                continue
            mean = paired(list(found.values()), [0.0] * len(found), higher_is_better=False)
            ends = "" if mean.low is None or mean.high is None else f" [{_times(mean.low)}, {_times(mean.high)}]"
            lengths = f"{run.lengths[0]:,} to {run.lengths[-1]:,}"
            said = [f"`{name}`", f"{run.bits[name]:.2f}", f"{_times(mean.mean)}{ends}", str(len(found))]
            lines.append([MODELS[model][0], lengths, *said])
    return markdown(["model", "tokens", "method", "bits", "times KIVI-2's KL [95%]", "windows"], lines)


def _plain_name(name: str) -> str:
    return name.partition(":")[0]


def _times(log: float) -> str:
    return f"{math.exp(log):.3g}"


def ablation() -> str:
    """SQuat's rank and weight: multiples of KIVI-2's divergence on the same windows, a line per rank."""
    (path,) = files_in(ROOT / "evidence" / "ablation", "divergence-")
    kld: dict[tuple[object, object], dict[str, float]] = {}
    for row in ResultFile.read(path).rows.values():
        method, value = methods.get(row.method), row.scores.get("kld")
        if value is not None and value > 0 and row.method != NOTHING:
            where = (method.rank, method.lam) if isinstance(method, SQuat) else (BASE, BASE)
            kld.setdefault(where, {})[row.item] = math.log(value)
    base = kld.pop((BASE, BASE))
    ranks, weights = (sorted({at[i] for at in kld}, key=float) for i in (0, 1))  # type: ignore[arg-type]
    lines = []
    for rank in ranks:
        cells = []
        for weight in weights:
            own = kld[rank, weight]
            items = sorted(own.keys() & base.keys())
            found = paired([own[i] for i in items], [base[i] for i in items], higher_is_better=False)
            ends = (
                ""
                if found.low is None or found.high is None
                else f" [{math.exp(found.low):.2f}, {math.exp(found.high):.2f}]"
            )
            cells.append(f"{math.exp(found.mean):.2f}{ends} ({found.items}): {found.verdict}")
        lines.append([str(rank), *cells])
    return markdown(["rank", *(f"lambda {weight:g}" for weight in weights)], lines)


# ---- proposals -------------------------------------------------------------------------------------------------------


def recommended() -> str:
    """What ``kvfold recommend`` proposes, against the best uniform bits at their own effective bits and within the budget."""
    folder = ROOT / "evidence" / "recommend"
    files = [ResultFile.read(path) for path in files_in(folder, "divergence-")]
    lines = []
    for path in sorted(files_in(folder, "recommend-", ".json"), key=lambda path: (_model(path), _held(path)["budget"])):
        held = _held(path)
        for file in files:
            if file.settings.weights_sha256 != held["weights_sha256"]:
                continue
            for what, key in (("equal bits", "at_equal_bits"), ("the budget", "proposal")):
                line = _proposal(file, held, held[key])
                if line is not None:
                    lines.append([held["model"].removesuffix("-Instruct"), f"{held['budget']:g}", what, *line])
    return markdown(
        ["model", "budget", "within", "bits", "uniform bits", "times its KL [95%]", "windows", "by text", "verdict"],
        lines,
    )


def _held(path: pathlib.Path) -> dict[str, object] | dict:  # type: ignore[type-arg]
    return dict(json.loads(content(path)))


def _model(path: pathlib.Path) -> int:
    model = str(_held(path)["model"])
    return next(i for i, name in enumerate(MODELS) if model.startswith(name))


def _proposal(file: ResultFile, held: dict, proposal: str) -> list[str] | None:  # type: ignore[type-arg]
    """Bits, and the ratio to uniform bits on windows that both were run on; one at several lengths counts once."""
    by_item: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    bits: dict[str, float] = {}
    for row in file.rows.values():
        kld = row.scores.get("kld")
        if kld is not None and row.length is not None:
            at = by_item.setdefault(row.method, {}).setdefault((row.task, row.item.rsplit("/", 1)[-1]), {})
            at[row.length] = kld
            bits[row.method] = row.bits_without_tables or 0.0
    mine, theirs = by_item.get(proposal, {}), by_item.get(held["uniform"], {})
    logs: dict[tuple[str, str], float] = {}
    for item in sorted(mine.keys() & theirs.keys()):
        both = [math.log(kld / theirs[item][n]) for n, kld in mine[item].items() if n in theirs[item]]
        if both:
            logs[item] = sum(both) / len(both)
    if not logs or proposal == held["uniform"]:
        return None
    found = paired(list(logs.values()), [0.0] * len(logs), higher_is_better=False)
    ends = (
        "" if found.low is None or found.high is None else f" [{math.exp(found.low):.2f}, {math.exp(found.high):.2f}]"
    )
    kinds: dict[str, list[float]] = {}
    for (task, _), value in logs.items():
        kinds.setdefault(task, []).append(value)
    by_text = ", ".join(f"{kind}: {math.exp(sum(v) / len(v)):.2f}" for kind, v in kinds.items())
    numbers = [f"{bits[proposal]:.2f}", f"`{held['uniform']}` ({bits[held['uniform']]:.2f})"]
    return [*numbers, f"{math.exp(found.mean):.2f}{ends}", str(found.items), by_text, f"**{found.verdict}**"]


# ---- what rotations do -----------------------------------------------------------------------------------------------

TILES = ("kvarn", "kvarn:rounds=0", "kvarn:rounds=0,rotation=1", "kvarn:rotation=1", "kvarn+keep=0")
"""KVarN as it is; without balanced tiles; without them and without the rotation; without the rotation; but for layer 0."""


def rotated() -> str:
    """KVarN with and without its rotation and its factors, on the model where it fails."""
    model = next(name for name in MODELS if MODELS[name][0] == "0.5B")
    (run,) = (run for run in evidence.runs() if run.model == model and TILES[2] in run.by_method)
    (errors,) = (
        file
        for path in files_in(ROOT / "evidence", "layers-")
        if (file := ResultFile.read(path)).settings.model.startswith(model)
    )
    lines = []
    for name in (*TILES, BASE, "fold:bits=2"):
        found = logs(run, name, BASE)
        mean = paired(list(found.values()), [0.0] * len(found), higher_is_better=False)
        ends = "" if mean.low is None or mean.high is None else f" [{_times(mean.low)}, {_times(mean.high)}]"
        times = ["1", "-"] if name == BASE else [f"{_times(mean.mean)}{ends}", str(len(found))]
        series = [row.series["scores"] for row in errors.rows.values() if row.method == name]
        cells = ["-", "-"]
        if series:
            rest = [value or 0.0 for layers in series for value in layers[1:]]
            cells = [f"{series[0][0]:.2f}", f"{sum(rest) / len(rest):.2f}"]
        lines.append([f"`{name}`", *times, *cells])
    head = ["method", "times KIVI-2's KL [95%]", "windows", "error of scores, layer 0", "error of scores, other layers"]
    return markdown(head, lines)


# ---- in short --------------------------------------------------------------------------------------------------------


def short() -> str:
    """What a reader takes away."""
    own, wide = evidence.pair("fold", BASE), evidence.pair("fold:bits=2", BASE)
    best, spent = evidence.pair("fold", BEST_BASE), evidence.pair(BEST_BASE, BASE)
    assert own is not None and wide is not None and best is not None and spent is not None
    lines = [
        f"- **Divergence**: `fold` at {evidence.bits_of('fold'):.2f} bits has {_span(best)} of that of the best KIVI at 3.00 "
        f"bits (`{BEST_BASE}`), which has {_span(spent)} of its default's, KIVI-2's. Of KIVI-2's `fold` has {_span(own)}, at "
        f"{evidence.bits_of('fold:bits=2'):.2f} bits {_span(wide)} (three models, {own.items} windows)."
    ]
    for suite in (*CHAINS, "ruler", "code", "needle", "retrieval"):
        of = current(suite)
        said = []
        for name, word in (
            ("fold", "`fold`"),
            ("fold:bits=2", "`fold:bits=2`"),
            (BEST_BASE, "the best KIVI"),
            (BASE, "KIVI-2"),
        ):
            found = difference(of, name, NOTHING, main_measure(suite))
            if found is None or found.items < ENOUGH:
                continue
            said.append(f"{word} {percent(found, True)}")
        count = difference(of, "fold", NOTHING, main_measure(suite))
        if count is not None:
            many = f"{count.items} items" + ("" if count.items >= ENOUGH else ": too few for a claim")
            lines.append(
                f"- **{WORDS[suite][:1].upper()}{WORDS[suite][1:]}**, points over full precision: {', '.join(said)} ({many})."
            )
    papers = [claim for claim in evidence_claims.CLAIMS if claim.paper != "kvfold"]
    verdicts = [evidence_claims.verdict(evidence.pair(claim.ours, claim.other)) for claim in papers]
    held = sum(v == "holds" for v in verdicts)
    fails = sum(v.startswith("does not hold") for v in verdicts)
    lines.append(
        f"- **The papers' claims about divergence**: {held} of {len(verdicts)} hold on every model that was run, {fails} do "
        "not; of the others no difference is shown, or there are too few windows."
    )
    return "\n".join(lines)


def headline() -> str:
    """The README's claim about answers; it names what is lost, and raises once one of its verdicts is another."""
    found = {suite: current(suite) for suite in ("gsm8k", "ruler", "retrieval")}
    words, ruler, pairs = (difference(of, "fold", NOTHING, main_measure(suite)) for suite, of in found.items())
    theirs = difference(found["ruler"], BASE, NOTHING, main_measure("ruler"))
    best, best_pairs = (
        difference(found[suite], BEST_BASE, NOTHING, main_measure(suite)) for suite in ("ruler", "retrieval")
    )
    assert words is not None and ruler is not None and pairs is not None and theirs is not None
    assert best is not None and best_pairs is not None and best.items >= ENOUGH and best_pairs.items >= ENOUGH
    assert words.verdict == "no difference shown" and {theirs.verdict, best.verdict, best_pairs.verdict} == {"worse"}
    said = f"no difference shown on {words.items} problems of GSM8K"
    low, high = 100 * (ruler.low or 0.0), 100 * (ruler.high or 0.0)
    if ruler.verdict == "no difference shown":
        said += f" and on {ruler.items} prompts of RULER to 30,000 tokens "
        said += f"({100 * ruler.mean:.1f} points, from {low:.1f} to {high:.1f})"
    else:
        assert ruler.verdict == "worse", ruler
        said += f"; RULER to 30,000 tokens loses {-100 * ruler.mean:.1f} points on {ruler.items} prompts "
        said += f"(from {-high:.1f} to {-low:.1f})"
    said += f", where the best KIVI loses {-100 * best.mean:.1f} and KIVI-2 {-100 * theirs.mean:.0f}"
    assert pairs.verdict == "worse", pairs
    said += f"; the hardest task, key-value pairs, loses {-100 * pairs.mean:.0f} on {pairs.items} prompts, where the best KIVI "
    said += f"loses {-100 * best_pairs.mean:.0f}"
    return f"- **Answers close to the full cache's**: {said} ([1.5B model](docs/evidence.md#on-tasks))."


def beside_full() -> str:
    """Tasks in the README: fold, learned keys, the best KIVI and KIVI-2 against full precision, on the items that both have.

    How many are fold's; another method's are said where it has others.
    """
    lines = []
    for suite in (*CHAINS, "ruler", "needle", "retrieval", "code"):
        of, measure = current(suite), main_measure(suite)
        longest = [n for one in of for n in one.lengths]
        where = f", {min(longest):,} to {max(longest):,} tokens" if longest else ""
        full = [value for _, value in both(of, "fold", NOTHING, measure)]
        mine = difference(of, "fold", NOTHING, measure)
        if mine is None:
            continue
        cells = []
        for name in ("fold", LEARNED_KEYS, BEST_BASE, BASE):
            found = difference(of, name, NOTHING, measure)
            if found is None or found.items < FEW:
                cells.append("-")
                continue
            many = "" if found.items == mine.items else f" ({found.items})"
            said = found.verdict if found.items >= ENOUGH else f"fewer than {ENOUGH} items"
            cells.append(f"{percent(found, True)}{many}: {said}")
        lines.append([f"{WORDS[suite]}{where}", str(mine.items), f"{100 * sum(full) / len(full):.1f}", *cells])
    names = ("`fold`", f"`{LEARNED_KEYS}`", f"`{BEST_BASE}`", "`kivi`")
    return markdown(["task", "items", "full precision, %", *(f"{name}, points over it" for name in names)], lines)


def _span(found: evidence.Pair) -> str:
    low, high = min(found.by_model.values()), max(found.by_model.values())
    return f"{low:.2f} to {high:.2f}"


TABLES: dict[str, Callable[[], str]] = {
    "short": short,
    "families": families,
    "rotated": rotated,
    "published": published,
    "chains": chains,
    "tasks": tasks,
    "task claims": claims,
    "recommended": recommended,
    "ablation": ablation,
}
