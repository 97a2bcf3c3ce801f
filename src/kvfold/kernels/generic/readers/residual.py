"""Residual vector quantization (VQLLM): a code per stage and group of channels stands for a row of a table."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvfold.arithmetic import beside
from kvfold.formats import ResidualCodes
from kvfold.formats.residual import Codebook
from kvfold.kernels.generic.readers._codes import channels, of_tokens
from kvfold.kernels.generic.readers._gather import eight_numbers, eights, four_sum, gather, words
from kvfold.kernels.generic.readers.base import Reader


@triton.jit
def read_residual(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    D: tl.constexpr = SPEC[0]
    VECTOR: tl.constexpr = SPEC[1]
    CODES: tl.constexpr = SPEC[2]
    STAGES: tl.constexpr = SPEC[3]
    GROUPS: tl.constexpr = D // VECTOR
    EACH: tl.constexpr = 4 if STAGES % 4 == 0 else 1  # stages of a loaded word
    token = tl.minimum(tl.arange(0, T), left - 1)
    scale = of_tokens(fields[1], first, left, T, 1, 0)
    data = fields[0] + first * (GROUPS * STAGES // EACH)
    W: tl.constexpr = 4 * four.shape[0]
    STEP: tl.constexpr = VECTOR // 4 if SPEC[4] else VECTOR  # from row to row of the table
    if SPEC[4]:  # eight channels of a group, whose numbers lie together
        eight = eights(four)
        column = tl.minimum(eight, D // 8 - 1)[None, :]
        at = (token[:, None] * GROUPS + column // (VECTOR // 8)) * (STAGES // EACH)
        rows = tables[0] + column % (VECTOR // 8) * 2
    else:
        column = tl.minimum(channels(four), D - 1)[None, :]
        group, element = (column % GROUPS, column // GROUPS) if SPEC[5] else (column // VECTOR, column % VECTOR)
        at = (token[:, None] * GROUPS + group) * (STAGES // EACH)
        rows = tables[0] + element
    # the last stages first: they are smallest
    row = _row(data, at, rows, STAGES - 1, STAGES, CODES * STEP, STEP)
    if SPEC[4]:
        low, high = gather(row)
        for i in tl.static_range(1, STAGES):
            x, y = gather(_row(data, at, rows, STAGES - 1 - i, STAGES, CODES * STEP, STEP))
            low, high = four_sum(low, x), four_sum(high, y)
        total = tl.reshape(eight_numbers(low, high), (T, W))
    else:
        total = tl.load(row)
        for i in tl.static_range(1, STAGES):
            total += tl.load(_row(data, at, rows, STAGES - 1 - i, STAGES, CODES * STEP, STEP))
    if D & (D - 1) or D < 32:
        total = tl.where((channels(four) < D)[None, :], total, 0.0)
    return total, scale


@triton.jit
def _row(data, at, rows, STAGE: tl.constexpr, STAGES: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the row of a stage's code lies."""
    EACH: tl.constexpr = 4 if STAGES % 4 == 0 else 1
    code = (words(data + (at + STAGE // EACH)) >> (8 * (STAGE % EACH))) & 255
    return rows + code * STEP + STAGE * SIZE


class ResidualReader(Reader[ResidualCodes]):
    """``tables``: the codebook, fp16 [stages, codes, vector]."""

    read = read_residual
    names = ("codes", "rms")
    any_order = True
    ahead = False
    resident = 4

    def __init__(self, form: ResidualCodes) -> None:
        super().__init__(form)
        self.words = ("codes",) if form.stages % 4 == 0 else ()
        if form.strided and form.vector % 8 == 0:
            self.groups = form.head_dim // form.vector

    @staticmethod
    def why_not(form: ResidualCodes) -> str | None:
        return None if form.head_dim % 8 == 0 else f"head_dim={form.head_dim}; allowed: multiples of 8"

    @property
    def spec(self) -> tuple[Any, ...]:
        form = self.form
        together = self.eights and form.vector % 8 == 0 and (self.ordered or not form.strided)
        return (form.head_dim, form.vector, form.codes, form.stages, together, form.strided)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        assert self.form.book is not None
        table = _half(self.form.book.on(device))
        return (table.view(torch.int64) if self.spec[4] else table,)


@beside
def _half(book: Codebook) -> torch.Tensor:
    """A codebook in fp16, made once: its place in memory stays, as graphs need it."""
    return book.codes.to(torch.float16).contiguous()
