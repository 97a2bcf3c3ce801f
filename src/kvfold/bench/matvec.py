"""The two matrix products of a decode step apart, as in Tables 3 and 4 of InnerQ's paper.

``q K'`` (scores of all tokens) and ``p V`` (their weighted values) of one token, batch 1, over 2-bit storage: grouped along
the inner dimension (InnerQ: asymmetric, and hybrid as the paper has it) or along the outer one (KIVI). The models and the
lengths are the paper's; the kernels are the fused attention kernel's own code without the softmax. The baseline is
``torch.matmul`` on fp16, over grouped heads, so that it too reads each key and value once.

Every product is first compared with its float32 product over the decoded storage. Calls rotate among copies that together
are several times the L2 cache, as a model's layers do; the paper repeats one call.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfold.bench.attention import COLD_BYTES, HBM_BYTES_PER_MS, LIMIT
from kvfold.bench.rows import Row, append, environment, need_gpu, options, script, show
from kvfold.bench.timing import times
from kvfold.errors import KVFoldError
from kvfold.formats import AffineGroups, Fields

ROWS = Path("benchmarks/rows/matvec.csv")
MODELS: dict[str, dict[str, int]] = {
    "llama-3.2-1b": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64},
    "llama-3.1-8b": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "llama-2-13b": {"num_heads": 40, "num_kv_heads": 40, "head_dim": 128},
}
LENGTHS = tuple(512 << i for i in range(9))
LAYOUTS = {"outer": "asym", "inner": "asym", "inner-hybrid": "hybrid"}
"""Layout -> mode; ``outer`` is KIVI's."""
SIDES = {"key": "q K'", "value": "p V"}
COPIES = 1024
"""At most: more calls do not fit a graph."""
REPLAYS = 20


def check_lengths(benchmark: str, lengths: Sequence[int]) -> None:
    """Refuse lengths that are no whole number of units."""
    for n in lengths:
        if n < 512 or n % 128:
            raise KVFoldError(f"bench {benchmark}: length={n} is not allowed; allowed: multiples of 128, 512 or more")


@dataclass(frozen=True)
class Product:
    """One product of one token.

    Parameters
    ----------
    model : str
        A key of :data:`MODELS`.
    side : {"key", "value"}
        ``q K'`` or ``p V``.
    layout : str
        A key of :data:`LAYOUTS`.
    context : int
        Tokens, all packed.
    """

    model: str
    side: str
    layout: str
    context: int
    bits: int = 2

    @property
    def heads(self) -> int:
        return MODELS[self.model]["num_kv_heads"]

    @property
    def rows(self) -> int:
        """Query heads of a KV head."""
        return MODELS[self.model]["num_heads"] // self.heads

    @property
    def head_dim(self) -> int:
        return MODELS[self.model]["head_dim"]

    @property
    def format(self) -> AffineGroups:
        return self.other(self.side)

    def other(self, side: str) -> AffineGroups:
        """Storage of a side in this layout."""
        along_channels = (side == "key") == (self.layout != "outer")
        axis = "channel" if along_channels else "token"
        return AffineGroups(self.head_dim, 32, side, self.bits, axis, LAYOUTS[self.layout])

    @property
    def nbytes(self) -> int:
        """Packed bytes that the product reads."""
        return self.heads * self.context // 32 * self.format.block_bytes

    def __str__(self) -> str:
        return f"{self.model} {SIDES[self.side]} {self.layout}"


class Operands:
    """Storage of several copies of one product's matrix, and its vectors.

    ``vector``: fp16 queries [num_kv_heads, rows, head_dim], or weights of spread-out scores, the largest 1 [num_kv_heads,
    rows, context].
    """

    def __init__(self, product: Product, copies: int, device: torch.device) -> None:
        self.product, self.copies = product, copies
        generator = torch.Generator(device).manual_seed(0)
        heads, n, dim = product.heads, product.context, product.head_dim
        matrix = torch.randn(1, heads, n, dim, device=device, generator=generator)
        if product.side == "key":
            spread = torch.randn(2, 1, heads, 1, dim, device=device, generator=generator)
            matrix = matrix * torch.exp(0.7 * spread[0]) + spread[1]
            self.vector = torch.randn(heads, product.rows, dim, device=device, generator=generator).half()
        else:
            scores = 3 * torch.randn(heads, product.rows, n, device=device, generator=generator)
            self.vector = (scores - scores.amax(-1, keepdim=True)).exp().half()
        encoded = product.format.encode(matrix)
        self.fields: Fields = {k: x.expand(copies, *x.shape[1:]).contiguous() for k, x in encoded.items()}
        self.length = torch.full((1,), n, dtype=torch.int32, device=device)

    def reference(self) -> torch.Tensor:
        """The product in float32; of values, over the sum of the weights."""
        whole = self.product.format.decode({k: x[:1] for k, x in self.fields.items()})[0]
        vector = self.vector.float()
        if self.product.side == "key":
            return vector @ whole.transpose(-1, -2)
        return vector @ whole / vector.sum(-1, keepdim=True)

    def calls(self, out: torch.Tensor | None = None) -> list[Callable[[], torch.Tensor]]:
        """One call per copy; each writes ``out`` if given."""
        return [lambda i=i: launch(self.product, self, i, out) for i in range(self.copies)]  # type: ignore[misc]


def launch(product: Product, operands: Operands, copy: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Run a product on one of the copies: fp16 [num_kv_heads, rows, context], or [num_kv_heads, rows, head_dim]."""
    from kvfold.bench._matvec_gluon import scores_kernel, values_kernel
    from kvfold.kernels.affine.decode import MODES, make_plan
    from kvfold.kernels.common.partials import Partials
    from kvfold.kernels.device import device_info

    form = product.format
    heads, rows, dim, capacity = product.heads, product.rows, product.head_dim, product.context // 32
    device = operands.vector.device
    width = product.context if product.side == "key" else dim
    out = torch.empty(heads, rows, width, dtype=torch.float16, device=device) if out is None else out
    plan = make_plan(product.other("key"), product.other("value"), heads, rows, capacity, 0, device_info(device))
    fields = {k: x[copy] for k, x in operands.fields.items()}
    asym = form.mode == "asym"
    stored = [fields[k] for k in (("codes", "meta", "codes") if asym else ("codes", "scale", "aux"))]
    fixed: dict[str, Any] = {
        "D": dim,
        "BITS": form.bits_per_code,
        "AXIS": int(form.axis == "channel"),
        "MODE": MODES[form.mode],
        "GROUP": form.group,
        "NT": 1,
        "NB": plan.blocks,
        "num_warps": plan.warps,
    }
    grid = (heads, plan.splits)
    if product.side == "key":
        scores_kernel[grid](
            operands.vector,
            *stored,
            operands.length,
            out.view(torch.int32),
            1.0,
            heads,
            rows,
            capacity,
            plan.splits,
            CENTER=plan.center,
            **fixed,
        )
        return out
    parts = Partials.empty(heads, plan.splits, rows, dim, device)
    values_kernel[grid](
        operands.vector.view(torch.int32),
        *stored,
        operands.length,
        parts.out,
        parts.top,
        parts.total,
        heads,
        rows,
        capacity,
        plan.splits,
        **fixed,
    )
    return parts.merge(out)


def copies_of(nbytes: int) -> int:
    """How many copies are several times the L2 cache together."""
    return max(1, min(COPIES, math.ceil(COLD_BYTES / 2 / nbytes)))


def baseline_ms(product: Product, device: torch.device) -> float:
    """Median milliseconds of ``torch.matmul`` on fp16."""
    heads, n, dim = product.heads, product.context, product.head_dim
    copies = copies_of(heads * n * dim * 2)
    matrix = torch.randn(copies, heads, n, dim, device=device, dtype=torch.float16)
    if product.side == "key":
        vector = torch.randn(heads, product.rows, dim, device=device, dtype=torch.float16)
        return times([lambda i=i: torch.matmul(vector, matrix[i].mT) for i in range(copies)], REPLAYS)[1]  # type: ignore[misc]
    vector = torch.rand(heads, product.rows, n, device=device, dtype=torch.float16)
    return times([lambda i=i: torch.matmul(vector, matrix[i]) for i in range(copies)], REPLAYS)[1]  # type: ignore[misc]


def measure(product: Product, device: torch.device, env: dict[str, str], known: dict[Any, float]) -> Row:
    """Gate, then time, one product; ``known`` keeps the baseline of a shape."""
    operands = Operands(product, copies_of(product.nbytes), device)
    got, want = launch(product, operands, 0).float(), operands.reference()
    error = float((got - want).norm() / want.norm()) if bool(torch.isfinite(got).all()) else math.inf
    limit = LIMIT[torch.float16]
    p20 = p50 = p80 = best = None
    if error <= limit:
        out = torch.empty(got.shape, dtype=torch.float16, device=device)
        p20, p50, p80 = times(operands.calls(out), REPLAYS)
        shape = (product.model, product.side, product.context)
        if shape not in known:
            known[shape] = baseline_ms(product, device)
        best = known[shape]
    return Row(
        work=str(product),
        batch=1,
        num_heads=product.heads * product.rows,
        num_kv_heads=product.heads,
        head_dim=product.head_dim,
        query_tokens=1,
        context=product.context,
        dtype="float16",
        kernel="gluon",
        error=error,
        limit=limit,
        p20_ms=p20,
        p50_ms=p50,
        p80_ms=p80,
        gb_per_s=None if p50 is None else product.nbytes / p50 / 1e6,
        floor_percent=None if p50 is None else 100 * product.nbytes / HBM_BYTES_PER_MS / p50,
        effective_bits=product.format.bits,
        baseline="" if best is None else "torch.matmul",
        baseline_ms=best,
        ratio=None if p50 is None or best is None else best / p50,
        **env,
    )


def run(
    models: Sequence[str] = tuple(MODELS), lengths: Sequence[int] = LENGTHS, rows: Path | None = None
) -> Iterator[Row]:
    """Measure all products of some models at some lengths; ``rows``: CSV file that rows are appended to."""
    check_lengths("matvec", lengths)
    device, env = need_gpu("matvec"), environment()
    known: dict[Any, float] = {}
    for model in models:
        for side in SIDES:
            for n in lengths:
                for layout in LAYOUTS:
                    row = measure(Product(model, side, layout, n), device, env, known)
                    if rows is not None:
                        append(rows, [row])
                    yield row


def line(row: Row) -> str:
    """One row for people."""
    head = f"{row.work:34} {row.context:>7} tokens"
    if row.p50_ms is None:
        return f"{head}  error {row.error:.1e} > {row.limit:.0e}: not timed"
    return (
        f"{head}  {row.p50_ms:.4f} ms ({row.p20_ms:.4f} - {row.p80_ms:.4f})  {row.floor_percent:.0f}% of floor  "
        f"{row.effective_bits:.1f} bits  {row.ratio:.2f}x {row.baseline} ({row.baseline_ms:.4f} ms)  error {row.error:.1e}"
    )


def tables(rows: Sequence[Any]) -> list[str]:
    """The paper's two tables, as ratios: inner grouping against ``torch.matmul``, and against outer grouping."""
    by = {(row.work, row.context): row.p50_ms for row in rows}
    against = {(row.work, row.context): row.ratio for row in rows}
    lengths = sorted({row.context for row in rows})
    lines = [f"{'times as fast as':44}" + "".join(f"{n:>8}" for n in lengths)]

    def add(name: str, values: list[float | None]) -> None:
        lines.append(f"{name:44}" + "".join(f"{'-' if v is None else format(v, '.2f'):>8}" for v in values))

    for model in MODELS:
        for side in SIDES.values():
            for layout in LAYOUTS:
                work = f"{model} {side} {layout}"
                if any((work, n) in by for n in lengths):
                    add(f"{work}: torch.matmul", [against.get((work, n)) for n in lengths])
                    outer = [by.get((f"{model} {side} outer", n)) for n in lengths]
                    own = [by.get((work, n)) for n in lengths]
                    if layout != "outer":
                        pairs = zip(outer, own, strict=True)
                        add(f"{work}: outer", [a / b if a and b else None for a, b in pairs])
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = options("matvec", __doc__, ROWS)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="TOKENS")
    args = parser.parse_args(argv)
    found = []
    for row in run(args.models, args.lengths, args.rows):
        show(row, line(row), args.json)
        found.append(row)
    if not args.json:
        print("\n".join(tables(found)))
    return int(any(row.p50_ms is None for row in found))


if __name__ == "__main__":
    sys.exit(script(main))
