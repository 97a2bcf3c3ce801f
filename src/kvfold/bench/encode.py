"""Encoding a prompt, and a decode step's appending and closing, on the GPU.

``kvfold bench encode`` measures the default shapes, those of fold and InnerQ with statistics per page among them. Every shape
is first compared with the formats' own ``encode`` on the CPU; where more bytes differ than rounding explains, no time is
taken.

Rows have the columns of the attention rows with these meanings: ``error`` is the fraction of compared bytes that differ;
``context`` is the tokens encoded; times are those of all layers together (a step's: of one layer); ``baseline`` is the
model's prefill of the same tokens, or for hybrid rows of a single layer symmetric mode, so that ``ratio`` says how many
times longer that takes; bytes are the input read once and the packed form written once.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvfold.bench.attention import COLD_BYTES, HBM_BYTES_PER_MS
from kvfold.bench.rows import Row, append, environment, need_gpu, options, script, show
from kvfold.bench.timing import times
from kvfold.formats import AffineGroups, Fields, Format
from kvfold.kernels.lengths import Lengths
from kvfold.methods import LayerSpec, get
from kvfold.methods.squat import penalty_matrix, steer, update_matrix

if TYPE_CHECKING:
    from kvfold.kernels.affine.encode import KeyTransform

ROWS = Path("benchmarks/rows/encode.csv")
SINK, RECENT = 32, 96


@dataclass(frozen=True)
class Work:
    """One shape to measure.

    Parameters
    ----------
    method : {"kivi", "squat", "innerq-asym", "innerq-sym", "innerq-hybrid", "fold", "innerq"}
        InnerQ's keys are centred and normalized: by statistics of a sequence where a mode is named. "fold" and "innerq" are the
        methods' defaults, with statistics per page.
    bits : int
        0: those that ``method`` has by default.
    layers : int
        Layers whose time is summed; 0: a decode step of one layer, with ``context`` tokens in the cache.
    """

    method: str
    bits: int = 2
    batch: int = 1
    context: int = 32768
    layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    group: int = 32

    @property
    def paged(self) -> bool:
        """Whether statistics belong to pages."""
        return self.method in PAGED

    @property
    def formats(self) -> tuple[Format, Format]:
        if self.paged:
            spec = LayerSpec(0, 1, self.num_heads, self.num_kv_heads, self.head_dim)
            bits = f"bits={self.bits}," if self.bits else ""
            method = get(f"{self.method}:{bits}group={self.group}")
            return method.key_format(spec), method.value_format(spec)
        inner = self.method.startswith("innerq")
        mode = self.method.partition("-")[2] or "asym"

        def form(operand: str, axis: str) -> AffineGroups:
            return AffineGroups(self.head_dim, max(32, self.group), operand, self.bits, axis, mode, self.group)

        return form("key", "channel" if inner else "token"), form("value", "token" if inner else "channel")

    @property
    def limit(self) -> float:
        """Bytes that may differ: products that round differently flip a code; hybrid groups of equal error, a group; sums of
        another order, the last bit of a page's mean."""
        return {"squat": 1e-3, "innerq-hybrid": 1e-4, "fold": 5e-3, "innerq": 5e-3}.get(self.method, 0.0)

    def __str__(self) -> str:
        what = "step" if not self.layers else "encode" if self.layers > 1 else "encode one layer"
        bits = f" {self.bits}-bit" if self.bits else ""
        return f"{what} {self.method}{bits}" + ("" if self.method == "fold" else f" g{self.group}")


PAGED = ("fold", "innerq")
METHODS = ("kivi", "squat", "innerq-asym", "innerq-sym", "innerq-hybrid")
DEFAULT = (
    *(Work(m) for m in METHODS),
    Work("fold", bits=0),
    Work("fold"),
    Work("innerq"),
    *(Work("kivi", bits=b) for b in (1, 3, 4, 8)),
    *(Work("kivi", group=g) for g in (64, 128)),
    *(Work(m, head_dim=d, num_kv_heads=h) for d, h in ((64, 16), (256, 4)) for m in ("kivi", "squat", "innerq-hybrid")),
    *(Work(m, layers=1, context=n) for n in (512, 2048, 8192, 32768, 131072) for m in ("innerq-sym", "innerq-hybrid")),
    *(Work(m, batch=b, layers=0) for b in (1, 16) for m in ("kivi", "squat", "innerq-hybrid", "fold", "innerq")),
)
"""The shapes of docs/performance.md; one layer in both of InnerQ's modes is its Figure 4."""


@dataclass
class Layer:
    """A layer's keys, values and storage."""

    keys: torch.Tensor
    values: torch.Tensor
    key_fields: Fields
    value_fields: Fields


def make_transform(work: Work, keys: torch.Tensor) -> "KeyTransform":
    """The state that the method would compute from the first tokens of these keys."""
    from kvfold.kernels.affine.encode import KeyTransform

    if work.paged:
        return KeyTransform()
    first = keys[:, :, :256].float()
    if work.method == "squat":
        heads = work.batch * work.num_kv_heads
        queries = torch.randn(heads, 1024, work.head_dim, generator=torch.Generator().manual_seed(1))
        update = update_matrix(penalty_matrix(queries, 5, 1e-3), work.head_dim // 2)
        return KeyTransform(update=update.unflatten(0, (work.batch, -1)).to(keys.device))
    if work.method.startswith("innerq"):
        mean = first.mean(-2)
        return KeyTransform(mean=mean, norm=(first - mean.unsqueeze(-2)).abs().amax(-2).sqrt())
    return KeyTransform()


def make_layer(work: Work, tokens: int, device: torch.device, seed: int = 0) -> Layer:
    """Random keys (channels of different size and offset) and values; storage poisoned."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (work.batch, work.num_kv_heads, tokens, work.head_dim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch.float16)

    keys = random(*shape) * torch.exp(0.7 * random(1, shape[1], 1, shape[3])) + random(1, shape[1], 1, shape[3])
    sides = []
    for form in work.formats:
        fields = form.allocate(work.batch, work.num_kv_heads, tokens // form.block, device)
        for x in fields.values():
            x.fill_(float("nan") if x.is_floating_point() else 77)
        sides.append(fields)
    return Layer(keys, random(*shape), *sides)


def encode(work: Work, layer: Layer, how: "KeyTransform") -> None:
    from kvfold.kernels.affine.encode import encode_blocks
    from kvfold.kernels.fold.encode import encode_pages

    key_format, value_format = work.formats
    if work.paged:
        for form, x, fields in zip(
            work.formats, (layer.keys, layer.values), (layer.key_fields, layer.value_fields), strict=True
        ):
            encode_pages(x, fields, form, 0, x.shape[2])
        return
    encode_blocks(layer.keys, layer.key_fields, key_format, 0, how)
    encode_blocks(layer.values, layer.value_fields, value_format, 0)


def reference(work: Work, keys: torch.Tensor, values: torch.Tensor, how: "KeyTransform") -> tuple[Fields, Fields]:
    """What the formats' own encode makes of some blocks, on the CPU."""
    keys, values = keys.float().cpu(), values.float().cpu()
    if how.mean is not None:
        keys = keys - how.mean.cpu().unsqueeze(-2)
    if how.norm is not None:
        keys = keys / how.norm.cpu().unsqueeze(-2)
    if how.update is not None:
        keys = steer(keys, how.update.cpu(), work.head_dim // 2, work.bits, work.group)
    key_format, value_format = work.formats
    return key_format.encode(keys), value_format.encode(values)


def differing(got: Fields, want: Fields) -> float:
    """Fraction of bytes that differ."""
    wrong = sum(int((got[n].cpu().contiguous().view(torch.uint8) != want[n].view(torch.uint8)).sum()) for n in want)
    return wrong / sum(x.nbytes for x in want.values())


def gate(work: Work, layer: Layer, how: "KeyTransform") -> float:
    """Fraction of the bytes of the first, middle and last blocks that differ from the reference."""
    encode(work, layer, how)
    block = work.formats[0].block
    blocks = layer.keys.shape[2] // block
    error = 0.0
    for first in sorted({0, max(0, blocks // 2 - 2) // 4 * 4, max(0, blocks - 4) // 4 * 4}):  # four blocks are a page
        part = slice(first * block, (first + 4) * block)
        want = reference(work, layer.keys[:, :, part], layer.values[:, :, part], how)
        for form, fields, side in zip(work.formats, (layer.key_fields, layer.value_fields), want, strict=True):
            error = max(error, differing(form.take(fields, 4, first), side))
    return error


class Step:
    """A decode step of one layer: state on the device, new tokens that never change."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work = work
        self.key_format, self.value_format = work.formats
        packed = (work.context - SINK - RECENT) // self.key_format.block * self.key_format.block
        self.layer = make_layer(work, packed + 4096, device)
        self.how = make_transform(work, self.layer.keys)
        slots = RECENT + self.key_format.block + 15
        keys, values = self.layer.keys, self.layer.values
        self.ring = (keys[:, :, :slots].clone(), values[:, :, :slots].clone())
        self.sink = (keys[:, :, :SINK].clone(), values[:, :, :SINK].clone())
        self.key, self.value = keys[:, :, -1:].clone(), values[:, :, -1:].clone()
        self.lengths = Lengths.of([packed + SINK + RECENT] * work.batch, [packed] * work.batch, SINK, device, True)

    def __call__(self) -> None:
        from kvfold.kernels.affine import encode
        from kvfold.kernels.fold import encode as encode_pages

        stored = self.layer.key_fields, self.key_format, self.layer.value_fields, self.value_format
        windows = self.lengths, self.sink, self.ring, RECENT
        if self.work.paged:
            encode_pages.append_and_close(self.key, self.value, *windows, *stored)
        else:
            encode.append_and_close(self.key, self.value, *windows, *stored, self.how)

    def gate(self) -> float:
        """Fraction of the bytes of the first block that decoding closes that differ from the reference."""
        block, slots = self.key_format.block, self.ring[0].shape[2]
        packed = int(self.lengths.packed[0])
        waiting = (packed + torch.arange(RECENT, device=self.ring[0].device)) % slots
        # what a page's statistics are taken of: all that waits, and the tokens of the steps up to the one that closes
        keys, values = (
            torch.cat([ring[:, :, waiting], new.expand(-1, -1, block, -1)], 2)
            for ring, new in zip(self.ring, (self.key, self.value), strict=True)
        )
        count = RECENT + block if self.work.paged else block
        want = reference(self.work, keys[:, :, :count], values[:, :, :count], self.how)
        for _ in range(block + 1):
            self()
        if self.lengths.packed.tolist() != [packed + block] * self.work.batch:
            return math.inf
        sides = (self.layer.key_fields, self.layer.value_fields)
        return max(
            differing(form.take(fields, 1, packed // block), form.take(side, 1))
            for form, fields, side in zip(self.work.formats, sides, want, strict=True)
        )


def prefill_ms(work: Work, device: torch.device) -> float:
    """Median time of a prefill of these tokens by a Llama of this shape: one layer's products and attention, times layers.

    Weights are random; norms, rotation and the output head are left out, which favours neither side by more than 2 %.
    """
    hidden, inner = work.num_heads * work.head_dim, 14336 * work.num_heads * work.head_dim // 4096
    kv = work.num_kv_heads * work.head_dim

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) / math.sqrt(columns)

    qkv, out = weight(hidden + 2 * kv, hidden), weight(hidden, hidden)
    up, down = weight(2 * inner, hidden), weight(hidden, inner)
    x = torch.randn(1, work.context, hidden, device=device, dtype=torch.bfloat16)

    def layer() -> torch.Tensor:
        q, k, v = torch.nn.functional.linear(x, qkv).split([hidden, kv, kv], -1)
        q, k, v = (t.unflatten(-1, (-1, work.head_dim)).transpose(1, 2) for t in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = x + torch.nn.functional.linear(attended.transpose(1, 2).flatten(2), out)
        gate, value = torch.nn.functional.linear(y, up).chunk(2, -1)
        return y + torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, down)

    with torch.no_grad():
        for _ in range(2):
            layer()
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(5)]
        for start, stop in marks:
            start.record()
            layer()
            stop.record()
        torch.cuda.synchronize()
    return work.layers * sorted(start.elapsed_time(stop) for start, stop in marks)[2]


def _calls(work: Work, device: torch.device) -> tuple[float, list[Callable[[], Any]], int]:
    """Error, calls to time in turn, and the bytes that one of them moves."""
    key_format, value_format = work.formats
    if not work.layers:
        step = Step(work, device)
        return step.gate(), [step] * key_format.block, 0
    size = work.batch * work.num_kv_heads * work.context * work.head_dim * 4
    size += int(
        work.batch * work.num_kv_heads * work.context * work.head_dim * (key_format.bits + value_format.bits) / 8
    )
    first = make_layer(work, work.context, device)
    how = make_transform(work, first.keys)
    error = gate(work, first, how)
    layers = [first]
    while error <= work.limit and (len(layers) < work.layers or len(layers) * size < COLD_BYTES):
        layers.append(
            Layer(
                first.keys.clone(),
                first.values.clone(),
                *({n: torch.empty_like(x) for n, x in f.items()} for f in (first.key_fields, first.value_fields)),
            )
        )
    return error, [lambda one=one: encode(work, one, how) for one in layers], size  # type: ignore[misc]


def measure(work: Work, device: torch.device, env: dict[str, str], known: dict[Work, float]) -> Row:
    """Gate, then time, one shape; ``known`` collects medians that later rows compare with."""
    error, calls, size = _calls(work, device)
    key_format, value_format = work.formats
    row = Row(
        work=str(work),
        batch=work.batch,
        num_heads=work.num_heads,
        num_kv_heads=work.num_kv_heads,
        head_dim=work.head_dim,
        query_tokens=0 if work.layers else 1,
        context=work.context,
        dtype="float16",
        kernel="triton",
        error=error,
        limit=work.limit,
        p20_ms=None,
        p50_ms=None,
        p80_ms=None,
        gb_per_s=None,
        floor_percent=None,
        effective_bits=(key_format.bits + value_format.bits) / 2,
        baseline="",
        baseline_ms=None,
        ratio=None,
        **env,
    )
    if not error <= work.limit:
        return row
    p20, p50, p80 = (max(1, work.layers) * t for t in times(calls))
    del calls
    torch.cuda.empty_cache()
    known[work] = p50
    name, best = "", None
    if work.layers > 1:
        name = "model prefill"
        shape = replace(work, method="", bits=0, group=0)
        best = known[shape] = known.get(shape) or prefill_ms(work, device)
        torch.cuda.empty_cache()
    elif work.method == "innerq-hybrid":
        name, best = "symmetric", known.get(replace(work, method="innerq-sym"))
    moved = max(1, work.layers) * size
    return replace(
        row,
        p20_ms=p20,
        p50_ms=p50,
        p80_ms=p80,
        gb_per_s=moved / p50 / 1e6 if moved else None,
        floor_percent=100 * moved / HBM_BYTES_PER_MS / p50 if moved else None,
        baseline=name if best is not None else "",
        baseline_ms=best,
        ratio=None if best is None else best / p50,
    )


def run(works: tuple[Work, ...] = DEFAULT, rows: Path | None = None) -> Iterator[Row]:
    """Measure shapes one after the other; ``rows``: CSV file that rows are appended to.

    Raises
    ------
    KVFoldError
        Without a CUDA GPU.
    """
    device, env = need_gpu("encode"), environment()
    known: dict[Work, float] = {}
    for work in works:
        row = measure(work, device, env, known)
        if rows is not None:
            append(rows, [row])
        yield row


def line(row: Row) -> str:
    """One row for people."""
    shape = f"B={row.batch} N={row.context} KV heads {row.num_kv_heads} d={row.head_dim}"
    if row.p50_ms is None:
        return f"{row.work:36} {shape:34} {row.error:.1e} of the bytes differ > {row.limit:.0e}: not timed"
    text = f"{row.work:36} {shape:34} {row.p50_ms:.4f} ms ({row.p20_ms:.4f} - {row.p80_ms:.4f})"
    if row.gb_per_s is not None:
        text += f"  {row.gb_per_s:.0f} GB/s  {row.floor_percent:.0f}% of floor  {row.effective_bits:.2f} bits"
    if row.ratio is not None:
        text += f"  {100 / row.ratio:.2f}% of {row.baseline} ({row.baseline_ms:.4f} ms)"
    return f"{text}  differ {row.error:.1e}"


def main(argv: list[str] | None = None) -> int:
    parser = options("encode", __doc__, ROWS)
    args = parser.parse_args(argv)
    failed = False
    for row in run(rows=args.rows):
        failed |= row.p50_ms is None
        show(row, line(row), args.json)
    return int(failed)


if __name__ == "__main__":
    sys.exit(script(main))
