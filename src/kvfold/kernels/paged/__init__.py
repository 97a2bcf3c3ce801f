"""Attention over pages that somebody else allocates: a server's.

Three functions of one value (:class:`PagedCall`), in the order of a step::

    store(call)            # the step's tokens to the windows; blocks that they complete, encoded, to their pages
    attend(call, out)      # over sink, packed and recent tokens, and the step's own
    unpack(call, ...)      # packed tokens to 16 bits

What a page, a block and the windows of a sequence hold depends on the sequence's tokens only, not on how calls were cut.
"""

import torch

from kvfold.kernels.paged import reference
from kvfold.kernels.paged.call import PagedCall, PagedStep, unsupported
from kvfold.kernels.paged.layout import PageLayout


def attend(call: PagedCall, out: torch.Tensor) -> torch.Tensor:
    """Attention of a step's tokens over everything cached and over themselves (causal).

    Parameters
    ----------
    call : PagedCall
        With ``query``. Without ``new_keys`` the step's tokens lie in the windows (:func:`store` came first).
    out : Tensor [tokens, num_heads, head_dim]
        Written, and returned; zeros for tokens of no sequence.
    """
    return reference.attend(call, out)


def store(call: PagedCall) -> None:
    """Write a step's tokens to the windows where they have a block, and encode the blocks that are due into their pages.

    A block is closed in the step that completes it; where a format has statistics per page, in the step that completes what
    they are taken of, at most the whole page. Tokens from before the step are read from the windows.

    Parameters
    ----------
    call : PagedCall
        With ``new_keys`` and ``new_values``.
    """
    reference.store(call)


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


__all__ = ["PageLayout", "PagedCall", "PagedStep", "attend", "store", "unpack", "unsupported"]
