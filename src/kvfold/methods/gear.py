"""GEAR: quantization, a low-rank approximation of its residual, and sparse outliers (Kang et al., 2024)."""

from dataclasses import dataclass

import torch

from kvfold.errors import MethodError
from kvfold.formats import Dense, Fields, Format, Outliers, Stack
from kvfold.formats.affine import to_fp16
from kvfold.formats.outliers import outlier_count
from kvfold.methods.base import LayerSpec, Method, Observation, State


@dataclass(frozen=True)
class GEAR(Method):
    """``x = D + A B' + S``: KIVI's groups D, a rank-r approximation of what they miss, outliers S (sec. 3).

    B (head_dim x r) is computed once per sequence, KV head and operand from the residual of the first tokens; a token
    stores its row of A in fp16. Keys are read as ``concat(D + S, A)`` by queries ``concat(q, q B)``; the output's part
    from A is mapped back by B'. Keys and values together have 4 r bytes per channel and KV head in a sequence's state.

    Parameters
    ----------
    rank : int
        r of the paper, per head.
    loops : int
        Power iterations (Algorithm 2).
    outliers : float
        s of the paper: fraction of elements kept in fp16 (32 bits each, index included); 0: GEAR-L.
    seed : int
        Of the power iteration's start.
    """

    rank: int = 2
    loops: int = 3
    outliers: float = 0.0
    seed: int = 0

    name = "gear"
    summary = "KIVI's groups, a low-rank approximation of their residual, optional outliers"
    paper = "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference (arXiv 2403.05527)"
    url = "https://arxiv.org/abs/2403.05527"
    maps_values = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("rank", "loops"):
            if getattr(self, field) < 1:
                raise MethodError(f"{self.name}: {field}={getattr(self, field)} is not allowed; allowed: 1 or more")
        if not 0 <= self.outliers <= 0.25:
            raise MethodError(f"{self.name}: outliers={self.outliers} is not allowed; allowed: 0 to 0.25")

    @property
    def stateful(self) -> bool:
        return True

    # ---- storage -----------------------------------------------------------------------------------------------------

    def _backbone(self, spec: LayerSpec, operand: str) -> Format:
        """D + S."""
        axis = "token" if operand == "key" else "channel"
        inner = self.affine(spec, operand, axis)
        count = outlier_count(self.outliers, self.block, spec.head_dim)
        if not count:
            return inner
        try:
            return Outliers(spec.head_dim, self.block, inner.operand, inner, count, axis)
        except ValueError as error:
            raise MethodError(f"{self.name}: {error}") from None

    def _format(self, spec: LayerSpec, operand: str) -> Stack:
        if self.rank > spec.head_dim:
            raise MethodError(f"{self.name}: rank={self.rank} is not allowed; allowed: up to head_dim={spec.head_dim}")
        backbone = self._backbone(spec, operand)
        parts = (backbone, Dense(self.rank, self.block, backbone.operand, torch.float16))
        return Stack(spec.head_dim, self.block, backbone.operand, parts, (spec.head_dim, self.rank))

    def key_format(self, spec: LayerSpec) -> Stack:
        return self._format(spec, "key")

    def value_format(self, spec: LayerSpec) -> Stack:
        return self._format(spec, "value")

    # ---- maps --------------------------------------------------------------------------------------------------------

    def observe(self, seen: Observation, spec: LayerSpec) -> State:
        state = super().observe(seen, spec)
        whole = seen.keys.shape[-2] // self.block * self.block
        keys = super().transform_keys(seen.keys, state, spec, seen.key_positions)
        for operand, x in (("key", keys), ("value", seen.values)):
            missed = self._missed(x[..., :whole, :], spec, operand)
            state[f"{operand}_basis"] = row_space(missed, self.rank, self.loops, self.seed).to(torch.float16)
        return state

    def _missed(self, x: torch.Tensor, spec: LayerSpec, operand: str) -> torch.Tensor:
        backbone = self._backbone(spec, operand)
        return x - backbone.decode(backbone.encode(x))

    def _with_coefficients(self, x: torch.Tensor, state: State, spec: LayerSpec, operand: str) -> torch.Tensor:
        """x and its row of A, ``(x - D - S) B``: the best A for this B, its columns being orthonormal."""
        basis = state[f"{operand}_basis"].float().unsqueeze(-3)
        missed = self._missed(x, spec, operand).unflatten(-2, (-1, self.block))
        # one product per block: the same coefficients whatever the call's length
        return torch.cat([x, to_fp16(missed @ basis).float().flatten(-3, -2)], -1)

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        return self._with_coefficients(super().transform_keys(keys, state, spec, positions), state, spec, "key")

    def restore_keys(
        self, stored: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        return super().restore_keys(self._restore(stored, state, spec, "key"), state, spec, positions)

    def project_queries(
        self, queries: torch.Tensor, state: State, spec: LayerSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        queries, bias = super().project_queries(queries.float(), state, spec)
        return torch.cat([queries, queries @ state["key_basis"].float()], -1), bias

    def encode_values(self, values: torch.Tensor, state: State, spec: LayerSpec, prompt: bool) -> Fields:
        return self.value_format(spec).encode(self._with_coefficients(values, state, spec, "value"))

    def unproject_values(self, values: torch.Tensor, state: State, spec: LayerSpec) -> torch.Tensor:
        return self._restore(values, state, spec, "value")

    def _restore(self, stored: torch.Tensor, state: State, spec: LayerSpec, operand: str) -> torch.Tensor:
        basis = state[f"{operand}_basis"].float()
        return stored[..., : spec.head_dim] + stored[..., spec.head_dim :] @ basis.transpose(-1, -2)


def row_space(x: torch.Tensor, rank: int, loops: int, seed: int) -> torch.Tensor:
    """Orthonormal basis near the top right singular vectors, by power iteration (GEAR, Algorithm 2).

    Parameters
    ----------
    x : Tensor, float32 [..., tokens, d]

    Returns
    -------
    Tensor, float32 [..., d, rank]
    """
    gram = x.double().transpose(-1, -2) @ x.double()
    start = torch.randn(x.shape[-1], rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = torch.linalg.qr(start).Q.to(x.device).expand(*gram.shape[:-1], rank)
    for _ in range(loops):
        # a residual of zero has no direction; the start's serve as well as any
        size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        basis = torch.linalg.qr(torch.where(size > 0, gram @ basis / size.clamp_min(1e-300), basis)).Q
    return basis.float()
