# mypy: ignore-errors
"""Codes of affine groups in the fused kernels: where they lie, how they come to a warp, how they become MMA operands."""

# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import _arrays, _fetch, _field, _main, _operand, code_bytes
from kvfold.kernels.common._registers import _item
from kvfold.kernels.common._warp import either, load_shared, odd_bytes, times, without

SIGN_BITS = gl.constexpr(-2147450880)  # 0x80008000


# ---- where the codes of a tile lie (kvfold.formats.packing) ----------------------------------------------------------


@gluon.constexpr_function
def meta_bytes(dim, axis_channel, mode, group):
    """Bytes of (scales and zero-points, or scales; sign words) of a row of groups."""
    groups = 32 * dim // group if axis_channel else dim
    return (4 * groups, 0) if mode == 0 else (2 * groups, 4 * groups)


@gluon.constexpr_function
def _kept(dim, bits, tiles, j):
    """Which sign bits of a lane stay in the word that is shifted for register j of a group's fragments (two tiles).

    A lane finds its signs at bits 3, 7, 11, 15 of each half. Shifted so that bit 3 + 4j comes to be the operand's sign, those
    of registers j + 1 and j + 2 (mod 4) lie on bits 3 and 7: they may stay where no code lies there. One choice for all
    registers of a group lets them share a word.
    """
    low = [_field(dim, _main(bits), tile)[1] % 8 for tile in tiles]
    on3 = any(k <= 3 < k + bits for k in low)
    on7 = any(k <= 7 < k + bits for k in low)
    if on3 and on7:
        kept = {j}
    elif on3:
        kept = {j, (j + 2) % 4}
    elif on7:
        kept = {j, j ^ 1}
    else:
        kept = {0, 1, 2, 3}
    mask = sum(1 << (3 + 4 * i) for i in kept) * 0x10001
    return mask - (1 << 32) if mask >> 31 else mask


@gluon.constexpr_function
def _signed_mask(bits, k):
    return (((((1 << bits) - 1) << k) | 0x8000) * 0x10001) - (1 << 32)


@gluon.jit
def _bytes(words, D: gl.constexpr, BITS: gl.constexpr):
    """Words of codes cut in two, so that no code lies on an operand's sign bit; 3 bits stay as they are."""
    if BITS == 3:
        return words
    else:
        low = ()
        high = ()
        for i in gl.static_range(len(words)):
            low = low + (words[i] & 0x00FF00FF,)
            high = high + (odd_bytes(words[i]),)
        return low + high


@gluon.jit
def _counting(signs, asym, KEPT: gl.constexpr, HYBRID: gl.constexpr):
    if HYBRID:
        return without(signs, asym, KEPT)
    else:
        return signs & KEPT


@gluon.jit
def _signed_register(
    cut, signs, asym, I: gl.constexpr, J: gl.constexpr, TILE: gl.constexpr, OTHER: gl.constexpr, D: gl.constexpr,
    BITS: gl.constexpr, HYBRID: gl.constexpr,
):  # fmt: skip
    ARRAY: gl.constexpr = _item(_field(D, BITS, TILE), 0)
    BIT: gl.constexpr = _item(_field(D, BITS, TILE), 1)
    HALF: gl.constexpr = 4 * _arrays(D, BITS) if BIT >= 8 else 0
    s = _counting(signs, asym, _kept(D, BITS, (TILE, OTHER), J), HYBRID)
    return either(cut[HALF + 4 * ARRAY + I], s << (12 - 4 * J), _signed_mask(BITS, BIT % 8))


@gluon.jit
def _signed(
    cut, signs, asym, TILE: gl.constexpr, OTHER: gl.constexpr, KS: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr,
    HYBRID: gl.constexpr,
):  # fmt: skip
    """As :func:`_operand`, with signs: ``signs`` are the words of the group's two rows, bits shifted left by 3 - t; those
    where ``asym`` is all ones do not count. TILE is number KS of the group's two tiles."""
    out = ()
    if BITS == 3:
        plain = _operand(cut, TILE, D, BITS)
        for i in gl.static_range(4):
            s = _counting(signs[i % 2] << (12 - 4 * (2 * KS + i // 2)), asym[i % 2], SIGN_BITS, HYBRID)
            out = out + (plain[i] | s,)
    else:
        for i in gl.static_range(4):
            out = out + (
                _signed_register(cut, signs[i % 2], asym[i % 2], i, 2 * KS + i // 2, TILE, OTHER, D, BITS, HYBRID),
            )
    return out


@gluon.jit
def _own_zero(base, mine, own, AUX: gl.constexpr, META: gl.constexpr, AT: gl.constexpr):
    """The fp32 zero-point of group AT + own of a hybrid row, 0 if it has none."""
    zero = load_shared(base + own * 4, AUX + 4 * AT, 1)[0]
    pair = load_shared(mine + own // 2 * 4, META + 2 * AT, 1)[0]
    return gl.where(times(pair, 1 << (16 - own % 2 * 16)) < 0, zero, 0)


# ---- from global memory to a warp's stage ---------------------------------------------------------------------------


@gluon.jit
def _fetch_stage(
    base, copier, codes, meta, aux, unit, first, valid, D: gl.constexpr, BITS: gl.constexpr, AXIS: gl.constexpr,
    MODE: gl.constexpr, GROUP: gl.constexpr, NB: gl.constexpr, TO: gl.constexpr, COPIERS: gl.constexpr,
):  # fmt: skip
    """One operand of a stage: blocks ``first`` to ``first + NB`` of the region that starts at block ``unit``."""
    CODE: gl.constexpr = code_bytes(D, BITS)
    ROW: gl.constexpr = _item(meta_bytes(D, AXIS, MODE, GROUP), 0)
    WORDS: gl.constexpr = _item(meta_bytes(D, AXIS, MODE, GROUP), 1)
    to = base + copier * 16
    at = (unit + first).to(gl.int64)
    _fetch(to, codes + at * CODE + copier * 16, copier, valid, TO, CODE, NB, COPIERS)
    if AXIS == 0 and GROUP > 32:
        for j in gl.static_range(NB):
            row = (unit + (first + j)) // (GROUP // 32)
            source = meta + row.to(gl.int64) * ROW + copier * 16
            _fetch(to, source, copier, valid - j, TO + NB * CODE + j * ROW, ROW, 1, COPIERS)
    else:
        _fetch(to, meta + at * ROW + copier * 16, copier, valid, TO + NB * CODE, ROW, NB, COPIERS)
    if MODE > 0:
        _fetch(to, aux + at * WORDS + copier * 16, copier, valid, TO + NB * (CODE + ROW), WORDS, NB, COPIERS)
