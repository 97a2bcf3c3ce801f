"""The float32 truth for pages: one sequence after the other, in plain Torch. Waits for the device."""

import torch

from kvfold.formats import Fields, Format, PagedFormat
from kvfold.formats.paged import PAGE
from kvfold.kernels.merge import Partial
from kvfold.kernels.paged.call import Encode, PagedCall, Row, in_turn

LARGEST = 1e18
"""As everywhere: what is encoded lies within these bounds."""


def attend(call: PagedCall, out: torch.Tensor) -> torch.Tensor:
    """See :func:`kvfold.kernels.paged.attend`."""
    assert call.query is not None
    for row in call.step.host:
        if row.count:
            out[row.start : row.start + row.count] = _attend_row(call, row).to(out.dtype)
    return out


def _attend_row(call: PagedCall, row: Row) -> torch.Tensor:
    """Attention of one sequence's tokens, float32 [tokens, num_heads, head_dim]."""
    assert call.query is not None
    span = slice(row.start, row.start + row.count)
    # [1, num_kv_heads, heads_per_kv * tokens, head_dim]
    query = call.query[span].float().transpose(0, 1).unflatten(0, (call.num_kv_heads, -1)).flatten(1, 2).unsqueeze(0)
    parts = []
    if row.packed > row.sink:
        keys, values = unpacked(call, row, row.sink, row.packed)
        part = Partial.of(_capped(query @ keys.mT * call.scale, call.softcap), None, values)
        if call.unproject is not None:
            part.out = call.unproject(part.out)
        parts.append(part)
    keys, values, positions = _raw(call, row)
    own = torch.arange(row.before, row.after, device=positions.device)
    sees = positions <= own.repeat(query.shape[2] // row.count).unsqueeze(-1)
    parts.append(Partial.of(_capped(query @ keys.mT * call.scale, call.softcap), sees, values))
    if call.sinks is not None:
        parts.append(Partial.of_sinks(call.sinks, parts[-1]))
    merged = Partial.merge(parts)[0]
    return merged.unflatten(1, (-1, row.count)).flatten(0, 1).transpose(0, 1)


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def _raw(call: PagedCall, row: Row) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of raw tokens, the step's own last, float32 [1, num_kv_heads, n, head_dim], and their positions."""
    stop = row.before if call.new_keys is not None else row.after
    ranges = [(0, row.sink), (row.packed, stop)]
    sides = [[_window(window, row, *span) for span in ranges] for window in (call.window_keys, call.window_values)]
    at = [torch.arange(*span, device=call.window_keys.device) for span in ranges]
    if call.new_keys is not None:
        assert call.new_values is not None
        for side, new in zip(sides, (call.new_keys, call.new_values), strict=True):
            side.append(new[row.start : row.start + row.count].float())
        at.append(torch.arange(row.before, row.after, device=at[0].device))
    keys, values = (torch.cat(side).transpose(0, 1).unsqueeze(0) for side in sides)
    return keys, values, torch.cat(at)


def _window(window: torch.Tensor, row: Row, start: int, stop: int) -> torch.Tensor:
    """Raw tokens ``start`` to ``stop``, float32 [n, num_kv_heads, head_dim]."""
    return window[row.slots(start, stop)].float()


def unpacked(call: PagedCall, row: Row, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed tokens ``start`` to ``stop`` of one sequence, float32 [1, num_kv_heads, n, width]: keys after RoPE, and values."""
    block, first = call.step.block, start // PAGE * PAGE
    pages = row.pages(stop)[first // PAGE :]
    sides = []
    for form, fields in ((call.key_format, call.keys), (call.value_format, call.values)):
        some = {name: t[pages].transpose(0, 1).flatten(1, 2).unsqueeze(0) for name, t in fields.items()}
        whole = form.take(some, -(-(stop - first) // block))
        sides.append(form.decode(whole)[:, :, start - first : stop - first])
    keys, values = sides
    if call.rope is not None:
        keys = call.rope.rotate(keys, torch.arange(start, stop, device=keys.device).view(1, 1, -1))
    return keys, values


def store(call: PagedCall) -> None:
    """See :func:`kvfold.kernels.paged.store`."""
    assert call.new_keys is not None and call.new_values is not None
    sides = (
        (call.window_keys, call.new_keys, call.key_format, call.keys, call.encode_keys),
        (call.window_values, call.new_values, call.value_format, call.values, call.encode_values),
    )
    for row in call.step.host:
        queries = _queries(call, row)
        for window, new, form, fields, encode in sides:
            own = new[row.start : row.start + row.count]
            follows = call.following is not None and new is call.new_keys
            for at in row.due(call.seen):
                _close(call, row, at, window, own, form, fields, _following(call, row, queries) if follows else encode)
            _append(call, row, window, own)
        if call.window_queries is not None:
            _append(call, row, call.window_queries, queries)


def _append(call: PagedCall, row: Row, window: torch.Tensor, own: torch.Tensor) -> None:
    """Write one sequence's tokens of the step to the windows."""
    if row.count:
        blocks, places = row.slots(row.before, row.after)
        position = torch.arange(row.before, row.after, device=blocks.device)
        there = (blocks != call.step.null) & ((position >= row.kept) | (position < call.step.sink))
        window[blocks[there], places[there]] = own[there].to(window.dtype)


def _queries(call: PagedCall, row: Row) -> torch.Tensor:
    """Of a sequence's tokens of the step, the queries that a page may follow [tokens, num_kv_heads, head_dim]."""
    if call.following is None:
        return call.window_keys[:0, 0]
    if call.query is None:
        raise ValueError("query: storing needs it where pages follow their queries")
    positions = torch.arange(row.before, row.after, device=call.query.device)
    return in_turn(call.query[row.start : row.start + row.count], positions, call.num_kv_heads, call.step.window_block)


def _following(call: PagedCall, row: Row, queries: torch.Tensor) -> Encode:
    """How a block of a page is encoded that follows its queries."""
    following, window = call.following, call.window_queries
    assert following is not None and window is not None

    def encode(keys: torch.Tensor, positions: torch.Tensor, page: Fields | None) -> Fields:
        first = int(positions[0, 0, 0]) // PAGE * PAGE
        return following.encode_keys(keys, positions, _tokens(row, window, queries, first, first + PAGE))

    return encode


def _tokens(row: Row, window: torch.Tensor, own: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Tokens ``start`` to ``stop`` of a sequence, those of the step from ``own``: float32 [1, num_kv_heads, n, head_dim]."""
    waiting = _window(window, row, min(start, row.before), min(stop, row.before))
    new = own[max(start - row.before, 0) : max(stop - row.before, 0)].to(window.dtype).float()
    return torch.cat((waiting, new)).transpose(0, 1).unsqueeze(0).clamp(-LARGEST, LARGEST)


def _close(
    call: PagedCall,
    row: Row,
    at: int,
    window: torch.Tensor,
    own: torch.Tensor,
    form: Format,
    fields: Fields,
    encode: Encode | None,
) -> None:
    """Encode the block from token ``at`` on into its page."""
    block, first = form.block, at // PAGE * PAGE

    def tokens(start: int, stop: int) -> torch.Tensor:
        return _tokens(row, window, own, start, stop)

    page, unit = int(row.pages(at + 1)[-1]), at % PAGE // block
    statistics: Fields | None = None
    if isinstance(form, PagedFormat):
        statistics = {}
        if form.page_fields():
            if unit == 0:
                start = first or call.step.sink  # the first tokens are unlike others
                made = form.statistics(tokens(start, first + form.seen).unsqueeze(2))
                for name, t in made.items():
                    fields[name][page] = t[0]
            statistics = {name: fields[name][page].unsqueeze(0) for name in form.page_fields()}
    x = tokens(at, at + block)
    if encode is not None:
        stored = encode(x, torch.arange(at, at + block, device=x.device).view(1, 1, -1), statistics)
    elif isinstance(form, PagedFormat):
        stored = form.encode(x, page=statistics)
    else:
        stored = form.encode(x)
    for name in form.fields():
        fields[name][page, :, unit] = stored[name][0, :, 0]


__all__ = ["attend", "store", "unpacked"]
