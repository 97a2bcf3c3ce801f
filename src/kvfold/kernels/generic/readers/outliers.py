"""A few elements of a block in fp16 in place of what another format decodes to (KVQuant)."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvfold.formats import Lookup, Outliers
from kvfold.kernels.generic.readers._codes import PTX
from kvfold.kernels.generic.readers._gather import four_numbers
from kvfold.kernels.generic.readers.base import Reader
from kvfold.kernels.generic.readers.lookup import LookupReader


@triton.jit
def read_outliers(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    """Outliers are laid out in memory of the program's own, zeros but for them, and read back from there as a tile.

    Elements find their outlier, or none, without a search so. Stores come from few threads; what is read lies in the cache.
    """
    D: tl.constexpr = SPEC[0]
    READ: tl.constexpr = SPEC[1]
    BLOCK: tl.constexpr = SPEC[3]
    COUNT: tl.constexpr = SPEC[4]
    SLOTS: tl.constexpr = SPEC[5]
    W: tl.constexpr = 4 * four.shape[0]
    BLOCKS: tl.constexpr = T // BLOCK if BLOCK < T else 1
    x, scale = READ(fields, tables, head, first, left, four, T, SPEC[2])
    which = tl.arange(0, BLOCKS)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    inside = (slot < COUNT) & (which * BLOCK < left)
    at = (first // BLOCK + which) * COUNT + slot
    place = tl.load(fields[len(fields) - 1] + at, mask=inside, other=0).to(tl.int32)
    value = tl.load(fields[len(fields) - 2] + at, mask=inside, other=0.0).to(tl.int16, bitcast=True)
    value = tl.where((value & 32767) == 0, 1, value).to(tl.int16)  # an outlier of zero: the smallest number
    token = place // D + which * BLOCK
    if BLOCK > T:
        token -= (first % BLOCK).to(tl.int32)
        inside = inside & (token >= 0) & (token < T)
    words = tables[len(tables) - 1]
    scratch = words.to(tl.pointer_type(tl.int16), bitcast=True) + (token * D + place % D)
    tl.store(scratch, value, mask=inside)
    tl.debug_barrier()
    bits = _shared(words + (tl.arange(0, T)[:, None] * (D // 4) + tl.minimum(four, D // 4 - 1)[None, :]))
    if D & (D - 1) or D < 16:
        bits = tl.where((four < D // 4)[None, :], bits, 0)
    tl.debug_barrier()
    tl.store(scratch, tl.zeros_like(value), mask=inside)
    tl.debug_barrier()
    return _replaced(x, tl.reshape(four_numbers(bits), (T, W))), scale


@triton.jit
def _shared(at):  # type: ignore[no-untyped-def]
    """What the program's threads have written; nothing may move this load, as the compiler might one that it understands."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.global.b64 $0, [$1];", "=l,l", (at,), dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.load(at)


@triton.jit
def _replaced(x, outlier):  # type: ignore[no-untyped-def]
    """``outlier``, where it is not 0."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 m, z; mov.b32 z, 0; set.ne.u32.f16x2 m, $2, z; lop3.b32 $0, $1, m, $2, 0xBA; }",
            "=r,r,r",
            (x, outlier),
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.where(outlier != 0, outlier, x)


class OutliersReader(Reader[Outliers]):
    """``tables``: the inner format's; last, the program's own memory."""

    read = read_outliers
    resident = 4
    most_tokens = 32

    def __init__(self, form: Outliers) -> None:
        super().__init__(form)
        assert isinstance(form.inner, Lookup)
        self.inner: Reader[Lookup] = LookupReader(form.inner)
        self.names = (*self.inner.names, "outlier", "where")
        self.words = self.inner.words

    @staticmethod
    def why_not(form: Outliers) -> str | None:
        if isinstance(form.inner, Lookup) and form.inner.scaling != "rms":
            return LookupReader.why_not(form.inner)
        return f"outliers in {form.inner.describe()}; allowed: in lookup tables with a range per token or constants per channel"

    @property
    def spec(self) -> tuple[Any, ...]:
        form = self.form
        slots = 1 << (form.count - 1).bit_length()
        return (form.head_dim, self.inner.read, self.inner.spec, form.block, form.count, slots)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return self.inner.tables(device)

    def scratch(self, tokens: int) -> int:
        return tokens * self.form.head_dim // 4
