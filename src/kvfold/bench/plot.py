"""Draw the committed rows: speed against context, percent of the byte floor, memory and throughput against batch."""

import argparse
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold import files
from kvfold.bench.generation import PLAIN, STATIC
from kvfold.bench.matvec import LAYOUTS, MODELS, SIDES
from kvfold.bench.rows import latest, of_last_commit, read, script
from kvfold.errors import KVFoldError, OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = Path("benchmarks/rows")
OUT = Path("docs/plots")

# Okabe and Ito's colours, which people with any colour vision tell apart; markers differ as well
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY = "#666666"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvfold",
    "figure.constrained_layout.use": True,
}
FLOOR = {
    "kivi 2-bit g32": "KIVI, SQuat 2-bit (3.0 bits)",
    "innerq-asym 2-bit g32": "InnerQ asym (3.0 bits)",
    "innerq-sym 2-bit g32": "InnerQ sym (3.5 bits)",
    "innerq-hybrid 2-bit g32": "InnerQ hybrid (3.5 bits)",
    "kivi 4-bit g32": "KIVI 4-bit (5.0 bits)",
}
LAYOUT_NAMES = {
    "outer": ("outer groups (KIVI), 3.0 bits", ORANGE, "s"),
    "inner": ("inner groups (InnerQ asym), 3.0 bits", BLUE, "o"),
    "inner-hybrid": ("inner groups (InnerQ hybrid), 3.5 bits", GREEN, "^"),
}
CACHES = {
    STATIC: ("bf16, static buffer, CUDA graph", GREY, "o", "--"),
    PLAIN: ("bf16, Transformers' DynamicCache", "black", "x", ":"),
    "kivi:recent=32": ("KIVI / SQuat 2-bit, window 32", BLUE, "s", "-"),
    "kivi:recent=0": ("KIVI / SQuat 2-bit, no window", GREEN, "v", "-"),
    "kivi:recent=128": ("KIVI / SQuat 2-bit, window 128", ORANGE, "^", "-"),
}


def _number(text: str) -> float | None:
    return float(text) if text else None


def _compact(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 else str(count)


def _legend(figure: "Figure", axes: "Axes", columns: int) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def speed(plt: Any, folder: Path) -> "Figure":
    """Both products of a decode step against the context, as times as fast as ``torch.matmul`` on fp16."""
    rows = latest(read(folder / "matvec.csv"), "work", "context")
    figure, axes = plt.subplots(2, len(MODELS), figsize=(8.6, 5.2), sharex=True, sharey="row")
    for line, side in zip(axes, SIDES.values(), strict=True):
        for axis, model in zip(line, MODELS, strict=True):
            for layout in LAYOUTS:
                name, colour, marker = LAYOUT_NAMES[layout]
                points = [
                    (int(row["context"]), _number(row["ratio"]))
                    for row in rows
                    if row["work"] == f"{model} {side} {layout}"
                ]
                points = [p for p in points if p[1] is not None]
                axis.plot(*zip(*points, strict=True), color=colour, marker=marker, label=name)
            axis.axhline(1, color=GREY, linestyle="--", linewidth=1, label="torch.matmul, fp16")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.set_xticks(
                [512, 2048, 8192, 32768, 131072], labels=[_compact(n) for n in (512, 2048, 8192, 32768, 131072)]
            )
            axis.set_yticks([0.5, 1, 2, 4, 8], labels=["0.5", "1", "2", "4", "8"])
            shape = MODELS[model]
            axis.set_title(
                f"{side},  {shape['num_heads']}/{shape['num_kv_heads']} heads, d = {shape['head_dim']}", fontsize=9
            )
        line[0].set_ylabel("times as fast")
    for axis in axes[-1]:
        axis.set_xlabel("tokens of context")
    _legend(figure, axes[0][0], 2)
    figure.suptitle("Products of one decode step, batch 1, one H200", fontsize=10)
    return figure


def floor(plt: Any, folder: Path) -> "Figure":
    """How near attention over packed caches comes to the time that reading the packed bytes takes, and its speed."""
    shape = ("batch", "context", "num_heads", "num_kv_heads", "head_dim")
    steps = [row for row in read(folder / "attention.csv") if (row["dtype"], row["query_tokens"]) == ("float16", "1")]
    rows = [row for row in latest(steps, "work", *shape) if row["work"] in FLOOR and row["ratio"]]
    rows.sort(
        key=lambda row: [int(row[name]) for name in ("num_kv_heads", "head_dim", "batch", "context")], reverse=True
    )
    colours = dict(zip(FLOOR, (BLUE, ORANGE, GREEN, PURPLE, SKY), strict=True))
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 0.27 * len(rows) + 1.4), sharey=True)
    seen: set[str] = set()
    for at, row in enumerate(rows):
        work = row["work"]
        label = None if work in seen else FLOOR[work]
        seen.add(work)
        for axis, column, form in ((left, "floor_percent", "{:.0f}"), (right, "ratio", "{:.2f}")):
            value = float(row[column])
            axis.barh(at, value, color=colours[work], label=label)
            axis.text(value, at, " " + form.format(value), va="center", fontsize=7.5)
    names = [
        f"B={row['batch']}, N={_compact(int(row['context']))}, {row['num_heads']}/{row['num_kv_heads']} heads, "
        f"d={row['head_dim']}"
        for row in rows
    ]
    left.set_yticks(range(len(rows)), labels=names, fontsize=7.5)
    left.set_xlim(0, 112)
    left.axvline(100, color=GREY, linestyle="--", linewidth=1)
    left.set_xlabel("% of the byte floor (packed bytes at 4.35 TB/s)")
    right.axvline(1, color=GREY, linestyle="--", linewidth=1)
    right.set_xlabel("times as fast as the fastest fp16 kernel (dashed)")
    for axis in (left, right):
        axis.grid(axis="y", visible=False)
    _legend(figure, left, 3)
    figure.suptitle("Decode attention over packed caches, one H200", fontsize=10)
    return figure


def _panel(axis: "Axes", rows: Sequence[Mapping[str, str]], column: str) -> None:
    """A column of the memory rows against the batch, a line per cache; where the next batch did not fit, its size."""
    for cache, (name, colour, marker, style) in CACHES.items():
        points = sorted(
            (int(row["batch"]), float(row[column]), row["largest"] == "True") for row in rows if row["cache"] == cache
        )
        if not points:
            continue
        pairs = [point[:2] for point in points]
        axis.plot(*zip(*pairs, strict=True), color=colour, marker=marker, linestyle=style, label=name)
        if points[-1][2]:
            axis.annotate(f"B={pairs[-1][0]}", pairs[-1], xytext=(4, -10), textcoords="offset points", fontsize=7.5)
    axis.set_ylim(bottom=0)
    axis.margins(x=0.12)


def _against_batch(plt: Any, folder: Path, columns: dict[str, str]) -> "Figure":
    """Columns of the memory rows (and their units) against the batch: a line of panels each, a panel per pair of lengths."""
    rows = of_last_commit(read(folder / "memory.csv"), "cache", "prompt", "output")
    rows = [row for row in rows if row["fits"] == "True"]
    lengths = list(dict.fromkeys((row["prompt"], row["output"]) for row in rows))
    size = (8.6, 1.1 + 2.6 * len(columns))
    figure, axes = plt.subplots(len(columns), len(lengths), figsize=size, squeeze=False, sharex="col")
    for line, (column, unit) in zip(axes, columns.items(), strict=True):
        line[0].set_ylabel(unit)
        for axis, pair in zip(line, lengths, strict=True):
            _panel(axis, [row for row in rows if (row["prompt"], row["output"]) == pair], column)
            if column == "peak_gb":
                axis.axhline(float(rows[0]["cap_gb"]), color=RED, linewidth=1, label="cap")
    for axis, (prompt, output) in zip(axes[0], lengths, strict=True):
        axis.set_title(f"prompt {prompt}, output {output} tokens", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("batch")
    _legend(figure, axes[0][0], 3)
    figure.suptitle(f"Llama-2-7B shape, {float(rows[0]['cap_gb']):g} GB cap, one H200", fontsize=10)
    return figure


def memory(plt: Any, folder: Path) -> "Figure":
    """Peak memory of whole generations against the batch."""
    return _against_batch(plt, folder, {"peak_gb": "peak memory, GB (weights included)"})


def throughput(plt: Any, folder: Path) -> "Figure":
    """Tokens per second of whole generations, and of their decoding alone, against the batch."""
    columns = {"tokens_per_s": "tokens/s, prefill included", "decode_tokens_per_s": "tokens/s, decoding alone"}
    return _against_batch(plt, folder, columns)


PLOTS: dict[str, Callable[[Any, Path], "Figure"]] = {
    "speed": speed,
    "floor": floor,
    "memory": memory,
    "throughput": throughput,
}


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises
    ------
    KVFoldError
        Without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise KVFoldError("bench plot: needs matplotlib, the extra 'plot': pip install 'kvfold[plot]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(names: Sequence[str], folder: Path = ROWS, out: Path = OUT, form: str = "svg") -> list[Path]:
    """Draw plots from the rows in ``folder``.

    Parameters
    ----------
    names : sequence of str
        Keys of :data:`PLOTS`.
    out : Path
        Folder that the files go to.
    form : {"svg", "png"}

    Returns
    -------
    list of Path
        The files written. The same rows give the same bytes, with one version of matplotlib.
    """
    plt = pyplot()
    written = []
    with plt.rc_context(STYLE):
        for name in names:
            figure = PLOTS[name](plt, folder)
            path = out / f"{name}.{form}"
            metadata = {"Date": None} if form == "svg" else {"Software": None}
            drawn = io.BytesIO()
            figure.savefig(drawn, format=form, dpi=130, metadata=metadata)
            plt.close(figure)
            try:
                out.mkdir(parents=True, exist_ok=True)
                files.write(path, drawn.getvalue())
            except OSError as error:
                raise OutputError(f"out: cannot write {path}: {error.strerror or error}") from error
            written.append(path)
    return written


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvfold bench plot", description=__doc__)
    parser.add_argument("plots", nargs="*", help=f"which ones: {', '.join(PLOTS)}; default: all")
    parser.add_argument("--rows", type=Path, default=ROWS, help=f"folder of the CSV files; default: {ROWS}")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder to write to; default: {OUT}")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.plots) - set(PLOTS))
    if unknown:
        raise KVFoldError(f"bench plot: {unknown[0]} is not a plot; allowed: {', '.join(PLOTS)}")
    for path in draw(args.plots or list(PLOTS), args.rows, args.out, args.format):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(script(main))
