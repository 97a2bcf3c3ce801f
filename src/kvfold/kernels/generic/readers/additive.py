"""Additive codes that commute with RoPE (CommVQ's keys): sums of centres ``z_a + i z_b``, two rows of a table per stage."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvfold.arithmetic import beside
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook
from kvfold.kernels.generic.readers._codes import PTX, channels, of_tokens
from kvfold.kernels.generic.readers._gather import eight_numbers, eights, four_sum, gather, words
from kvfold.kernels.generic.readers.base import Reader


@triton.jit
def read_additive(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    D: tl.constexpr = SPEC[0]
    STAGES: tl.constexpr = SPEC[1]
    BITS: tl.constexpr = SPEC[2]  # of a half of a code
    STEP: tl.constexpr = 8 if SPEC[4] else 1  # channels of a load
    W: tl.constexpr = 4 * four.shape[0]
    scale = of_tokens(fields[1], first, left, T, 1, 0) * tl.load(tables[1] + head)
    column = tl.minimum(eights(four) if SPEC[4] else channels(four), D // STEP - 1)
    # i times a pair's first half is the second one, and times the second one the first, negative
    half: tl.constexpr = SPEC[3] // (2 * STEP)
    rest: tl.constexpr = (D - SPEC[3]) // (2 * STEP)
    here = column < 2 * half
    size = tl.where(here, half, rest)
    real = column < tl.where(here, half, 2 * half + rest)
    other = tl.where(real, column + size, column - size)
    ROW: tl.constexpr = D // 4 if SPEC[4] else D  # in elements of the table
    EACH: tl.constexpr = 2 if SPEC[4] else 1
    table = tables[0] + head * ((STAGES * ROW) << BITS)
    rows = table + (column * EACH)[None, :]
    others = table + (other * EACH)[None, :]
    token = tl.minimum(tl.arange(0, T), left - 1)
    bit = token % 32 * (2 * BITS)
    data = fields[0] + first // 32 * (STAGES * 2 * BITS)
    low_at = token // 32 * (STAGES * 2 * BITS) + bit // 32
    high_at = tl.minimum(bit // 32 + 1, 2 * BITS - 1) - bit // 32  # past the end only where nothing of it is needed
    low_at = low_at[:, None] + tl.zeros_like(column)[None, :]
    # the last stages first: they are smallest
    a, b = _rows(data, low_at, high_at, bit, rows, others, STAGES - 1, BITS, ROW)
    if SPEC[4]:
        low, high = gather(a)
        i_low, i_high = gather(b)
        for i in tl.static_range(1, STAGES):
            a, b = _rows(data, low_at, high_at, bit, rows, others, STAGES - 1 - i, BITS, ROW)
            x, y = gather(a)
            low, high = four_sum(low, x), four_sum(high, y)
            x, y = gather(b)
            i_low, i_high = four_sum(i_low, x), four_sum(i_high, y)
        sign = tl.where(real, -0x7FFF7FFF7FFF8000, 0)[None, :]  # the signs of four numbers
        total = eight_numbers(four_sum(low, i_low ^ sign), four_sum(high, i_high ^ sign))
    else:
        x, y = tl.load(a), tl.load(b)
        for i in tl.static_range(1, STAGES):
            a, b = _rows(data, low_at, high_at, bit, rows, others, STAGES - 1 - i, BITS, ROW)
            x += tl.load(a)
            y += tl.load(b)
        total = tl.where(real[None, :], x - y, x + y)
    total = tl.reshape(total, (T, W))
    if D & (D - 1) or D < 32:
        total = tl.where((channels(four) < D)[None, :], total, 0.0)
    return total, scale


@triton.jit
def _rows(data, low_at, high_at, bit, rows, others, STAGE: tl.constexpr, BITS: tl.constexpr, ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the rows of both halves of a stage's code lie."""
    at = data + (low_at + STAGE * 2 * BITS)
    code = _joined(words(at), words(at + high_at[:, None]), (bit % 32)[:, None])
    offset = (STAGE * ROW) << BITS
    a = rows + (code & ((1 << BITS) - 1)) * ROW + offset
    return a, others + ((code >> BITS) & ((1 << BITS) - 1)) * ROW + offset


@triton.jit
def _joined(low, high, start):  # type: ignore[no-untyped-def]
    """32 bits from bit ``start`` on of two words."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", (low, high, start), dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        both = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        return (both >> start).to(tl.int32)


class AdditiveReader(Reader[AdditiveCodes]):
    """``tables``: fp16 [heads, stages, levels, d], divided by a power of two, and that, float32 [heads]."""

    read = read_additive
    names = ("codes", "rms")
    any_order = True
    ahead = False
    by_head = True

    def __init__(self, form: AdditiveCodes) -> None:
        super().__init__(form)
        self.resident = 4 if form.stages <= 12 else 2  # more stages need more registers

    @staticmethod
    def why_not(form: AdditiveCodes) -> str | None:
        return None if form.head_dim % 8 == 0 else f"head_dim={form.head_dim}; allowed: multiples of 8"

    @property
    def spec(self) -> tuple[Any, ...]:
        form = self.form
        assert form.codebook is not None
        rotary = form.codebook.rotary
        wide = self.eights and not (form.head_dim % 16 or rotary % 16)
        return (form.head_dim, form.stages, form.code_bits // 2, rotary, wide)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        assert self.form.codebook is not None
        table, size = tables_of(self.form.codebook.on(device))
        return (table.view(torch.int64) if self.spec[4] else table, size)


@beside
def tables_of(book: KeyCodebook) -> tuple[torch.Tensor, torch.Tensor]:
    """Centres in fp16 and their size by head, made once: their place in memory stays, as graphs need it."""
    centres = book.centres.float()
    most = centres.abs().flatten(1).amax(1).clamp_min(2.0**-100)
    size = 2.0 ** torch.floor(torch.log2(most))
    return (centres / size.view(-1, 1, 1, 1)).to(torch.float16).contiguous(), size
