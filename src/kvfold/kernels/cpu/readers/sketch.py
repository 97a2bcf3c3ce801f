"""Signs of random projections and norms: QJL's keys, and what TurboQuant's codes miss."""

import math

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import Fields, SignSketch, SketchedResidual, SplitSketch
from kvfold.kernels.cpu._numbers import (
    TILE,
    add_product,
    address,
    bytes_at,
    carray,
    copy,
    decode_inside,
    decoder,
    flip,
    half,
    halves_at,
    loops,
    np,
    widen,
)
from kvfold.kernels.cpu.readers.base import ROW, CPUReader, place, places
from kvfold.kernels.cpu.readers.nested import NestedReader

SIGNS = 12
"""Integers that a :class:`SignReader` is given."""


@loops
def _signs(row, batch, head, unit, tile):
    """Signs times norms and gains into ``tile`` [32, sum of sketches or more]."""
    width, parts = row[8], row[9]
    data = bytes_at(row, 0, batch, head, unit, width * 4)
    stored = halves_at(row, 4, batch, head, unit, TILE * parts)
    sizes = carray(address(row[10]), parts, np.int64)
    gains = carray(address(row[11]), parts, np.float32)
    for t in range(TILE):  # four tokens share a byte's bit
        start, shift = 0, 31 - t // 4
        for p in range(parts):
            negative = -gains[p] * half(stored[t * parts + p])
            at = t % 4 * width + start
            word, x = data[at : at + sizes[p]], tile[t, start : start + sizes[p]]
            for i in range(sizes[p]):
                x[i] = flip(negative, np.int32(word[i]), shift)
            start += sizes[p]


@decoder
def _read_signs(row, batch, head, unit, tile, width, scratch):
    _signs(carray(row, ROW), batch, head, unit, carray(tile, (TILE, width)))


class SignReader(CPUReader[SignSketch]):
    decode = _read_signs

    def __init__(self, form: SignSketch) -> None:
        super().__init__(form)
        self.sizes = torch.tensor(form.sketches, dtype=torch.int64, device="cpu")
        gains = [gain * math.sqrt(form.head_dim) for gain in form.gains]
        self.gains = torch.tensor(gains, dtype=torch.float32, device="cpu")

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Signs and norms, both by units; rows of all sketches, sketches; addresses of each one's rows and gain."""
        form, units = self.form, self.form.block // TILE
        row = places(form, fields, ("signs", "rms"), keep)
        row[3], row[7] = row[3] // units, row[7] // units
        return [*row, form.width, len(form.sketches), self.sizes.data_ptr(), self.gains.data_ptr()]


# ---- vectors of their sketches ---------------------------------------------------------------------------------------

SPLIT = 15
"""Where the signs' row begins in that of a split sketch."""
RESIDUAL = 2
"""The same of a sketched residual; behind it lies the inner format's decoder."""


@loops
def _split(row, batch, head, unit, tile, scratch):
    dim, inliers, rows, outliers, units = row[0], row[1], row[2], row[3], row[4]
    page = unit // units if units else 0
    mean = scratch[:dim]
    if row[11]:
        widen(halves_at(row, 11, batch, head, page, dim), mean)
    else:
        mean[:] = np.float32(0.0)
    for t in range(TILE):
        copy(mean, tile[t])
    projected = scratch[dim : dim + TILE * (inliers + rows)].reshape(TILE, inliers + rows)
    _signs(row[SPLIT:], batch, head, unit, projected)
    add_product(projected, carray(address(row[5]), (inliers, dim), np.float32), tile)
    channels = carray(address(row[6]), (dim, rows), np.float32)
    where = bytes_at(row, 7, batch, head, page, outliers)
    for k in range(outliers):
        at = min(np.int64(where[k]), dim - 1)
        s = channels[at]
        for t in range(TILE):
            p, total = projected[t, inliers:], np.float32(0.0)
            for i in range(rows):
                total += p[i] * s[i]
            tile[t, at] = mean[at] + total


@decoder
def _read_split(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    space = carray(scratch, numbers[0] + TILE * (numbers[1] + numbers[2]))
    _split(numbers, batch, head, unit, carray(tile, (TILE, width)), space)


@lasting(64)
def _by_channel(sketch: torch.Tensor) -> torch.Tensor:
    """A sketch that all layers share, [channels, rows]."""
    return sketch.T.contiguous()


class SplitReader(CPUReader[SplitSketch]):
    decode = _read_split

    def __init__(self, form: SplitSketch) -> None:
        super().__init__(form)
        self.signs = SignReader(form.signs)
        inliers, outliers = form.tables("cpu").values()
        self.inliers, self.outliers = inliers.numpy(), _by_channel(outliers).numpy()

    @property
    def scratch(self) -> int:
        return self.form.head_dim + TILE * sum(self.form.rows)

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Channels, rows of both sketches, outlier channels, units of a page (0: one page); addresses of the first sketch
        [rows, channels] and of the second [channels, rows]; outlier channels and means by pages; the signs."""
        form, dim = self.form, self.form.head_dim
        row = [dim, *form.rows, form.outliers, form.page // TILE, self.inliers.ctypes.data, self.outliers.ctypes.data]
        row += place(fields["outlier"], form.outliers, keep)
        row += place(fields["mean"], dim, keep) if form.mean else (0, 0, 0, 0)
        return [*row, *self.signs.row(fields, keep)]


@loops
def _residual(row, batch, head, unit, tile, scratch):
    decode_inside(row, RESIDUAL + SIGNS, batch, head, unit, tile, scratch)
    dim = row[0]
    projected = scratch[: TILE * dim].reshape(TILE, dim)
    _signs(row[RESIDUAL:], batch, head, unit, projected)
    add_product(projected, carray(address(row[1]), (dim, dim), np.float32), tile)


@decoder
def _read_residual(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    space = carray(scratch, TILE * numbers[0])
    _residual(numbers, batch, head, unit, carray(tile, (TILE, width)), space)


class SketchedReader(NestedReader[SketchedResidual]):
    decode = _read_residual

    def __init__(self, form: SketchedResidual) -> None:
        super().__init__(form)
        self.signs = SignReader(form.signs)
        self.sketch = form.basis.tables("cpu")["sketch"].numpy()

    @property
    def own_scratch(self) -> int:
        return TILE * self.form.head_dim

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Channels, address of the sketch [rows, channels]; the signs; the inner format."""
        signs = self.signs.row(fields, keep)
        return [self.form.head_dim, self.sketch.ctypes.data, *signs, *self.inside(fields, keep)]
