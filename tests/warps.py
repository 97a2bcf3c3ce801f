"""Warps in NumPy: they run the functions of Gluon kernels, which no interpreter runs, where there is no GPU.

:func:`on_cpu` gives a module's functions anew, with the instructions of :mod:`kvfold.kernels.common._warp` as what PTX says
they do to 32 lanes. A warp is a thread that calls them; memory is one array of bytes, addresses are integers.
"""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from types import FunctionType, SimpleNamespace

import numpy as np
from triton.experimental.gluon import language
from triton.experimental.gluon._runtime import GluonJITFunction

LANE = np.arange(32)
ROW, COLUMN = LANE // 4, LANE % 4
CODES, PARTS, PLACES = np.ogrid[:64, :2, :8]
TYPES = {"int32": np.int32, "int64": np.int64, "float32": np.float32}


class Register(np.ndarray):
    """An element per lane, or one for all."""

    def to(self, dtype):
        return self.astype(TYPES[dtype]).view(Register)

    def __index__(self):
        return int(np.asarray(self).reshape(-1)[0])


def register(x, dtype=None):
    x = np.asarray(x, dtype)
    return (x.astype(np.float32) if x.dtype == np.float64 else x).view(Register)


def scalar(x, dtype=np.int32):
    return register([x], dtype)


class Pointer:
    """Global memory from an address on; ``kind`` is Triton's name of the elements' type."""

    def __init__(self, address, dtype, kind="fp32", offset=0):
        self.address, self.type, self.offset = address, np.dtype(dtype), offset
        self.dtype = SimpleNamespace(element_ty=SimpleNamespace(name=kind))

    def __add__(self, offset):
        return Pointer(self.address, self.type, self.dtype.element_ty.name, self.offset + offset)

    def to(self, _dtype):
        return scalar(self.address, np.int64)


class Machine:
    """Global and shared memory of a program of ``warps`` warps, and what a warp does with them.

    Copies arrive at once, or (``late``) no sooner than a warp waits for their group.
    """

    def __init__(self, warps, size=1 << 22, late=False):
        self.warps, self.barrier, self.late, self.own = warps, Barrier(warps, timeout=60), late, local()
        self.memory, self.shared, self.end = np.zeros(size, np.uint8), np.zeros(1 << 18, np.uint8), 4096
        self.together = [Barrier(4, timeout=60) for _ in range(warps // 4)]

    def put(self, tensor):
        """Address of a copy of a Torch tensor."""
        data = np.frombuffer(tensor.contiguous().numpy().tobytes(), np.uint8)
        at, self.end = self.end, -(-(self.end + len(data)) // 4096) * 4096
        self.memory[at : at + len(data)] = data
        return at

    # ---- what `gl` offers

    int32, int64, float32 = TYPES
    static_range = staticmethod(range)

    def num_warps(self):
        return self.warps

    def where(self, condition, a, b):
        return register(np.where(condition, a, b))

    def fma(self, a, b, c):
        return register(np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64))

    def maximum(self, a, b):
        return register(np.maximum(a, b))

    def minimum(self, a, b):
        return register(np.minimum(a, b))

    def abs(self, x):
        return register(np.abs(x))

    def load(self, pointer, mask=None, other=0):
        at = pointer.address + lanes(pointer.offset, np.int64) * pointer.type.itemsize
        return register(self._read(self.memory, at, pointer.type.itemsize).view(pointer.type)[:, 0])

    def store(self, pointer, value, mask=True):
        value, mask = lanes(value, pointer.type), lanes(mask, bool)
        at = pointer.address + lanes(pointer.offset, np.int64) * pointer.type.itemsize
        for lane in LANE[mask]:
            self.memory[at[lane] : at[lane] + pointer.type.itemsize] = value[lane : lane + 1].view(np.uint8)

    # ---- memory

    def get(self, address, shape):
        """Of fp32."""
        return self.memory[address : address + 4 * math.prod(shape)].view(np.float32).reshape(shape)

    def _read(self, memory, at, size):
        return np.stack([memory[a : a + size] for a in at])

    def load_shared(self, address, offset, n):
        words = self._read(self.shared, lanes(address, np.int64) + offset, 4 * n).view(np.int32)
        return tuple(register(words[:, i].copy()) for i in range(n))

    def load_shared4f(self, address):
        return tuple(x.view(np.float32) for x in self.load_shared(address, 0, 4))

    def load_shared_short(self, address, offset):
        return register(self._read(self.shared, lanes(address, np.int64) + offset, 2).view(np.uint16)[:, 0], np.int32)

    def load_words(self, address, offset, n):
        words = self._read(self.memory, lanes(address, np.int64) + offset, 4 * n).view(np.int32)
        return tuple(register(words[:, i].copy()) for i in range(n))

    def load_fragment(self, address, offset):
        return self.load_words(address, offset, 4)

    def load_words4(self, address, offset):
        return self.load_words(address, offset, 4)

    def load_words2(self, address, offset):
        return self.load_words(address, offset, 2)

    def load_matrix4(self, address, offset, transposed):
        rows = self._read(self.shared, lanes(address, np.int64) + offset, 16).view(np.uint16).reshape(4, 8, 8)
        return tuple(fragment(m.T if transposed else m) for m in rows)

    def store_shared(self, address, *words):
        _write(self.shared, lanes(address, np.int64), words)

    store_shared1 = store_shared2 = store_shared4 = store_shared

    def copy_async(self, to, source, size, active, to_offset, source_offset, guarded):
        to, source, size = lanes(to, np.int64) + to_offset, lanes(source, np.int64) + source_offset, lanes(size)
        active = LANE[lanes(active) != 0] if guarded else LANE

        def arrive():
            for lane in active:
                data = self.memory[source[lane] : source[lane] + 16] if size[lane] else 0
                self.shared[to[lane] : to[lane] + 16] = data

        if self.late:
            self._groups()[-1].append(arrive)
        else:
            arrive()

    def _groups(self):
        """Copies of a warp under way, group by group; the last one is not committed yet."""
        if not hasattr(self.own, "groups"):
            self.own.groups = [[]]
        return self.own.groups

    def copy_commit(self, _lane):
        self._groups().append([])

    def copy_wait(self, lane, count):
        if count == 0:  # all, also those that no group has
            self.copy_commit(lane)
        groups = self._groups()
        while len(groups) > count + 1:
            for arrive in groups.pop(0):
                arrive()

    def prefetch_second(self, address, active):
        """What is asked for has to be there."""
        at = lanes(address, np.int64)[lanes(active) != 0]
        assert ((at >= 4096) & (at < self.end)).all()

    def load_pair(self, address, active, kind):
        assert kind == 0
        at = np.where(lanes(active) != 0, lanes(address, np.int64), 0)
        pair = self._read(self.memory, at, 4).view(np.float16).astype(np.float32)
        return register(pair[:, 0].copy()), register(pair[:, 1].copy())

    # ---- codes of four bits as levels

    def _nibbles(self, x, mask, shift):
        return word(unsigned(x) >> np.uint32(shift) & np.uint32(mask))

    def _two_levels(self, x, held, table, half):
        upper, lower = np.array([int(n, 16) for n in table.split()], np.uint32).view(np.uint8).reshape(2, 8)
        levels = (upper.astype(np.uint16) << 8 | lower).view(np.float16)
        pairs = [[levels[unsigned(x) >> (at + 16 * e) & 7] for e in range(2)] for at in (8 * half, 8 * half + 4)]
        return tuple(word(np.stack(pair, 1)) for pair in pairs)

    def nothing(self, _lane):
        return None

    warp_sync = show_copies = nothing

    def program_sync(self, _lane):
        self.barrier.wait()

    # ---- products of four warps

    def start_wide(self, words, tile):
        """A warp's 16 rows; its group's other warps have to begin theirs, too."""
        self.together[self.own.warp // 4].wait()
        (at,) = set(lanes(tile).tolist())
        assert at % 1024 == 0
        address = at + 8192 * PARTS + 128 * CODES + 16 * (PLACES ^ CODES % 8)
        a = np.zeros((16, 128))
        for i, x in enumerate(words):
            for e in range(2):
                a[ROW + 8 * (i % 2), 16 * (i // 4) + 8 * (i // 2 % 2) + 2 * COLUMN + e] = halves(x)[:, e]
        product = SimpleNamespace(a=a, address=address.reshape(-1), sums=None)
        if not hasattr(self.own, "products"):
            self.own.products = []
        self.own.products.append(product)
        return (product,) * 32

    def wait_wide(self, sums, pending):
        while len(self.own.products) > pending:
            product = self.own.products.pop(0)
            b = self._read(self.shared, product.address, 16).view(np.float16).reshape(64, 128)
            product.sums = (product.a @ b.T.astype(float)).astype(np.float32)
        product = sums[0]
        assert product.sums is not None and all(x is product for x in sums)
        return tuple(
            register(product.sums[ROW + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * COLUMN + i % 2]) for i in range(32)
        )

    def run(self, function):
        """Call a function with the number of each warp."""

        def of(warp):
            self.own.__dict__.clear()
            self.own.warp = warp
            function(warp)

        with ThreadPoolExecutor(self.warps) as pool:
            list(pool.map(of, range(self.warps)))


def _write(memory, at, words):
    for i, word in enumerate(words):
        data = unsigned(word).view(np.uint8).reshape(32, 4)
        for lane in LANE:
            memory[at[lane] + 4 * i : at[lane] + 4 * i + 4] = data[lane]


def lanes(x, dtype=np.int32):
    return np.broadcast_to(np.asarray(x).astype(dtype), (32,))


def unsigned(x):
    """The 32 bits of a register."""
    x = np.asarray(x)
    x = x.view(np.uint32) if x.dtype == np.float32 else (x.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
    return np.ascontiguousarray(np.broadcast_to(x, (32,)))


def word(x):
    return register(np.ascontiguousarray(x).reshape(32, -1).view(np.int32)[:, 0])


def halves(x):
    return unsigned(x).view(np.float16).reshape(32, 2)


def fragment(matrix):
    """A lane's pair of an 8 x 8 matrix of 16 bits."""
    return word(np.stack([matrix[ROW, 2 * COLUMN], matrix[ROW, 2 * COLUMN + 1]], 1))


def transpose8(x):
    matrix = np.zeros((8, 8), np.uint16)
    for e in range(2):
        matrix[ROW, 2 * COLUMN + e] = unsigned(x).view(np.uint16).reshape(32, 2)[:, e]
    return fragment(matrix.T)


def _parts(kind):
    """How a register of an operand becomes numbers, [32, n]."""
    if kind == "bf16":
        return lambda x: (
            np.stack([unsigned(x) << 16, unsigned(x) & np.uint32(0xFFFF0000)], 1).view(np.float32).astype(float)
        )
    if kind == "fp16":
        return lambda x: halves(x).astype(float)
    return lambda x: unsigned(x).view(kind).reshape(32, 4).astype(np.int64)


def product(a, b, c, a_kind, b_kind, dtype):
    """c + A B of registers; operands as in :func:`kvfold.kernels.common._warp.mma` and ``mma_bytes``."""
    of_a, of_b = _parts(a_kind), _parts(b_kind)
    n = of_a(a[0]).shape[1]
    left, right, sums = np.zeros((16, 8 * n)), np.zeros((8 * n, 8)), np.zeros((16, 8))
    for i in range(4):
        for e in range(n):
            left[ROW + 8 * (i % 2), n * COLUMN + e + 4 * n * (i // 2)] = of_a(a[i])[:, e]
    for i in range(2):
        for e in range(n):
            right[n * COLUMN + e + 4 * n * i, ROW] = of_b(b[i])[:, e]
    for i in range(4):
        sums[ROW + 8 * (i // 2), 2 * COLUMN + i % 2] = lanes(c[i], float)
    sums = (sums + left @ right).astype(dtype)
    return tuple(register(sums[ROW + 8 * (i // 2), 2 * COLUMN + i % 2]) for i in range(4))


def mma(a0, a1, a2, a3, b0, b1, c, bf16):
    kind = "bf16" if bf16 else "fp16"
    return product((a0, a1, a2, a3), (b0, b1), c, kind, kind, np.float32)


def mma_bytes(a0, a1, a2, a3, b0, b1, c, signed, levels=False):
    kinds = [np.int8 if sign else np.uint8 for sign in (levels, signed)]
    return product((a0, a1, a2, a3), (b0, b1), c, *kinds, np.int32)


def pack_half2(low, high, bf16):
    pair = np.stack([lanes(low, np.float32), lanes(high, np.float32)], 1)
    if not bf16:
        return word(pair.astype(np.float16))
    bits = pair.view(np.uint32)
    return word(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def unpack_half2(x):
    return tuple(register(halves(x)[:, i].astype(np.float32)) for i in range(2))


def either_bytes(a, b, which):
    chosen = [int(digit) for digit in reversed(str(which)[2:])]
    return word(np.concatenate([unsigned(x).view(np.uint8).reshape(32, 4) for x in (a, b)], 1)[:, chosen])


def select(a, b, mask):
    return word((unsigned(a) & np.uint32(mask)) | (unsigned(b) & ~np.uint32(mask)))


def weighted_bytes(x, weight, more):
    a, b = (unsigned(y).view(np.uint8).reshape(32, 4).astype(np.int64) for y in (x, weight))
    return register(((a * b).sum(1) + unsigned(more)).astype(np.int32))


def joined_halves(a, b, half):
    return word(np.stack([unsigned(x).view(np.uint16).reshape(32, 2)[:, half] for x in (a, b)], 1))


INSTRUCTIONS = {
    "low_halves": lambda a, b: joined_halves(a, b, 0), "high_halves": lambda a, b: joined_halves(a, b, 1),
    "_weighted_bytes": weighted_bytes,
    "mma": mma, "mma_bytes": mma_bytes, "transpose8": transpose8, "pack_half2": pack_half2, "unpack_half2": unpack_half2,
    "either_bytes": either_bytes,
    "select": select,
    "mul_half2": lambda a, b: word(halves(a) * halves(b)),
    "max_half2": lambda a, b: word(np.maximum(halves(a), halves(b))),
    "shuffle": lambda x, source: register(lanes(x, np.float32)[lanes(source)]),
    "shuffle_xor": lambda x, mask: register(lanes(x, np.float32)[LANE ^ mask]),
    "exp2_fast": lambda x: register(np.exp2(np.asarray(x, np.float32))),
    "reciprocal": lambda x: register(np.float32(1) / np.asarray(x, np.float32)),
    "sqrt_fast": lambda x: register(np.sqrt(np.asarray(x, np.float32))),
    "fma_half2": lambda a, b, c: word((halves(a).astype(float) * halves(b) + halves(c)).astype(np.float16)),
    "negative_half2": lambda x: word(-halves(x)),
    "round_nearest": lambda x: register(np.rint(np.asarray(x, np.float32))),
    "cos_fast": lambda x: register(np.cos(np.asarray(x, np.float32))),
    "sin_fast": lambda x: register(np.sin(np.asarray(x, np.float32))),
    "_bits": lambda x: word(lanes(x, np.float32)),
    "as_int": lambda x: word(lanes(x, np.float32)),
    "as_float": lambda x: register(unsigned(x).view(np.float32)),
}  # fmt: skip


def on_cpu(module, machine):
    """The functions of a module of kernels, as they run on a machine's warps."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = names = {}
            for key, value in vars(sys.modules[name]).items():
                if key == "gl":
                    names[key] = machine
                elif key in INSTRUCTIONS:
                    names[key] = INSTRUCTIONS[key]
                elif isinstance(value, GluonJITFunction):
                    own = getattr(machine, key, None)
                    names[key] = own if own else (value.fn.__module__, value.fn)
                elif isinstance(value, language.constexpr):
                    names[key] = value.value
                else:
                    names[key] = value
            for key, value in names.items():
                if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], FunctionType):
                    where = names if value[0] == name else of(value[0])
                    names[key] = FunctionType(value[1].__code__, where, key, value[1].__defaults__)
        return made[name]

    return SimpleNamespace(**of(module.__name__))
