"""Largest eigenpairs of small symmetric matrices, for what a prompt's statistics need on a GPU."""

from collections.abc import Callable

import torch

from kvfold.arithmetic import lasting

BLOCK = 32  # columns iterated; cuSOLVER's batched eigensolver stops being fast beyond 32
SPARE = 8  # columns beyond the wanted ones without which the iteration is slow
WARM = (1, 2, 3)  # degrees before the first check; higher ones make the columns of a fresh block too much alike
DEGREE = 6  # of a filter before a check
CHECKS = 3
TOLERANCE = 1e-11  # of ||G v - value v||, relative to the largest value
FLOOR = (
    2e-3  # lowest cut, relative to the largest value: a filter must not swamp all columns with the first eigenvector
)
SHIFT = 1e-13  # added to a Cholesky factorization's diagonal, relative to it


Eigh = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""As ``torch.linalg.eigh`` of float64 [n, d, d], but only where a bool [n] says so, and without a wait for the device."""


def top_eigenpairs(
    gram: torch.Tensor, rank: int, iterate: bool | None = None, eigh: Eigh | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``rank`` largest eigenvalues, ascending, and their eigenvectors: the end of what ``torch.linalg.eigh`` gives.

    ``eigh`` is the reference, and what a CPU runs. On a GPU it goes matrix by matrix (12.5 ms for 8 matrices of 128 x 128
    on an H200), so there :func:`subspace_iteration` finds the pairs and checks them; matrices whose pairs do not pass (flat
    spectra) go to ``eigh`` one by one. Which of two equal values at the boundary is among the top ``rank`` is arbitrary in
    both.

    Parameters
    ----------
    gram : Tensor, float64 [..., d, d]
        Symmetric, positive semidefinite.
    iterate : bool, optional
        Iterate where sizes allow; default: on a GPU.
    eigh : callable, optional
        Solver that does not wait for the device. Then nothing here does: there are always as many filters, and the solver is
        told which matrices did not pass.

    Returns
    -------
    values : Tensor, float64 [..., min(rank, d)]
    vectors : Tensor, float64 [..., d, min(rank, d)]
    """
    d = gram.shape[-1]
    iterate = gram.is_cuda if iterate is None else iterate
    if not iterate or d < 2 * BLOCK or rank > BLOCK - SPARE:
        values, vectors = torch.linalg.eigh(gram) if eigh is None else _everywhere(gram, eigh)
        return values[..., -rank:], vectors[..., -rank:]
    flat = gram.flatten(0, -3)
    values, vectors, failed = subspace_iteration(flat, rank, eigh)
    if failed is not None and eigh is not None:
        exact = eigh(flat, failed)
        values = torch.where(failed[:, None], exact[0][..., -rank:], values)
        vectors = torch.where(failed[:, None, None], exact[1][..., -rank:], vectors)
    elif failed is not None:
        exact = torch.linalg.eigh(flat[failed])
        values[failed], vectors[failed] = exact[0][..., -rank:], exact[1][..., -rank:]
    return values.unflatten(0, gram.shape[:-2]), vectors.unflatten(0, gram.shape[:-2])


def _everywhere(gram: torch.Tensor, eigh: Eigh) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = eigh(gram.flatten(0, -3), None)
    return values.unflatten(0, gram.shape[:-2]), vectors.unflatten(0, gram.shape[:-2])


def subspace_iteration(
    gram: torch.Tensor, rank: int, eigh: Eigh | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Chebyshev-filtered subspace iteration (Zhou and Saad, 2007) on a fixed block of :data:`BLOCK` columns.

    A filter amplifies what lies above a cut, the block's smallest value so far. Amplification also makes columns alike, so
    that they are orthonormalized before the next filter; the Cholesky factorization keeps their order, the largest value
    first, and with it each column's progress. A check (a Rayleigh-Ritz step and its residual) follows the first filter of
    full degree, and each one after it until all matrices pass. A matrix keeps the pairs that passed first: its numbers do not
    depend on how many rounds others of the call need.

    Parameters
    ----------
    gram : Tensor, float64 [n, d, d]

    Returns
    -------
    values : Tensor, float64 [n, rank]
    vectors : Tensor, float64 [n, d, rank]
    failed : Tensor, bool [n], or None
        Matrices whose pairs did not pass; None: all did, which is known only without a solver that does not wait.
    """
    tiny = torch.finfo(gram.dtype).tiny
    scale = gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=tiny)[:, None, None]  # squares of 1e40 stay finite
    a = gram / scale
    x = _start(a.shape[-1], a.device).expand(len(a), -1, -1)
    cut = a.new_full((len(a), 1, 1), FLOOR)
    for degree in WARM:
        x = _orthonormal(_filter(a, x, cut, degree), SHIFT)
        cut = _cut((x * (a @ x)).sum(-2, keepdim=True))
    waiting = a.new_ones(len(a), dtype=torch.bool)
    found, pairs = a.new_zeros(len(a), 1, rank), a.new_zeros(len(a), a.shape[-1], rank)
    for check in range(CHECKS):
        x = _orthonormal(_orthonormal(_filter(a, x, cut, DEGREE), SHIFT))
        if eigh is not None and not check:  # where all are made anyway, the first is left out
            cut = _cut((x * (a @ x)).sum(-2, keepdim=True))
            continue
        ritz = x.mT @ (a @ x)
        # a failed Cholesky factorization leaves NaN, which solvers may refuse; the residual shows it
        ritz = ((ritz + ritz.mT) / 2).nan_to_num(0.0, 0.0, 0.0)
        values, rotation = torch.linalg.eigh(ritz) if eigh is None else eigh(ritz, waiting)
        x = (x @ rotation).flip(-1)
        values = values.flip(-1).unsqueeze(-2)
        top, vectors = values[..., :rank], x[..., :rank]
        residual = (a @ vectors - vectors * top).norm(dim=-2).amax(-1)
        found = torch.where(waiting[:, None, None], top, found)
        pairs = torch.where(waiting[:, None, None], vectors, pairs)
        waiting = waiting & ~(residual <= TOLERANCE * top[:, 0, 0])  # not `>`: NaN fails
        if all_passed := eigh is None and not waiting.any():
            break
        cut = _cut(values)
    return (found * scale).squeeze(-2).flip(-1), pairs.flip(-1), None if all_passed else waiting


@lasting()
def _start(d: int, device: torch.device) -> torch.Tensor:
    """Orthonormal columns [d, BLOCK], always the same; random, since a structured block could miss a structured vector."""
    draw = torch.Generator().manual_seed(0)
    block = torch.randn(d, BLOCK, dtype=torch.float64, generator=draw, device="cpu")
    return torch.linalg.qr(block)[0].to(device)


def _cut(values: torch.Tensor) -> torch.Tensor:
    """Where the next filter cuts [n, 1, 1], from the block's values [n, 1, BLOCK]."""
    lowest, highest = values.aminmax(dim=-1, keepdim=True)
    return torch.maximum(lowest, FLOOR * highest).clamp(min=torch.finfo(values.dtype).tiny)


def _filter(a: torch.Tensor, x: torch.Tensor, cut: torch.Tensor, degree: int) -> torch.Tensor:
    """Chebyshev polynomial of ``a`` times ``x``: at most 1 on ``[0, cut]``, and growing beyond."""
    twice = a * (4 / cut)
    twice.diagonal(dim1=-2, dim2=-1).sub_(2)
    before, x = x, twice @ x / 2
    for step in range(degree - 1):  # the caller's columns stay; others give their place to those two steps later
        before, x = x, (before.baddbmm_ if step else before.baddbmm)(twice, x, beta=-1)
    return x


def _orthonormal(x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    """Cholesky-QR; accurate where columns are nearly orthogonal, so a second pass follows where accuracy counts."""
    products = x.mT @ x
    if shift:
        products.diagonal(dim1=-2, dim2=-1).mul_(1 + shift)
    lower, _ = torch.linalg.cholesky_ex(products)  # does not wait for the device
    return torch.linalg.solve_triangular(lower.mT, x, upper=True, left=False)
