"""Uniform levels and a scale per token (fold)."""

import triton
import triton.language as tl

from kvfold.formats import UniformTokens
from kvfold.kernels.generic.readers._codes import UNIFORM, codes, of_tokens
from kvfold.kernels.generic.readers.base import Reader


@triton.jit
def read_uniform(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    W: tl.constexpr = 4 * four.shape[0]
    x = codes(fields[0], first, left, four, T, SPEC[0], SPEC[1], UNIFORM)
    return tl.reshape(x, (T, W)), of_tokens(fields[1], first, left, T, 1, 0)


class UniformReader(Reader[UniformTokens]):
    read = read_uniform
    names = ("codes", "scale")

    @property
    def spec(self) -> tuple[int, ...]:
        return (self.form.head_dim, self.form.bits_per_code)
