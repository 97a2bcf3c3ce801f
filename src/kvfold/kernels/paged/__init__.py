"""Attention over pages that somebody else allocates: a server's.

Three functions of one value (:class:`PagedCall`), in the order of a step::

    prepare(step, workspace, seen)     # once for all layers: lists of work, on the device
    store(call, workspace)             # the step's tokens to the windows; blocks that they complete, encoded, to their pages
    attend(call, out, workspace)       # over sink, packed and recent tokens, and the step's own
    unpack(call, ...)                  # packed tokens to 16 bits

With a :class:`Workspace` kernels do it, without one the float32 reference, on any device. What a page, a block and the windows
of a sequence hold depends on the sequence's tokens only, not on how calls were cut.
"""

from collections.abc import Mapping
from typing import Any

import torch

from kvfold.formats import Format
from kvfold.formats.binary import BinaryCodes
from kvfold.kernels.paged import long, reference
from kvfold.kernels.paged.call import Following, Maps, PagedCall, PagedStep, Steering, unsupported
from kvfold.kernels.paged.layout import PageLayout
from kvfold.kernels.paged.long import Flash
from kvfold.kernels.paged.work import Workspace, prepare


def attend(
    call: PagedCall, out: torch.Tensor, workspace: Workspace | None = None, flash: Flash | None = None
) -> torch.Tensor:
    """Attention of a step's tokens over everything cached and over themselves (causal).

    Parameters
    ----------
    call : PagedCall
        With ``query``. Without ``new_keys`` the step's tokens lie in the windows (:func:`store` came first).
    out : Tensor [tokens, num_heads, head_dim]
        Written, and returned; tokens of no sequence are left as they are.
    workspace : Workspace or None
        For kernels; the step was prepared. None: the float32 reference.
    flash : Flash or None
        The platform's attention for sequences with more tokens than ``workspace.short`` in the step; None:
        Torch's. Such steps read lengths on the host, and are not fit for a CUDA graph.
    """
    if workspace is None:
        return reference.attend(call, out)
    if call.step.max_query_len > workspace.short:
        return long.attend(call, out, workspace, flash)
    from kvfold.kernels.paged import attention

    return attention.attend(call, out, workspace)


def store(call: PagedCall, workspace: Workspace | None = None) -> None:
    """Write a step's tokens to the windows where they have a block, and encode the blocks that are due into their pages.

    A block is closed in the step that completes it; where a format has statistics per page, in the step that completes what
    they are taken of, at most the whole page. Tokens from before the step are read from the windows. Of the step's tokens those
    are written that will be read raw: from ``P(n)`` on, with ``n`` the length after the step, the newest 16, and the sink.

    Parameters
    ----------
    call : PagedCall
        With ``new_keys`` and ``new_values``.
    workspace : Workspace or None
        As for :func:`attend`. Formats that no kernel encodes (:func:`why_not_stored`) are encoded by the reference, which
        waits for the device.
    """
    if workspace is None or why_not_stored(call.key_format, call.value_format, call) is not None:
        reference.store(call)
        return
    from kvfold.kernels.paged import storing

    storing.store(call, workspace)


def why_not(
    key_format: Format,
    value_format: Format,
    device: torch.device,
    pre_rope: bool = False,
    steering: Steering | Following | None = None,
    maps: Maps | None = None,
) -> str | None:
    """Why no kernel attends to pages of these formats; None if one does.

    On a GPU kernels that store and attend are run once and compared with the reference (:mod:`kvfold.kernels.paged.check`),
    with ``steering`` and ``maps`` where a method has them.
    """
    from kvfold.kernels.paged import attention

    why = attention.why_not(key_format, value_format, pre_rope, device)
    if why is None and device.type == "cuda" and torch.cuda.is_available():
        from kvfold.kernels.paged.check import self_test

        if pre_rope and (maps is None or "rope" not in maps.given):
            return "keys: stored before RoPE; not checked in pages on a GPU without a rotation"
        why = self_test(key_format, value_format, device, steering=steering, maps=maps)
    return why


def serving(
    key_format: Format, value_format: Format, device: torch.device, heads_per_kv: int, maps: Maps | None = None
) -> str:
    """What attends to pages of formats that :func:`why_not` has nothing against, in steps of one token, for reports: a kernel's
    name in :data:`kvfold.kernels.REGISTRY`, and why not a faster one that there is for such codes."""
    from kvfold.kernels.paged import attention

    rope = None if maps is None else maps.given.get("rope")
    return attention.serving(key_format, value_format, rope, heads_per_kv, device)


def why_not_stored(
    key_format: Format,
    value_format: Format,
    call: PagedCall | None = None,
    steering: Steering | Following | None = None,
    maps: Maps | None = None,
) -> str | None:
    """Why no kernel encodes pages of these formats (or of a call's), with ``steering`` or ``maps``; None if one does."""
    from kvfold.kernels.paged import storing

    width = None if steering is None else steering.width
    if call is not None:
        steering, width = call.following, storing.width_of(call)
        names = ("rope", "encode_keys", "encode_values", "bits")
        given = {name: value for name in names if (value := getattr(call, name)) is not None}
    else:
        given = {} if maps is None else dict(maps.given)
    if why := _by_function(key_format, value_format, given, width is not None):
        return why
    if isinstance(steering, Following) and (why := storing.unfollowed(key_format, steering)):
        return f"keys: {why}"
    return storing.unsupported(key_format, value_format, width)


def _by_function(key_format: Format, value_format: Format, given: Mapping[str, Any], steered: bool) -> str | None:
    """What of a step's encoding is more than its formats', and than kernels know; None if nothing is."""
    from kvfold.kernels.paged import books

    if isinstance(value_format, BinaryCodes):
        if given.get("bits") is None:
            return "values: nothing says how bits are chosen"
    elif "encode_values" in given:
        return "values: encoded by a function"
    if "rope" in given:
        return None if isinstance(key_format, books.BEFORE_ROPE) else "keys: encoded by a function before RoPE"
    return "keys: encoded by a function" if "encode_keys" in given and not steered else None


def ready(key_format: Format, value_format: Format, maps: Mapping[str, Any], device: torch.device) -> None:
    """Make what kernels read beside pages: of codebooks, which every layer has, it is large, and no graph may make it.

    Parameters
    ----------
    maps : mapping
        As of :class:`Maps`.
    """
    from kvfold.kernels.paged import attention, books

    rope = maps.get("rope")
    attention.ready(key_format, value_format, rope, device)
    if rope is not None:
        books.frequencies(rope, device)
    for form in (key_format, value_format):
        if books.serves(form) and not books.unsupported(form):
            books.tables_of(form, maps.get("bits"), device)


def unpack(
    call: PagedCall, seq: int, start: int, stop: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed tokens ``start`` to ``stop`` of one sequence, as attention sees them.

    Returns
    -------
    keys : Tensor [tokens, num_kv_heads, head_dim]
        After RoPE; of ``dtype``, by default the windows'.
    values : Tensor [tokens, num_kv_heads, width]
        Before ``call.unproject``.
    """
    row = call.step.host[seq]
    dtype = dtype or call.window_keys.dtype
    keys, values = reference.unpacked(call, row, start, stop)
    return keys[0].transpose(0, 1).to(dtype), values[0].transpose(0, 1).to(dtype)


__all__ = [
    "Flash",
    "Following",
    "Maps",
    "PageLayout",
    "PagedCall",
    "PagedStep",
    "Steering",
    "Workspace",
    "attend",
    "prepare",
    "ready",
    "serving",
    "store",
    "unpack",
    "unsupported",
    "why_not",
    "why_not_stored",
]
