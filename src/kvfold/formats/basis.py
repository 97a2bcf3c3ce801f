"""Fixed linear maps that vectors pass before they are stored: a Hadamard rotation, a random rotation, a sketch.

A basis is static: it depends on ``head_dim`` and a seed, never on data. What it maps to is stored; attention either maps the
decoded vectors back (:meth:`Basis.restore`) or, since every map is linear, maps the query once instead.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from kvfold.arithmetic import lasting
from kvfold.formats.packing import UNIT

ROWS = 4096
"""Of a product on a GPU."""


@dataclass(frozen=True)
class Basis(ABC):
    """A linear map of vectors of ``head_dim`` channels."""

    head_dim: int

    @abstractmethod
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """What the inner format encodes: float32 [..., head_dim] -> [..., n].

        A row of the result depends on that row of ``x`` alone, bit for bit, so that codes do not depend on how calls were
        cut.
        """

    @abstractmethod
    def restore(self, y: torch.Tensor) -> torch.Tensor:
        """Decoded vectors as vectors of the model: float32 [..., width] -> [..., head_dim]."""

    def tables(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Constant tensors on a device, shared by all layers."""
        return {}


@dataclass(frozen=True)
class Hadamard(Basis):
    """Random signs, then an orthonormal Hadamard matrix in blocks of ``block`` channels.

    A block of 2^k channels takes k stages of additions and no table but the signs. Large channels are spread over their
    block; blocks do not mix.

    Parameters
    ----------
    block : int
        A power of two that divides ``head_dim``.
    seed : int
        Of the signs.
    """

    block: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block & (self.block - 1) or self.head_dim % self.block:
            allowed = [1 << i for i in range(9) if self.head_dim % (1 << i) == 0]
            raise ValueError(
                f"rotation={self.block}: head_dim={self.head_dim} is not divisible by it; allowed: {allowed}"
            )

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._transform(x * self.signs(x.device))

    def restore(self, y: torch.Tensor) -> torch.Tensor:
        return self._transform(y) * self.signs(y.device)

    def signs(self, device: torch.device | str) -> torch.Tensor:
        """Float32 [head_dim] of +1 and -1."""
        return _signs(self.head_dim, self.seed, str(device))

    def _transform(self, x: torch.Tensor) -> torch.Tensor:
        """In stages of sums and differences: no product, so every row comes out the same in any company."""
        shape, size = x.shape, 1
        while size < self.block:
            a, b = x.reshape(*shape[:-1], -1, 2, size).unbind(-2)
            x = torch.stack((a + b, a - b), -2)
            size *= 2
        return x.reshape(shape) / math.sqrt(self.block)

    def tables(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"signs": self.signs(device)}


@dataclass(frozen=True)
class Rotation(Basis):
    """A uniformly random orthogonal matrix (TurboQuant, Algorithm 1).

    Parameters
    ----------
    seed : int
    """

    seed: int = 0

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return by_block(x, rotation(self.head_dim, self.seed, str(x.device)).T)

    def restore(self, y: torch.Tensor) -> torch.Tensor:
        return product(y, rotation(self.head_dim, self.seed, str(y.device)))

    def tables(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"rotation": rotation(self.head_dim, self.seed, str(device))}


@dataclass(frozen=True)
class Sketch(Basis):
    """Projections ``S x`` and, last, the norm of x: what :class:`~kvfold.formats.sketch.SignSketch` encodes (QJL).

    Parameters
    ----------
    rows : int
        m of the paper.
    seed : int
    """

    rows: int = 0
    seed: int = 0

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        projected = by_block(x, projection(self.rows, self.head_dim, self.seed, str(x.device)).T)
        return torch.cat([projected, x.norm(dim=-1, keepdim=True)], -1)

    def restore(self, y: torch.Tensor) -> torch.Tensor:
        return product(y, projection(self.rows, self.head_dim, self.seed, str(y.device)))

    def tables(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {"sketch": projection(self.rows, self.head_dim, self.seed, str(device))}


def by_block(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``x @ matrix``, one product per 32 tokens: the same bits whatever the call's length.

    Parameters
    ----------
    x : Tensor [..., tokens, d]
        ``tokens`` a multiple of 32.
    """
    if x.is_cuda and matrix.dim() == 2:  # which a product takes together, however they are cut
        return product(x, matrix)
    return (x.unflatten(-2, (-1, UNIT)) @ matrix).flatten(-3, -2)


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``x @ matrix``; a row's bits do not depend on how many there are.

    Parameters
    ----------
    x : Tensor, float32 [..., d]
    matrix : Tensor, float32 [d, n]
    """
    return filled(x, matrix) if x.is_cuda else x @ matrix


def filled(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """:func:`product`, by :data:`ROWS` rows at a time: a GPU's library chooses its algorithm by their number, and with that the
    last bits."""
    rows = x.reshape(-1, x.shape[-1])
    whole = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    parts = [part @ matrix for part in whole.split(ROWS)]
    return torch.cat(parts)[: len(rows)].view(*x.shape[:-1], matrix.shape[-1])


def gain(head_dim: int) -> float:
    """m times the factor that makes ``|k| sign(S k) . (S q)`` unbiased, for uniform rows of length sqrt(d).

    QJL's ``sqrt(pi / 2)`` (eq. 3) is exact for Gaussian rows. Orthogonalized rows all have length sqrt(d); their exact
    factor is ``sqrt(pi / d) Gamma((d + 1) / 2) / Gamma(d / 2)``, 0.4 % less at d = 64.
    """
    return math.sqrt(math.pi / head_dim) * math.exp(math.lgamma((head_dim + 1) / 2) - math.lgamma(head_dim / 2))


@lasting(64)
def projection(rows: int, head_dim: int, seed: int, device: str) -> torch.Tensor:
    """S of QJL: Gaussian rows, orthogonalized by QR in chunks of ``head_dim``, of length sqrt(d); float32 [rows, d]."""
    generator = torch.Generator().manual_seed(seed)
    chunks = []
    for _ in range(0, rows, head_dim):
        q, r = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64, device="cpu"))
        chunks.append((q * r.diagonal().sign()).T)  # the sign makes the rotation uniform
    return (torch.cat(chunks)[:rows] * math.sqrt(head_dim)).float().to(device)


@lasting(64)
def rotation(head_dim: int, seed: int, device: str) -> torch.Tensor:
    """A uniformly random orthogonal matrix, float32 [head_dim, head_dim]."""
    return projection(head_dim, head_dim, seed, device) / math.sqrt(head_dim)


@lasting(64)
def _signs(head_dim: int, seed: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (head_dim,), generator=generator, device="cpu").float() * 2 - 1).to(device)
