"""Nearest codes on the GPU: what :func:`kvfold.formats.residual.choose` computes, stage by stage, in one launch."""

from functools import lru_cache

import torch
import triton

from kvfold.formats import residual
from kvfold.kernels._search import _choose_kernel

ROWS = 64
"""Vectors per program."""
LARGEST = 1e4
"""Of what is searched for: far beyond a vector divided by its root mean square, and within fp16."""


def why_not(codes: int, vector: int, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot search among ``codes`` vectors of ``vector`` channels; None if it can."""
    if dtype != torch.float16:
        return f"codes are {str(dtype).removeprefix('torch.')}; allowed: float16"
    for name, value, allowed in (("codes", codes, (16, 32, 64, 128, 256)), ("vector", vector, (16, 32, 64, 128))):
        if value not in allowed:
            return f"{name}={value}; allowed: {', '.join(map(str, allowed))}"
    return None


def choose(x: torch.Tensor, stages: torch.Tensor) -> torch.Tensor:
    """Nearest code of each stage to what the stages before it left over.

    Parameters
    ----------
    x : Tensor, float32 [n, vector]
    stages : Tensor, fp16 [stages, codes, vector]
        That :func:`why_not` has nothing against.

    Returns
    -------
    Tensor, uint8 [n, stages]
    """
    count, codes, vector = stages.shape
    if why := why_not(codes, vector, stages.dtype):
        raise ValueError(f"search: {why}")
    x = x.clamp(-LARGEST, LARGEST).contiguous()
    stages = stages.contiguous()
    chosen = torch.empty(len(x), count, dtype=torch.uint8, device=x.device)
    if len(x):
        squares = stages.float().square().sum(-1)
        _choose_kernel[(triton.cdiv(len(x), ROWS),)](
            x, stages, squares, chosen, len(x), count, codes, vector, ROWS, num_warps=8, num_stages=1
        )
    return chosen


@lru_cache(maxsize=64)
def self_test(stages: int, codes: int, vector: int, device: torch.device) -> str | None:
    """Run the kernel once as it is compiled on this device; what went wrong, or None. Waits for the device."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1000, vector, generator=draw, dtype=torch.float32, device="cpu")
    book = torch.randn(stages, codes, vector, generator=draw, dtype=torch.float32, device="cpu").half()
    got, want = choose(x.to(device), book.to(device)).cpu(), residual.choose(x, book.float())
    differ = float((got != want).any(-1).float().mean())
    return f"{100 * differ:.1f} % of the vectors get other codes on this device" if differ > 0.005 else None
