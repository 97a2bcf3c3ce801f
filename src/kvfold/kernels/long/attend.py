"""Calls of many tokens on packed storage: bounded pieces are unpacked to 16 bits for the platform's own flash attention.

A call of hundreds of tokens reads every packed byte for hundreds of queries, so that unpacking once costs less than masks in
the inner loop do. Every query sees every packed token: no mask is needed, and query heads of a KV head are rows of one call.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from kvfold.formats import Dense, Fields, Format
from kvfold.kernels.call import AttentionCall, NewTokens, Windows
from kvfold.kernels.common.windows import windows_result
from kvfold.kernels.device import Aside, device_info
from kvfold.kernels.generic.unpack import Turn, make_constants, turn_of, unpack
from kvfold.kernels.generic.unpack import why_not as no_unpacking
from kvfold.kernels.long.join import Joint, Result
from kvfold.kernels.long.pad import OF, excess, fill, takes_windows
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
SLOWER, TILE = 3.1, 64
"""How many times as long programs of windows take for a key, and keys that they meet at a time."""


@dataclass(frozen=True)
class Part:
    """Sequences with as many packed tokens: ``where`` they are in the batch, and what is theirs of a call; ``rows``: queries as
    they meet packed keys, all query heads of a KV head together, which are there for a stream that called ``ready``."""

    where: slice
    query: torch.Tensor
    rows: torch.Tensor
    ready: Callable[[], None]
    windows: Windows
    new: NewTokens


@dataclass(frozen=True)
class Piece:
    """Packed tokens that are unpacked together: ``count`` from number ``first`` of a span on, which begins at ``start``, where
    ``room`` have a place; ``keys``, ``values``: fields of the span, of some sequences."""

    start: int
    keys: Fields
    values: Fields
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
    rows, bias = call.grouped(query), None
    out = torch.empty_like(rows)
    turn = None
    if call.unproject is not None and call.spans:
        turn = turn_of(call.unproject, call.value_format, call.num_kv_heads, query.device)
    for form, rope in ((call.key_format, call.rope), (call.value_format, None)):
        if call.spans and not isinstance(form, Dense):
            make_constants(form, query.device, rope)
    with Aside(query.device, 2) as ahead, Aside(query.device) as aside:
        if call.spans and call.project is not None:
            with ahead.launches():
                rows, bias = call.project(rows, rows.dtype)
        ready = partial(ahead.meet, rows, *([] if bias is None else [bias]))
        for part, tokens in _alike(call, len(query)):
            some = Part(part, query[part], rows[part], ready, call.windows.of(part), call.new.of(part))
            joint = Joint(some.rows, None if bias is None else bias[part], call.scale)
            _attend_alike(call, some, tokens, joint, turn, aside, out[part])
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
    part: Part,
    tokens: int | None,
    joint: Joint,
    turn: Turn | None,
    aside: Aside,
    out: torch.Tensor,
) -> None:
    """Attention of some sequences over their packed tokens, and over everything else, to ``out``.

    Windows, and what is left over of cuDNN's part, are computed aside: these multiply while the rest is unpacked, or windows
    while cuDNN's attention leaves multiprocessors.
    """
    rows = part.rows
    wide = None
    if takes_cudnn(rows):
        if _widening(rows):
            part.ready()
        wide = _widened(rows)
    pieces = _cut(call, part, tokens, wide)
    moves = bool(pieces) and pieces[-1].empty > 0 and call.project is None and takes_windows(part.windows)
    skip = pieces[-1].empty if moves else 0  # tokens of the windows that lie behind those of the last piece
    left = part.query.shape[2] // 2 + max(
        0, sum(side[0].shape[2] for side in (part.windows.sink, part.windows.ring)) - skip
    )
    stay = _stay(wide, left, pieces) if wide is not None and moves else None
    others: list[Result] = []

    def attend_others() -> None:
        with aside.launches():
            others.append(windows_result(part.query, part.windows, call.scale, part.new, skip, stay))

    if stay is None:
        attend_others()
    over: list[Result] = []
    rest = [] if wide is None else _cut(call, part, tokens, wide, over=True)
    if rest:
        part.ready()
        with aside.launches():
            for piece in rest:
                keys, values, _ = _unpacked(call, part, piece, turn)
                over.append(_flash(rows, keys, values, call.scale))
    for piece in pieces:
        keys, values, more = _unpacked(call, part, piece, turn, moves and piece is pieces[-1])
        if stay is not None and not others:
            attend_others()
        for result in _attend(rows, wide, keys, values, call.scale):
            joint.add(result)
        if more is not None:
            joint.take_off(more)
    aside.wait(*(tensor for result in others + over for tensor in result))
    for result in over:
        joint.add(result)
    joint.end(out, others, call.sinks, call.tokens)


def _stay(wide: torch.Tensor, tokens: int, pieces: list[Piece]) -> int | None:
    """How many programs attend to windows and a call's own tokens, of which a query sees ``tokens`` on average, beside cuDNN's
    attention, on multiprocessors that this leaves; None where it leaves none, or they would take longer."""
    batch, heads, count, _ = wide.shape
    busy = batch * heads * math.ceil(count / ROWS)
    free = device_info(wide.device).sms - busy
    if free <= 0 or SLOWER * busy * (tokens + TILE // 2) > free * sum(piece.room for piece in pieces):
        return None
    return free


def _cut(
    call: AttentionCall, part: Part, packed: int | None, wide: torch.Tensor | None, over: bool = False
) -> list[Piece]:
    """Pieces of ``packed`` tokens of some sequences (None: of all that spans hold).

    Where cuDNN is given rows, ``wide``: those that it is given, a multiple of ``STEP``, or, where they are unpacked, with room
    up to one; or the tokens left ``over``. Without: all of them.
    """
    form = call.key_format
    dense = isinstance(form, Dense) and isinstance(call.value_format, Dense)
    once = wide is not None and at_once(wide)
    found = []
    for span in call.spans:
        keys, values = ({name: t[part.where] for name, t in fields.items()} for fields in (span.keys, span.values))
        stored = next(t for name, t in keys.items() if name in form.fields())
        tokens = stored.shape[2] * form.block
        if packed is not None:
            tokens = max(0, min(tokens, packed - span.start))
        step = max(tokens, 1) if dense else _piece(stored.shape[0] * stored.shape[1] * form.head_dim)
        last = tokens % step or step  # of the last piece
        fills = wide is not None and _unpacks(call) and tokens >= FEW
        fills = fills and last % OF == 0 and for_cudnn(last, once) > last
        whole = tokens if fills else tokens // STEP * STEP
        begin, end = (0, tokens) if wide is None else (whole, tokens) if over else (0, whole)
        for first in range(begin, end, step):
            count = min(step, end - first)
            room = for_cudnn(count, once) if fills else count
            found.append(Piece(span.start, keys, values, first, count, room))
    return found


def _unpacks(call: AttentionCall) -> bool:
    """Whether both sides of packed tokens are unpacked."""
    return not isinstance(call.key_format, Dense) and not isinstance(call.value_format, Dense)


def _unpacked(
    call: AttentionCall, part: Part, piece: Piece, turn: Turn | None, moves: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values of a piece's tokens, [sequences, num_kv_heads, room, head_dim]. Where there is more room they are filled
    up, with tokens of the windows if it ``moves``; then also what copies add, :func:`kvfold.kernels.long.pad.excess`."""
    dtype, device = part.rows.dtype, part.rows.device
    at = piece.start, piece.first, piece.count
    place = None if call.first_position is None else call.first_position[part.where]
    rooms: list[torch.Tensor | None] = [None, None]
    if piece.empty:
        shape = (*part.rows.shape[:2], piece.room, call.key_format.head_dim)
        rooms = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
    more: torch.Tensor | None = None

    def fill_up(windows: Windows | None) -> torch.Tensor:
        assert rooms[0] is not None and rooms[1] is not None
        fill(rooms[0], rooms[1], piece.count, windows)
        return excess(part.rows.contiguous(), rooms[0], piece.count, call.scale, windows)

    with Aside(device, 1) as beside:  # beside what is unpacked, whatever else waits for a place there
        if moves:
            with beside.launches():
                more = fill_up(part.windows)
        keys = _side(call.key_format, piece.keys, *at, dtype, call.rope, place, whole=rooms[0])
        if piece.empty and not moves:
            with beside.launches():  # beside values
                part.ready()
                more = fill_up(None)
        values = _side(call.value_format, piece.values, *at, dtype, turn=turn, whole=rooms[1])
        part.ready()
        if more is not None:
            beside.wait(more)
    return keys, values, more


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
    return batch * heads * math.ceil(count / ROWS) <= device_info(rows.device).sms


def _widening(rows: torch.Tensor) -> int:
    """How many rows are added so that there are one of eight numbers up to the next power of two."""
    count = rows.shape[2]
    return -count % max(256, 1 << max(0, count.bit_length() - 4))


def _widened(rows: torch.Tensor) -> torch.Tensor:
    """Rows, and others after them."""
    more = _widening(rows)
    return torch.nn.functional.pad(rows, (0, 0, 0, more)) if more else rows


def takes_cudnn(rows: torch.Tensor) -> bool:
    """Whether cuDNN's attention is faster than flash attention: on Hopper and later, where there are programs enough."""
    batch, heads, count, dim = rows.shape
    if rows.device.type != "cuda" or dim > 128 or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    programs, found = batch * heads * math.ceil(count / ROWS), device_info(rows.device)
    return found.capability >= (9, 0) and 4 * programs >= 3 * found.sms
