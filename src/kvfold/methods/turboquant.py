"""TurboQuant: random rotation and optimal scalar quantization (Zandieh et al., 2025, arXiv 2504.19874)."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvfold.errors import MethodError
from kvfold.formats import Fields, Format, Lookup, SignSketch, Stack
from kvfold.methods.base import LayerSpec, Method, State
from kvfold.methods.qjl import gain, projection


@dataclass(frozen=True)
class TurboQuant(Method):
    """A rotated vector's coordinates are near-Gaussian whatever the data, so one Lloyd-Max table serves all of them.

    Keys and values are stored rotated, as b-bit codes and a norm per token. Queries are rotated instead of keys, and
    the output is rotated back once (Algorithm 1). With ``residual`` a key has b - 1 bits of codes and one sign per
    channel of a projection of what they miss, which makes its inner products unbiased (Algorithm 2).

    Parameters
    ----------
    center : bool
        True here; the published method has none, and its norms are dominated by constant key channels where a model has
        them.
    residual : bool
        Algorithm 2 for keys: QJL of the residual. Values never have it, their error being averaged by attention.
    seed : int
        Of the rotation and the projection.
    """

    center: bool = True
    residual: bool = False
    seed: int = 0

    name = "turboquant"
    summary = "random rotation, Lloyd-Max codes, a norm per token; optional QJL of the key residual"
    paper = "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate (arXiv 2504.19874)"
    url = "https://arxiv.org/abs/2504.19874"
    maps_values = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual and self.key_bits not in (2, 3, 4):
            raise MethodError(
                f"{self.name}: residual=true takes one of the key's bits for signs; k_bits={self.key_bits} is not "
                "allowed; allowed: 2, 3, 4"
            )

    def _lookup(self, spec: LayerSpec, operand: str, bits: int) -> Lookup:
        if spec.head_dim % 16:
            raise MethodError(f"{self.name}: head_dim={spec.head_dim} is not a multiple of 16")
        return Lookup(spec.head_dim, self.block, spec.operand(operand), bits, lloyd_max(bits, spec.head_dim))

    def key_format(self, spec: LayerSpec) -> Format:
        if not self.residual:
            return self._lookup(spec, "key", self.key_bits)
        d, operand = spec.head_dim, spec.operand("key")
        sketch = SignSketch(d, self.block, operand, (d,), (gain(d) / d,))
        return Stack(d, self.block, operand, (self._lookup(spec, "key", self.key_bits - 1), sketch), (d, d + 1))

    def value_format(self, spec: LayerSpec) -> Lookup:
        return self._lookup(spec, "value", self.value_bits)

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        tables = {"rotation": rotation(spec.head_dim, self.seed, str(device))}
        if self.residual:
            tables["sketch"] = projection(spec.head_dim, spec.head_dim, self.seed + 1, str(device))
        return tables

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        """Rotated keys; with ``residual`` also the projection of their residual and its norm."""
        rotated = self._blockwise(super().transform_keys(keys, state, spec, positions), self._rotation(spec, keys).T)
        if not self.residual:
            return rotated
        lookup = self._lookup(spec, "key", self.key_bits - 1)
        missed = rotated - lookup.decode(lookup.encode(rotated))
        sketch = self.tables(spec, keys.device)["sketch"]
        return torch.cat([rotated, self._blockwise(missed, sketch.T), missed.norm(dim=-1, keepdim=True)], -1)

    def restore_keys(
        self, stored: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        rotated = stored[..., : spec.head_dim]
        if self.residual:
            rotated = rotated + stored[..., spec.head_dim :] @ self.tables(spec, stored.device)["sketch"]
        return super().restore_keys(rotated @ self._rotation(spec, stored), state, spec, positions)

    def project_queries(
        self, queries: torch.Tensor, state: State, spec: LayerSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        queries, bias = super().project_queries(queries.float(), state, spec)
        rotated = queries @ self._rotation(spec, queries).T
        if self.residual:
            rotated = torch.cat([rotated, rotated @ self.tables(spec, queries.device)["sketch"].T], -1)
        return rotated, bias

    def encode_values(self, values: torch.Tensor, state: State, spec: LayerSpec, prompt: bool) -> Fields:
        return self.value_format(spec).encode(self._blockwise(values, self._rotation(spec, values).T))

    def unproject_values(self, values: torch.Tensor, state: State, spec: LayerSpec) -> torch.Tensor:
        return values @ self._rotation(spec, values)

    def _rotation(self, spec: LayerSpec, like: torch.Tensor) -> torch.Tensor:
        return rotation(spec.head_dim, self.seed, str(like.device))

    def _blockwise(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """``x @ matrix``, one product per block: the same codes whatever the call's length."""
        return (x.unflatten(-2, (-1, self.block)) @ matrix).flatten(-3, -2)


@lru_cache(maxsize=64)
def rotation(head_dim: int, seed: int, device: str) -> torch.Tensor:
    """A uniformly random orthogonal matrix, float32 [head_dim, head_dim]."""
    return projection(head_dim, head_dim, seed, device) / math.sqrt(head_dim)


@lru_cache(maxsize=64)
def lloyd_max(bits: int, head_dim: int | None = None) -> tuple[float, ...]:
    """Levels of least mean squared error for a coordinate of a random direction, times sqrt(head_dim) (eq. 4).

    Parameters
    ----------
    bits : int
    head_dim : int or None
        The coordinate's density is proportional to ``(1 - x^2 / d)^((d - 3) / 2)`` (Lemma 1); None: its limit for large
        d, the standard normal.

    Returns
    -------
    tuple of float
        2^bits levels, ascending, symmetric about 0.

    Notes
    -----
    Lloyd's algorithm on the density itself: cells end halfway between levels, levels are their cells' means, both from
    running integrals over a fine grid. The density is log-concave, so the fixed point is the optimum (Fleischer, 1964).
    """
    edge = min(9.0, math.sqrt(head_dim)) if head_dim else 9.0
    grid = torch.linspace(-edge, edge, 100_001, dtype=torch.float64)
    if head_dim:
        density = (1 - grid.square() / head_dim).clamp_min(0) ** ((head_dim - 3) / 2)
    else:
        density = (-grid.square() / 2).exp()
    mass = torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumulative_trapezoid(density, grid)])
    moment = torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumulative_trapezoid(density * grid, grid)])
    step = float(grid[1] - grid[0])

    def at(integral: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        place = ((x + edge) / step).clamp(0, len(grid) - 1)
        index = place.floor().long().clamp_max(len(grid) - 2)
        return torch.lerp(integral[index], integral[index + 1], place - index)

    count = 1 << bits
    # levels spread like density^(1/3) are optimal for many levels (Panter and Dite, 1951): a start next to the end
    spread = torch.cumulative_trapezoid(density.pow(1 / 3), grid)
    wanted = (torch.arange(count, dtype=torch.float64) + 0.5) / count * spread[-1]
    levels = grid[torch.searchsorted(spread, wanted).clamp_max(len(grid) - 1)]
    outer = torch.tensor([edge], dtype=torch.float64)
    for _ in range(5000):
        cuts = torch.cat([-outer, (levels[1:] + levels[:-1]) / 2, outer])
        updated = at(moment, cuts).diff() / at(mass, cuts).diff()
        updated = (updated - updated.flip(0)) / 2
        moved = float((updated - levels).abs().max())
        levels = updated
        if moved < 1e-8:
            break
    return tuple(levels.tolist())
