"""Prompts that ``generate`` reads a second time: refused, or read on from where the cache ends."""

import torch

from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.errors import CacheStateError
from kvfold.storage.columns import AS_IT_BEGINS


def check_prompt(layer: FoldedLayer, position_ids: torch.Tensor | None, count: int, mask: torch.Tensor | None) -> None:
    """Refuse a prompt that is not longer than what the cache holds: of ``n`` tokens that follow ``columns`` others,
    ``generate`` passes on those from ``columns - n`` on, to be read a second time. Tokens that ``mask`` [batch, columns and new
    tokens] hides are not held. Steps on accelerators are not looked at.

    Raises
    ------
    CacheStateError
    """
    columns = layer.columns.count
    skipped = (columns - count) // 2
    if position_ids is None or position_ids.ndim != 2 or count > columns or 2 * skipped != columns - count:
        return
    if count == 1 and columns > 1 and layer.device.type != "cpu":
        return
    if layer.running is not None and len(layer.running[0].before) > 1:
        return  # the first layer has looked
    held = layer.lens[0]
    if mask is not None and mask.shape[1] == columns + count:
        held = int(mask[0, :columns].sum())
    if held < min(count, 2):  # padding, or a token that padding follows
        return
    ends = position_ids[0, :: max(count - 1, 1)].tolist()
    if (ends[0], ends[-1]) == (skipped, held - 1 - skipped):
        raise CacheStateError(
            f"input_ids: a prompt of {skipped + count} tokens, not more than the {columns} that the cache holds: "
            f"they have the positions of tokens that it holds; {AS_IT_BEGINS}"
        )


def read_again(layer: FoldedLayer, position_ids: torch.Tensor | None, count: int) -> int:
    """How many of a call's first tokens the cache holds already.

    Assisted generation and prompt lookup pass the whole prompt, from its first position on, and a draft, also where the cache
    holds an earlier turn. They record the past, which other callers of whole prompts do not.

    Raises
    ------
    CacheStateError
        If layers that are not folded would hold these tokens twice.
    """
    columns = layer.columns.count
    if not layer.writer.recording or not 0 < columns < count or position_ids is None or position_ids.ndim != 2:
        return 0
    call = layer.running[0] if layer.running is not None else None
    if call is None or call.again is None:
        held = layer.lens[0]
        expected = [held, held + count - columns - 1]
        whole = position_ids.shape[1] == count and position_ids[0, [columns, -1]].tolist() == expected
        if call is None:
            return columns if whole else 0
        call.read_again(columns if whole else 0)
    assert call.again is not None
    return call.again
