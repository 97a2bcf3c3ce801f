"""Sign sketches: one bit per random projection and one norm per token. The storage of QJL keys."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.formats.affine import to_fp16
from kvfold.formats.base import Fields, Format
from kvfold.formats.basis import Sketch, by_block, gain, projection
from kvfold.formats.packing import UNIT, pack, unpack, words_per_unit
from kvfold.formats.paged import PagedFormat


@dataclass(frozen=True)
class SignSketch(Format):
    """Signs of one or more independent sketches of a vector, with one norm each (QJL, Definition 1).

    The input of :meth:`encode` is the concatenation of the sketches' projections ``S k`` and, last, the vectors' norms;
    the output of :meth:`decode` lives in the space of the projections, where a projected query ``S q`` meets it.

    Parameters
    ----------
    sketches : tuple of int
        Rows m of each sketch, each a multiple of 16.
    gains : tuple of float
        What turns ``norm * sign . (S q)`` of each sketch into an unbiased inner product, e.g. ``sqrt(pi / 2) / m``.

    Notes
    -----
    Fields, per block and KV head: ``signs`` int16 [block / 32, 2 sum(m)] (bit 1: the projection is not negative),
    ``rms`` fp16 [block, sketches]: norm / sqrt(head_dim), which stays in fp16's range for every fp16 vector.
    """

    sketches: tuple[int, ...] = ()
    gains: tuple[float, ...] = ()

    kind: ClassVar[str] = "sign sketch"

    def __post_init__(self) -> None:
        if any(m % 16 or m <= 0 for m in self.sketches):
            raise ValueError(f"sketch={self.sketches}: every sketch needs a positive multiple of 16 rows")

    @property
    def width(self) -> int:
        return sum(self.sketches)

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "signs": ((self.block // UNIT, words_per_unit(self.width, 1)), torch.int16),
            "rms": ((self.block, len(self.sketches)), torch.float16),
        }

    def encode(self, x: torch.Tensor) -> Fields:
        """``x``: float32 [batch, num_kv_heads, tokens, sum(m) + sketches]: projections, then norms."""
        projections, norms = x[..., : self.width], x[..., self.width :]
        words = pack(projections >= 0, 1, self.operand).unflatten(-2, (-1, self.block // UNIT))
        rms = to_fp16(norms / math.sqrt(self.head_dim)).unflatten(-2, (-1, self.block))
        return {"signs": words, "rms": rms}

    def decode(self, fields: Fields) -> torch.Tensor:
        bits = unpack(fields["signs"].flatten(-3, -2), 1, self.operand, self.width, torch.float32)
        norms = fields["rms"].flatten(-3, -2).float() * math.sqrt(self.head_dim)
        signs = bits * 2 - 1
        parts = signs.split(list(self.sketches), -1)
        return torch.cat([s * norms[..., i : i + 1] * self.gains[i] for i, s in enumerate(parts)], -1)

    def describe(self) -> str:
        return f"signs of {'+'.join(map(str, self.sketches))} projections and norms ({self.bits:.2f} bits)"


@dataclass(frozen=True)
class SplitSketch(PagedFormat):
    """A sketch of most channels and one of the page's ``outliers`` largest, each with its own norm (QJL, sec. 4.1).

    Parameters
    ----------
    rows : pair of int
        Rows of the sketches of inliers and of outliers.
    outliers : int
        Channels, those of largest norm in the page after centring.
    mean : bool
        Subtract the page's mean.
    seed : int
        Of the first sketch; the second has the next one.

    Notes
    -----
    Fields: those of :class:`SignSketch` per block; per page ``outlier`` uint8 [outliers], the channels, and ``mean`` fp16
    [head_dim].
    """

    rows: tuple[int, int]
    outliers: int
    mean: bool = True
    seed: int = 0

    kind: ClassVar[str] = "split sketch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outliers and self.head_dim > 256:
            raise ValueError(f"outliers={self.outliers}: a channel's number is a byte, and head_dim={self.head_dim}")

    @property
    def signs(self) -> SignSketch:
        """The format of both sketches' signs and norms."""
        gains = tuple(gain(self.head_dim) / m for m in self.rows)
        return SignSketch(self.head_dim, self.block, self.operand, self.rows, gains)

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self.signs.fields()

    def page_fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"outlier": ((self.outliers,), torch.uint8)}
        return fields | ({"mean": ((self.head_dim,), torch.float16)} if self.mean else {})

    def statistics(self, first: torch.Tensor) -> Fields:
        fields = {}
        if self.mean:
            fields["mean"] = to_fp16(first.mean(-2))
            first = first - fields["mean"].float().unsqueeze(-2)
        # a stable sort: of equal channels the first are taken, on every device
        order = first.square().sum(-2).sort(dim=-1, descending=True, stable=True).indices
        fields["outlier"] = order[..., : self.outliers].sort(-1).values.to(torch.uint8)
        return fields

    def tables(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Projections of inliers and outliers, float32 [rows, head_dim]."""
        return {
            f"sketch_{i}": projection(m, self.head_dim, self.seed + i, str(device)) for i, m in enumerate(self.rows)
        }

    def _masks(self, page: Fields) -> tuple[torch.Tensor, torch.Tensor]:
        """What each sketch leaves out: bool [batch, num_kv_heads, blocks, 1, head_dim]."""
        where = page["outlier"].long().clamp_max(self.head_dim - 1)  # storage that nothing was written to may hold any
        outlier = torch.zeros(*where.shape[:-1], self.head_dim, dtype=torch.bool, device=where.device)
        outlier = outlier.scatter(-1, where, True).unsqueeze(-2)
        return outlier, ~outlier

    def encode(self, x: torch.Tensor, page: Fields | None = None, **how: object) -> Fields:
        page, made = self.with_statistics(x, page)
        blocks = x.float().unflatten(-2, (-1, self.block))
        if self.mean:
            blocks = blocks - page["mean"].float().unsqueeze(-2)
        parts = [blocks.masked_fill(mask, 0.0).flatten(-3, -2) for mask in self._masks(page)]
        tables = self.tables(x.device).values()
        projected = [by_block(part, table.T) for part, table in zip(parts, tables, strict=True)]
        return self.signs.encode(torch.cat([*projected, *(p.norm(dim=-1, keepdim=True) for p in parts)], -1)) | made

    def decode(self, fields: Fields) -> torch.Tensor:
        inner, page = self.split(fields)
        sketches = self.signs.decode(inner).split(list(self.rows), -1)
        tables = self.tables(sketches[0].device).values()
        x = torch.zeros((), dtype=torch.float32, device=sketches[0].device)
        for sketch, table, mask in zip(sketches, tables, self._masks(page), strict=True):
            x = x + (sketch @ table).unflatten(-2, (-1, self.block)).masked_fill(mask, 0.0)
        if self.mean:
            x = x + page["mean"].float().unsqueeze(-2)
        return x.flatten(-3, -2)

    def describe(self) -> str:
        where = "page" if self.page else "sequence"
        return f"{self.signs.describe()}, {self.outliers} outlier channels per {where} ({self.bits:.2f} bits in all)"


@dataclass(frozen=True)
class SketchedResidual(Format):
    """Another format, and a sign sketch of what it misses (TurboQuant, Algorithm 2).

    Parameters
    ----------
    inner : Format
        Decodes to vectors of ``head_dim``.
    seed : int
        Of the sketch, which has ``head_dim`` rows.

    Notes
    -----
    Fields: the inner format's, and ``signs`` and ``rms`` of :class:`SignSketch`.
    """

    inner: Format
    seed: int = 0

    kind: ClassVar[str] = "sketched residual"

    @property
    def basis(self) -> Sketch:
        return Sketch(self.head_dim, self.head_dim, self.seed)

    @property
    def signs(self) -> SignSketch:
        d = self.head_dim
        return SignSketch(d, self.block, self.operand, (d,), (gain(d) / d,))

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {**self.inner.fields(), **self.signs.fields()}

    def encode(self, x: torch.Tensor) -> Fields:
        fields = self.inner.encode(x)
        return fields | self.signs.encode(self.basis.apply(x - self.inner.decode(fields)))

    def decode(self, fields: Fields) -> torch.Tensor:
        return self.inner.decode(fields) + self.basis.restore(self.signs.decode(fields))

    def describe(self) -> str:
        return f"{self.inner.describe()} + a sign per channel of what it misses ({self.bits:.2f} bits in all)"
