"""What the kernel of :mod:`kvfold.kernels.fragments.decode` reads beside pages, in the order in which its lanes take it."""

import math

import torch

from kvfold.arithmetic import lasting
from kvfold.formats.paged import PAGE
from kvfold.rope import Rope

PAIRS = 64
"""Pairs of channels that are rotated."""


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


def wide_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix [rows, 128] as products of warpgroups read it: fp16 [rows / 64, 2, 64, 64], tiles of 64 rows in parts of 64
    channels; rows in the order of :mod:`kvfold.kernels.fragments._wide`, a row's 16 bytes in another by its last three bits."""
    blocks = matrix.half().unflatten(0, (2, -1, 2, 8)).permute(1, 2, 0, 3, 4)  # [half, row tile, block, row]
    lines = blocks.reshape(-1, 64, 2, 8, 8).transpose(1, 2)  # [tile, part, row, place, 8]
    row, place = torch.arange(64, device=matrix.device)[:, None], torch.arange(8, device=matrix.device)
    return lines[:, :, row, place ^ row % 8].flatten(-2).contiguous()
