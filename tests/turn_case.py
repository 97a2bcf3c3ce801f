"""Sums of codes turned into values by Triton's interpreter, some parts of all, against PyTorch."""

import torch

from interpreter import quicken
from kvfold.kernels.common.partials import Partials
from kvfold.kernels.generic import decode as blocks

quicken()
for heads, splits, rows, width, dim, part, stop in ((4, 5, 4, 129, 128, 1, 4), (2, 3, 8, 257, 96, 0, 3)):
    sums, matrix = torch.randn(heads, splits, rows, width), torch.randn(2, width, dim)
    partials = Partials.empty(heads, splits, rows, dim, sums.device)
    partials.out.zero_()
    blocks._turn(sums, matrix, partials, part, stop)
    want = torch.zeros_like(partials.out)
    want[:, part:stop] = (sums[:, part:stop].reshape(heads // 2, 2, -1, width) @ matrix).view(heads, -1, rows, dim)
    torch.testing.assert_close(partials.out, want, atol=1e-4, rtol=1e-4)
