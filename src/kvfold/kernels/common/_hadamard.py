# mypy: ignore-errors
"""The Hadamard rotation inside of a kernel: its 16 x 16 matrix as an operand, sums and differences of tiles, signs."""
# ruff: noqa: RUF005  (the compiler knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.kernels.common._codes import nibble_weight
from kvfold.kernels.common._registers import _zero4
from kvfold.kernels.common._warp import as_float, as_int, load_shared, mma, pack_half2, transpose8

SIGN_BITS = gl.constexpr(-2147450880)  # 0x80008000


@gluon.jit
def _entry(i, j, MIX: gl.constexpr, BF16: gl.constexpr):
    """16 bits: element (i, j) of the 16 x 16 matrix of Hadamard blocks of MIX (or 16) channels, without its factor."""
    x = i & j & (MIX - 1)
    x = x ^ (x >> 2)
    x = (x ^ (x >> 1)) & 1
    if BF16:
        one = i * 0 + 0x3F80
    else:
        one = i * 0 + 0x3C00
    out = one | (x << 15)
    if MIX < 16:
        out = gl.where(((i ^ j) & (16 - MIX)) == 0, out, 0)
    return out


@gluon.jit
def hadamard(g, t, MIX: gl.constexpr, BF16: gl.constexpr):
    """The four registers of that matrix as the first operand."""
    out = ()
    for r in gl.static_range(4):
        i = g + 8 * (r % 2)
        j = 2 * t + 8 * (r // 2)
        out = out + (_entry(i, j, MIX, BF16) | (_entry(i, j + 1, MIX, BF16) << 16),)
    return out


@gluon.jit
def mix_tiles(x, CT: gl.constexpr, MIX: gl.constexpr):
    """Sums and differences of tiles of 16 channels: what is left of the rotation of blocks of MIX channels."""
    for s in gl.static_range(4):
        if (32 << s) <= MIX:
            new = ()
            for c in gl.static_range(CT):
                a = x[c]
                b = x[c ^ (1 << s)]
                if (c >> s) % 2 == 0:
                    new = new + ((a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]),)
                else:
                    new = new + ((b[0] - a[0], b[1] - a[1], b[2] - a[2], b[3] - a[3]),)
            x = new
    return x


@gluon.constexpr_function
def _sign_places(i):
    return SIGN_BITS.value if i == 0 else 0x80008000 >> i


@gluon.jit
def sign_bits(signs, lane, D: gl.constexpr):
    """Of channels 2 (lane + 32 i) and the next: whether they change sign, in bits 15 - i and 31 - i."""
    out = lane * 0
    for i in gl.static_range(D // 64):
        low = gl.load(signs + 2 * (lane + 32 * i))
        high = gl.load(signs + 2 * (lane + 32 * i) + 1)
        word = ((as_int(low) >> 16) & 0x8000) | (as_int(high) & (-2147483648))
        out = out | ((word >> i) & _sign_places(i))
    return out


@gluon.jit
def with_signs(word, bits, I: gl.constexpr):
    return word ^ ((bits << I) & SIGN_BITS)


@gluon.jit
def turned_tiles(x, matrix, lane, CT: gl.constexpr, MIX: gl.constexpr):
    """H x for operand pairs x of a vector's channel tiles: accumulators. ``matrix`` is a lane's address of the operand."""
    matrix = load_shared(matrix, 0, 4)
    out = ()
    for ct in gl.static_range(CT):
        out = out + (mma(matrix[0], matrix[1], matrix[2], matrix[3], x[2 * ct], x[2 * ct + 1], _zero4(lane), False),)
    return mix_tiles(out, CT, MIX)


@gluon.jit
def rest(a, b, word):
    """What rounding of a pair to bf16 left over."""
    return a - as_float(word << 16), b - as_float(word & -65536)


@gluon.jit
def turned_back(out, lane, signs_ptr, D: gl.constexpr, BITS: gl.constexpr, MIX: gl.constexpr, NT: gl.constexpr):
    """Sums of values in the model's basis. They pass the tensor core as two bf16 parts, which keep 16 bits of them. BITS: of
    codes in whose units they are; 0: they are in those of values."""
    CT: gl.constexpr = D // 16
    g = lane // 4
    t = lane % 4
    full = ()
    for n in gl.static_range(NT):
        for ct in gl.static_range(CT):
            f = float(1 << (24 - nibble_weight(D, BITS, ct))) if BITS else 1.0
            x = out[n * CT + ct]
            full = full + ((x[0] * f, x[1] * f, x[2] * f, x[3] * f),)
    if MIX > 1:
        matrix = hadamard(g, t, MIX, True)
        FACTOR: gl.constexpr = MIX**-0.5
        turned = ()
        for n in gl.static_range(NT):
            mixed = ()
            for ct in gl.static_range(CT):
                x = full[n * CT + ct]
                low = pack_half2(x[0], x[1], True)
                high = pack_half2(x[2], x[3], True)
                l0, l1 = rest(x[0], x[1], low)
                h0, h1 = rest(x[2], x[3], high)
                acc = mma(
                    matrix[0], matrix[1], matrix[2], matrix[3],
                    transpose8(pack_half2(l0, l1, True)), transpose8(pack_half2(h0, h1, True)), _zero4(lane), True,
                )  # fmt: skip
                acc = mma(matrix[0], matrix[1], matrix[2], matrix[3], transpose8(low), transpose8(high), acc, True)
                mixed = mixed + (acc,)
            mixed = mix_tiles(mixed, CT, MIX)
            for ct in gl.static_range(CT):
                s0 = gl.load(signs_ptr + ct * 16 + g) * FACTOR
                s1 = gl.load(signs_ptr + ct * 16 + g + 8) * FACTOR
                x = mixed[ct]
                turned = turned + ((x[0] * s0, x[1] * s0, x[2] * s1, x[3] * s1),)
        full = turned
    return full
