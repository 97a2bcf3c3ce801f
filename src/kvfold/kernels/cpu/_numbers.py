"""What the CPU kernel's loops and readers are made of: how they are compiled, and numbers that Numba has no words for."""
# mypy: ignore-errors

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import RLock
from time import perf_counter
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, config, njit, types
from numba.core import event
from numba.extending import intrinsic as _intrinsic

from kvfold.arithmetic import lasting
from kvfold.kernels.compiling import compiling

TILE = 32
"""Tokens decoded at once: a packed unit."""

FAST = {"reassoc", "contract", "nsz"}
"""Sums may be reordered for vectors; NaN and infinity keep their meaning."""


def intrinsic(function) -> Any:
    """A function for compiled code, which builds its instructions."""
    return _intrinsic(function)


I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


@lasting()
def _kept_in() -> str:
    """A folder for what was compiled from these sources: Numba itself looks for changes in a function's own file only, and
    would go on with what an older version of another one was compiled into."""
    here = Path(__file__).parent
    stamp = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.rglob("*.py")))).hexdigest()[:12]
    own = here / "__pycache__"
    places = [config.CACHE_DIR] if config.CACHE_DIR else [own, "~/.cache/kvfold"]
    for place in places:
        with suppress(OSError, RuntimeError):  # not to be written, nobody's home
            folder = Path(place).expanduser() / f"numba-{stamp}"
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):  # it may be there and be another user's
                pass
            for old in own.glob("numba-*"):  # other places may be those of other versions, too
                if old.name != folder.name:
                    shutil.rmtree(old, ignore_errors=True)
            return str(folder)
    return config.CACHE_DIR


_COMPILING = RLock()


def _compiled(compile, function) -> Any:
    """``compile(cache)(function)``, once for all processes if there is a place to keep the result."""
    with _COMPILING:
        before, config.CACHE_DIR = config.CACHE_DIR, _kept_in()
        try:
            return compile(True)(function)
        except RuntimeError:
            return compile(False)(function)
        finally:
            config.CACHE_DIR = before


class _Listener(event.Listener):
    """Hears of functions that are compiled, not of those that come from the cache; Numba holds its lock meanwhile."""

    def on_start(self, event) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith("kvfold."):
            compiling.begin()

    def on_end(self, event) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith("kvfold."):
            compiling.end()


event.register("numba:compile", _Listener())


def loops(function) -> Any:
    """Compile a function when it is first called."""
    return _compiled(lambda cache: njit(fastmath=FAST, nogil=True, cache=cache), function)


DECODE = types.void(
    types.CPointer(types.int64),  # row
    types.int64,  # batch
    types.int64,  # head
    types.int64,  # unit
    types.CPointer(types.float32),  # tile
    types.int64,  # width
    types.CPointer(types.float32),  # scratch
)


class Decoder:
    """A reader's function, compiled when its address is first asked for, apart from the loops that call it."""

    def __init__(self, function) -> None:
        self._function, self._compiled = function, None

    @property
    def address(self) -> int:
        with _COMPILING:  # another one's code would be freed
            if self._compiled is None:
                before, begun = compiling.seconds, perf_counter()
                self._compiled = _compiled(lambda cache: cfunc(DECODE, cache=cache), self._function)
                if not self._compiled.cache_hits:  # the functions it calls are in it
                    compiling.seconds = before + perf_counter() - begun
        return self._compiled.address


def decoder(function) -> Decoder:
    """Make ``function(row, batch, head, unit, tile, width, scratch)`` a reader's
    (:class:`~kvfold.kernels.cpu.readers.base.CPUReader`).

    It is given pointers (``carray`` makes arrays of them), and is best a call of a function under :func:`loops`.
    """
    return Decoder(function)


@intrinsic
def call(typing, address, row, batch, head, unit, tile, width, scratch):
    """Call a :class:`Decoder` by its address; all arguments are integers."""

    def build(context, builder, signature, args):
        whole, number = ir.PointerType(I64), ir.PointerType(F32)
        kind = ir.FunctionType(ir.VoidType(), [whole, I64, I64, I64, number, I64, number])
        function = builder.inttoptr(args[0], ir.PointerType(kind))
        pointers = {1: whole, 5: number, 7: number}
        given = [builder.inttoptr(a, pointers[i]) if i in pointers else a for i, a in enumerate(args) if i]
        builder.call(function, given)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), build


# Numba widens integers to 64 bits, which halves vectors and has no conversion to float: these stay at 32.


@intrinsic
def address(typing, x):
    """An integer as a pointer."""

    def build(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), build


@intrinsic
def field(typing, byte, shift, mask):
    """``float32((byte >> shift) & mask)``."""

    def build(context, builder, signature, args):
        byte, shift, mask = builder.zext(args[0], I32), *(builder.trunc(a, I32) for a in args[1:])
        return builder.uitofp(builder.and_(builder.lshr(byte, shift), mask), F32)

    return types.float32(types.uint8, types.int64, types.int64), build


def has_halves() -> bool:
    """Whether the processor that is compiled for converts fp16 itself, subnormal numbers included whatever its mode."""
    if "x86" not in llvmlite.binding.get_default_triple():
        return llvmlite.binding.get_default_triple().startswith(("aarch64", "arm64"))
    if config.CPU_FEATURES is not None:  # NUMBA_CPU_FEATURES, or NUMBA_CPU_NAME=generic
        return "+f16c" in config.CPU_FEATURES.split(",")
    return bool(config.ENABLE_AVX and llvmlite.binding.get_host_cpu_features().get("f16c"))


@intrinsic
def half(typing, word):
    """Value of fp16 bits. Without an instruction for it a subnormal one is converted as an integer: processors may flush
    subnormals to zero."""

    def build(context, builder, signature, args):
        if has_halves():
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), F32)

        def constant(x: int) -> ir.Constant:
            return ir.Constant(I32, x)

        word = builder.zext(args[0], I32)
        size = builder.and_(word, constant(0x7FFF))
        small = builder.fmul(builder.uitofp(size, F32), ir.Constant(F32, 2.0**-24))
        high = builder.icmp_unsigned(">=", size, constant(0x7C00))  # infinity or NaN
        exponent = builder.select(high, constant(224 << 23), constant(112 << 23))
        normal = builder.bitcast(builder.add(builder.shl(size, constant(13)), exponent), F32)
        value = builder.select(builder.icmp_unsigned("<", size, constant(0x0400)), small, normal)
        sign = builder.shl(builder.and_(word, constant(0x8000)), constant(16))
        return builder.bitcast(builder.or_(builder.bitcast(value, I32), sign), F32)

    return types.float32(types.uint16), build


@intrinsic
def as_float(typing, bits):
    """Float32 of 32 bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), build


@intrinsic
def flip(typing, x, word, shift):
    """Negate ``x`` where bit ``31 - shift`` of ``word`` is set."""

    def build(context, builder, signature, args):
        bit = builder.and_(builder.shl(args[1], builder.trunc(args[2], I32)), ir.Constant(I32, 1 << 31))
        return builder.bitcast(builder.xor(builder.bitcast(args[0], I32), bit), F32)

    return types.float32(types.float32, types.int32, types.int64), build


@loops
def exp(x):
    """``exp(x)`` for x <= 0 to float32's precision, in operations that have vector forms."""
    low = x if x > np.float32(-87.0) else np.float32(-87.0)
    n = np.int32(low * np.float32(1.44269504) - np.float32(0.5))
    f = np.float32(n)
    r = (low - f * np.float32(0.693359375)) + f * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    p = p * as_float(np.int32((n + np.int32(127)) << np.int32(23)))
    below = np.float32(0.0) if x < np.float32(-87.0) else x  # NaN stays NaN
    return p if x >= np.float32(-87.0) else below


@loops
def copy(x, y):
    """``y[:len(x)] = x``. Numba's own assignment between arrays has an error of wrong sizes to say, and the strings that it
    brings for that take a fifth of the time of compiling."""
    for i in range(x.shape[0]):
        y[i] = x[i]


@loops
def unpack(data, bits, codes):
    """Codes of a unit as float32; see :mod:`kvfold.formats.packing`."""
    count = codes.shape[0]
    width = 2 if bits == 3 else bits
    size = count * width // 8
    for f in range(8 // width):
        for i in range(size):
            codes[f * size + i] = field(data[i], f * width, (1 << width) - 1)
    if bits == 3:
        high = data[size:]
        size = count // 8
        for f in range(8):
            for i in range(size):
                codes[f * size + i] += np.float32(4.0) * field(high[i], f, 1)


@loops
def bytes_at(row, first, batch, head, block, count):
    """``count`` bytes of a block of the field whose place (address, strides of batch, head and block in bytes) begins at
    ``row[first]``."""
    at = row[first] + batch * row[first + 1] + head * row[first + 2] + block * row[first + 3]
    return carray(address(at), count, np.uint8)


@loops
def halves_at(row, first, batch, head, block, count):
    """The same as words of 16 bits; ``half`` makes numbers of them."""
    at = row[first] + batch * row[first + 1] + head * row[first + 2] + block * row[first + 3]
    return carray(address(at), count, np.uint16)


@loops
def decode_inside(row, at, batch, head, unit, tile, scratch):
    """Decode a unit by the reader whose decoder's address is ``row[at]``, and whose row lies behind it."""
    place = np.int64(row.ctypes.data) + 8 * (at + 1)
    to, memory = np.int64(tile.ctypes.data), np.int64(scratch.ctypes.data)
    call(row[at], place, batch, head, unit, to, tile.shape[1], memory)


@loops
def widen(words, x):
    """Values of fp16 bits: ``x[i] = half(words[i])``."""
    for i in range(x.shape[0]):
        x[i] = half(words[i])


@loops
def add_product(a, b, tile):
    """``tile[:, :n] += a @ b``: float32 [32, rows] and [rows, n]; eight rows at a time, which stay in the cache."""
    rows, n = b.shape
    whole = rows // 8 * 8
    for j in range(0, whole, 8):
        b0, b1, b2, b3 = b[j], b[j + 1], b[j + 2], b[j + 3]
        b4, b5, b6, b7 = b[j + 4], b[j + 5], b[j + 6], b[j + 7]
        for t in range(TILE):
            f, x = a[t, j : j + 8], tile[t]
            f0, f1, f2, f3, f4, f5, f6, f7 = f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]
            for i in range(n):
                low = (f0 * b0[i] + f1 * b1[i]) + (f2 * b2[i] + f3 * b3[i])
                high = (f4 * b4[i] + f5 * b5[i]) + (f6 * b6[i] + f7 * b7[i])
                x[i] += low + high
    pairs = whole + (rows - whole) // 2 * 2
    for j in range(whole, pairs, 2):
        b0, b1 = b[j], b[j + 1]
        for t in range(TILE):
            f0, f1, x = a[t, j], a[t, j + 1], tile[t]
            for i in range(n):
                x[i] += f0 * b0[i] + f1 * b1[i]
    if pairs < rows:
        b0 = b[pairs]
        for t in range(TILE):
            f0, x = a[t, pairs], tile[t]
            for i in range(n):
                x[i] += f0 * b0[i]


__all__ = [
    "TILE",
    "add_product",
    "address",
    "as_float",
    "bytes_at",
    "call",
    "carray",
    "copy",
    "decode_inside",
    "decoder",
    "exp",
    "field",
    "flip",
    "half",
    "halves_at",
    "has_halves",
    "loops",
    "np",
    "unpack",
    "widen",
]
