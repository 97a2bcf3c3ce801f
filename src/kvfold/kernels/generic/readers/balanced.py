"""Affine groups of tiles that were divided by factors of tokens or channels (KVarN)."""

from typing import Any

import torch
import triton
import triton.language as tl

from kvfold.formats import Balanced, Fields
from kvfold.kernels.generic.readers._codes import channels, of_tokens
from kvfold.kernels.generic.readers.affine import AffineReader
from kvfold.kernels.generic.readers.base import Reader


@triton.jit
def read_balanced(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    D: tl.constexpr = SPEC[0]
    BLOCK: tl.constexpr = SPEC[1]
    BY_TOKEN: tl.constexpr = SPEC[2]
    W: tl.constexpr = 4 * four.shape[0]
    x, scale = SPEC[3](fields, tables, head, first, left, four, T, SPEC[4])
    if BY_TOKEN:
        scale *= of_tokens(fields[2], first, left, T, 1, 0)
    else:
        EACH: tl.constexpr = min(T, BLOCK)  # tokens of a tile that lie in one block for certain
        start = tl.minimum(tl.arange(0, T // EACH) * EACH, left - 1)
        column = channels(four)
        at = ((first + start) // BLOCK)[:, None] * D + column[None, :]
        factor = tl.load(fields[2] + at, mask=(column < D)[None, :], other=0.0)
        x = tl.reshape(tl.reshape(x, (T // EACH, EACH, W)) * factor[:, None, :], (T, W))
        most = tl.full([1, 1], 65504.0, tl.float16)  # nothing decodes to an infinity
        x = tl.minimum(tl.maximum(x, -most), most)
    return x, scale


class BalancedReader(Reader[Balanced]):
    """Fields: the inner format's, and factors."""

    read = read_balanced

    def __init__(self, form: Balanced) -> None:
        super().__init__(form)
        self.inner = AffineReader(form.inner)
        self.names = (*self.inner.names, "factor")

    @staticmethod
    def why_not(form: Balanced) -> str | None:
        return AffineReader.why_not(form.inner)

    @property
    def spec(self) -> tuple[Any, ...]:
        return self._spec(self.inner.spec)

    def spec_of_halves(self) -> tuple[Any, ...]:
        return self._spec(self.inner.spec_of_halves())

    def _spec(self, inner: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.form.head_dim, self.form.block, self.form.by_token, self.inner.read, inner)

    def fields(self, stored: Fields) -> tuple[torch.Tensor, ...]:
        return (*self.inner.fields(stored), stored["factor"])
