"""Taking tokens into storage that holds them as they are: what :mod:`kvfold.kernels.affine.encode` is for affine groups.

:func:`encode_blocks` copies a prompt's blocks, :func:`append_and_close` is a decode step's share. The bytes are those of
:meth:`kvfold.formats.Dense.encode`.
"""

import torch

from kvfold.formats import Dense, Fields, Format
from kvfold.formats.packing import UNIT
from kvfold.kernels.common.step import MAX_TOKENS, Pair, Step, or_any
from kvfold.kernels.dense._encode import _copy_kernel, _step_kernel
from kvfold.kernels.lengths import Lengths


def why_not(fmt: Format, device: torch.device) -> str | None:
    """Why the GPU cannot encode this format; None if it can."""
    if device.type != "cuda":
        return f"device {device.type}: encoding kernels run on cuda"
    return unsupported(fmt)


def unsupported(fmt: Format) -> str | None:
    """Like :func:`why_not`, whatever the device."""
    if not isinstance(fmt, Dense):
        return f"{fmt.kind} storage"
    if fmt.block % UNIT:
        return f"block={fmt.block}: must be a multiple of {UNIT} tokens"
    if fmt.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype={str(fmt.dtype).removeprefix('torch.')}; allowed: float16, bfloat16, float32"
    return None


def encode_blocks(
    x: torch.Tensor,
    fields: Fields,
    fmt: Format,
    block_offset: int,
    rows: torch.Tensor | None = None,
    first_block: int = 0,
    ring_blocks: int | None = None,
) -> None:
    """Copy whole blocks into packed storage, in one pass.

    Parameters are those of :func:`kvfold.kernels.affine.encode.encode_blocks`.
    """
    if why := unsupported(fmt):
        raise ValueError(f"encode: {why}")
    batch, heads, slots, dim = x.shape
    ring = ring_blocks is not None
    tokens = slots if ring_blocks is None else ring_blocks * fmt.block
    if ring and rows is not None:
        batch = rows.numel()
    target = fields["x"]
    if tokens > slots:
        raise ValueError(f"ring_blocks={ring_blocks}: {tokens} tokens do not fit in {slots} slots")
    if tokens % fmt.block or dim != fmt.head_dim:
        raise ValueError(f"x: shape {tuple(x.shape)} is not whole blocks of {fmt.block} tokens by {fmt.head_dim}")
    if not target.is_contiguous():
        raise ValueError(f"x: packed storage must be contiguous, its strides are {target.stride()}")
    if target.shape[1] != heads or (rows is None and target.shape[0] != batch):
        raise ValueError(f"fields: hold {tuple(target.shape[:2])} sequences and heads, x {(batch, heads)}")
    if not 0 <= block_offset <= target.shape[2] - tokens // fmt.block:
        raise ValueError(f"block_offset={block_offset}: {tokens // fmt.block} blocks do not fit in {target.shape[2]}")
    if not tokens or not batch:
        return
    if x.stride(-1) != 1:
        x = x.contiguous()
    _copy_kernel[(tokens // UNIT, heads, batch)](
        x,
        *x.stride()[:3],
        or_any(rows, target),
        target,
        heads,
        target.shape[2] * fmt.block,
        block_offset * fmt.block,
        (first_block + block_offset) * fmt.block,
        slots,
        D=dim,
        PICKED=rows is not None,
        RING=ring,
    )


def append_and_close(
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    lengths: Lengths,
    sink: tuple[torch.Tensor, torch.Tensor],
    ring: tuple[torch.Tensor, torch.Tensor],
    recent: int,
    key_fields: Fields,
    key_format: Format,
    value_fields: Fields,
    value_format: Format,
    first_block: int = 0,
) -> None:
    """Close the blocks that are due, write a step's tokens into the windows, advance the lengths: one launch.

    Parameters are those of :func:`kvfold.kernels.affine.encode.append_and_close`.
    """
    for fmt in (key_format, value_format):
        if why := unsupported(fmt):
            raise ValueError(f"encode: {why}")
    step, block = Step(key, value, lengths, sink, ring, recent), key_format.block
    step.check((block, value_format.block), (key_format.head_dim, value_format.head_dim))
    stored = key_fields["x"], value_fields["x"]
    for x in stored:
        if not x.is_contiguous():
            raise ValueError(f"fields: must be contiguous, its strides are {x.stride()}")
    step.check_stored(stored[0].shape[:3], stored[1].shape[:3])
    _launch(step, stored, first_block, stored[0].shape[2], block)


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Lengths,
    sink: tuple[torch.Tensor, torch.Tensor],
    ring: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write a step's tokens into the windows; blocks are closed by somebody else, whatever their format.

    Parameters are those of :func:`kvfold.kernels.affine.encode.append_and_close`.
    """
    step = Step(key, value, lengths, sink, ring, 0)
    if not 1 <= step.tokens <= MAX_TOKENS:
        raise ValueError(f"tokens={step.tokens}: a step appends 1 to {MAX_TOKENS} keys and as many values")
    step.check_windows()
    _launch(step, ring, 0, 0, UNIT, warps=1)


def _launch(step: Step, stored: Pair, first_block: int, blocks: int, block: int, warps: int = 4) -> None:
    batch, heads = step.ring[0].shape[:2]
    _step_kernel[(2 * heads, batch)](
        *step.new_and_windows(),
        *stored,
        *step.lengths_and_sizes(),
        first_block,
        blocks,
        num_warps=warps,
        **step.constants(block),
    )
