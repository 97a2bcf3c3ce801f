"""Attention on the CPU: loops compiled by Numba that decode tiles of 32 tokens and use them at once.

No decoded copy of the cache exists at any time; beyond the output, a call needs a few kilobytes per thread.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from kvfold.formats import PAGE, AffineGroups, Dense, Fields, Format, Hadamard, Paged, UniformTokens
from kvfold.kernels.base import AttentionKernel
from kvfold.kernels.call import AttentionCall, DensePart, Span
from kvfold.kernels.reference import ReferenceKernel

MODES = {"asym": 0, "sym": 1, "hybrid": 2}
STORED = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""Dtypes of dense operands, as the loops name them; 0 stands for affine groups."""
UNIFORM = 4
"""As the loops name uniform levels."""
MAX_TOKENS = 64
"""Query tokens up to which the loops are faster than decoding for a matrix product."""
CHUNK = 2048
"""Packed tokens that are decoded at once when there are more query tokens."""
TOKENS_PER_THREAD = 2048
"""Cached tokens of a KV head that are worth waking a thread for: a tenth of a millisecond."""


class CPUKernel(AttentionKernel):
    """Affine groups and uniform levels in plain packing, with or without statistics per page, and dense storage; needs Numba.

    Calls that need gradients and sums of values that a linear map follows are left to the reference; calls of more than
    :data:`MAX_TOKENS` query tokens as well, over pieces of the cache.
    """

    name = "cpu"
    caps_scores = True
    limits = (
        "calls of more than 64 tokens on an existing cache, and calls that need gradients, go to the reference kernel"
    )
    dtypes = frozenset(STORED)

    def why_not(self, key_format: Format, value_format: Format, device: torch.device, pre_rope: bool) -> str | None:
        if device.type != "cpu":
            return f"runs on the CPU, not on {device.type}"
        for side, form in (("keys", key_format), ("values", value_format)):
            if why := _unsupported(form, norms=side == "keys"):
                return f"{side}: {why}"
        if pre_rope:
            return "keys are stored before RoPE"
        if find_spec("numba") is None:
            return "numba is not installed; run: pip install 'kvfold[cpu]'"
        return None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        new, tokens = call.new, call.tokens
        if new is None or call.unproject is not None or call.rope is not None or new.keys.dtype not in STORED:
            return ReferenceKernel().attend(call)
        if call.query.requires_grad or new.keys.requires_grad or new.values.requires_grad:
            return ReferenceKernel().attend(call)
        if tokens > MAX_TOKENS:
            return ReferenceKernel().attend(replace(call, spans=_chunks(call)))
        queries = call.rows.contiguous()
        batch, heads, rows, _ = queries.shape
        out = queries.new_empty(batch, heads, rows, new.values.shape[-1])
        keep: list[torch.Tensor] = []  # what addresses point to must live until the end
        parts, sides, pages = [], [], []
        for span in call.spans:
            keys, count = _stored(inner(call.key_format), span.keys, keep)
            values, _ = _stored(inner(call.value_format), span.values, keep)
            parts.append((count, span.start, 0, 0, 0))
            sides.append((keys, values))
            pages.append((_statistics(span.keys, keep), _statistics(span.values, keep)))
        newest = DensePart(new.keys, new.values, new.valid)  # type: ignore[arg-type]
        for kind, part in (*((1, d) for d in call.windows), (2, newest)):
            sides.append((_dense(part.keys, keep), _dense(part.values, keep)))
            parts.append((part.keys.shape[-2], 0, kind, *_validity(part.valid, keep)))
            pages.append((NO_PAGES, NO_PAGES))
        packed, bias = call.projected if call.spans else (queries, None)
        packed = packed.contiguous()
        bias = queries.new_empty(batch, heads, 0) if bias is None else bias.contiguous()
        forms = [_form(call.key_format), _form(call.value_format)]
        tables = [torch.tensor(x, device="cpu").numpy() for x in (parts, sides, forms, pages)]
        tables.append(torch.stack([_signs(call.key_format), _signs(call.value_format)]).numpy())
        lengths = call.packed_len.long().numpy()
        cap = call.softcap or 0.0
        arguments = (packed.numpy(), queries.numpy(), bias.numpy(), call.scale, cap, *tables, lengths, tokens)
        _run(sum(part[0] for part in parts), arguments, out, _sinks(call.sinks, heads, tokens))
        return call.ungrouped(out)


@cache
def _loops() -> ModuleType:
    """What Numba compiles; imported when first needed, for it takes a second."""
    from kvfold.kernels import _cpu_loops

    return _cpu_loops


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads of our own, which sleep while there is nothing to do.

    Numba's parallel loops bring a second pool of OpenMP threads, which wait busily where Torch's want to run.
    """
    return ThreadPoolExecutor(os.cpu_count(), "kvfold")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child inherits the pool but not its threads


def _sinks(sinks: torch.Tensor | None, heads: int, tokens: int) -> torch.Tensor:
    """Learned sinks, one per query row: float32 [num_kv_heads, rows]; no rows where there are none."""
    if sinks is None:
        return _no_sinks(heads)
    return sinks.detach().float().view(heads, -1).repeat_interleave(tokens, 1)


@cache
def _no_sinks(heads: int) -> torch.Tensor:
    return torch.empty(heads, 0, dtype=torch.float32, device="cpu")


def _run(cached: int, arguments: tuple[Any, ...], out: torch.Tensor, sinks: torch.Tensor) -> None:
    """Share the loops' work, ``cached`` tokens of every KV head, among threads."""
    loops = _loops()
    heads, rows = out.shape[0] * out.shape[1], out.shape[2]
    threads = max(1, min(torch.get_num_threads(), heads * cached // TOKENS_PER_THREAD))
    splits = threads // math.gcd(threads, heads)  # as many equal shares for every thread
    items = heads * splits
    parts = [out.new_empty(items, rows, *rest).numpy() for rest in ((out.shape[-1],), (), ())]
    cuts = [items * i // threads for i in range(threads + 1)]
    others = [_pool().submit(loops.attend, a, b, splits, *arguments, *parts) for a, b in pairwise(cuts[1:])]
    try:
        loops.attend(0, cuts[1], splits, *arguments, *parts)
    finally:  # what they read must live until they are done
        wait(others)
    for other in others:
        other.result()
    loops.merge(*parts, splits, sinks.numpy(), out.flatten(0, 1).numpy())


def _chunks(call: AttentionCall) -> list[Span]:
    """The spans, cut so that little is decoded at once."""
    key_format, value_format = call.key_format, call.value_format
    step = max(1, CHUNK // key_format.block)  # whole pages
    spans = []
    for span in call.spans:
        blocks = span.keys[next(iter(key_format.fields()))].shape[2]
        for first in range(0, blocks, step):
            count = min(step, blocks - first)
            keys, values = key_format.take(span.keys, count, first), value_format.take(span.values, count, first)
            spans.append(Span(span.start + first * key_format.block, keys, values))
    return spans


def inner(form: Format) -> Format:
    """What lies in blocks."""
    return form.inner if isinstance(form, Paged) else form


def _unsupported(form: Format, norms: bool) -> str | None:
    """Why the loops cannot read a format; None if they can. Norms are for keys only."""
    if isinstance(form, Paged):
        if form.page != PAGE:
            return "statistics of a whole sequence"
        if form.norm and not norms:
            return "norms per page"
        if form.basis is not None and not isinstance(form.basis, Hadamard):
            return f"{type(form.basis).__name__.lower()} of channels; allowed: hadamard"
        form = form.inner
    if isinstance(form, Dense):
        return None if form.dtype in STORED else f"stored as {form.dtype}; allowed: {', '.join(map(str, STORED))}"
    if not isinstance(form, AffineGroups | UniformTokens):
        return f"{form.kind} storage; allowed: affine, uniform, dense"
    return "packed for tensor cores" if form.operand != "plain" else None


@lru_cache
def _form(form: Format) -> tuple[int, int, int, int, int, int]:
    paged, block = int(isinstance(form, Paged)), 0
    if isinstance(form, Paged):
        block = form.basis.block if isinstance(form.basis, Hadamard) else 0
        form = form.inner
    if isinstance(form, UniformTokens):
        return (form.bits_per_code, 0, 0, 0, paged, block)
    if isinstance(form, AffineGroups):
        return (form.bits_per_code, int(form.axis == "channel"), MODES[form.mode], form.group, paged, block)
    return (0, 0, 0, 0, paged, block)


@lru_cache
def _signs(form: Format) -> torch.Tensor:
    """Signs of a format's rotation, float32 [head_dim]; ones where it has none."""
    if isinstance(form, Paged) and isinstance(form.basis, Hadamard):
        return form.basis.signs("cpu")
    return torch.ones(form.head_dim, dtype=torch.float32, device="cpu")


def _place(x: torch.Tensor, inner: int, keep: list[torch.Tensor]) -> tuple[int, int, int, int]:
    """Address, and strides in bytes of batch, head and the next dimension; what lies below is adjacent.

    ``inner`` is the number of elements below the third dimension.
    """
    stride = x.stride()
    if stride[2] != inner or stride[-1] != 1:
        x = x.contiguous()
        stride = x.stride()
    keep.append(x)
    size = x.itemsize
    return x.data_ptr(), stride[0] * size, stride[1] * size, inner * size


NOTHING = (0, 0, 0, 0)


@lru_cache
def _layout(form: Format) -> dict[str, int]:
    """Elements per block of every field."""
    return {name: math.prod(shape) for name, (shape, _) in form.fields().items()}


def _stored(form: Format, fields: Fields, keep: list[torch.Tensor]) -> tuple[tuple[int, ...], int]:
    """One operand of a span for the loops, and how many tokens there are."""
    size = _layout(form)
    if isinstance(form, Dense):
        x = fields["x"]
        address, batch, head, block = _place(x, size["x"], keep)
        return (STORED[x.dtype], address, batch, head, block // form.block, *NOTHING, *NOTHING), x.shape[2] * form.block
    if isinstance(form, UniformTokens):
        places = [_place(fields[name], size[name], keep) for name in ("codes", "scale")]
        return (UNIFORM, *places[0], *places[1], *NOTHING), fields["codes"].shape[2] * form.block
    assert isinstance(form, AffineGroups)
    names = ("codes", "meta") if form.mode == "asym" else ("codes", "scale", "aux")
    places = [_place(fields[name], size[name], keep) for name in names]
    places += [NOTHING] * (3 - len(places))
    return (0, *places[0], *places[1], *places[2]), fields["codes"].shape[2] * form.block


NO_PAGES = (0, 0, 0, 0, 0, 0)


def _statistics(fields: Fields, keep: list[torch.Tensor]) -> tuple[int, ...]:
    """Where a span's means and norms per page are."""
    places: list[int] = []
    for name in ("mean", "norm"):
        places += _place(fields[name], fields[name].shape[-1], keep)[:3] if name in fields else (0, 0, 0)
    return tuple(places)


def _dense(x: torch.Tensor, keep: list[torch.Tensor]) -> tuple[int, ...]:
    """Keys or values of a window, or new ones, in any strides but adjacent channels."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    keep.append(x)
    size = x.itemsize
    batch, head, token, _ = x.stride()
    return (STORED[x.dtype], x.data_ptr(), batch * size, head * size, token * size, *NOTHING, *NOTHING)


def _validity(valid: torch.Tensor | None, keep: list[torch.Tensor]) -> tuple[int, int]:
    if valid is None:
        return 0, 0
    valid = valid.contiguous()
    keep.append(valid)
    return valid.data_ptr(), valid.stride(0)
