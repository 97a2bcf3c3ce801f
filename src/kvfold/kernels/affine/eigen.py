"""Products of queries with themselves, and eigenvectors of small symmetric matrices, on a GPU and without a wait for it."""

import warnings

import torch
import triton

from kvfold.arithmetic import lasting
from kvfold.kernels.affine._eigen import gram_kernel, jacobi_kernel

PART, TOGETHER = 1024, 128
"""Tokens that a program of :func:`gram` sums, and that it multiplies at a time."""
SWEEPS = 60
"""Of rotations, at most; matrices of 32 columns take four to sixteen, of 128 with values over twelve decades thirty."""
CLOSE = 3e-15
"""Of two columns' product: what counts as orthogonal."""


def gram(queries: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``Q'Q`` of the queries that each KV head serves.

    Parameters
    ----------
    queries : Tensor, fp16 or bf16 [n, num_heads, tokens, d]
        Numbers beyond 1e18 count as that.

    Returns
    -------
    Tensor, float64 [n, num_kv_heads, d, d]
        Within 1e-6 of the largest element, since tensor cores sum 128 tokens at a time in float32.
    """
    n, heads, tokens, d = queries.shape
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    splits = max(1, triton.cdiv(tokens, PART))
    out = queries.new_empty((n, num_kv_heads, splits, d, d), dtype=torch.float64)
    gram_kernel[(splits, num_kv_heads, n)](
        queries,
        *queries.stride()[:3],
        out,
        tokens,
        num_kv_heads,
        splits,
        D=d,
        DP=max(16, triton.next_power_of_2(d)),
        GROUP=heads // num_kv_heads,
        PART=PART,
        T=TOGETHER,
        num_warps=4 if d <= 64 else 8,
        num_stages=2,
        enable_fp_fusion=False,
    )
    return out.sum(2)


def eigh(matrices: torch.Tensor, needed: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, ascending, and eigenvectors, as ``torch.linalg.eigh`` gives them, but the host does not wait.

    Parameters
    ----------
    matrices : Tensor, float64 [n, d, d]
        Symmetric, positive semidefinite but for rounding.
    needed : Tensor, bool [n], optional
        Where False, nothing is computed, and what comes back has no meaning.

    Returns
    -------
    values : Tensor, float64 [n, d]
    vectors : Tensor, float64 [n, d, d]
    """
    n, d, _ = matrices.shape
    size = max(16, triton.next_power_of_2(d))
    work, turned = matrices.new_empty(2, n, size, size)
    values, vectors = matrices.new_empty(n, d), matrices.new_empty(n, d, d)
    jacobi_kernel[(n,)](
        matrices.contiguous(),
        work,
        turned,
        needed,
        values,
        vectors,
        D=d,
        N=size,
        R=min(size, 32),
        SWEEPS=SWEEPS,
        CLOSE=CLOSE,
        num_warps=4 if size <= 32 else 8,
        num_stages=1,
        enable_fp_fusion=False,  # fused, lanes that sum the same column have different last bits, and turn its rows differently
    )
    return values, vectors.mT


@lasting()
def is_right(device: torch.device) -> bool:
    """Whether :func:`eigh` gives eigenvectors on this device: tried once a process, which waits for it; warns if not."""
    d = 128
    at = torch.arange(d, dtype=torch.float64, device=device)
    basis = torch.linalg.qr(torch.cos((at[:, None] + 0.5) * (at + 0.25) * 0.7))[0]
    spectra = torch.stack((10.0 ** (-0.1 * at), (at < 3).double(), 1.0 + 0.01 * at))  # steep, few and equal, flat
    for size in (32, d):
        own = torch.linalg.qr(basis[:size, :size])[0]
        matrices = (own * spectra[:, None, :size]) @ own.mT
        values, vectors = eigh(matrices)
        largest = spectra[:, :size].amax(-1)
        turned = (matrices @ vectors - vectors * values.unsqueeze(-2)).abs().amax((-1, -2))
        straight = (vectors.mT @ vectors - torch.eye(size, dtype=torch.float64, device=device)).abs().amax((-1, -2))
        if not bool(((turned <= 1e-11 * largest) & (straight <= 1e-11)).all()):
            warnings.warn(
                "kvfold: eigenvectors by kernel are not those of torch.linalg.eigh on this GPU; SQuat's states are made by "
                "Torch, which waits for the host",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
    return True
