"""TurboQuant: random rotation and optimal scalar quantization (Zandieh et al., 2025, arXiv 2504.19874)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvfold.arithmetic import lasting
from kvfold.errors import MethodError
from kvfold.formats import Format, Lookup, Rotation, Sketch, SketchedResidual
from kvfold.methods.base import LayerSpec, Method
from kvfold.methods.options import Problem


@dataclass(frozen=True)
class TurboQuant(Method):
    """A rotated vector's coordinates are near-Gaussian whatever the data, so one Lloyd-Max table serves all of them.

    Keys and values are stored rotated, as b-bit codes and a norm per token (Algorithm 1). With ``residual`` a key has
    b - 1 bits of codes and one sign per channel of a projection of what they miss, which makes its inner products unbiased
    (Algorithm 2).

    Parameters
    ----------
    center : {"page", "false"}
        Of keys and of values. The published method has no mean, and its norms are dominated by constant key channels where a
        model has them.
    normalize : bool
        Divide keys by channel norms per page before the rotation; the published method does not.
    residual : bool
        Algorithm 2 for keys: QJL of the residual. Values never have it, their error being averaged by attention.
    seed : int
        Of the rotation and the projection.
    """

    center: str = "page"
    normalize: bool = True
    residual: bool = False
    seed: int = 0

    name = "turboquant"
    summary = "random rotation, Lloyd-Max codes, a norm per token; optional QJL of the key residual"
    source = "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate (arXiv 2504.19874)"
    url = "https://arxiv.org/abs/2504.19874"
    published = {"sink": 0, "recent": 128, "center": "false", "normalize": False}  # noqa: RUF012
    centers = True

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.residual and self.key_bits not in (2, 3, 4):
            field = "bits" if self.k_bits is None else "k_bits"
            yield Problem(field, (2, 3, 4), " is not allowed beside residual=true, which takes a key's bit for signs")

    @property
    def kernel_encodes(self) -> bool:
        return True

    def _format(self, spec: LayerSpec, operand: str, bits: int, residual: bool, norm: str) -> Format:
        if spec.head_dim % 16:
            raise MethodError(f"{self.name}: head_dim={spec.head_dim} is not a multiple of 16")
        d, order = spec.head_dim, spec.operand(operand)
        bits -= residual
        inner: Format = Lookup(d, self.block, order, bits, self._levels(bits, d))
        if residual:
            inner = SketchedResidual(d, self.block, order, inner, self.seed + 1)
        return self.paged(inner, self.centered, norm, Rotation(d, self.seed))

    def _levels(self, bits: int, head_dim: int) -> tuple[float, ...]:
        """Eight levels are whole numbers times a unit, so that a byte holds one; the published ones are not."""
        levels = lloyd_max(bits, head_dim)
        return levels if bits != 3 or self.paper else whole(levels)

    def key_format(self, spec: LayerSpec) -> Format:
        return self._format(spec, "key", self.key_bits, self.residual, "rms" if self.normalize else "")

    def value_format(self, spec: LayerSpec) -> Format:
        return self._format(spec, "value", self.value_bits, False, "")

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        tables = Rotation(spec.head_dim, self.seed).tables(device)
        if self.residual:
            sketch = Sketch(spec.head_dim, spec.head_dim, self.seed + 1).tables(device)
            tables |= {f"key.{name}": t for name, t in sketch.items()}
        return tables


@lasting(64)
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
    exact: Any = {"dtype": torch.float64, "device": "cpu"}
    grid = torch.linspace(-edge, edge, 100_001, **exact)
    if head_dim:
        density = (1 - grid.square() / head_dim).clamp_min(0) ** ((head_dim - 3) / 2)
    else:
        density = (-grid.square() / 2).exp()
    mass = torch.cat([torch.zeros(1, **exact), torch.cumulative_trapezoid(density, grid)])
    moment = torch.cat([torch.zeros(1, **exact), torch.cumulative_trapezoid(density * grid, grid)])
    step = float(grid[1] - grid[0])

    def at(integral: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        place = ((x + edge) / step).clamp(0, len(grid) - 1)
        index = place.floor().long().clamp_max(len(grid) - 2)
        return torch.lerp(integral[index], integral[index + 1], place - index)

    count = 1 << bits
    # levels spread like density^(1/3) are optimal for many levels (Panter and Dite, 1951): a start next to the end
    spread = torch.cumulative_trapezoid(density.pow(1 / 3), grid)
    wanted = (torch.arange(count, **exact) + 0.5) / count * spread[-1]
    levels = grid[torch.searchsorted(spread, wanted).clamp_max(len(grid) - 1)]
    outer = torch.tensor([edge], **exact)
    for _ in range(5000):
        cuts = torch.cat([-outer, (levels[1:] + levels[:-1]) / 2, outer])
        updated = at(moment, cuts).diff() / at(mass, cuts).diff()
        updated = (updated - updated.flip(0)) / 2
        moved = float((updated - levels).abs().max())
        levels = updated
        if moved < 1e-8:
            break
    return tuple(levels.tolist())


@lasting(64)
def whole(levels: tuple[float, ...], most: int = 127) -> tuple[float, ...]:
    """Levels as whole numbers up to ``most`` times a unit, those of least squared difference from ``levels``.

    Of eight levels for a normal coordinate, 13, 40, 71 and 113 units: their relative difference is 0.001, and the mean squared
    error of codes grows by its square.
    """
    best: tuple[float, tuple[float, ...]] = math.inf, levels
    for largest in range(most // 2, most + 1):
        counts = [round(x / levels[-1] * largest) for x in levels]
        unit = sum(n * x for n, x in zip(counts, levels, strict=True)) / sum(n * n for n in counts)
        error = sum((n * unit - x) ** 2 for n, x in zip(counts, levels, strict=True))
        best = min(best, (error, tuple(n * unit for n in counts)))
    return best[1]
