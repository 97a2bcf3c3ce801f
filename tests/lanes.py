"""Gluon kernels whose tensors are a register of every thread, run by PyTorch on a CPU.

:func:`run` executes the kernel's own Python text, and that of the functions it calls: only the instructions of
:mod:`kvfold.kernels.common._warp`, those that modules write in assembly themselves, and ``gl`` are replaced, by what they mean
for all threads of a program at once. Copies arrive at once, so what is not waited for is not noticed.
"""

import itertools
import math
import sys
import types

import torch
from triton.runtime.jit import JITFunction

WORD = 1 << 32
HALF = {False: torch.float16, True: torch.bfloat16}


def imported(module, found=None):
    """A module and those of the package's kernels that functions in it come from, by name."""
    found = {} if found is None else found
    if module.__name__ not in found:
        found[module.__name__] = module
        for x in vars(module).values():
            for one in (x, getattr(x, "fn", None)):
                name = getattr(one, "__module__", None) or ""
                if name.startswith("kvfold.kernels."):
                    imported(sys.modules[name], found)
    return found


def tensor(x, like=None):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x, device=None if like is None else like.device)


def stored_bytes(x):
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


class Memory:
    """Bytes at addresses."""

    def __init__(self, size):
        self.bytes = torch.zeros(size, dtype=torch.uint8)
        self.end, self.places = 256, {}

    def place(self, x):
        """A tensor with all that its storage has; tensors of one storage share it here, too."""
        raw = stored_bytes(x)
        key = raw.data_ptr() if raw.numel() else None
        if key is None or key not in self.places:
            self.places[key] = self.end
            self.bytes[self.end : self.end + raw.numel()] = raw
            self.end = (self.end + raw.numel() + 511) // 256 * 256
            assert self.end <= self.bytes.numel()
        at = self.places[key]
        return Pointer(self, at, x.dtype, torch.tensor(x.storage_offset()))

    def read(self, address, dtype, count=1):
        size = torch.empty((), dtype=dtype).element_size() * count
        at = address.to(torch.int64).unsqueeze(-1) + torch.arange(size)
        assert int(at.min()) >= 0 and int(at.max()) < self.bytes.numel()
        return self.bytes[at].view(dtype)

    def write(self, address, value):
        raw = value.contiguous().view(torch.uint8).reshape(*address.shape, -1)
        at = address.to(torch.int64).unsqueeze(-1) + torch.arange(raw.shape[-1])
        assert int(at.min()) >= 0 and int(at.max()) < self.bytes.numel()
        self.bytes[at] = raw


class Pointer:
    def __init__(self, memory, base, kind, index):
        self.memory, self.base, self.kind, self.index = memory, base, kind, index

    def __add__(self, more):
        return Pointer(self.memory, self.base, self.kind, self.index + more)

    @property
    def dtype(self):
        """As the compiler knows it."""
        names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
        return types.SimpleNamespace(element_ty=types.SimpleNamespace(name=names.get(self.kind)))

    def to(self, _):
        return self.base + self.index.to(torch.int64) * self.size

    @property
    def size(self):
        return torch.empty((), dtype=self.kind).element_size()


def halves(x):
    """Words as pairs of fp16 numbers, [..., 2]."""
    return x.to(torch.int32).contiguous().unsqueeze(-1).view(torch.float16)


def joined(x, dtype=torch.float16):
    return x.to(dtype).contiguous().view(torch.int32).squeeze(-1)


def of_word(f):
    return lambda *x: joined(f(*(halves(y) for y in x)))


def float_bits(x):
    return x.to(torch.float32).contiguous().view(torch.int32)


def bits_float(x):
    return x.to(torch.int32).contiguous().view(torch.float32)


def unsigned(x):
    return x.to(torch.int64) & (WORD - 1)


def signed(x):
    return ((x + (WORD >> 1)) % WORD - (WORD >> 1)).to(torch.int32)


def chosen_bytes(a, b, selector):
    """PRMT of two words by the lower three bits of four nibbles."""
    both = unsigned(b) << 32 | unsigned(a)
    return signed(sum((both >> 8 * (selector.long() >> 4 * i & 7) & 255) << 8 * i for i in range(4)))


def permuted(x, selector):
    """PRMT of x and zeros."""
    out = 0
    for i in range(4):
        pick = selector >> (4 * i) & 15
        out = out | (torch.where(tensor(pick) < 4, unsigned(x) >> (8 * (pick & 3)) & 255, 0) << (8 * i))
    return signed(out)


class Program:
    """What one program's instructions do."""

    def __init__(self, memory, warps, grid, at, shared_bytes):
        self.memory, self.warps, self.grid, self.at = memory, warps, grid, at
        self.shared = Memory(shared_bytes + 1024)
        self.shared.bytes.fill_(255)  # what nobody has written is no number

    # ---- gl

    def gl(self):
        def pick(f):
            def of(a, b):
                a, b = torch.broadcast_tensors(tensor(a), tensor(b))
                return f(a, b)

            return of

        def load(at, mask=None, other=0):
            index = at.index if mask is None else torch.where(mask, at.index, 0)
            x = self.memory.read(at.base + index.to(torch.int64) * at.size, at.kind).squeeze(-1)
            return x if mask is None else torch.where(mask, x, torch.tensor(other, dtype=x.dtype))

        def store(at, value, mask=None):
            index = at.index.broadcast_to(value.shape)
            if mask is not None:
                mask = mask.broadcast_to(value.shape)
                index, value = index[mask], value[mask]
            if index.numel():
                self.memory.write(at.base + index.to(torch.int64) * at.size, value.to(at.kind))

        return types.SimpleNamespace(
            int8=torch.int8, int16=torch.int16, float16=torch.float16, int32=torch.int32, int64=torch.int64,
            float32=torch.float32, constexpr=object,
            static_range=range, num_warps=lambda: self.warps, BlockedLayout=lambda *_: None,
            arange=lambda a, b, _: torch.arange(a, b, dtype=torch.int32),
            program_id=lambda i: torch.tensor(self.at[i], dtype=torch.int32),
            num_programs=lambda i: torch.tensor(self.grid[i], dtype=torch.int32),
            minimum=pick(torch.minimum), maximum=pick(torch.maximum), abs=torch.abs,
            where=lambda c, a, b: torch.where(tensor(c), a, b), max=lambda x, _: x.max(),
            fma=lambda a, b, c: a * b + c, load=load, store=store,
        )  # fmt: skip

    # ---- instructions

    def by_warp(self, x):
        return x.view(self.warps, 32)

    def load_shared(self, address, offset, count):
        return tuple(self.shared.read(address + offset, torch.int32, count).unbind(-1))

    def load_global4(self, address, active):
        active = (active != 0).expand(32 * self.warps)
        words = torch.zeros(32 * self.warps, 4, dtype=torch.int32)
        if active.any():
            words[active] = self.memory.read(address.expand(32 * self.warps)[active], torch.int32, 4)
        return tuple(words.unbind(-1))

    def load_shared4f(self, address):
        return tuple(self.shared.read(address, torch.float32, 4).unbind(-1))

    def store_shared4(self, address, *words):
        self.shared.write(address, torch.stack(words, -1).to(torch.float32))

    def load_shared_short(self, address, offset):
        return self.shared.read(address + offset, torch.int16).squeeze(-1).to(torch.int32) & 0xFFFF

    def copy_async(self, to, source, size, active, to_more, source_more, guarded):
        assert bool(((size == 16) | (size == 0)).all())
        on = (active != 0).broadcast_to(to.shape) if guarded else torch.ones(to.shape, dtype=torch.bool)
        size = size.broadcast_to(to.shape)
        if (empty := on & (size == 0)).any():
            self.shared.write(to[empty] + to_more, torch.zeros(int(empty.sum()), 16, dtype=torch.uint8))
        on = on & (size == 16)
        if on.any():
            source = source.broadcast_to(to.shape)[on] + source_more
            assert bool((source % 16 == 0).all()) and bool(((to[on] + to_more) % 16 == 0).all())
            self.shared.write(to[on] + to_more, self.memory.read(source, torch.uint8, 16))

    def mma(self, a0, a1, a2, a3, b0, b1, c, bf16):
        g, t = torch.arange(32) // 4, torch.arange(32) % 4

        def numbers(x):
            return x.to(torch.int32).expand(32 * self.warps).contiguous().unsqueeze(-1).view(HALF[bool(bf16)]).float()

        a = torch.zeros(self.warps, 16, 16)
        b = torch.zeros(self.warps, 16, 8)
        for e in range(2):
            for x, row, column in ((a0, 0, 0), (a1, 8, 0), (a2, 0, 8), (a3, 8, 8)):
                a[:, g + row, 2 * t + column + e] = self.by_warp(numbers(x)[:, e])
            for x, row in ((b0, 0), (b1, 8)):
                b[:, 2 * t + row + e, g] = self.by_warp(numbers(x)[:, e])
        product = a @ b
        places = ((g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1))
        return tuple(x + product[:, i, j].reshape(-1) for x, (i, j) in zip(c, places, strict=True))

    def mma_wide(self, sums, words, tile):
        """Tokens of four warps times a tile of codes, which is put in order again."""
        assert self.warps % 4 == 0
        at, group = tile.view(-1, 128), ()
        assert bool((at == at[:, :1]).all()) and bool((at % 1024 == 0).all())
        row, place = torch.arange(64)[:, None, None], torch.arange(8)[None, None, :]
        part = torch.arange(2)[None, :, None]
        address = 8192 * part + 128 * row + 16 * (place ^ row % 8)
        for g in range(len(at)):
            b = self.shared.read(at[g, 0] + address, torch.float16, 8).reshape(64, 128)
            group += (b.float(),)
        lane = torch.arange(32)
        g, t = lane // 4, lane % 4
        a = torch.zeros(self.warps, 16, 128)
        for i, word in enumerate(words):
            step, kind = i // 4, i % 4
            for e in range(2):
                column = 16 * step + 8 * (kind // 2) + 2 * t + e
                a[:, g + 8 * (kind % 2), column] = self.by_warp(halves(word)[:, e].float())
        out = []
        products = torch.stack([a[w] @ group[w // 4].T for w in range(self.warps)])
        for i, x in enumerate(sums):
            n, kind = i // 4, i % 4
            out.append(x + products[:, g + 8 * (kind // 2), 8 * n + 2 * t + kind % 2].reshape(-1))
        return tuple(out)

    def products_of_pairs(self, words, tile):
        """Products with codes z and i z, summed in fp16 after each 16 channels, as the tensor cores may at worst."""
        zero, out = (torch.zeros(32 * self.warps),) * 32, ()
        for side in range(2):
            sums = zero
            for step in range(8):
                # <x, i z> is <-i x, z>
                source = words[4 * ((step + 4 * side) % 8) :][:4]
                if side and step >= 4:
                    source = tuple(w ^ -2147450880 for w in source)
                empty = (torch.zeros_like(words[0]),) * 4
                part = self.mma_wide(zero, empty * step + tuple(source) + empty * (7 - step), tile)
                sums = tuple((x + y).half().float() for x, y in zip(sums, part, strict=True))
            out += tuple(joined(torch.stack((sums[2 * i], sums[2 * i + 1]), -1), torch.float16) for i in range(16))
        return out

    def copy_all(self, to, source, size, barrier, active):
        lead = active.nonzero().flatten()
        assert len(lead) == 1
        at, begin, count = (int(tensor(x).expand(active.shape)[lead[0]]) for x in (to, source, size))
        self.shared.bytes[at : at + count] = self.memory.bytes[begin : begin + count]

    def exchange(self, x, new, old, changed, of_b):
        on, out = (changed != 0).expand(32 * self.warps), list(x)
        for c in range(4):
            rows = [
                self.load_shared(torch.where(on, at[c % 2], 1024), 64 * ((c + 2) % 4 if of_b else c), 4) for at in (new, old)
            ]  # fmt: skip
            for i, (n, o) in enumerate(zip(*rows, strict=True)):
                less = halves(o) - halves(n)
                moved = halves(x[4 * c + i]) + (-less if of_b and c < 2 else less)
                out[4 * c + i] = torch.where(on, joined(moved), x[4 * c + i])
        return tuple(out)

    def mma_bytes(self, a0, a1, a2, a3, b0, b1, c, is_signed, levels=False):
        g, t = torch.arange(32) // 4, torch.arange(32) % 4

        def numbers(x, kind):
            x = x.to(torch.int32).expand(32 * self.warps).contiguous().unsqueeze(-1)
            return x.view(kind).view(self.warps, 32, 4).double()

        a_kind, b_kind = (torch.int8 if sign else torch.uint8 for sign in (levels, is_signed))
        a, b = torch.zeros(self.warps, 16, 32).double(), torch.zeros(self.warps, 32, 8).double()
        for e in range(4):
            for x, row, column in ((a0, 0, 0), (a1, 8, 0), (a2, 0, 16), (a3, 8, 16)):
                a[:, g + row, 4 * t + column + e] = numbers(x, a_kind)[..., e]
            for x, row in ((b0, 0), (b1, 16)):
                b[:, 4 * t + row + e, g] = numbers(x, b_kind)[..., e]
        product = (a @ b).to(torch.int32)
        places = ((g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1))
        return tuple(x + product[:, i, j].reshape(-1) for x, (i, j) in zip(c, places, strict=True))

    def load_matrix4(self, address, offset, transposed):
        rows = self.shared.read(self.by_warp(address + offset), torch.int16, 8).view(self.warps, 4, 8, 8)
        if transposed:
            rows = rows.transpose(2, 3)
        return tuple(x.reshape(-1) for x in rows.contiguous().view(torch.int32).unbind(1))

    def load_pair(self, address, active, kind):
        on, out = (active != 0).broadcast_to(address.shape), torch.zeros(*address.shape, 2)
        if on.any():
            out[on] = self.memory.read(address[on], (torch.float16, torch.bfloat16, torch.float32)[kind], 2).float()
        return tuple(out.unbind(-1))

    def transpose8(self, x):
        pairs = halves(x).view(self.warps, 8, 8)
        return joined(pairs.transpose(1, 2).contiguous().view(-1, 2))

    def shuffle_xor(self, x, mask):
        return self.by_warp(x)[:, torch.arange(32) ^ mask].reshape(-1)

    def store_words4(self, address, *words):
        self.memory.write(address, torch.stack(words, -1).to(torch.int32))

    def load_words4(self, address, offset):
        return tuple(self.memory.read(address + offset, torch.int32, 4).unbind(-1))

    def cosine_sine(self, position, turns, rest):
        angle = 2 * math.pi * (position.double() * (turns.double() + rest.double()))
        return angle.cos().float(), angle.sin().float()

    def turn(self, angle):
        return angle.double().cos().float(), angle.double().sin().float()

    def names(self):
        """Everything that is replaced."""

        def nothing(*_):
            return None

        def funnel(low, high, start):
            return signed(((unsigned(high) << 32 | unsigned(low)) >> (start.to(torch.int64) & 31)) & (WORD - 1))

        return {
            "load_matrix4": self.load_matrix4, "load_pair": self.load_pair, "abs_halves": of_word(torch.abs),
            "fma_half2": of_word(
                lambda a, b, c: (a.double() * b.double() + c.double()).half()
            ), "load_word": lambda at: self.memory.read(at, torch.int32).squeeze(-1),
            "_replaced": of_word(lambda x, y: torch.where(y != 0, y, x)), "load_words4": self.load_words4,
            "load_words2": lambda at, more: tuple(self.memory.read(at + more, torch.int32, 2).unbind(-1)),
            "operand_words": self.load_words4,
            "store_shared2": lambda to, a, b: self.shared.write(to, torch.stack((a, b), -1)),
            "select": lambda a, b, mask: a & signed(tensor(mask)) | b & ~signed(tensor(mask)),
            "gl": self.gl(), "tl": None,
            "load_shared": self.load_shared, "load_global4": self.load_global4,
            "load_shared4f": self.load_shared4f, "store_shared4": self.store_shared4,
            "load_shared_short": self.load_shared_short, "store_shared1": lambda to, x: self.shared.write(to, x.int()),
            "copy_async": self.copy_async, "mma": self.mma, "mma_bytes": self.mma_bytes,
            "products_of_pairs": self.products_of_pairs, "exchange": self.exchange, "copy_all": self.copy_all,
            **dict.fromkeys(("begin_barrier", "wait_at", "arrive_at"), nothing),
            "start_wide": lambda words, tile: self.mma_wide((torch.zeros(32 * self.warps),) * 32, words, tile),
            "wait_wide": lambda sums, _: sums, "sqrt_fast": torch.sqrt, "reciprocal": torch.reciprocal,
            "shuffle": lambda x, source: self.by_warp(x).gather(1, self.by_warp(source).long()).reshape(-1),
            "either_bytes": lambda a, b, which: chosen_bytes(a, b, torch.tensor(int(which, 16))),
            "_halves_of": chosen_bytes,
            "load_fragment": self.load_words4, "transpose8": self.transpose8,
            "shuffle_xor": self.shuffle_xor, "exp2_fast": torch.exp2, "as_int": float_bits, "as_float": bits_float,
            "mul_half2": of_word(torch.mul), "add_half2": of_word(torch.add),
            "sub_half2": of_word(torch.sub), "max_half2": of_word(torch.maximum),
            "numbered": lambda x, number, mask: (x & mask) | number,
            "swap_halves": of_word(lambda x: x.flip(-1)),
            "equal_halves": lambda x, y: (halves(x) == halves(y)).to(torch.int16).neg().view(torch.int32).squeeze(-1),
            "where_bits": lambda mask, x, y: (mask & x) | (~mask & y),
            "product_less_half2": of_word(lambda a, b, c: (a.float() * b.float() - c.float()).half()),
            "minus_product_half2": of_word(lambda a, b, c: (c.float() - a.float() * b.float()).half()),
            "pack_half2": lambda low, high, bf16: joined(torch.stack((low, high), -1), HALF[bool(bf16)]),
            "store_words4": self.store_words4, "store_words2": self.store_words4, "cosine_sine": self.cosine_sine,
            "load_half": lambda at: self.memory.read(at, torch.float16).squeeze(-1).float(),
            "bounded_half2": of_word(lambda x: x.clamp(-65504, 65504)),
            "low_halves": of_word(lambda a, b: torch.stack((a[..., 0], b[..., 0]), -1)),
            "high_halves": of_word(lambda a, b: torch.stack((a[..., 1], b[..., 1]), -1)),
            "unpack_half2": lambda x: tuple(halves(x).float().unbind(-1)),
            "_funnel": funnel, "_turn": self.turn, "_byte_twice": lambda x, i: permuted(x, 0x4040 | i | i << 8),
            "_shuffled": lambda x, source: self.by_warp(x).gather(1, self.by_warp(source).long()).reshape(-1),
            "_weighted_bytes": lambda x, weight, more: more + sum(
                (x >> 8 * i & 255) * (weight >> 8 * i & 255) for i in range(4)
            ),
            "_above_1024": lambda x, order, odd: chosen_bytes(x, order, torch.tensor(0x7371 if odd else 0x7270)),
            "_with_difference": lambda x, a, b: signed(unsigned(x) + unsigned(a) - unsigned(b)),
            "_with_sum": lambda x, a, b: signed(unsigned(x) + unsigned(a) + unsigned(b)),
            "_swapped": lambda x, selector: permuted(x, selector),
            "_load_again": lambda at: self.memory.read(at, torch.int32).squeeze(-1),
            "_dynamic_base": lambda lane: lane * 0 + 1024, "shared_base": lambda lane, size: lane * 0 + 1024,
            "minus_ones": lambda x, k: (x >> k & 0x00010001) * 0xBC00,
            "_allocated": lambda *_: types.SimpleNamespace(_keep_alive=nothing),
            **dict.fromkeys(("copy_commit", "copy_wait", "show_copies"), nothing),
            **dict.fromkeys(("warp_sync", "program_sync", "wait_for_previous", "launch_dependents"), nothing),
            "prefetch": nothing, "prefetch_bulk": nothing,
        }  # fmt: skip

    def function(self, kernel):
        """A kernel as a function of Python."""
        replaced = self.names()
        spaces = {}
        for name, module in imported(sys.modules[kernel.fn.__module__]).items():
            space = {}
            for key, x in vars(module).items():
                value = getattr(x, "value", x) if type(x).__name__ == "constexpr" else x
                space[key] = value
            spaces[name] = space
        made = {}
        for space in spaces.values():
            for key, x in list(space.items()):
                if isinstance(x, JITFunction):
                    f = x.fn
                    if f not in made:
                        made[f] = types.FunctionType(
                            f.__code__, spaces.get(f.__module__, {}), f.__name__, f.__defaults__
                        )
                    space[key] = made[f]
                elif hasattr(x, "__wrapped__") and not isinstance(x, type):
                    space[key] = x.__wrapped__
        for space in spaces.values():
            space.update(replaced)
        return made[kernel.fn]


def run(kernel, grid, arguments, constants, warps, shared_bytes, size=1 << 24):
    """Run a kernel over a grid; tensors among ``arguments`` are written in place."""
    memory = Memory(size)
    placed = [memory.place(x) if isinstance(x, torch.Tensor) else torch.tensor(x) for x in arguments]
    for at in itertools.product(*map(range, reversed(grid))):
        Program(memory, warps, grid, at[::-1], shared_bytes).function(kernel)(*placed, **constants)
    for x, p in zip(arguments, placed, strict=True):
        if isinstance(x, torch.Tensor):
            raw = stored_bytes(x)
            raw.copy_(memory.bytes[p.base : p.base + raw.numel()])
