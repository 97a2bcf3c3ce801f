"""Codes into a table of levels (TurboQuant, KVQuant)."""

import torch
import triton
import triton.language as tl

from kvfold.arithmetic import beside, lasting
from kvfold.formats import Lookup
from kvfold.formats.lookup import ChannelScales
from kvfold.kernels.generic.readers._codes import (
    LEVELS,
    PLAIN,
    bounded,
    channels,
    codes,
    level_table,
    of_tokens,
    token_of,
)
from kvfold.kernels.generic.readers.base import Reader

SCALING = {"rms": 0, "range": 1, "channel": 2}


@triton.jit
def read_lookup(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    D: tl.constexpr = SPEC[0]
    BITS: tl.constexpr = SPEC[1]
    KIND: tl.constexpr = SPEC[2]
    W: tl.constexpr = 4 * four.shape[0]
    if BITS == 8:
        x = tl.load(tables[0] + codes(fields[0], first, left, four, T, D, BITS, PLAIN).to(tl.int32))
    else:
        x = codes(fields[0], first, left, four, T, D, BITS, LEVELS, tables[0])
    scale = tl.full([T], 1.0, tl.float32)
    if KIND == 0:
        scale = of_tokens(fields[1], first, left, T, 1, 0)
    elif KIND == 1:
        token = tl.minimum(token_of(T, BITS), left - 1)
        at = fields[1] + (first + token) * 2
        x = bounded(tl.load(at) + tl.load(at + 1) * x)
    else:
        column = channels(four)[None, None, None, None, :]
        at = tables[1] + head * (2 * D) + column
        inside = column < D
        x = tl.load(at, mask=inside, other=0.0) + tl.load(at + D, mask=inside, other=0.0) * x
    return tl.reshape(x, (T, W)), scale


class LookupReader(Reader[Lookup]):
    """``tables``: levels; for constants per channel also those, fp16 [heads, 2 (center, spread), d]."""

    read = read_lookup

    def __init__(self, form: Lookup) -> None:
        super().__init__(form)
        self.names = ("codes",) if form.scaling == "channel" else ("codes", "scale")

    @property
    def spec(self) -> tuple[int, ...]:
        return (self.form.head_dim, self.form.bits_per_code, SCALING[self.form.scaling])

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        form = self.form
        levels = levels_on(form.levels, device) if form.bits_per_code == 8 else level_table(form.levels, device)
        if self.form.scaling != "channel":
            return (levels,)
        assert self.form.channels is not None
        return (levels, constants_of(self.form.channels.on(device), max(map(abs, form.levels))))


@lasting(256)
def levels_on(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.float16, device=device)


@beside
def constants_of(channels: ChannelScales, most: float) -> torch.Tensor:
    """Constants whose values fp16 holds for levels up to ``most``; made once: graphs know where they are."""
    center, spread = channels.center.clamp(-32752, 32752), channels.spread.clamp(max=32752 / max(most, 1.0))
    return torch.stack((center, spread), 1).to(torch.float16).contiguous()
