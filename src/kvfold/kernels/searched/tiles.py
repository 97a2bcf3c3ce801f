"""Encoding on the GPU in plain order: rotated affine groups, of KVarN's balanced tiles or as they are (values of NOVA-KV and
TaSQ), and keys under a learned map (NOVA-KV).

A tile takes one launch, from the model's vectors to bytes; the same one closes a block between a graph's steps. Compared with
the formats' own encoding sums have another order and a round's deviations are computed once: a factor may differ by its last
bit, and a round that is as even as another one may be taken in its place.
"""

from typing import Any

import torch
import triton

from kvfold.formats import AffineGroups, Balanced, Format, Hadamard, Paged, Projected
from kvfold.kernels.common.encode_source import Source, misfit
from kvfold.kernels.searched._tiles import project_kernel, tile_kernel

ELEMENTS = 128 * 128
"""Of a tile, at most: what the registers of a program hold."""
PROJECT = {"T": 64, "STEP": 16, "num_warps": 4}
"""Tokens of a program of :func:`project_kernel`, channels that it multiplies at a time, and its warps."""
PIECE = 8192
"""Tokens whose vectors under a map exist at a time."""


def is_tile(fmt: Format) -> bool:
    """Whether :func:`encode_tiles` is what may encode this format."""
    inner, basis = _parts(fmt)
    return isinstance(inner, Balanced) or (isinstance(inner, AffineGroups) and basis is not None)


def _parts(fmt: Format) -> tuple[Format, Any]:
    """What holds the codes, and the basis before it; the format itself where pages have statistics."""
    if isinstance(fmt, Paged) and not fmt.page_fields():
        return fmt.inner, fmt.basis
    return fmt, None


def no_tiles(fmt: Format) -> str | None:
    """Why the kernel cannot encode these tiles; None if it can."""
    inner, basis = _parts(fmt)
    affine = inner.inner if isinstance(inner, Balanced) else inner
    if not isinstance(affine, AffineGroups):
        return f"{inner.kind} storage"
    whole = affine.block if affine.axis == "token" else affine.head_dim
    why = misfit(
        ("operand", affine.operand, ("plain",)),
        ("head_dim", affine.head_dim, (64, 128, 256)),
        ("block", affine.block, (32, 64, 128)),
        ("mode", affine.mode, ("asym",)),
        ("group", affine.group, (whole,)),
    )
    if why is None and basis is not None and not isinstance(basis, Hadamard):
        why = f"basis {type(basis).__name__.lower()} before {affine.kind} storage; allowed: hadamard"
    if why is None and affine.block * affine.head_dim > ELEMENTS:
        why = f"tiles of {affine.block} tokens, {affine.head_dim} channels; allowed: up to {ELEMENTS} elements"
    return why


def no_map(fmt: Projected) -> str | None:
    """Why the kernel cannot map vectors; None if it can."""
    return misfit(("head_dim", fmt.head_dim, (64, 128)))


def warps(fmt: Format) -> int:
    """Of a program: 64 elements a lane. With 32 a multiprocessor has one tile's registers, and waits at each sum."""
    return max(1, fmt.block * fmt.head_dim // 2048)


def constants(fmt: Format) -> dict[str, Any]:
    """Constants of :func:`tile_kernel`, and how it is launched. Nothing is contracted: lanes that share a sum must
    round it alike, for it decides which round is taken."""
    inner, basis = _parts(fmt)
    affine = inner.inner if isinstance(inner, Balanced) else inner
    assert isinstance(affine, AffineGroups)
    return {
        "D": affine.head_dim,
        "T": affine.block,
        "BITS": affine.bits_per_code,
        "AXIS": int(affine.axis == "channel"),
        "ROTATION": 0 if basis is None else basis.block,
        "FACTORS": isinstance(inner, Balanced),
        "ROUNDS": inner.rounds if isinstance(inner, Balanced) else 0,
        "num_warps": warps(fmt),
        "num_stages": 1,
        "enable_fp_fusion": False,
    }


def _aligned(source: Source) -> tuple[torch.Tensor, int, int, int]:
    """Vectors and strides as one compiled kernel takes all: what lanes hold, and with it the order of sums, is then the same
    however calls were cut."""
    x = source.x
    if x.stride(-1) != 1 or x.data_ptr() % 16 or any(_steps(x)[i] % 16 for i in range(3)):
        x = x.clone(memory_format=torch.contiguous_format)
    return (x, *_steps(x))


def _steps(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of sequences, heads and tokens; 0 where there is one."""
    first, second, third = (n if count > 1 else 0 for n, count in zip(x.stride()[:3], x.shape[:3], strict=True))
    return first, second, third


def encode_tiles(fmt: Format, source: Source) -> None:
    """Encode whole blocks; see :func:`kvfold.kernels.searched.encode.encode`."""
    batch, heads, tokens, _ = source.x.shape
    inner, basis = _parts(fmt)
    fields = source.fields
    codes = fields["codes"].view(torch.uint8)
    tile_kernel[(tokens // fmt.block, heads, batch)](
        *_aligned(source),
        codes if source.rows is None else source.rows,
        fields["meta"] if basis is None else basis.signs(source.x.device),
        codes,
        fields["meta"],
        fields["factor"] if isinstance(inner, Balanced) else fields["meta"],
        source.first_block,
        codes.shape[2],
        heads,
        PICKED=source.rows is not None,
        **constants(fmt),
    )


def mapped(fmt: Projected, x: torch.Tensor, out: torch.Tensor) -> None:
    """Vectors less their head's mean, under its map.

    Parameters
    ----------
    x : Tensor [batch, num_kv_heads, tokens, head_dim]
    out : Tensor, float32 [batch, num_kv_heads, at least as many tokens, head_dim], contiguous
    """
    assert fmt.maps is not None
    maps = fmt.maps.on(x.device)
    batch, heads, tokens, dim = x.shape
    vectors = _aligned(Source(x, {}, 0))
    project_kernel[(triton.cdiv(tokens, PROJECT["T"]), heads, batch)](
        *vectors,
        maps.mean,
        maps.apply,
        out,
        tokens,
        out.shape[2],
        heads,
        D=dim,
        **PROJECT,
        num_stages=1,
    )
