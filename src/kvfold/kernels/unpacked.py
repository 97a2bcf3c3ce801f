"""Calls of many tokens on packed storage: bounded pieces are unpacked to 16 bits for the platform's own flash attention.

A call of hundreds of tokens reads every packed byte for hundreds of queries, so that unpacking once costs less than masks in
the inner loop do. Every query sees every packed token: no mask is needed, and query heads of a KV head are rows of one call.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from kvfold.formats import Dense, Fields, Format
from kvfold.kernels.call import AttentionCall, DensePart, Windows
from kvfold.kernels.device import Aside, multiprocessors
from kvfold.kernels.padding import OF, excess, fill, takes_windows
from kvfold.kernels.partials import Partials
from kvfold.kernels.unpack import Turn, make_constants, turn_of, unpack
from kvfold.kernels.unpack import why_not as no_unpacking
from kvfold.kernels.windows import attend_windows
from kvfold.rope import Rope

PIECE = 64 << 20
"""Bytes of keys, and as many of values, that exist unpacked at a time."""
STEP, MOST = 1024, 8192
"""cuDNN, which compiles for every shape, is given multiples of ``STEP`` keys, at most ``MOST`` at a time,"""
MANY, LONG = 16384, 32768
"""or up to ``LONG`` where all its programs run at once, beyond ``MANY`` in multiples of twice that: every part costs a start,
and programs that follow others find the keys of ``MOST`` tokens in the second cache."""
FEW = 256
"""Unpacked keys are filled up to such a number from so many on; fewer go to flash attention."""
ROWS = 128
"""Query rows of a program of cuDNN's attention."""
JOIN = 8
"""Results over pieces that are joined in one launch at most."""
RESULTS = 64 << 20
"""Bytes of results over pieces that wait to be joined, apart from one piece's."""
Result = tuple[torch.Tensor, torch.Tensor]
"""Attention over some keys [batch, num_kv_heads, rows, head_dim], and its log-sum-exp [batch, num_kv_heads, rows]."""


@dataclass(frozen=True)
class Piece:
    """Packed tokens that are unpacked together: ``count`` from number ``first`` of a span on, which begins at ``start``, where
    ``room`` have a place; ``sides``: fields of the span's keys and values, of some sequences."""

    start: int
    sides: tuple[Fields, Fields]
    first: int
    count: int
    room: int

    @property
    def empty(self) -> int:
        """Places that other keys than those of packed tokens fill."""
        return self.room - self.count


def why_not(key_format: Format, value_format: Format, pre_rope: bool) -> str | None:
    """Why calls on these formats cannot unpack; None if they can."""
    for side, form, stored_before in (("keys", key_format, pre_rope), ("values", value_format, False)):
        if form.head_dim % 8:
            return f"{side}: head_dim={form.head_dim}; allowed: multiples of 8"
        why = None if isinstance(form, Dense) and not stored_before else no_unpacking(form, stored_before)
        if why is not None:
            return f"{side}: {why}"
    return None


def serves(call: AttentionCall) -> bool:
    """Whether :func:`attend_unpacked` can compute this call."""
    return (
        call.new is not None
        and (call.uniform or call.packed is not None)
        and isinstance(call.windows, Windows)
        and call.softcap is None
        and call.new.keys.dtype in (torch.float16, torch.bfloat16)
        and not call.query.requires_grad
        and why_not(call.key_format, call.value_format, call.rope is not None) is None
    )


def attend_unpacked(call: AttentionCall) -> torch.Tensor:
    """Attention of a call's tokens over everything cached and over themselves.

    Parameters
    ----------
    call : AttentionCall
        That :func:`serves` accepts.

    Returns
    -------
    Tensor [batch, num_heads, tokens, head_dim], of the new keys' dtype
    """
    assert call.new is not None and isinstance(call.windows, Windows)
    query = call.query.to(call.new.keys.dtype).contiguous()
    rows = call.grouped(query)
    batch, heads, count, dim = rows.shape
    partials = Partials.empty(batch * heads, 1, count, dim, query.device)
    bias = None
    if call.spans and call.project is not None:
        projected, shift = call.projected
        rows = projected.to(rows.dtype)
        bias = None if shift is None else shift * call.scale
    out = torch.empty_like(rows)
    turn = None
    if call.unproject is not None and call.spans:
        turn = turn_of(call.unproject, call.value_format, call.num_kv_heads, query.device)
    for form, rope in ((call.key_format, call.rope), (call.value_format, None)):
        if call.spans and not isinstance(form, Dense):
            make_constants(form, query.device, rope)
    with Aside(query.device) as aside:
        for part, tokens in _alike(call, batch):
            some = slice(part.start * heads, part.stop * heads)
            own = Partials(partials.out[some], partials.top[some], partials.total[some])
            shared = None if bias is None else bias[part]
            _attend_alike(call, query[part], part, tokens, rows[part], shared, own, out[part], turn, aside)
    return call.ungrouped(out)


def _alike(call: AttentionCall, batch: int) -> list[tuple[slice, int | None]]:
    """Neighbours in the batch with as many packed tokens, and how many; None: all that spans hold."""
    if call.uniform:
        return [(slice(0, batch), None)]
    assert call.packed is not None
    found: list[tuple[slice, int | None]] = []
    first = 0
    for tokens, rows in groupby(call.packed):
        stop = first + len(list(rows))
        found.append((slice(first, stop), tokens))
        first = stop
    return found


def _attend_alike(
    call: AttentionCall,
    query: torch.Tensor,
    part: slice,
    tokens: int | None,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    partials: Partials,
    out: torch.Tensor,
    turn: Turn | None,
    aside: Aside,
) -> None:
    """Attention of some sequences over their packed tokens and over everything else, to ``out``.

    Windows, and what is left over of cuDNN's part, are computed aside: these multiply while the rest is unpacked.
    """
    results: list[Result] = []
    most = max(1, min(JOIN, RESULTS // (rows.numel() * rows.itemsize)))
    wide = _widened(rows) if takes_cudnn(rows) else None
    pieces = _cut(call, part, tokens, rows, over=None if wide is None else False)
    windows = _of_part(call.windows, part)
    moved = None  # windows whose tokens, or the first of them, lie behind those of the last piece
    if pieces and pieces[-1].empty and call.project is None and takes_windows(windows):
        moved = windows
    stay = None if moved is None or not _beside(turn) else _stay(rows, query.shape[2], pieces)

    def attend_others() -> None:
        new = call.new
        assert new is not None
        valid = None if new.valid is None else new.valid[part]
        skip = 0 if moved is None else pieces[-1].empty
        with aside.launches():
            attend_windows(
                query,
                windows,
                call.scale,
                partials,
                0,
                new.keys[part],
                new.values[part],
                valid,
                skip=skip,
                programs=stay,
            )

    if stay is None:
        attend_others()
    over: list[Result] = []
    if wide is not None:
        with aside.launches():
            over = [
                _flash(rows, *_sides(call, part, piece, rows, turn), call.scale)
                for piece in _cut(call, part, tokens, rows, over=True)
            ]
    more: torch.Tensor | None = None
    for piece in pieces:
        if more is not None:  # what is taken off is that of the last result of those joined
            partials.join(results, bias, excess=more)
            results = []
        within = moved if piece is pieces[-1] else None
        then = attend_others if stay is not None and piece is pieces[0] else None
        keys, values, more = _filled(call, part, piece, rows, turn, aside, within, then)
        if more is not None and within is None and not _beside(turn):  # keys were filled up aside
            aside.wait()
        for result in _attend(rows, wide, keys, values, call.scale):
            if len(results) >= most:
                aside.wait()
                partials.join(results, bias)
                results = []
            results.append(result)
        if more is not None:  # before what it reads is another piece's
            aside.wait(more)
    if more is not None and over:
        partials.join(results, bias, excess=more)
        results, more = [], None
    aside.wait(*(tensor for result in over for tensor in result))
    for result in over:
        if len(results) >= most:
            partials.join(results, bias)
            results = []
        results.append(result)
    partials.join(results, bias, out, call.sinks, call.tokens, more)


def _of_part(windows: Iterable[DensePart], part: slice) -> Windows:
    """Windows of some sequences."""
    assert isinstance(windows, Windows)
    (sink_k, sink_v), (ring_k, ring_v) = windows.sink, windows.ring
    lengths = (windows.sink_len, windows.packed_len, windows.recent_len)
    return Windows((sink_k[part], sink_v[part]), (ring_k[part], ring_v[part]), *(n[part] for n in lengths))


def _stay(rows: torch.Tensor, tokens: int, pieces: list[Piece]) -> int | None:
    """How many programs attend to windows on the multiprocessors that neither keys, where tables decode them, nor cuDNN's
    attention uses; None where there are none, or they would take longer than attention does."""
    batch, heads, count, _ = rows.shape
    there = multiprocessors(rows.device)
    busy = batch * heads * math.ceil(count / ROWS)
    free = there - max(busy, there // (batch * heads) * (batch * heads))
    if free <= 0 or 3 * tokens * busy > 2 * free * sum(piece.room for piece in pieces):  # they multiply half as fast
        return None
    return 2 * free


def _cut(call: AttentionCall, part: slice, packed: int | None, rows: torch.Tensor, over: bool | None) -> list[Piece]:
    """Pieces of ``packed`` tokens of some sequences (None: of all that spans hold).

    ``over`` None: of all tokens. False: those that cuDNN is given, a multiple of ``STEP``, or, where they are unpacked, with
    room up to one. True: the others.
    """
    form = call.key_format
    dense = isinstance(form, Dense) and isinstance(call.value_format, Dense)
    once = at_once(rows)
    found = []
    for span in call.spans:
        keys, values = ({name: t[part] for name, t in fields.items()} for fields in (span.keys, span.values))
        stored = next(t for name, t in keys.items() if name in form.fields())
        tokens = stored.shape[2] * form.block
        if packed is not None:
            tokens = max(0, min(tokens, packed - span.start))
        step = max(tokens, 1) if dense else _piece(stored.shape[0] * stored.shape[1] * form.head_dim)
        last = tokens % step or step  # of the last piece
        fills = over is not None and _unpacks(call) and tokens >= FEW
        fills = fills and last % OF == 0 and for_cudnn(last, once) > last
        whole = tokens if fills else tokens // STEP * STEP
        begin, end = (0, tokens) if over is None else (whole, tokens) if over else (0, whole)
        for first in range(begin, end, step):
            count = min(step, end - first)
            found.append(Piece(span.start, (keys, values), first, count, for_cudnn(count, once) if fills else count))
    return found


def _unpacks(call: AttentionCall) -> bool:
    """Whether both sides of packed tokens are unpacked."""
    return not isinstance(call.key_format, Dense) and not isinstance(call.value_format, Dense)


def _sides(
    call: AttentionCall, part: slice, piece: Piece, rows: torch.Tensor, turn: Turn | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a piece's tokens [sequences, num_kv_heads, tokens, head_dim]."""
    return _keys(call, part, piece, rows.dtype), _values(call, piece, rows.dtype, turn)


def _keys(
    call: AttentionCall, part: slice, piece: Piece, dtype: torch.dtype, room: torch.Tensor | None = None
) -> torch.Tensor:
    place = None if call.first_position is None else call.first_position[part]
    at = piece.start, piece.first, piece.count
    return _side(call.key_format, piece.sides[0], *at, dtype, call.rope, place, whole=room)


def _values(
    call: AttentionCall, piece: Piece, dtype: torch.dtype, turn: Turn | None, room: torch.Tensor | None = None
) -> torch.Tensor:
    at = piece.start, piece.first, piece.count
    return _side(call.value_format, piece.sides[1], *at, dtype, turn=turn, whole=room)


def _filled(
    call: AttentionCall,
    part: slice,
    piece: Piece,
    rows: torch.Tensor,
    turn: Turn | None,
    aside: Aside,
    windows: Windows | None,
    then: Callable[[], None] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values of a piece's tokens [sequences, num_kv_heads, room, head_dim], filled up, with ``windows`` where they are
    given; then also what the queries ``rows`` lose by copies, :func:`kvfold.kernels.padding.excess`.

    ``then`` is launched when values are unpacked, beside keys.
    """
    key_room = value_room = values = more = None
    if piece.empty:
        shape = (rows.shape[0], rows.shape[1], piece.room, call.key_format.head_dim)
        key_room, value_room = (torch.empty(shape, dtype=rows.dtype, device=rows.device) for _ in range(2))
    with Aside(rows.device, 1) as beside:  # beside keys, whatever else waits for a place there
        if windows is not None and key_room is not None and value_room is not None:
            with beside.launches():
                fill(key_room, value_room, piece.count, windows)
            with aside.launches():
                more = excess(rows.contiguous(), key_room, piece.count, call.scale, windows)
        if _unpacks(call) and _beside(turn):
            with beside.launches():
                values = _values(call, piece, rows.dtype, turn, value_room)
                if then is not None:
                    then()
        keys = _keys(call, part, piece, rows.dtype, key_room)
        if values is not None:
            beside.wait(values)
        if value_room is not None and windows is None:
            if values is not None:  # nothing aside has to end before attention over them begins
                fill(keys, value_room, piece.count)
            with aside.launches():
                if values is None:  # beside values that come after keys
                    fill(keys, value_room, piece.count)
                more = excess(rows.contiguous(), keys, piece.count, call.scale)
        if values is None:
            values = _values(call, piece, rows.dtype, turn, value_room)
    return keys, values, more


def _beside(turn: Turn | None) -> bool:
    """Whether values are unpacked beside keys: where products make them of bits, and look-ups keys; others lose by it."""
    return turn is not None and turn.operands is not None


def for_cudnn(tokens: int, once: bool) -> int:
    """As many keys as cuDNN has compiled for, or more; ``once``: as of :func:`_for_cudnn`."""
    step = _step(tokens, once)
    return -(-tokens // step) * step


def _step(tokens: int, once: bool) -> int:
    return 2 * STEP if once and tokens > MANY else STEP


def _piece(elements: int) -> int:
    """Tokens of a piece, of ``elements`` elements each: whole pages."""
    most = PIECE // (2 * elements)
    return most // STEP * STEP if most >= STEP else max(256, most // 256 * 256)


def _side(
    form: Format,
    fields: Fields,
    start: int,
    first: int,
    count: int,
    dtype: torch.dtype,
    rope: Rope | None = None,
    place: torch.Tensor | None = None,
    turn: Turn | None = None,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """Vectors of one side; where they are stored as such, they themselves."""
    if isinstance(form, Dense):
        return fields["x"].flatten(-3, -2)[:, :, first : first + count].to(dtype)
    return unpack(form, fields, start, first, count, dtype, rope, place, turn, whole)


def _attend(
    rows: torch.Tensor, wide: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> Iterator[Result]:
    """Attention of rows [batch, num_kv_heads, rows, head_dim] over all of the keys, part by part; ``wide``: the same rows as
    cuDNN is given them."""
    at = 0
    while at < keys.shape[2]:
        left = keys.shape[2] - at
        count = 0 if wide is None else _for_cudnn(left, at_once(wide))
        part = slice(at, at + (count or left))
        k, v = keys[:, :, part], values[:, :, part]
        if count and wide is not None:
            cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
            out, total = cudnn(wide, k, v, None, True, 0.0, False, False, scale=scale)[:2]
            total = total.reshape(wide.shape[:3])[:, :, : rows.shape[2]]
            yield out, total.contiguous()
        else:
            yield _flash(rows, k, v, scale)
        at = part.stop


def _flash(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> Result:
    """Flash attention, which takes any number of keys."""
    if rows.device.type == "cpu":
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, 0.0, False, scale=scale
        )
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, total = flash(rows, keys, values, 0.0, False, False, scale=scale)[:2]
    return out, total.contiguous()


def _for_cudnn(left: int, once: bool) -> int:
    """How many of the keys that are left cuDNN is given next, where its programs run all at ``once`` or not."""
    if once and left >= MOST:
        step = _step(left, once)
        return min(LONG, left // step * step)
    return min(MOST, left // STEP * STEP)


def at_once(rows: torch.Tensor) -> bool:
    """Whether every program of cuDNN's attention has a multiprocessor."""
    batch, heads, count, _ = rows.shape
    return batch * heads * math.ceil(count / ROWS) <= multiprocessors(rows.device)


def _widened(rows: torch.Tensor) -> torch.Tensor:
    """Rows, and others after them, so that there are one of eight numbers up to the next power of two."""
    count = rows.shape[2]
    step = max(256, 1 << max(0, count.bit_length() - 4))
    more = -count % step
    return torch.nn.functional.pad(rows, (0, 0, 0, more)) if more else rows


def takes_cudnn(rows: torch.Tensor) -> bool:
    """Whether cuDNN's attention is faster than flash attention: on Hopper and later, where there are programs enough."""
    batch, heads, count, dim = rows.shape
    if rows.device.type != "cuda" or dim > 128 or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    programs = batch * heads * math.ceil(count / ROWS)
    return torch.cuda.get_device_capability(rows.device)[0] >= 9 and 4 * programs >= 3 * multiprocessors(rows.device)
