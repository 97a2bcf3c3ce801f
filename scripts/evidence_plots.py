"""The picture of docs/evidence.md and README: bits against what is lost, of divergence and of exact retrieval.

``tables.py`` writes it, from the committed rows.
"""

import evidence_tasks
from evidence import BASE, BEST_BASE, GRID, MODELS, NOTHING, bits_of, ranked

from kvfold.evaluation.report import figures

TOKENS = 16_384
"""Of the prompts whose key-value pairs are drawn."""
WIDTH, HEIGHT = 720, 480
"""Of a panel."""
BITS = figures.Axis("effective bits, tables aside", low=0.0, high=5.5, written=lambda v: f"{v:.4g}")
NAMED = {"fold": "fold", BASE: "kivi", BEST_BASE: "kivi 3/2, groups of 64"}
STYLE = (
    "<style>text{font:11px sans-serif;fill:#333}.grid{stroke:#ddd}"
    ".frontier{fill:none;stroke:#999;stroke-width:1.5}</style>"
)


def pareto() -> str:
    """Bits against divergence, on the worst of the models, and below against the loss on exact retrieval."""
    divergence, retrieval = _divergence(), list(_retrieval())
    colors = list(dict.fromkeys(point.method for point in (*divergence, *retrieval)))
    y = figures.Axis("KL, times KIVI-2's, worst of models", log=True, limit=30, written=lambda v: f"{v:.3g}")
    above = figures.pareto("Divergence by effective bits", divergence, BITS, y, False, colors, NAMED)
    y = figures.Axis(f"exact pairs lost, points, {TOKENS:,} tokens", low=0.0, written=lambda v: f"{v:.3g}")
    below = figures.pareto("Loss on exact retrieval by effective bits", retrieval, BITS, y, False, colors, NAMED)
    panels = "".join(_panel(drawn, i * HEIGHT) for i, drawn in enumerate((above, below)))
    size = f'width="{WIDTH}" height="{2 * HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {2 * HEIGHT}" role="img" '
        'aria-label="Divergence and loss on exact retrieval by effective bits">'
        f'{STYLE}<rect width="100%" height="100%" fill="#fff"/>{panels}</svg>\n'
    )


def _panel(drawn: str, top: int) -> str:
    """A figure's picture, placed in another."""
    svg = drawn[drawn.index("<svg") : drawn.index("</svg>") + len("</svg>")]
    return svg.replace("<svg", f'<svg y="{top}" width="{WIDTH}" height="{HEIGHT}"', 1)


def _divergence() -> list[figures.Point]:
    """Methods that were run on all models."""
    points = [
        figures.Point(name, bits, ratio.worst[1])
        for name, bits, ratio in ranked()
        if len(ratio.by_model) == len(MODELS) and ":seed=" not in name and name != "squat_pre"
    ]
    return [*points, figures.Point(BASE, bits_of(BASE) or 0.0, 1.0)]


def _retrieval() -> dict[figures.Point, int]:
    """Methods of the grid and how many prompts each answered, paired with full precision on those that both did in one file."""
    of = [one for one in evidence_tasks.current("retrieval") if not one.earlier]
    points = {}
    for name in dict.fromkeys(name for one in of for name in one.by_method):
        found = evidence_tasks.difference(of, name, NOTHING, evidence_tasks.main_measure("retrieval"), length=TOKENS)
        bits = bits_of(name) or next((bits for one in of if (bits := one.bits(name)) is not None), None)
        if name == NOTHING or found is None or found.items < evidence_tasks.FEW or bits is None:
            continue
        low, high = (None if end is None else -100 * end for end in (found.high, found.low))
        points[figures.Point(name, bits, -100 * found.mean, low, high)] = found.items
    return points


def lacking() -> str:
    """What the second panel is of, and which methods of the first it has no rows of."""
    found = _retrieval()
    there = {point.method for point in found}
    missing = [f"`{point.method}`" for point in _divergence() if point.method not in there]
    return (
        f"The panel below is of key-value pairs of Qwen2.5-Coder-1.5B after {TOKENS:,} tokens: points of exact values that are "
        f"lost against full precision on the same prompts, {min(found.values())} to {max(found.values())} of each method "
        f"([rows](../benchmarks/{GRID})). Methods of the panel above that have no such rows: {', '.join(missing)}."
    )
