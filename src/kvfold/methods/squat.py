"""SQuat: key residuals kept orthogonal to the prompt's query subspace (Wang et al., 2025, arXiv 2503.24358)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kvfold.formats.affine import quantize_asym
from kvfold.methods.base import QUERY_WINDOW, LayerSpec, Observation, State
from kvfold.methods.eigenpairs import Eigh, top_eigenpairs
from kvfold.methods.kivi import KIVI
from kvfold.methods.options import Numbers, Problem

HARD = 1e10
"""Weight at which orthogonality is a hard constraint; more would only cost P its positive definiteness."""
WEIGHT = Numbers(0, step=0, text="a finite number, 0 or more")


@dataclass(frozen=True)
class SQuat(KIVI):
    """KIVI's storage, with keys adjusted before they are quantized.

    Channels are quantized ``channels`` at a time. The error ``e`` made in a slice moves the channels that follow by
    ``-P_rr^-1 P_rs e`` with ``P = I + lam Q'Q`` (Lemmas 2 and 3), so that the residual's projection on the queries
    stays small; Q holds the top ``rank`` right singular vectors of queries, scaled by the singular values, per KV head.
    Decoding is KIVI's.

    The paper takes the queries of the whole prompt and lets ``Q'Q`` grow with their number, so that long prompts ruin keys.
    Here ``Q'Q`` is divided by the number of queries and by their mean square, and the subspace follows the sequence: blocks
    are encoded with that of the newest 64 queries before 128, 256, 512, 1,024, 2,048, 3,072, ... tokens. ``paper=true`` is the
    paper's form.

    Parameters
    ----------
    rank : int
        r of the paper: dimension of the query subspace; 0: all directions, weighted by the queries' second moments, which
        needs no eigendecomposition.
    lam : float
        lambda of the paper: weight of orthogonality against closeness; 0 is KIVI bit for bit.
    channels : int
        g of the paper: channels quantized between two updates; 0: half of ``head_dim`` (64 at d = 128, as in the paper;
        at d = 64 a slice of 64 would leave nothing to update).
    """

    rank: int = 0
    lam: float = 1.0
    channels: int = 0

    name = "squat"
    summary = "KIVI's storage, key errors steered off the subspace of the sequence's queries"
    source = "SQuat: Subspace-orthogonal KV Cache Quantization (arXiv 2503.24358)"
    url = "https://arxiv.org/abs/2503.24358"
    published = {"sink": 0, "recent": 32, "rank": 5, "lam": 1e-3}  # noqa: RUF012
    query_window = QUERY_WINDOW

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.rank < 0:
            yield Problem("rank", Numbers(0, text="0 (all) to head_dim"))
        if self.lam not in WEIGHT:
            yield Problem("lam", WEIGHT)
        if self.channels < 0:
            yield Problem("channels", Numbers(0, text="0 (half of head_dim) or what divides head_dim"))

    def shape_problems(self, spec: LayerSpec) -> Iterator[Problem]:
        if self.rank > spec.head_dim:
            yield Problem("rank", range(spec.head_dim + 1))
        if spec.head_dim % (self.channels or 1):
            divisors = [c for c in range(1, spec.head_dim + 1) if spec.head_dim % c == 0]
            yield Problem("channels", [0, *divisors], f" does not divide head_dim={spec.head_dim}")

    def slice_width(self, head_dim: int) -> int:
        """Channels per slice."""
        return self.channels or head_dim // 2

    def observe(self, seen: Observation, spec: LayerSpec) -> State:
        gram, width = seen.gram(spec.num_kv_heads), self.slice_width(spec.head_dim)
        if self.rank:
            scaled = gram if self.paper else normalized(gram)
            return {"update": update_of_factor(penalty_factor(scaled, self.rank, self.lam, eigh=seen.eigh), width)}
        return {"update": update_matrix(penalty_of(gram, self.rank, self.lam, not self.paper), width)}

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        if self.lam == 0:
            return keys
        return steer(keys, state["update"], self.slice_width(spec.head_dim), self.key_bits, self.group)


@dataclass(frozen=True)
class SQuatPre(SQuat):
    """SQuat on keys before RoPE, with the subspace of the queries before RoPE; keys are rotated as they are read."""

    name = "squat_pre"
    summary = "SQuat on keys before RoPE, rotated as they are read"
    pre_rope = True

    def observe(self, seen: Observation, spec: LayerSpec) -> State:
        if spec.rope is not None:
            queries = spec.rope.unrotate(seen.queries, seen.positions.unsqueeze(1))
            seen = replace(seen, model_queries=queries)
        return super().observe(seen, spec)

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        keys = spec.rope.unrotate(keys, positions) if spec.rope is not None else keys
        return super().transform_keys(keys, state, spec, positions)

    def restore_keys(self, stored: torch.Tensor, spec: LayerSpec, positions: torch.Tensor) -> torch.Tensor:
        return spec.rope.rotate(stored, positions) if spec.rope is not None else stored


def penalty_matrix(
    queries: torch.Tensor, rank: int, lam: float, normalize: bool = False, iterate: bool | None = None
) -> torch.Tensor:
    """``P = I + lam Q'Q`` with Q the top ``rank`` scaled right singular vectors of the queries (sec. 3.2, Prop. 1).

    ``Q'Q`` is the top part of the eigendecomposition of the Gram matrix, so no SVD of the tall query matrix is needed.

    Parameters
    ----------
    queries : Tensor, float32 [..., tokens, d]
    normalize : bool
        Divide ``Q'Q`` by the number of queries and their mean square, so that ``lam`` means the same for every length and
        model: P's trace is then ``d (1 + lam)`` if ``rank`` is ``d``.
    iterate : bool, optional
        How the eigenpairs are found (:func:`~kvfold.methods.eigenpairs.top_eigenpairs`).

    Returns
    -------
    Tensor, float64 [..., d, d]
    """
    queries = queries.double()
    return penalty_of(queries.transpose(-1, -2) @ queries, rank, lam, normalize, iterate)


def penalty_of(
    gram: torch.Tensor, rank: int, lam: float, normalize: bool = False, iterate: bool | None = None
) -> torch.Tensor:
    """:func:`penalty_matrix` of queries of which only ``Q'Q`` is known, float64 [..., d, d]; its size is free if normalized."""
    gram = normalized(gram) if normalize else gram
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    if not rank:
        largest = gram.diagonal(dim1=-1, dim2=-2).amax(-1)[..., None, None]
        weight = (100 * HARD / largest).clamp(max=min(lam, HARD))
        return eye + weight * gram
    top = penalty_factor(gram, rank, lam, iterate)
    return eye + top @ top.transpose(-1, -2)


def normalized(gram: torch.Tensor) -> torch.Tensor:
    """``Q'Q`` over the number of queries and their mean square."""
    size = gram.diagonal(dim1=-1, dim2=-2).mean(-1)[..., None, None]  # tokens x mean square
    return gram / size.clamp_min(torch.finfo(gram.dtype).tiny)


def penalty_factor(
    gram: torch.Tensor, rank: int, lam: float, iterate: bool | None = None, eigh: Eigh | None = None
) -> torch.Tensor:
    """F of ``P = I + F F'``, float64 [..., d, rank]."""
    values, vectors = top_eigenpairs(gram, rank, iterate, eigh)
    return vectors * (lam * values).clamp(0, HARD).sqrt().unsqueeze(-2)


def update_matrix(penalty: torch.Tensor, width: int) -> torch.Tensor:
    """What the error of each slice of ``width`` channels adds to the channels after it (Lemma 2).

    The update ``-P_rr^-1 P_rs`` needs one inverse per slice. All of them come from one Cholesky factorization ``P_rr = L' L``
    of the block r after the first slice, with L lower triangular, since its trailing blocks are the factors of P's: the same
    saving as the recursion of Prop. 2 and Lemma 3, in one call.

    Parameters
    ----------
    penalty : Tensor, float64 [..., d, d]

    Returns
    -------
    Tensor, float32 [..., d - width, d - width]
        Rows are channels ``width...d``, columns channels ``0...d - width``; block lower triangular. Zero, which steers nothing,
        where P is not finite: a query was NaN.
    """
    rest = penalty[..., width:, width:]
    factor, failed = torch.linalg.cholesky_ex(rest.flip(-1, -2))  # does not wait for the device
    lower = factor.flip(-1, -2).transpose(-1, -2)  # rest = lower' lower
    update = torch.zeros_like(rest)
    below = torch.linalg.solve_triangular(lower.transpose(-1, -2), penalty[..., width:, :width], upper=True)
    for start in range(0, rest.shape[-1], width):
        # P_rs = L_rr' L_rs, so -P_rr^-1 P_rs = -L_rr^-1 L_rs
        solved = torch.linalg.solve_triangular(lower[..., start:, start:], below, upper=False)
        update[..., start:, start : start + width] = -solved
        below = lower[..., start + width :, start : start + width]
    unusable = (failed != 0) | ~update.isfinite().all(-1).all(-1)
    return update.masked_fill(unusable[..., None, None], 0.0).float()


def update_of_factor(top: torch.Tensor, width: int) -> torch.Tensor:
    """:func:`update_matrix` of ``P = I + F F'``: ``-P_rr^-1 P_rs = -F_r (I + F_r' F_r)^-1 F_s'``, whose inverse is a small one.

    Parameters
    ----------
    top : Tensor, float64 [..., d, rank]
        F.
    """
    size = top.shape[-2] - width
    update = top.new_zeros(*top.shape[:-2], size, size)
    failed = torch.zeros(top.shape[:-2], dtype=torch.bool, device=top.device)
    for start in range(0, size, width):
        right, left = top[..., width + start :, :], top[..., start : start + width, :]
        inner = right.mT @ right
        inner.diagonal(dim1=-1, dim2=-2).add_(1.0)
        lower, info = torch.linalg.cholesky_ex(inner)  # does not wait for the device
        both = torch.linalg.solve_triangular(lower, torch.cat((left, right), -2).mT, upper=False)
        update[..., start:, start : start + width] = -(both[..., left.shape[-2] :].mT @ both[..., : left.shape[-2]])
        failed |= info != 0
    unusable = failed | ~update.isfinite().all(-1).all(-1)
    return update.masked_fill(unusable[..., None, None], 0.0).float()


def steer(keys: torch.Tensor, update: torch.Tensor, width: int, bits: int, group: int) -> torch.Tensor:
    """Keys adjusted slice by slice so that plain per-channel quantization of the result is SQuat's (Algorithm 1).

    Parameters
    ----------
    keys : Tensor, float32 [batch, num_kv_heads, tokens, d]
    update : Tensor, float32 [batch, num_kv_heads, d - width, d - width]
        For all tokens; or [batch, num_kv_heads, blocks, d - width, d - width], for as many tokens each.
    """
    # one product per group of tokens: the same whatever the call's length
    keys = keys.unflatten(-2, (-1, group)).clone()
    update = update.unsqueeze(-3) if update.dim() == 4 else update
    if 1 < update.shape[-3] < keys.shape[-3]:
        update = update.repeat_interleave(keys.shape[-3] // update.shape[-3], -3)
    for start in range(0, keys.shape[-1] - width, width):
        stop = start + width
        x = keys[..., start:stop].transpose(-1, -2)
        codes, scale, zero = quantize_asym(x, bits)
        error = (zero.float() + scale.float() * codes - x).transpose(-1, -2)
        keys[..., stop:] += error @ update[..., start:, start:stop].transpose(-1, -2)
    return keys.flatten(-3, -2)
