"""The same codes in another order (:mod:`kvfold.formats.packing`): of saved caches, where kernels read another one today."""

import torch

from kvfold.formats.affine import AffineGroups
from kvfold.formats.base import Fields, Format
from kvfold.formats.lookup import Lookup
from kvfold.formats.lowrank import LowRank
from kvfold.formats.mixed import MixedTokens
from kvfold.formats.outliers import Outliers
from kvfold.formats.packing import UNIT, pack, pack_signs, unpack, unpack_signs
from kvfold.formats.paged import Paged
from kvfold.formats.sketch import SignSketch
from kvfold.formats.uniform import UniformTokens

KNOWN = (AffineGroups, Lookup, MixedTokens, SignSketch, UniformTokens)


def reorderable(form: Format) -> bool:
    """Whether :func:`reordered` knows how a format's codes lie."""
    while isinstance(form, Paged | LowRank | Outliers):
        form = form.inner
    return isinstance(form, KNOWN)


def reordered(fields: Fields, old: Format, new: Format) -> Fields:
    """Fields of a format as the same format with another ``operand`` stores them, bit for bit what it would have encoded.

    Parameters
    ----------
    fields : Fields
        As ``old`` has them: ``[batch, num_kv_heads, blocks, ...]``.
    old, new : Format
        :func:`reorderable`.
    """
    if old.operand == new.operand:
        return fields
    while isinstance(old, Paged | LowRank | Outliers):
        assert isinstance(new, Paged | LowRank | Outliers)
        old, new = old.inner, new.inner
    if isinstance(old, SignSketch):
        return fields | {"signs": _codes(fields["signs"], 1, old, new)}
    assert isinstance(old, AffineGroups | Lookup | MixedTokens | UniformTokens)
    made = {"codes": _codes(fields["codes"], old.bits_per_code, old, new)}
    if isinstance(old, MixedTokens):
        which = unpack_signs(fields["which"].unflatten(-1, (-1, UNIT // 16)), old.operand)
        made["which"] = pack_signs(which, new.operand).flatten(-2)
    if isinstance(old, AffineGroups):
        assert isinstance(new, AffineGroups)
        made |= _groups(fields, old, new)
    return fields | made


def _codes(words: torch.Tensor, bits: int, old: Format, new: Format) -> torch.Tensor:
    codes = unpack(words.flatten(-3, -2), bits, old.operand, old.width)
    return pack(codes, bits, new.operand).unflatten(-2, (-1, old.block // UNIT))


def _groups(fields: Fields, old: AffineGroups, new: AffineGroups) -> Fields:
    """What lies beside codes, group by group."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return new._put(old._get(x))

    if old.mode == "asym":
        return {"meta": torch.stack([moved(x.unsqueeze(-1)) for x in fields["meta"].unbind(-2)], -3).squeeze(-1)}
    scale, aux = moved(fields["scale"].unsqueeze(-1)), moved(fields["aux"])
    signed = pack_signs(unpack_signs(aux, old.operand), new.operand)
    if old.mode == "hybrid":  # 32 bits of an asymmetric group are its zero-point
        signed = torch.where(torch.signbit(scale), aux, signed)
    return {"scale": scale.squeeze(-1), "aux": signed}
