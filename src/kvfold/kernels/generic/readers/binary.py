"""Bits that a codebook outside turns into vectors once their weighted sums are known (CommVQ's values)."""

import triton
import triton.language as tl

from kvfold.formats.binary import BinaryCodes
from kvfold.kernels.generic.readers._codes import PLAIN, codes
from kvfold.kernels.generic.readers.base import Reader


@triton.jit
def read_binary(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    W: tl.constexpr = 4 * four.shape[0]
    x = codes(fields[0], first, left, four, T, SPEC[0], 1, PLAIN)
    return tl.reshape(x, (T, W)), tl.full([T], 1.0, tl.float32)


class BinaryReader(Reader[BinaryCodes]):
    """Of ``[bits, 1]`` the bits; the last column's sum is that of the weights."""

    read = read_binary
    names = ("bits",)
    words = ("bits",)

    @property
    def spec(self) -> tuple[int, ...]:
        return (self.form.codes,)

    @property
    def width(self) -> int:
        return self.form.codes
