"""Attention on the CPU: loops compiled by Numba that decode tiles of 32 tokens and use them at once.

No decoded copy of the cache exists at any time; beyond the output, a call needs a few kilobytes per thread.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import PAGE, Dense, Fields, Format, Hadamard, Paged
from kvfold.formats.basis import Basis
from kvfold.formats.binary import ValueRows
from kvfold.kernels.base import AttentionKernel
from kvfold.kernels.call import AttentionCall, DensePart, NewTokens, Span
from kvfold.kernels.cpu import importing, readers
from kvfold.kernels.cpu.readers.base import ROW, made, place
from kvfold.kernels.merge import Partial
from kvfold.kernels.reference import ReferenceKernel
from kvfold.kernels.stored import inner

STORED = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""Dtypes of dense operands, as the loops name them; 0 stands for what a reader decodes."""
MAX_TOKENS = 64
"""Query tokens up to which the loops are faster than decoding for a matrix product."""
CHUNK = 2048
"""Packed tokens that are decoded at once when there are more query tokens."""
TOKENS_PER_THREAD = 2048
"""Cached tokens of a KV head that are worth waking a thread for: a tenth of a millisecond."""
WIDTH = 1 + ROW
"""Integers that describe an operand of a part."""
NO_PAGES = (0,) * 6


class CPUKernel(AttentionKernel):
    """Formats with a reader (:mod:`kvfold.kernels.cpu.readers`) in plain packing, and dense storage; needs Numba.

    Calls that need gradients are left to the reference; calls of more than :data:`MAX_TOKENS` query tokens as well, over pieces
    of the cache.
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
        if find_spec("numba") is None:
            return "numba is not installed; run: pip install 'kvfold[cpu]'"
        if why := importing.why_not():
            return why
        for side, form in (("keys", key_format), ("values", value_format)):
            if why := _unsupported(form, norms=side == "keys"):
                return f"{side}: {why}"
        if pre_rope and isinstance(key_format, Paged):
            return "keys: stored before RoPE, with statistics per page"
        return None

    def prepare(self, key_format: Format, value_format: Format) -> None:
        one = torch.zeros(1, 1, 1, key_format.head_dim, device="cpu")
        value = torch.zeros(1, 1, 1, value_format.head_dim, device="cpu")
        none = torch.zeros(1, dtype=torch.int32, device="cpu")
        with suppress(importing.NumbaError):  # known from now on: another kernel is chosen
            self.attend(AttentionCall(one, 1.0, 1, key_format, value_format, [], none, [], NewTokens(one, value)))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        new, tokens = call.new, call.tokens
        if new is None or new.keys.dtype not in STORED:
            return ReferenceKernel().attend(call)
        given = (call.query, new.keys, new.values, *([] if call.sinks is None else [call.sinks]))
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            return ReferenceKernel().attend(call)
        if tokens > MAX_TOKENS:
            return ReferenceKernel().attend(replace(call, spans=_chunks(call)))
        _loops()  # says it if Numba cannot be imported, before a reader does
        keep: list[torch.Tensor] = []  # what addresses point to must live until the end
        packed, dense = _packed(call, keep), _windows(call, keep)
        if call.unproject is None or isinstance(call.unproject, ValueRows) or not call.spans:
            shares = _run(call, packed + dense, new.values.shape[-1])
            out = shares.out.new_empty(*call.shape[:3], shares.out.shape[-1])
            _loops().merge(*shares.arrays, shares.splits, _sinks(call).numpy(), out.flatten(0, 1).numpy())
            return call.ungrouped(out)
        part = _run(call, packed, call.value_format.width).joined(call.shape)
        part.out = call.unproject(part.out)
        parts = [part, _run(call, dense, new.values.shape[-1]).joined(call.shape)]
        if call.sinks is not None:
            parts.append(Partial.of_sinks(call.sinks, part))
        return call.ungrouped(Partial.merge(parts))


@lasting(None)
def _loops() -> ModuleType:
    """What Numba compiles; imported when first needed, for it takes a second."""
    try:
        from kvfold.kernels.cpu import _attend
    except Exception as error:  # it does not go with the NumPy that there is, say: anything may be raised
        raise importing.failure(error) from error
    return _attend


@lasting(None)
def _pool() -> ThreadPoolExecutor:
    """Threads of our own, which sleep while there is nothing to do.

    Numba's parallel loops bring a second pool of OpenMP threads, which wait busily where Torch's want to run.
    """
    return ThreadPoolExecutor(os.cpu_count(), "kvfold")


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child inherits the pool but not its threads


def _sinks(call: AttentionCall) -> torch.Tensor:
    """Learned sinks, one per query row: float32 [num_kv_heads, rows]; no rows where there are none."""
    if call.sinks is None:
        return _no_sinks(call.num_kv_heads)
    return call.sinks.detach().float().view(call.num_kv_heads, -1).repeat_interleave(call.tokens, 1)


@lasting(None)
def _no_sinks(heads: int) -> torch.Tensor:
    return torch.empty(heads, 0, dtype=torch.float32, device="cpu")


# ---- what there is to read ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Tokens that lie together, as the loops are told of them.

    Attributes
    ----------
    about : tuple of int
        Row of ``parts``: first how many tokens there are.
    keys, values : list of int
        Rows of ``sides``.
    key_pages, value_pages : tuple of int
        Rows of ``pages``.
    """

    about: tuple[int, ...]
    keys: list[int]
    values: list[int]
    key_pages: tuple[int, ...] = NO_PAGES
    value_pages: tuple[int, ...] = NO_PAGES


def _packed(call: AttentionCall, keep: list[torch.Tensor]) -> list[Part]:
    parts = []
    for span in call.spans:
        keys, values = _stored(call.key_format, span.keys, keep), _stored(call.value_format, span.values, keep)
        tokens = span.keys[next(iter(call.key_format.fields()))].shape[2] * call.key_format.block
        about = (tokens, span.start, 0, 0, 0)
        pages = _statistics(call.key_format, span.keys, keep), _statistics(call.value_format, span.values, keep)
        parts.append(Part(about, keys, values, *pages))
    return parts


def _windows(call: AttentionCall, keep: list[torch.Tensor]) -> list[Part]:
    assert call.new is not None
    newest = DensePart(call.new.keys, call.new.values, call.new.valid)  # type: ignore[arg-type]
    return [
        Part(
            (part.keys.shape[-2], 0, kind, *_validity(part.valid, keep)),
            _dense(part.keys, keep),
            _dense(part.values, keep),
        )
        for kind, part in (*((1, d) for d in call.windows), (2, newest))
    ]


# ---- shares of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """What threads found, unnormalized: ``out`` float32 [items, rows, channels], ``top`` and ``total`` [items, rows]; an item
    is one of ``splits`` shares of a KV head of a sequence."""

    out: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor
    splits: int

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        return self.out.numpy(), self.top.numpy(), self.total.numpy()

    def joined(self, shape: tuple[int, int, int, int]) -> Partial:
        """All shares as one part, of ``shape``'s batch, heads and rows."""
        shares = [x.unflatten(0, (*shape[:2], self.splits)).unbind(2) for x in (self.out, self.top, self.total)]
        parts = [Partial(out, top.unsqueeze(-1), total.unsqueeze(-1)) for out, top, total in zip(*shares, strict=True)]
        return reduce(Partial.join, parts)


def _run(call: AttentionCall, parts: list[Part], channels: int) -> Shares:
    """Share the loops' work among threads."""
    loops: Any = _loops()
    queries = call.rows.detach().contiguous()
    batch, heads, rows, _ = queries.shape
    cached, items = sum(part.about[0] for part in parts), batch * heads
    threads = max(1, min(torch.get_num_threads(), items * cached // TOKENS_PER_THREAD))
    # as many equal shares for every thread; many items are near enough without
    splits = threads // math.gcd(threads, items) if items < 8 * threads else 1
    items *= splits
    shares = Shares(
        queries.new_empty(items, rows, channels), queries.new_empty(items, rows), queries.new_empty(items, rows), splits
    )
    packed, bias = call.projected if call.spans else (queries, None)
    bias = queries.new_empty(batch, heads, 0) if bias is None else bias.detach().contiguous()
    key_form, value_form = _form(call.key_format), _form(call.value_format)
    value_matrix = value_form.matrix[None]
    if isinstance(call.unproject, ValueRows) and call.spans:
        value_matrix = call.unproject.rows.detach().float().contiguous().numpy()
    arguments: tuple[Any, ...] = (
        packed.detach().contiguous().numpy(),
        queries.numpy(),
        bias.numpy(),
        float(call.scale),  # an integer of a model's configuration would have the loops compiled again
        float(call.softcap or 0.0),
        _table([part.about for part in parts]),
        _table([(_filled(part.keys), _filled(part.values)) for part in parts]),
        _table([key_form.numbers, value_form.numbers]),
        _table([(part.key_pages, part.value_pages) for part in parts]),
        key_form.signs,
        value_form.signs,
        key_form.matrix,
        value_matrix,
        *_rope(call),
        call.packed_len.long().contiguous().numpy(),
        call.tokens,
        max(_scratch(call.key_format), _scratch(call.value_format)),
        *shares.arrays,
    )
    cuts = [items * i // threads for i in range(threads + 1)]
    others = [_pool().submit(loops.attend, a, b, splits, *arguments) for a, b in pairwise(cuts[1:])]
    try:
        loops.attend(0, cuts[1], splits, *arguments)
    finally:  # what they read must live until they are done
        wait(others)
    for other in others:
        other.result()
    return shares


def _scratch(form: Format) -> int:
    form = inner(form)
    return 0 if isinstance(form, Dense) else readers.reader_of(form).scratch


def _rope(call: AttentionCall) -> tuple[Any, Any, float, Any]:
    """Angles per position, turns within a page, RoPE's factor, and where packed tokens begin."""
    rope = call.rope
    if rope is None or not call.spans:
        none = torch.zeros(call.shape[0], dtype=torch.int64, device="cpu")
        return *_no_turns(), 1.0, none.numpy()
    assert call.first_position is not None
    turns = made(rope, "turns", lambda: _turns(rope.inv_freq))
    return *turns, float(rope.scaling), call.first_position.long().contiguous().numpy()


def _turns(freq: torch.Tensor) -> tuple[Any, Any]:
    """Angles per position, float64 [pairs], and cosines and sines of a page's first positions, float32 [2, PAGE, pairs]."""
    freq = freq.cpu().double()
    angles = torch.arange(PAGE, dtype=torch.float64, device="cpu").unsqueeze(-1) * freq
    return freq.numpy(), torch.stack((angles.cos(), angles.sin())).float().numpy()


@lasting(None)
def _no_turns() -> tuple[Any, Any]:
    return _turns(torch.empty(0, device="cpu"))


def _table(rows: Any) -> Any:
    """Integers as an array of 64 bits each; Torch takes three times as long."""
    return _loops().np.array(rows, _loops().np.int64)


def _filled(row: list[int]) -> list[int]:
    return row + [0] * (WIDTH - len(row))


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


# ---- formats -----------------------------------------------------------------------------------------------------------


def _unsupported(form: Format, norms: bool) -> str | None:
    """Why the loops cannot read a format; None if they can. ``norms``: of channels that a basis mixes, too."""
    if isinstance(form, Paged):
        if form.page not in (0, PAGE):
            return f"statistics of {form.page} tokens; allowed: {PAGE}, or of the whole sequence"
        if form.norm and form.basis is not None and not norms:
            return "norms per page in another basis"
        form = form.inner
    if isinstance(form, Dense):
        return None if form.dtype in STORED else f"stored as {form.dtype}; allowed: {', '.join(map(str, STORED))}"
    return readers.why_not(form)


@dataclass(frozen=True)
class Form:
    """What the loops are told of a format beside its reader: a row of ``forms``, signs of a Hadamard rotation, the matrix of
    another basis; arrays over memory that all formats share."""

    numbers: tuple[int, ...]
    signs: Any
    matrix: Any


def _form(form: Format) -> Form:
    """Made once."""
    return made(form, "form", lambda: _made(form))


def _made(form: Format) -> Form:
    signs, block = _ones(form.head_dim), 0
    matrix, stored = signs.expand(0, -1), inner(form)
    if isinstance(form, Paged) and isinstance(form.basis, Hadamard):
        signs, block = form.basis.signs("cpu"), form.basis.block
    elif isinstance(form, Paged) and form.basis is not None:
        matrix = _matrix(form.basis, stored.width)
    address = 0 if isinstance(stored, Dense) else type(readers.reader_of(stored)).decode.address
    paged = isinstance(form, Paged)
    numbers = (address, stored.width, int(paged), int(isinstance(form, Paged) and form.page == PAGE), block)
    return Form(numbers, signs.numpy(), matrix.contiguous().numpy())


@lasting()
def _ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float32, device="cpu")


@lasting(64)
def _matrix(basis: Basis, width: int) -> torch.Tensor:
    """What decoded vectors are multiplied with, float32 [width, head_dim]: the basis's own table, where that is it."""
    found = basis.restore(torch.eye(width, dtype=torch.float32, device="cpu")).contiguous()
    return next((t for t in basis.tables("cpu").values() if t.shape == found.shape and torch.equal(t, found)), found)


def _stored(form: Format, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
    """One operand of a span: a row of ``sides``."""
    form = inner(form)
    if not isinstance(form, Dense):
        return [0, *readers.reader_of(form).row(fields, keep)]
    x = fields["x"]
    address, batch, head, block = place(x, form.block * form.head_dim, keep)
    return [STORED[x.dtype], address, batch, head, block // form.block]


def _statistics(form: Format, fields: Fields, keep: list[torch.Tensor]) -> tuple[int, ...]:
    """Where a span's means and norms per page are."""
    places: list[int] = []
    for name in ("mean", "norm"):
        there = isinstance(form, Paged) and name in fields
        places += place(fields[name], form.head_dim, keep)[:3] if there else (0, 0, 0)
    return tuple(places)


def _dense(x: torch.Tensor, keep: list[torch.Tensor]) -> list[int]:
    """Keys or values of a window, or new ones, in any strides but adjacent channels."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    keep.append(x)
    size = x.itemsize
    batch, head, token, _ = x.stride()
    return [STORED[x.dtype], x.data_ptr(), batch * size, head * size, token * size]


def _validity(valid: torch.Tensor | None, keep: list[torch.Tensor]) -> tuple[int, int]:
    if valid is None:
        return 0, 0
    valid = valid.contiguous()
    keep.append(valid)
    return valid.data_ptr(), valid.stride(0)
