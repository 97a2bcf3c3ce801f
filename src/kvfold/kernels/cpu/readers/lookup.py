"""Codes into fixed levels, with scales of tokens or of channels: TurboQuant's and KVQuant's."""

import torch

from kvfold.formats import Fields, Lookup
from kvfold.kernels.cpu._numbers import TILE, address, bytes_at, carray, decoder, half, halves_at, loops, np, unpack
from kvfold.kernels.cpu.readers.base import ROW, CPUReader, made, places

SCALINGS = {"rms": 0, "range": 1, "channel": 2}


@loops
def _decode(row, batch, head, unit, tile, codes):
    dim, bits, scaling = row[8], row[9], row[10]
    unpack(bytes_at(row, 0, batch, head, unit, dim * bits * 4), bits, codes)
    levels = carray(address(row[11]), 1 << bits, np.float32)
    if scaling == 2:
        center = carray(address(row[12] + head * dim * 4), dim, np.float32)
        spread = carray(address(row[13] + head * dim * 4), dim, np.float32)
        for t in range(TILE):
            c, x = codes[t * dim : (t + 1) * dim], tile[t]
            for i in range(dim):
                x[i] = center[i] + spread[i] * levels[np.int32(c[i])]
        return
    scale = halves_at(row, 4, batch, head, unit, TILE * (scaling + 1))
    for t in range(TILE):
        c, x = codes[t * dim : (t + 1) * dim], tile[t]
        if scaling == 0:
            offset, factor = np.float32(0.0), half(scale[t])
        else:
            offset, factor = half(scale[2 * t]), half(scale[2 * t + 1])
        for i in range(dim):
            x[i] = offset + factor * levels[np.int32(c[i])]


@decoder
def _read(row, batch, head, unit, tile, width, scratch):
    numbers = carray(row, ROW)
    _decode(numbers, batch, head, unit, carray(tile, (TILE, width)), carray(scratch, TILE * numbers[8]))


class LookupReader(CPUReader[Lookup]):
    decode = _read

    def __init__(self, form: Lookup) -> None:
        super().__init__(form)
        self.levels = torch.tensor(form.levels, dtype=torch.float32, device="cpu")

    @property
    def scratch(self) -> int:
        return TILE * self.form.head_dim

    def row(self, fields: Fields, keep: list[torch.Tensor]) -> list[int]:
        """Codes, scales, both by units; channels, bits, scaling; addresses of levels, centres and spreads."""
        form, units = self.form, self.form.block // TILE
        of_tokens = form.scaling != "channel"
        row = places(form, fields, ("codes", "scale") if of_tokens else ("codes",), keep)
        row += [0] * (8 - len(row))
        row[3], row[7] = row[3] // units, row[7] // units
        row += [form.head_dim, form.bits_per_code, SCALINGS[form.scaling], self.levels.data_ptr()]
        if of_tokens:
            return row
        channels = form.channels
        assert channels is not None
        tables = made(
            channels, "float32", lambda: [x.cpu().float().contiguous() for x in (channels.center, channels.spread)]
        )
        return [*row, *(x.data_ptr() for x in tables)]
