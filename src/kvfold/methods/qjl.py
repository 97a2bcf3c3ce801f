"""QJL: one bit per random projection of a key, and its norm (Zandieh et al., 2024, arXiv 2406.03482)."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvfold.errors import MethodError
from kvfold.formats import Format, SignSketch
from kvfold.methods.base import LayerSpec, Method, Observation, State


@dataclass(frozen=True)
class QJL(Method):
    """Keys as ``sign(S k)`` and ``|k|``, read as an unbiased estimate of ``q . k`` (Definition 1); values as in KIVI.

    Parameters
    ----------
    k_bits : int
        Rows of S per channel: m = ``k_bits`` x head_dim.
    outliers : int
        Channels per KV head, those of largest norm in the first tokens, that get a sketch of their own (sec. 4.1).
    outlier_sketch : int
        Rows of that sketch; 0: 2 x head_dim.
    early_layers, early_k_bits : int
        The first layers, and their rows per channel.
    seed : int
        Of the projections.
    """

    recent: int = 32
    center: bool = True
    outliers: int = 0
    outlier_sketch: int = 0
    early_layers: int = 0
    early_k_bits: int = 3
    seed: int = 0

    name = "qjl"
    summary = "keys as signs of random projections and a norm, values per token"
    paper = "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead (arXiv 2406.03482)"
    url = "https://arxiv.org/abs/2406.03482"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("outliers", "outlier_sketch", "early_layers"):
            if getattr(self, field) < 0:
                raise MethodError(f"{self.name}: {field}={getattr(self, field)} is not allowed; allowed: 0 or more")
        if self.outlier_sketch % 16:
            raise MethodError(
                f"{self.name}: outlier_sketch={self.outlier_sketch} is not allowed; allowed: multiples of 16"
            )
        if self.early_k_bits not in (1, 2, 3, 4, 8):
            raise MethodError(f"{self.name}: early_k_bits={self.early_k_bits} is not allowed; allowed: 1, 2, 3, 4, 8")

    @property
    def stateful(self) -> bool:
        return self.center or self.outliers > 0

    def _rows(self, spec: LayerSpec) -> tuple[int, ...]:
        bits = self.early_k_bits if spec.layer_idx < self.early_layers else self.key_bits
        rows = (bits * spec.head_dim,)
        return (*rows, self.outlier_sketch or 2 * spec.head_dim) if self.outliers else rows

    def key_format(self, spec: LayerSpec) -> SignSketch:
        if self.outliers >= spec.head_dim:
            raise MethodError(
                f"{self.name}: outliers={self.outliers} is not allowed; allowed: below head_dim={spec.head_dim}"
            )
        if spec.head_dim % 16:
            raise MethodError(f"{self.name}: head_dim={spec.head_dim} is not a multiple of 16")
        rows = self._rows(spec)
        return SignSketch(
            spec.head_dim, self.block, spec.operand("key"), rows, tuple(gain(spec.head_dim) / m for m in rows)
        )

    def value_format(self, spec: LayerSpec) -> Format:
        return self.affine(spec, "value", axis="channel")

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {
            f"sketch_{i}": projection(m, spec.head_dim, self.seed + i, str(device))
            for i, m in enumerate(self._rows(spec))
        }

    def observe(self, seen: Observation, spec: LayerSpec) -> State:
        state = super().observe(seen, spec)
        if self.outliers:
            keys = super().transform_keys(seen.keys, state, spec, seen.key_positions)
            largest = keys.square().sum(-2).topk(self.outliers, dim=-1).indices
            state["outlier"] = torch.zeros_like(keys[..., 0, :], dtype=torch.bool).scatter(-1, largest, True)
        return state

    def _parts(self, x: torch.Tensor, state: State) -> list[torch.Tensor]:
        if not self.outliers:
            return [x]
        outlier = state["outlier"].unsqueeze(-2)
        return [x.masked_fill(outlier, 0.0), x.masked_fill(~outlier, 0.0)]

    def _project(self, x: torch.Tensor, state: State, spec: LayerSpec) -> list[torch.Tensor]:
        tables = self.tables(spec, x.device).values()
        return [part @ table.T for part, table in zip(self._parts(x, state), tables, strict=True)]

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        """Projections of the inlier and outlier parts, then their norms: what :class:`SignSketch` encodes."""
        keys = super().transform_keys(keys, state, spec, positions)
        blocks = keys.unflatten(
            -2, (-1, self.block)
        )  # one product per block: the same signs whatever the call's length
        flat_state = {name: value.unsqueeze(-2) if name == "outlier" else value for name, value in state.items()}
        projected = torch.cat(self._project(blocks, flat_state, spec), -1).flatten(-3, -2)
        norms = torch.stack([part.norm(dim=-1) for part in self._parts(keys, state)], -1)
        return torch.cat([projected, norms], -1)

    def restore_keys(
        self, stored: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        tables = self.tables(spec, stored.device).values()
        sketches = stored.split([t.shape[0] for t in tables], -1)
        parts = [sketch @ table for sketch, table in zip(sketches, tables, strict=True)]
        if self.outliers:
            outlier = state["outlier"].unsqueeze(-2)
            parts = [parts[0].masked_fill(outlier, 0.0), parts[1].masked_fill(~outlier, 0.0)]
        return super().restore_keys(torch.stack(parts).sum(0), state, spec, positions)

    def project_queries(
        self, queries: torch.Tensor, state: State, spec: LayerSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        queries, bias = super().project_queries(queries.float(), state, spec)
        return torch.cat(self._project(queries, state, spec), -1), bias


def gain(head_dim: int) -> float:
    """m times the factor that makes ``|k| sign(S k) . (S q)`` unbiased, for uniform rows of length sqrt(d).

    The paper's ``sqrt(pi / 2)`` (eq. 3) is exact for Gaussian rows. Orthogonalized rows all have length sqrt(d); their
    exact factor is ``sqrt(pi / d) Gamma((d + 1) / 2) / Gamma(d / 2)``, 0.4 % less at d = 64.
    """
    return math.sqrt(math.pi / head_dim) * math.exp(math.lgamma((head_dim + 1) / 2) - math.lgamma(head_dim / 2))


@lru_cache(maxsize=64)
def projection(rows: int, head_dim: int, seed: int, device: str) -> torch.Tensor:
    """S: Gaussian rows, orthogonalized by QR in chunks of ``head_dim``, of length sqrt(d); float32 [rows, d]."""
    generator = torch.Generator().manual_seed(seed)
    chunks = []
    for _ in range(0, rows, head_dim):
        q, r = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64))
        chunks.append((q * r.diagonal().sign()).T)  # the sign makes the rotation uniform
    return (torch.cat(chunks)[:rows] * math.sqrt(head_dim)).float().to(device)
