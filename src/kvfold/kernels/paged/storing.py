"""Storing a step by kernels: one a layer where both sides' blocks are encoded together, else one for each side."""

from typing import Any

import torch
import triton

from kvfold.arithmetic import lasting
from kvfold.formats import AffineGroups, Format
from kvfold.kernels.affine.encode import unsupported as affine_unsupported
from kvfold.kernels.fold.encode import Side, _norm_table, addressed, constants, side
from kvfold.kernels.fold.encode import unsupported as pages_unsupported
from kvfold.kernels.paged import books
from kvfold.kernels.paged._store import close_pages_kernel, store_kernel
from kvfold.kernels.paged.call import Following, PagedCall
from kvfold.kernels.paged.follow import follow
from kvfold.kernels.paged.follow import unsupported as follow_unsupported
from kvfold.kernels.paged.work import Workspace, closing_arguments

RESIDENT = 4
"""Programs per multiprocessor."""


@lasting(256)
def unsupported(key_format: Format, value_format: Format, width: int | None = None) -> str | None:
    """Why no kernel encodes these formats; None if one does.

    Parameters
    ----------
    width : int or None
        Channels of a slice of SQuat's update, if there is one.
    """
    for name, form in (("keys", key_format), ("values", value_format)):
        if why := books.unsupported(form) if books.serves(form) else pages_unsupported(form):
            return f"{name}: {why}"
    if width is not None:
        if not isinstance(key_format, AffineGroups):
            return "keys: an update of following channels beside statistics per page"
        if why := affine_unsupported(key_format, width):
            return f"keys: {why}"
    return None


def store(call: PagedCall, workspace: Workspace) -> None:
    """See :func:`kvfold.kernels.paged.store`; the step was prepared."""
    width = width_of(call)
    if why := unsupported(call.key_format, call.value_format, width):
        raise ValueError(f"store: {why}")
    new = _new(call, workspace)
    if not (books.serves(call.key_format) or books.serves(call.value_format)):
        _store_together(call, new, width, workspace)
        return
    windows = call.window_keys, call.window_values
    appended = (
        *(x for t in new for x in (t, *t.stride()[:2])),
        *(x for window in windows for x in (window, *window.stride()[:3])),
        workspace.slots,
    )
    for is_key, form in ((True, call.key_format), (False, call.value_format)):
        lanes = triton.next_power_of_2(call.num_kv_heads) if is_key else 0  # the first launch writes to the windows
        if books.serves(form):
            books.close(call, is_key, new[not is_key], appended, lanes, workspace)
        else:
            _close_pages(call, is_key, new[not is_key], width if is_key else None, appended, lanes, workspace)


def _close_pages(
    call: PagedCall,
    is_key: bool,
    new: torch.Tensor,
    width: int | None,
    appended: tuple[Any, ...],
    lanes: int,
    workspace: Workspace,
) -> None:
    """The blocks of keys or of values that the step completes, into their pages; see :func:`books.close`."""
    step, (form, fields, window) = call.step, call.side(is_key)
    of = side(form)
    stored = addressed(of, fields)
    update, update_step = _update(call, workspace) if is_key else (workspace.updates, 0)
    warps = max(of.warps, 1 if width is None else _cut_warps(of))
    close_pages_kernel[(RESIDENT * workspace.processors,)](
        new,
        *new.stride()[:2],
        window,
        *window.stride()[:3],
        *closing_arguments(step, workspace),
        stored,
        _steps(stored),
        constants(form, stored[1]),
        _norm_table(new.device),
        update,
        update_step,
        appended,
        step.seqs,
        call.num_kv_heads,
        step.sink,
        D=window.shape[3],
        H=lanes,
        FORM=of.form,
        VALUE=not is_key,
        BLOCK=step.block,
        WINDOW_BLOCK=step.window_block,
        SEEN=call.seen,
        WIDTH=width or 0,
        WARPS=warps,
        **options(warps),
    )


def options(warps: int) -> dict[str, Any]:
    """How kernels are compiled that make pages with so many warps: two programs of eight fit at a time, without spills."""
    return {
        "num_warps": warps,
        "maxnreg": 128 if warps > 4 else None,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }


def _store_together(call: PagedCall, new: list[torch.Tensor], width: int | None, workspace: Workspace) -> None:
    """Both sides, and the windows, by one kernel."""
    step, dim = call.step, call.window_keys.shape[3]
    k, v = side(call.key_format), side(call.value_format)
    update, update_step = _update(call, workspace)
    k_stored, v_stored = addressed(k, call.keys), addressed(v, call.values)
    warps = max(k.warps, v.warps, 1 if width is None else _cut_warps(k))
    store_kernel[(RESIDENT * workspace.processors,)](
        new[0],
        *new[0].stride()[:2],
        new[1],
        *new[1].stride()[:2],
        call.window_keys,
        *call.window_keys.stride()[:3],
        call.window_values,
        *call.window_values.stride()[:3],
        *closing_arguments(step, workspace),
        workspace.slots,
        k_stored,
        _steps(k_stored),
        constants(call.key_format, k_stored[1]),
        v_stored,
        _steps(v_stored),
        constants(call.value_format, v_stored[1]),
        _norm_table(new[0].device),
        update,
        update_step,
        step.seqs,
        call.num_kv_heads,
        step.sink,
        D=dim,
        H=triton.next_power_of_2(call.num_kv_heads),
        KEY=k.form,
        VALUE=v.form,
        BLOCK=step.block,
        WINDOW_BLOCK=step.window_block,
        SEEN=call.seen,
        WIDTH=width or 0,
        WARPS=warps,
        **options(warps),
    )


def _new(call: PagedCall, workspace: Workspace) -> list[torch.Tensor]:
    """The step's keys and values, as kernels address them."""
    assert call.new_keys is not None and call.new_values is not None
    new = [_adjacent(t, call.window_keys.dtype) for t in (call.new_keys, call.new_values)]
    if new[0].shape[0] > workspace.slots.shape[0]:
        raise ValueError(f"workspace: made for {workspace.slots.shape[0]} tokens, the step has {new[0].shape[0]}")
    return new


def unfollowed(key_format: Format, following: Following) -> str | None:
    """Why no kernel makes the updates of pages that follow their own queries; None if one does."""
    return follow_unsupported(key_format.head_dim, following.width, following.rank, following.lam)


def width_of(call: PagedCall) -> int | None:
    """Channels of a slice of SQuat's update; None: there is none."""
    if call.following is not None:
        return call.following.width
    return None if call.update is None else int(call.window_keys.shape[3] - call.update.shape[-1])


def _update(call: PagedCall, workspace: Workspace) -> tuple[torch.Tensor, int]:
    """SQuat's updates, and elements from a page's to the next one's; anything where there is none."""
    if call.following is not None:
        return follow(call, workspace), call.num_kv_heads * call.following.width**2
    return workspace.updates if call.update is None else call.update.contiguous(), 0


def _cut_warps(of: Side) -> int:
    """As in :mod:`kvfold.kernels.affine.encode`: a thread holds 32 elements of a tile of which slices move others."""
    return max(1, of.tile * of.inner.head_dim // 1024)


def _steps(stored: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """Elements from a page, and from a head, to the next, field by field."""
    return tuple(step for t in stored for step in t.stride()[:2])


def _adjacent(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype != dtype:
        raise ValueError(f"new tokens: {x.dtype}; allowed: the windows' {dtype}")
    return x if x.stride(-1) == 1 else x.contiguous()
