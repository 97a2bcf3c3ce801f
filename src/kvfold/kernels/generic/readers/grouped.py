"""A byte for a few channels, into a codebook of the KV head's group (NOVA-KV, TaSQ)."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvfold.arithmetic import beside
from kvfold.formats import GroupCodes
from kvfold.formats.grouped import GroupBook
from kvfold.kernels.generic.readers._codes import channels, of_tokens
from kvfold.kernels.generic.readers._gather import eight_numbers, eights, four_numbers, gather, words
from kvfold.kernels.generic.readers.base import Reader


@triton.jit
def read_grouped(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    D: tl.constexpr = SPEC[0]
    VECTOR: tl.constexpr = SPEC[1]
    CODES: tl.constexpr = SPEC[2]
    GROUPS: tl.constexpr = D // VECTOR
    W: tl.constexpr = 4 * four.shape[0]
    token = tl.minimum(tl.arange(0, T), left - 1)
    scale = of_tokens(fields[1], first, left, T, 1, 0)
    data = fields[0] + first * GROUPS
    if SPEC[3]:  # fours, or eights, of a group, whose numbers lie together
        STEP: tl.constexpr = VECTOR // 4  # int64 words of a code
        rows = tables[0] + head * (GROUPS * CODES * STEP)
        if VECTOR % 8 == 0:
            column = tl.minimum(eights(four), D // 8 - 1)[None, :]
            group, part = column // (VECTOR // 8), column % (VECTOR // 8) * 2
        else:
            column = tl.minimum(four, D // 4 - 1)[None, :]
            group, part = column // STEP, column % STEP
        code = words(data + (token[:, None] * GROUPS + group))
        at = rows + ((group * CODES + code) * STEP + part)
        if VECTOR % 8 == 0:
            low, high = gather(at)
            x = tl.reshape(eight_numbers(low, high), (T, W))
        else:
            x = tl.reshape(four_numbers(tl.load(at)), (T, W))
    else:
        column = tl.minimum(channels(four), D - 1)[None, :]
        group, part = (column % GROUPS, column // GROUPS) if SPEC[4] else (column // VECTOR, column % VECTOR)
        code = words(data + (token[:, None] * GROUPS + group))
        x = tl.load(tables[0] + (head * (D * CODES) + (group * CODES + code) * VECTOR + part))
    if D & (D - 1) or D < 32:
        x = tl.where((channels(four) < D)[None, :], x, 0.0)
    return x, scale


class GroupReader(Reader[GroupCodes]):
    """``tables``: codebooks, fp16 [heads, groups, codes, vector]; where codes are of vectors less it, the mean."""

    read = read_grouped
    names = ("codes", "rms")
    words = ()
    any_order = True
    ahead = False
    by_head = True
    resident = 4

    def __init__(self, form: GroupCodes) -> None:
        super().__init__(form)
        self.centred = form.centred
        if self.centred:
            self.resident = 3  # of four the keys' mean would spill too much
        if form.strided and form.vector % 8 == 0:
            self.groups = form.groups

    @staticmethod
    def why_not(form: GroupCodes) -> str | None:
        return None if form.head_dim % 8 == 0 else f"head_dim={form.head_dim}; allowed: multiples of 8"

    @property
    def spec(self) -> tuple[Any, ...]:
        form = self.form
        near = self.ordered or not form.strided
        together = near and (form.vector % 8 == 0 and self.eights if form.vector != 4 else True)
        return (form.head_dim, form.vector, form.codes, together, form.strided)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        assert self.form.book is not None
        book = self.form.book.on(device)
        table = _half(book)
        mean = () if book.mean is None or not self.centred else (book.mean,)
        return (table.view(torch.int64) if self.spec[3] else table, *mean)


@beside
def _half(book: GroupBook) -> torch.Tensor:
    """Codebooks in fp16, made once: their place in memory stays, as graphs need it."""
    return book.codes.to(torch.float16).contiguous()
