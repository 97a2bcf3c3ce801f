"""Affine groups: scale, optional zero-point, b-bit codes. The storage of KIVI, SQuat and InnerQ.

A group is ``group`` consecutive tokens of one channel (``axis="token"``: KIVI and SQuat keys, InnerQ values) or
``group`` consecutive channels of one token (``axis="channel"``: KIVI values, InnerQ keys).

==========  ==================================================  ==========================  =====================
mode        value of a code                                     stored per group            bits at b = 2, G = 32
==========  ==================================================  ==========================  =====================
``asym``    ``zero + scale * code``                             fp16 scale, fp16 zero       3.0
``sym``     ``(-1)^sign * scale * code``                        fp16 scale, G sign bits     3.5
``hybrid``  per group, whichever of the two has the lower       fp16 scale (negative marks  3.5
            squared error                                       asym), G bits: signs, or
                                                                the zero-point
==========  ==================================================  ==========================  =====================

Scales and zero-points are rounded to fp16 before the codes are chosen, so the codes are nearest to what is read back.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.arithmetic import lasting
from kvfold.formats.base import Fields, Format
from kvfold.formats.packing import PLANES, UNIT, group_order, pack, pack_signs, signs, unpack, words_per_unit

FP16_MAX = torch.finfo(torch.float16).max


def to_fp16(x: torch.Tensor) -> torch.Tensor:
    """Round to fp16; values beyond its range go to its largest finite ones."""
    return x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)


def floor_fp16(x: torch.Tensor) -> torch.Tensor:
    """The largest finite fp16 value that is not above x (the smallest one where x is below all of them)."""
    rounded = to_fp16(x)
    bits = rounded.view(torch.int16)
    below = torch.where(rounded > 0, bits - 1, torch.where(rounded < 0, bits + 1, -0x7FFF)).to(torch.int16)
    return torch.where((rounded.float() > x) & (x >= -FP16_MAX), below.view(torch.float16), rounded)


def _codes(x: torch.Tensor, scale: torch.Tensor, levels: int) -> torch.Tensor:
    """Nearest code in [0, levels] of x / scale; 0 where the scale is 0."""
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.where(scale == 0, torch.zeros_like(x), (x / safe).round().clamp(0, levels))


def quantize_asym(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric quantization of groups along the last axis (KIVI sec. 3; InnerQ eq. 10 - 11).

    Parameters
    ----------
    x : Tensor, float32 [..., group]

    Returns
    -------
    codes : Tensor, float32 [..., group], integers in [0, 2^bits)
    scale, zero : Tensor, float16 [..., 1]

    Notes
    -----
    A constant group of an fp16 value decodes exactly. For other constants, what fp16 rounds off the zero-point becomes the
    scale of code 1: 22 bits of the value survive.
    """
    levels = (1 << bits) - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    zero = floor_fp16(low)  # not above the minimum, so that no scale is negative
    constant = low == high
    # divided by a tensor: by a number, a GPU would multiply with its reciprocal and round differently
    scale = to_fp16(torch.where(constant, low - zero.float(), (high - zero.float()) / x.new_full((), levels)))
    codes = torch.where(constant, torch.ones_like(x), _codes(x - zero.float(), scale.float(), levels))
    return codes, scale, zero


def quantize_sym(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sign and b-bit magnitude of groups along the last axis (InnerQ eq. 13); returns codes [..., group], scale [...,
    1].

    Where all magnitudes of a group are equal the scale is that magnitude itself, so that it decodes exactly.
    """
    levels = (1 << bits) - 1
    size = x.abs()
    high = size.amax(-1, keepdim=True)
    constant = size.amin(-1, keepdim=True) == high
    scale = to_fp16(torch.where(constant, high, high / x.new_full((), levels)))
    codes = torch.where(constant, torch.ones_like(x), _codes(size, scale.float(), levels))
    return codes, scale


@lasting()
def _group_order(operand: str, axis: str, groups: int, device: torch.device, inverse: bool) -> torch.Tensor:
    order = group_order(operand, axis, groups)
    return (torch.argsort(order) if inverse else order).to(device)


@dataclass(frozen=True)
class AffineGroups(Format):
    """Affine groups of ``group`` elements along ``axis``; see the module's table.

    Parameters
    ----------
    bits_per_code : {1, 2, 3, 4, 8}
    axis : {"token", "channel"}
        Along what a group runs.
    mode : {"asym", "sym", "hybrid"}
    group : int
        Elements per group: a multiple of 16 that divides ``block`` (axis "token") or ``head_dim`` (axis "channel").

    Notes
    -----
    Fields, per block and KV head: ``codes`` int16 [block / 32, 2 d b]; mode asym: ``meta`` fp16 [rows, 2, groups]
    (scales, then zero-points); modes sym and hybrid: ``scale`` fp16 [rows, groups], ``aux`` int16 [rows, groups, group
    / 16] (sign bits, or the bits of an fp32 zero-point, fp16 where a group has 16 members). A row is the groups of
    ``group`` tokens (axis "token") or of 32 tokens (axis "channel"), in the order of
    :func:`kvfold.formats.packing.group_order`.
    """

    bits_per_code: int
    axis: str
    mode: str = "asym"
    group: int = 32

    kind: ClassVar[str] = "affine"

    def __post_init__(self) -> None:
        if self.bits_per_code not in PLANES:
            raise ValueError(f"bits={self.bits_per_code}: affine groups store one of {sorted(PLANES)} bits")
        if self.head_dim % 16:
            raise ValueError(f"head_dim={self.head_dim}: packed formats need a multiple of 16")
        if self.block % UNIT:
            raise ValueError(f"block={self.block}: must be a multiple of {UNIT} tokens")
        extent, name = (self.block, "block") if self.axis == "token" else (self.head_dim, "head_dim")
        if self.group % 16 or extent % self.group:
            allowed = [g for g in range(16, extent + 1, 16) if extent % g == 0]
            raise ValueError(f"group={self.group}: {name}={extent} is not divisible by it; allowed: {allowed}")

    @property
    def _grid(self) -> tuple[int, int]:
        if self.axis == "token":
            return (self.block // self.group, self.head_dim)
        return (self.block, self.head_dim // self.group)

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        codes = (self.block // UNIT, words_per_unit(self.head_dim, self.bits_per_code))
        rows, groups = self._rows
        if self.mode == "asym":
            return {"codes": (codes, torch.int16), "meta": ((rows, 2, groups), torch.float16)}
        return {
            "codes": (codes, torch.int16),
            "scale": ((rows, groups), torch.float16),
            "aux": ((rows, groups, self.group // 16), torch.int16),
        }

    @property
    def _rows(self) -> tuple[int, int]:
        """Rows of group metadata in a block, and groups in a row."""
        if self.axis == "token":
            return (self.block // self.group, self.head_dim)
        return (self.block // UNIT, UNIT * self.head_dim // self.group)

    def _order(self, device: torch.device, inverse: bool = False) -> torch.Tensor:
        return _group_order(self.operand, self.axis, self._rows[1], device, inverse)

    def _put(self, x: torch.Tensor) -> torch.Tensor:
        """Metadata [..., *grid, n] -> as stored, [..., rows, groups, n]."""
        rows, groups = self._rows
        return x.flatten(-3, -2).unflatten(-2, (rows, groups))[..., self._order(x.device), :]

    def _get(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`_put`."""
        if self.operand != "plain":
            x = x[..., self._order(x.device, inverse=True), :]
        return x.flatten(-3, -2).unflatten(-2, self._grid)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """[..., T, d] -> groups on the last axis: [..., blocks, *grid, group]."""
        x = x.unflatten(-2, (-1, self.block))
        if self.axis == "token":
            return x.unflatten(-2, (-1, self.group)).transpose(-1, -2)
        return x.unflatten(-1, (-1, self.group))

    def _join(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`_split`."""
        x = x.transpose(-1, -2).flatten(-3, -2) if self.axis == "token" else x.flatten(-2)
        return x.flatten(-3, -2)

    def _store(self, codes: torch.Tensor, **meta: torch.Tensor) -> Fields:
        words = pack(self._join(codes).to(torch.uint8), self.bits_per_code, self.operand)
        return {"codes": words.unflatten(-2, (-1, self.block // UNIT)), **meta}

    def encode(self, x: torch.Tensor, mode: str | None = None) -> Fields:
        """Encode; ``mode="sym"`` makes a hybrid format choose symmetric groups throughout (InnerQ's Hybrid_Prefill)."""
        groups = self._split(x.float())
        if self.mode == "asym":
            codes, scale, zero = quantize_asym(groups, self.bits_per_code)
            return self._store(codes, meta=torch.stack([self._put(scale), self._put(zero)], -3).squeeze(-1))
        codes, scale = quantize_sym(groups, self.bits_per_code)
        aux = pack_signs(groups < 0, self.operand)
        if self.mode == "hybrid" and mode != "sym":
            a_codes, a_scale, a_zero = quantize_asym(groups, self.bits_per_code)
            a_zero = a_zero.float()
            a_scale = a_scale.clamp_min(0)  # below fp16's range it would be negative, which means symmetric here
            if self.group != 16:  # in its own 32 bits the zero-point of a constant group needs no help from the scale
                constant = groups.amin(-1, keepdim=True) == groups.amax(-1, keepdim=True)
                a_zero = torch.where(constant, groups[..., :1], a_zero)
                a_scale = torch.where(constant, torch.zeros_like(a_scale), a_scale)
            a_value = a_zero + a_scale.float() * a_codes
            s_value = torch.where(groups < 0, -1.0, 1.0) * scale.float() * codes
            wins = (a_value - groups).square().sum(-1) < (s_value - groups).square().sum(-1)
            codes = torch.where(wins.unsqueeze(-1), a_codes, codes)
            scale = torch.where(wins.unsqueeze(-1), -a_scale, scale)
            aux = torch.where(wins.unsqueeze(-1), self._zero_bits(a_zero), aux)
        return self._store(codes, scale=self._put(scale).squeeze(-1), aux=self._put(aux))

    def _zero_bits(self, zero: torch.Tensor) -> torch.Tensor:
        """Zero-point [..., 1] as int16 words [..., group / 16]; words past its 32 bits are 0."""
        zero = zero.squeeze(-1).contiguous()
        words = (zero.to(torch.float16) if self.group == 16 else zero).view(torch.int16)
        words = words.unflatten(-1, (zero.shape[-1], -1))
        return torch.nn.functional.pad(words, (0, self.group // 16 - words.shape[-1]))

    def _zero_value(self, aux: torch.Tensor) -> torch.Tensor:
        if self.group == 16:
            return aux.view(torch.float16).float()
        return aux[..., :2].contiguous().view(torch.float32)

    def decode(self, fields: Fields) -> torch.Tensor:
        codes = unpack(fields["codes"].flatten(-3, -2), self.bits_per_code, self.operand, self.head_dim, torch.float32)
        codes = codes.unflatten(-2, (-1, self.group)) if self.axis == "token" else codes.unflatten(-1, (-1, self.group))
        if self.mode == "asym":
            meta = fields["meta"].float()
            scale, zero = (self._spread(self._get(meta[..., i, :].unsqueeze(-1))) for i in (0, 1))
        else:
            stored, aux = self._get(fields["scale"].unsqueeze(-1)), self._get(fields["aux"])
            scale, zero = self._spread(stored.float().abs()), torch.zeros((), dtype=torch.float32, device=codes.device)
            if self.mode == "hybrid":  # asymmetric groups have no signs, symmetric ones no zero-point
                asym = torch.signbit(stored)
                zero = self._spread(torch.where(asym, self._zero_value(aux), zero))
                aux = torch.where(asym, torch.zeros_like(aux), aux)
            codes = codes * self._spread(signs(aux, self.operand))
        return torch.addcmul(zero, scale, codes).flatten(*((-3, -2) if self.axis == "token" else (-2, -1)))

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """Per group [..., blocks, *grid, n], n of them 1 or ``group``, as the codes lie in :meth:`decode`."""
        return x.flatten(-4, -3).transpose(-1, -2) if self.axis == "token" else x.flatten(-4, -3)

    def describe(self) -> str:
        along = f"{self.group} tokens of a channel" if self.axis == "token" else f"{self.group} channels of a token"
        return f"{self.bits_per_code}-bit {self.mode}, groups of {along} ({self.bits:.2f} bits)"
