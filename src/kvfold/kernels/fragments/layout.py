"""What the kernel of :mod:`kvfold.kernels.fragments.decode` reads beside pages, in the order in which its lanes take it."""

import math

import torch

from kvfold.arithmetic import beside, lasting
from kvfold.formats import Format, Lookup, Outliers
from kvfold.formats.lookup import ChannelScales
from kvfold.formats.paged import PAGE
from kvfold.rope import Rope


def channel_constants(form: Format, device: torch.device) -> torch.Tensor:
    """Spreads and centers of channels as the kernel's lanes take them: fp16 [heads, 8, 4, 2, 2, 2], of a channel tile, of t, of
    the tile's halves: a pair of each. Made once: graphs know where they are."""
    assert isinstance(form, Outliers) and isinstance(form.inner, Lookup) and form.inner.channels is not None
    return _in_lanes(form.inner.channels.on(device), max(1.0, *map(abs, form.inner.levels)))


@beside
def _in_lanes(channels: ChannelScales, most: float) -> torch.Tensor:
    both = torch.stack((channels.spread.clamp(max=32752 / most), channels.center.clamp(-32752, 32752)), 1)
    lanes = both.half().unflatten(-1, (8, 2, 4, 2))  # [heads, which, tile, half, t, pair]
    return lanes.permute(0, 2, 4, 3, 1, 5).contiguous()


PAIRS = 64
"""Pairs of channels that are rotated."""
STILL = Rope(torch.zeros(PAIRS, dtype=torch.float32, device="cpu"))
"""Of a layer without a rotation."""


@lasting(256)
def rope_turns(rope: Rope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns per token of 64 pairs of channels and what float32 leaves of them, float32 [2, 64]; cosines and sines of the places
    in a page, times RoPE's factor, as fragments of an operand: fp16 [8, 4, 2, 32, 8]."""
    freq = rope.inv_freq.double().cpu()
    if freq.numel() != PAIRS:
        raise ValueError(f"rope of {2 * freq.numel()} channels: allowed: {2 * PAIRS}")
    turns = freq / (2 * math.pi)
    parts = torch.stack((turns.float(), (turns - turns.float().double()).float()))
    angles = torch.arange(PAGE, dtype=torch.float64, device="cpu").unsqueeze(-1) * freq
    both = torch.stack((angles.cos(), angles.sin())) * rope.scaling
    tiles = both.half().unflatten(-1, (4, 2, 4, 2)).unflatten(1, (8, 2, 8))  # [which, tile, half, g, ct, half, t, pair]
    return parts.to(device), tiles.permute(1, 4, 0, 3, 6, 5, 2, 7).contiguous().to(device)


def lane_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix [rows, columns] as fragments of an operand: fp16 [rows / 16, columns / 16, 32, 8]."""
    tiles = matrix.half().unflatten(-1, (-1, 2, 4, 2)).unflatten(0, (-1, 2, 8))  # [row tile, half, g, tile, half, t, 2]
    return tiles.permute(0, 3, 2, 5, 4, 1, 6).contiguous()


def wide_tiles(matrix: torch.Tensor, bits: int) -> torch.Tensor:
    """A matrix [rows, 128] as products of warpgroups read it: fp16 [rows / 64, 2, 64, 64], tiles of 64 rows in parts of 64
    channels; rows in the order of :mod:`kvfold.kernels.fragments._wide`, a row's 16 bytes in another by its last three bits."""
    if bits == 3:
        blocks = matrix.half().unflatten(0, (4, 2, 2, 8)).permute(1, 2, 0, 3, 4)  # [field, parity, block, row]
    else:
        blocks = matrix.half().unflatten(0, (2, -1, 2, 8)).permute(1, 2, 0, 3, 4)  # [half, row tile, block, row]
    lines = blocks.reshape(-1, 64, 2, 8, 8).transpose(1, 2)  # [tile, part, row, place, 8]
    row, place = torch.arange(64, device=matrix.device)[:, None], torch.arange(8, device=matrix.device)
    return lines[:, :, row, place ^ row % 8].flatten(-2).contiguous()


@lasting()
def whole_levels(levels: tuple[float, ...]) -> tuple[float, tuple[int, int]] | None:
    """Unit in which eight levels are whole numbers of seven bits and a sign, and these as bytes of two words; None without."""
    for most in range(127, 7, -1):
        unit = levels[-1] / most
        if all(abs(x / unit - round(x / unit)) < 1e-6 for x in levels):
            bytes_ = torch.tensor([round(x / unit) for x in levels], dtype=torch.int8, device="cpu")
            low, high = bytes_.view(torch.int32).tolist()
            return unit, (low, high)
    return None
