"""What the kernel of :mod:`kvfold.kernels.fragments.decode` reads beside pages, in the order in which its lanes take it."""

import torch


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
