"""Lookup tables: b-bit codes into fixed levels, scaled per token or per channel. Storage of TurboQuant and KVQuant.

============  =======================================  ============================  ========================
scaling       value of a code                          stored                        bits at b = 2, d = 128
============  =======================================  ============================  ========================
``rms``       ``rms * level``                          fp16 rms per token            2.125
``range``     ``middle + half * level``                fp16 middle and half of the   2.25
                                                       range per token
``channel``   ``center_c + spread_c * level``          nothing per token; the two    2.0
                                                       are constants of the layer
============  =======================================  ============================  ========================
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvfold.arithmetic import beside, lasting
from kvfold.formats.affine import to_fp16
from kvfold.formats.base import Fields, Format
from kvfold.formats.packing import PLANES, UNIT, pack, unpack, words_per_unit


class ChannelScales:
    """Constants of a layer's channels: a value is ``center + spread * level``.

    Parameters
    ----------
    center, spread : Tensor, float32 [num_kv_heads, head_dim]
    """

    def __init__(self, center: torch.Tensor, spread: torch.Tensor) -> None:
        self.center, self.spread = center, spread

    def on(self, device: torch.device) -> "ChannelScales":
        """The same constants on another device; moved once."""
        return self if device == self.center.device else self._moved(device)

    @beside
    def _moved(self, device: torch.device) -> "ChannelScales":
        return ChannelScales(self.center.to(device), self.spread.to(device))


@dataclass(frozen=True)
class Lookup(Format):
    """Codes into ``levels``; see the module's table.

    Parameters
    ----------
    bits_per_code : {1, 2, 3, 4, 8}
    levels : tuple of float
        2^bits_per_code values, ascending.
    scaling : {"rms", "range", "channel"}
    channels : ChannelScales or None
        Constants of scaling "channel"; without them the format knows its size only.

    Notes
    -----
    Fields, per block and KV head: ``codes`` int16 [block / 32, 2 d b], in the order of :mod:`kvfold.formats.packing`;
    scaling "rms": ``scale`` fp16 [block, 1]; scaling "range": ``scale`` fp16 [block, 2] (middle, half of the range).
    """

    bits_per_code: int
    levels: tuple[float, ...]
    scaling: str = "rms"
    channels: ChannelScales | None = field(default=None, compare=False, repr=False)

    kind: ClassVar[str] = "lookup"

    def __post_init__(self) -> None:
        if self.bits_per_code not in PLANES:
            raise ValueError(f"bits={self.bits_per_code}: lookup tables store one of {sorted(PLANES)} bits")
        if len(self.levels) != 1 << self.bits_per_code or list(self.levels) != sorted(self.levels):
            raise ValueError(f"levels: {self.bits_per_code} bits need {1 << self.bits_per_code} of them, ascending")
        if self.head_dim % 16:
            raise ValueError(f"head_dim={self.head_dim}: packed formats need a multiple of 16")
        if self.block % UNIT:
            raise ValueError(f"block={self.block}: must be a multiple of {UNIT} tokens")

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]]
        fields = {"codes": ((self.block // UNIT, words_per_unit(self.head_dim, self.bits_per_code)), torch.int16)}
        if self.scaling == "channel":
            return fields
        return {**fields, "scale": ((self.block, 1 if self.scaling == "rms" else 2), torch.float16)}

    def _affine(self, scale: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(offset, factor) that take levels to values, broadcastable to [batch, num_kv_heads, tokens, head_dim]."""
        if self.scaling == "channel":
            assert self.channels is not None
            channels = self.channels.on(device)
            return channels.center.unsqueeze(-2), channels.spread.unsqueeze(-2)
        assert scale is not None
        scale = scale.float()
        return (torch.zeros_like(scale), scale) if self.scaling == "rms" else (scale[..., :1], scale[..., 1:])

    def encode(self, x: torch.Tensor) -> Fields:
        x = x.float()
        scale = None
        if self.scaling == "rms":
            scale = to_fp16(x.square().mean(-1, keepdim=True).sqrt())
        elif self.scaling == "range":
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
            middle = to_fp16(low + (high - low) / 2)
            # what fp16 rounds off the middle widens the range, so that both ends stay inside
            half = to_fp16(torch.maximum(high - middle.float(), middle.float() - low))
            scale = torch.cat([middle, half], -1)
        offset, factor = self._affine(scale, x.device)
        levels = _levels(self.levels, x.device)
        safe = torch.where(factor == 0, torch.ones_like(factor), factor)
        codes = torch.bucketize(((x - offset) / safe).contiguous(), (levels[1:] + levels[:-1]) / 2)
        words = pack(codes, self.bits_per_code, self.operand)
        fields = {"codes": words.unflatten(-2, (-1, self.block // UNIT))}
        return fields if scale is None else {**fields, "scale": scale.unflatten(-2, (-1, self.block))}

    def decode(self, fields: Fields) -> torch.Tensor:
        codes = unpack(fields["codes"].flatten(-3, -2), self.bits_per_code, self.operand, self.head_dim)
        scale = None if self.scaling == "channel" else fields["scale"].flatten(-3, -2)
        offset, factor = self._affine(scale, codes.device)
        levels = _levels(self.levels, codes.device)
        return offset + factor * levels[codes.long()]

    def describe(self) -> str:
        scales = {"rms": "an rms per token", "range": "a range per token", "channel": "constants per channel"}
        return f"{self.bits_per_code}-bit lookup, {scales[self.scaling]} ({self.bits:.2f} bits)"


@lasting(256)
def _levels(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """On a device; to bring them there waits for it."""
    return torch.tensor(levels, dtype=torch.float32, device=device)
