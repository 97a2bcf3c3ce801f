"""Attention over packed caches against full-precision kernels: decode steps and calls of many tokens.

``python -m kvfold.bench.attention --json`` measures the default shapes. Every shape is first compared with float32
attention over the decoded cache, with unused storage poisoned; where the error is over its limit no time is taken.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfold import methods
from kvfold.arithmetic import lasting
from kvfold.bench import storage
from kvfold.bench.rows import Row, append, environment, need_gpu, options, script
from kvfold.bench.timing import times, times_in_turn
from kvfold.errors import KVFoldError
from kvfold.formats import AffineGroups, Dense, Format, PagedFormat
from kvfold.kernels import AttentionCall, NewTokens, Span, Windows
from kvfold.methods import LayerSpec
from kvfold.rope import Rope

FUSED = ("kivi", "squat_pre", "innerq-asym", "innerq-sym", "innerq-hybrid", "fold", "none")
HBM_BYTES_PER_MS = 4.35e9
"""What the best full-precision decode kernels read on an H200."""
COLD_BYTES = 256 << 20
"""Calls rotate among copies of their inputs that together are several times the L2 cache."""
LIMIT = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
SINK, RECENT = 32, 96
ROWS = Path("benchmarks/rows/attention.csv")


@dataclass(frozen=True)
class Work:
    """One shape to measure.

    Parameters
    ----------
    method : {"kivi", "squat_pre", "innerq-asym", "innerq-sym", "innerq-hybrid", "fold", "none"}, or a method's string
        Whose storage; SQuat's is KIVI's, and SQuat_pre's holds keys before RoPE. Of a method's string, with its options, in the
        order that readers take.
    bits : int
        For fold 0: 3 bits for keys, 2 for values; else two digits, as 43, or the same for both.
    context : int
        Tokens of each sequence in the cache: with the call's own where they are few enough to be written to the windows
        first (up to 16, without padding), else without.
    padded : bool
        Left padding: sequence b of a batch has b / (2 batch) of the call's columns empty.
    plain : bool
        Codes in plain order, as the Triton kernel reads them where the fused kernels refuse a layer.
    """

    method: str
    bits: int
    batch: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    group: int = 32
    query_tokens: int = 1
    padded: bool = False
    plain: bool = False

    @property
    def long(self) -> bool:
        """Whether the call's own tokens come apart from the cache."""
        return self.query_tokens > 16 or self.padded

    @property
    def read(self) -> bool:
        """Whether readers take it."""
        return self.method not in FUSED

    @property
    def kernel(self) -> str:
        """Name in the registry of what attends to such calls; of long ones, which are unpacked, what attends to steps."""
        if self.read:
            rows = self.num_heads // self.num_kv_heads * (1 if self.long else self.query_tokens)
            return storage.kernel_of(*storage.read_as(*self.formats)[0], rows)
        return "triton" if self.plain else {"fold": "pages", "none": "dense"}.get(self.method, "gluon")

    @property
    def formats(self) -> tuple[Any, Any]:
        """Of keys and values: affine groups; fold's are paged; those of ``none`` are dense, of the run's dtype."""
        if self.read:
            return storage.formats(self.method, self.num_kv_heads, self.head_dim, torch.device("cuda"))[:2]
        if self.method == "fold":
            return _fold(self.bits, self.head_dim)
        if self.method == "none":
            return Dense(self.head_dim, 32, "key", torch.float16), Dense(self.head_dim, 32, "value", torch.float16)
        inner = self.method.startswith("innerq")
        mode = self.method.partition("-")[2] or "asym"

        def form(operand: str, axis: str) -> AffineGroups:
            order = "plain" if self.plain else operand
            return AffineGroups(self.head_dim, 32, order, self.bits, axis, mode, self.group)

        return (
            (form("key", "channel"), form("value", "token"))
            if inner
            else (form("key", "token"), form("value", "channel"))
        )

    def __str__(self) -> str:
        if self.read:
            return self.method
        if self.method == "fold":
            return "fold {}/{}".format(*_fold_bits(self.bits))
        how = [text for text, of in (("left-padded", self.padded), ("plain order", self.plain)) if of]
        group = "" if self.method == "none" else f" g{self.group}"
        return ", ".join([f"{self.method} {self.bits}-bit{group}", *how])


def _fold_bits(bits: int) -> tuple[int, int]:
    return divmod(bits, 10) if bits > 9 else (bits or 3, bits or 2)


@lasting()
def _fold(bits: int, head_dim: int) -> tuple[Format, Format]:
    method = methods.get("fold:k_bits={},v_bits={}".format(*_fold_bits(bits)))
    spec = LayerSpec(0, 1, 1, 1, head_dim)
    return method.key_format(spec), method.value_format(spec)


def stored_bytes(form: Format, tokens: int) -> int:
    """Bytes of ``tokens`` packed tokens of one KV head."""
    pages = form.pages(tokens // form.block) * form.page_bytes if isinstance(form, PagedFormat) else 0
    return tokens // form.block * form.block_bytes + pages


DEFAULT = (
    *(Work("fold", bits, b, n) for b, n in ((1, 131072), (16, 32768), (1, 32768), (1, 8192)) for bits in (0, 2)),
    *(Work("none", 16, b, n) for b, n in ((1, 131072), (16, 32768), (1, 32768), (1, 8192))),
    *(Work(m, 2, b, n) for b, n in ((1, 131072), (16, 32768), (1, 32768)) for m in ("kivi", "innerq-asym")),
    Work("innerq-hybrid", 2, 16, 32768),
    Work("innerq-sym", 2, 16, 32768),
    Work("kivi", 4, 16, 32768),
    *(Work(m, 2, 8, 32768, num_kv_heads=32) for m in ("kivi", "innerq-asym")),
    *(Work(m, 2, 16, 32768, head_dim=d) for d in (64, 256) for m in ("kivi", "innerq-asym")),
    Work("kivi", 2, 64, 8192),
)
"""The decode steps of docs/performance.md."""

LEARNED = "tasq:bits=2,values=fold"
READERS = (
    "turboquant:bits=3", "turboquant:bits=3,center=false,normalize=false", "qjl", "innerq", "gear", "zipcache",
    "vqllm:bits=1", "vqllm", "kvquant:bits=3", "kvquant", "commvq:bits=1", "commvq", "tasq",
    LEARNED, "tasq:bits=2,values=fold,v_bits=1", "fold:bits=2,codebook=true", "fold:codebook=true", "kvarn", "nova", "gsrq",
)  # fmt: skip
READ = (
    *(Work(method, 0, batch, context) for method in READERS for batch, context in ((1, 131072), (16, 32768))),
    *(Work(LEARNED, 0, batch, context, num_heads=56) for batch, context in ((1, 131072), (16, 32768))),
)
"""Formats that readers take; of learned keys also with seven query heads for each KV head."""

STORED = (
    *(("fold", 0), ("none", 16), ("kivi", 2), ("innerq-asym", 2), ("innerq-sym", 2), ("innerq-hybrid", 2), ("kivi", 4)),
    *((method, 0) for method in READERS if "center=false" not in method),
)
LONG = (
    *(Work(m, bits, 1, 32768, query_tokens=n) for n in (512, 2048, 64) for m, bits in STORED),
    *(Work(m, 2, 4, 32768, query_tokens=512, padded=True) for m in ("kivi", "innerq-asym")),
)
"""Calls of many tokens on an existing cache."""


PLAIN = tuple(
    replace(work, plain=True)
    for work in (
        *(Work(m, 2, b, n) for b, n in ((1, 131072), (16, 32768)) for m in ("squat_pre", "kivi")),
        *(Work(m, 2, 4, 32768, num_kv_heads=32, head_dim=96) for m in ("kivi", "innerq-hybrid")),
        Work("kivi", 2, 4, 32768, num_kv_heads=32, head_dim=80, group=16),
        *(Work(m, 2, 1, 32768, query_tokens=512) for m in ("squat_pre", "kivi")),
        Work("kivi", 2, 1, 32768, num_kv_heads=32, head_dim=96, query_tokens=512),
    )
)
"""What the fused kernels refuse, and KIVI at ``head_dim`` 128 for comparison."""


@dataclass
class Inputs:
    """Tensors of one call; see :mod:`kvfold.kernels.affine.decode`. ``new`` and ``valid``: of long calls; ``rope`` and
    ``first_position`` where keys are stored before RoPE, as a cache keeps them."""

    q: torch.Tensor
    span: Span
    windows: Windows
    new: tuple[torch.Tensor, torch.Tensor] | None = None
    valid: torch.Tensor | None = None
    rope: Rope | None = None
    first_position: torch.Tensor | None = None

    def copy(self) -> "Inputs":
        """The same numbers at other addresses, sequences in another order."""

        def moved(x: torch.Tensor) -> torch.Tensor:
            return x.roll(1, 0)

        def pair(x: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return moved(x[0]), moved(x[1])

        keys, values = ({n: moved(x) for n, x in f.items()} for f in (self.span.keys, self.span.values))
        windows = replace(self.windows, sink=pair(self.windows.sink), ring=pair(self.windows.ring))
        return replace(self, span=Span(0, keys, values), windows=windows)


def make_inputs(work: Work, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    """Random keys (channels of different size and offset) and values, encoded; unused storage holds NaN or all ones."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def lengths(n: int) -> torch.Tensor:
        return torch.full((work.batch,), n, dtype=torch.int32, device=device)

    batch, heads, dim, tokens = work.batch, work.num_kv_heads, work.head_dim, work.query_tokens
    packed = (work.context - SINK - RECENT) // 32 * 32
    slots = RECENT + 32
    gain, offset = torch.exp(0.7 * random(1, heads, 1, dim)), random(1, heads, 1, dim)
    stored = []
    for form, is_key in zip(work.formats, (True, False), strict=True):
        form = replace(form, dtype=dtype) if isinstance(form, Dense) else form
        fields = form.allocate(batch, heads, packed // form.block + 1, device)
        for x in fields.values():
            x.fill_(float("nan") if x.is_floating_point() else -1)
        for b in range(batch):
            vectors = random(1, heads, min(packed, storage.SAMPLE) if work.read else packed, dim)
            if is_key:
                vectors = vectors * gain + offset
            if work.read:
                storage.fill(form, {name: x[b : b + 1] for name, x in fields.items()}, vectors, packed)
                continue
            for name, x in form.encode(vectors).items():
                fields[name][b : b + 1, :, : x.shape[2]] = x
        stored.append(fields)
    windows = [random(batch, heads, n, dim).to(dtype) for n in (SINK, SINK, slots, slots)]
    used = (packed + torch.arange(RECENT, device=device)) % slots
    for x in windows[2:]:
        kept = x[:, :, used].clone()
        x.fill_(float("nan"))
        x[:, :, used] = kept
    inputs = Inputs(
        random(batch, work.num_heads, tokens, dim).to(dtype),
        Span(0, *stored),
        Windows(
            (windows[0], windows[1]), (windows[2], windows[3]), lengths(SINK), lengths(packed), lengths(RECENT)
        ),
    )  # fmt: skip
    if work.method.partition(":")[0] in ("squat_pre", "commvq", "vqllm", "gsrq", "tasq", "kvquant"):
        inputs.rope = Rope(10000.0 ** (-torch.arange(0, dim, 2, device=device).float() / dim))
        inputs.first_position = inputs.windows.sink_len.long()
    if work.long:
        keys, values = (random(batch, tokens, heads, dim).to(dtype).transpose(1, 2) for _ in range(2))
        inputs.new = keys, values
    if work.padded:
        empty = torch.arange(batch, device=device) * tokens // (2 * batch)
        inputs.valid = torch.arange(tokens, device=device) >= empty[:, None]
    return inputs


def reference(work: Work, inputs: Inputs, sequence: int) -> torch.Tensor:
    """Float32 attention of one sequence over the decoded cache, [num_heads, query_tokens, head_dim]; 0 at padding."""
    windows, tokens, device = inputs.windows, work.query_tokens, inputs.q.device
    packed = int(windows.packed_len[sequence])
    ring = (packed + torch.arange(RECENT, device=device)) % windows.ring[0].shape[2]
    fields = (inputs.span.keys, inputs.span.values)
    sides, unproject = [], _unproject(work)
    for i, form in enumerate(work.formats):
        middle = form.decode({n: x[sequence : sequence + 1] for n, x in fields[i].items()})
        if i == 1 and unproject is not None:
            middle = unproject(middle)
        middle = middle[0, :, :packed]
        if i == 0 and inputs.rope is not None:
            exact = Rope(inputs.rope.inv_freq.double())
            middle = exact.rotate(middle, SINK + torch.arange(packed, device=device)).float()
        parts = [windows.sink[i][sequence].float(), middle, windows.ring[i][sequence][:, ring].float()]
        parts += [inputs.new[i][sequence].float()] if inputs.new else []
        sides.append(torch.cat(parts, 1))
    keys, values = sides
    q = inputs.q[sequence].float().unflatten(0, (work.num_kv_heads, -1))
    position = torch.arange(keys.shape[1], device=device)
    sees = position <= position[-tokens:].unsqueeze(-1)
    if inputs.valid is not None:
        sees[:, -tokens:] &= inputs.valid[sequence]
    out = torch.empty_like(q)
    for head in range(work.num_kv_heads):  # one by one: scores of a long call are large
        scores = (q[head] @ keys[head].T / math.sqrt(work.head_dim)).masked_fill_(~sees, float("-inf"))
        out[head] = scores.softmax(-1) @ values[head]
    if inputs.valid is not None:
        out.masked_fill_(~inputs.valid[sequence][:, None], 0.0)
    return out.flatten(0, 1)


def call(work: Work, inputs: Inputs, out: torch.Tensor | None = None) -> torch.Tensor:
    from kvfold.kernels import REGISTRY
    from kvfold.kernels.affine.decode import decode_attention
    from kvfold.kernels.dense import decode as dense
    from kvfold.kernels.fold import decode as pages

    scale = 1 / math.sqrt(work.head_dim)
    if work.long:
        return REGISTRY[work.kernel].attend(_given(work, inputs, scale)).to(inputs.q.dtype)
    if work.method == "none":
        return dense.attend(_given(work, inputs, scale), out=out)
    if work.read:
        from kvfold.kernels.fragments import decode as fragments

        if work.kernel == "fragments":
            return fragments.decode_attention(inputs.q, *work.formats, [inputs.span], inputs.windows, scale, out=out)
        if work.kernel != "pages":
            return REGISTRY[work.kernel].attend(_given(work, inputs, scale)).to(inputs.q.dtype)
    if work.plain:
        return _plain_call(work, inputs, scale)
    if work.kernel == "pages":
        return pages.decode_attention(inputs.q, *work.formats, [inputs.span], inputs.windows, scale, out=out)
    return decode_attention(inputs.q, *work.formats, [inputs.span], inputs.windows, scale, out=out)


def _plain_call(work: Work, inputs: Inputs, scale: float) -> torch.Tensor:
    from kvfold.kernels.affine.tiles import attend

    return attend(_given(work, inputs, scale)).to(inputs.q.dtype)


def _given(work: Work, inputs: Inputs, scale: float) -> AttentionCall:
    """What a kernel of the registry is given."""
    windows, span = inputs.windows, inputs.span
    formats, project = storage.read_as(*work.formats)
    if work.long:  # all of it is written, as sequences of one length have it
        tokens = work.context - SINK - RECENT
        sides = zip(formats, (span.keys, span.values), strict=True)
        span = Span(0, *(form.take(fields, tokens // form.block) for form, fields in sides))
    return AttentionCall(
        inputs.q,
        scale,
        work.num_kv_heads,
        *formats,
        [span],
        windows.packed_len,
        windows,
        None if inputs.new is None else NewTokens(*inputs.new, inputs.valid),
        uniform=True,
        project=project,
        unproject=_unproject(work),
        rope=inputs.rope,
        first_position=inputs.first_position,
    )


def _unproject(work: Work) -> Any:
    """What turns sums of values, float32 [..., num_kv_heads, rows, width], into outputs; None where nothing does."""
    if not work.read:
        return None
    return storage.formats(work.method, work.num_kv_heads, work.head_dim, torch.device("cuda"))[2]


def gate(work: Work, inputs: Inputs) -> float:
    """Relative RMS error of the first, the middle and the last sequence."""
    got = call(work, inputs).float()
    if not bool(torch.isfinite(got).all()):
        return math.inf
    if inputs.valid is not None:  # what a padding query gets has no meaning
        got = got.masked_fill(~inputs.valid[:, None, :, None], 0.0)
    chosen = sorted({0, work.batch // 2, work.batch - 1})
    want = torch.stack([reference(work, inputs, b) for b in chosen])
    return float((got[chosen] - want).norm() / want.norm())


@lasting()
def baselines(shape: Work, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Median milliseconds of every full-precision kernel that runs here at this shape (of whatever method)."""
    found: dict[str, float] = {}
    for name, calls in full_precision(shape, dtype, device):
        try:
            found[name] = times(calls(), 10 if shape.long else 40)[1]
        except torch.OutOfMemoryError:  # it would serve the shape: a slower one is not to take its place
            raise
        except (RuntimeError, ImportError, TypeError, ValueError):
            torch.cuda.synchronize()  # a kernel that does not serve this shape is no baseline
    return found


Make = Callable[[torch.Tensor, torch.Tensor], Callable[[], Any]]


def full_precision(
    shape: Work, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], list[Callable[[], Any]]]]]:
    """Names of full-precision kernels, and what makes their calls at a shape, over inputs that they all share."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    tokens = shape.query_tokens
    keys = shape.context + (tokens if shape.long else 0)
    size = (shape.batch, shape.num_kv_heads, keys, shape.head_dim)
    sets = [
        tuple(torch.randn(size, device=device, dtype=dtype) for _ in range(2))
        for _ in range(max(1, math.ceil(COLD_BYTES / (2 * math.prod(size) * dtype.itemsize))))
    ]
    q = torch.randn(shape.batch, shape.num_heads, tokens, shape.head_dim, device=device, dtype=dtype)
    grouped = shape.num_heads != shape.num_kv_heads

    def over_sets(make: Make) -> Callable[[], list[Callable[[], Any]]]:
        return lambda: [make(k, v) for k, v in sets]

    def sdpa(backend: SDPBackend, mask: torch.Tensor | None) -> Make:
        def make(k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
            def run() -> Any:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

            return run

        return make

    flash, cudnn = (SDPBackend.FLASH_ATTENTION, "SDPA flash"), (SDPBackend.CUDNN_ATTENTION, "SDPA cuDNN")
    if shape.long:
        # cuDNN has no causal mask that ends at the last key; without a mask it computes a little more, but nothing else
        attempts: list[tuple[SDPBackend, str, torch.Tensor | None, str]] = [(*cudnn, None, ", no mask")]
        if not shape.padded:
            attempts.append((*flash, causal_lower_right(tokens, keys), ", causal"))
        else:  # a mask says what is padding: flash attention takes none
            column = torch.arange(keys, device=device)
            mask = (column <= column[-tokens:, None]).expand(shape.batch, 1, -1, -1)
            attempts.append((*cudnn, mask, ", mask"))
    else:
        attempts = [(*flash, None, ""), (*cudnn, None, "")]
    for backend, name, given, how in attempts:
        yield name + how, over_sets(sdpa(backend, given))
    if shape.long:
        return

    def flash3(k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
        from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

        lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        return lambda: flash_attn_with_kvcache(q.transpose(1, 2), k, v, cache_seqlens=lengths)

    yield "FlashAttention 3", over_sets(flash3)

    def flashinfer(k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
        import flashinfer  # type: ignore[import-not-found]

        if shape.batch != 1 or shape.query_tokens != 1:
            raise ValueError("single sequences only")
        return lambda: flashinfer.single_decode_with_kv_cache(q[0, :, 0], k[0], v[0], kv_layout="HND")

    yield "FlashInfer", over_sets(flashinfer)


def measure(work: Work, dtype: torch.dtype, device: torch.device, env: dict[str, str]) -> Row:
    """Gate, then time, one shape."""
    inputs = make_inputs(work, dtype, device)
    error = gate(work, inputs)
    key_format, value_format = work.formats
    packed = int(inputs.windows.packed_len[0])
    size = work.batch * work.num_kv_heads * sum(stored_bytes(form, packed) for form in work.formats)
    p20 = p50 = p80 = best = None
    name = ""
    if error <= LIMIT[dtype]:
        sets = [inputs]
        while len(sets) * size < COLD_BYTES:
            sets.append(sets[-1].copy())
        out = torch.empty_like(inputs.q)
        calls = [partial(call, work, s, out) for s in sets]
        shape = replace(work, method="kivi", bits=2, group=32, plain=False)
        if work.long:
            others = baselines(shape, dtype, device)
            name = min(others, key=others.__getitem__)
            theirs = dict(full_precision(shape, dtype, device))[name]()
            (p20, p50, p80), (_, best, _) = times_in_turn([calls, theirs], 20)
            del calls, sets, inputs, theirs
        else:
            p20, p50, p80 = times(calls)
            del calls, sets, inputs
            torch.cuda.empty_cache()
            others = baselines(shape, dtype, device)
            if others:
                name = min(others, key=others.__getitem__)
                best = others[name]
        torch.cuda.empty_cache()
    return Row(
        work=str(work),
        batch=work.batch,
        num_heads=work.num_heads,
        num_kv_heads=work.num_kv_heads,
        head_dim=work.head_dim,
        query_tokens=work.query_tokens,
        context=work.context,
        dtype=str(dtype).removeprefix("torch."),
        kernel=work.kernel,
        error=error,
        limit=LIMIT[dtype],
        p20_ms=p20,
        p50_ms=p50,
        p80_ms=p80,
        gb_per_s=None if p50 is None or work.long else size / p50 / 1e6,
        floor_percent=None if p50 is None or work.long else 100 * size / HBM_BYTES_PER_MS / p50,
        effective_bits=(key_format.bits + value_format.bits) / 2,
        baseline=name,
        baseline_ms=best,
        ratio=None if p50 is None or best is None else best / p50,
        **env,
    )


def run(
    works: tuple[Work, ...] = DEFAULT + LONG + PLAIN, dtype: torch.dtype = torch.float16, rows: Path | None = None
) -> Iterator[Row]:
    """Measure shapes one after the other.

    Parameters
    ----------
    works : tuple of Work
    dtype : torch.float16 or torch.bfloat16
        Of queries and windows, and of the baselines.
    rows : Path or None
        CSV file that rows are appended to.

    Raises
    ------
    KVFoldError
        Without a CUDA GPU.
    """
    device = need_gpu("attention")
    if dtype not in LIMIT:
        raise KVFoldError(f"bench attention: dtype={dtype} is not allowed; allowed: float16, bfloat16")
    env = environment()
    for work in works:
        row = measure(work, dtype, device, env)
        if rows is not None:
            append(rows, [row])
        yield row


def line(row: Row) -> str:
    """One row for people."""
    shape = (
        f"B={row.batch} N={row.context} heads {row.num_heads}/{row.num_kv_heads} d={row.head_dim} T={row.query_tokens}"
    )
    if row.p50_ms is None:
        return f"{row.work:24} {shape:44} error {row.error:.1e} > {row.limit:.0e}: not timed"
    ratio = "no baseline" if row.ratio is None else f"{row.ratio:.2f}x {row.baseline} ({row.baseline_ms:.4f} ms)"
    read = "" if row.gb_per_s is None else f"{row.gb_per_s:.0f} GB/s  {row.floor_percent:.0f}% of floor  "
    return (
        f"{row.work:24} {shape:44} {row.p50_ms:.4f} ms ({row.p20_ms:.4f} - {row.p80_ms:.4f})  {read}"
        f"{row.effective_bits:.2f} bits  {ratio}  error {row.error:.1e}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = options("attention", __doc__, ROWS)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument(
        "--calls",
        choices=("decode", "long", "plain", "readers", "all"),
        default="all",
        help="one new token, many, either where the fused kernels refuse a layer, formats that readers take, or everything",
    )
    args = parser.parse_args(argv)
    works = {"decode": DEFAULT, "long": LONG, "plain": PLAIN, "readers": READ, "all": DEFAULT + LONG + PLAIN + READ}[
        args.calls
    ]

    failed = False
    for row in run(works, getattr(torch, args.dtype), args.rows):
        failed |= row.p50_ms is None
        print(json.dumps(asdict(row)) if args.json else line(row), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(script(main))
