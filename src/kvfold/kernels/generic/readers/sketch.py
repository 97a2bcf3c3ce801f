"""Signs of random projections and a norm per token (QJL)."""

import math

import triton
import triton.language as tl

from kvfold.formats import SignSketch
from kvfold.kernels.generic.readers._codes import SIGN, codes, of_tokens
from kvfold.kernels.generic.readers.base import Reader


@triton.jit
def read_sketch(fields, tables, head, first, left, four, T: tl.constexpr, SPEC):  # type: ignore[no-untyped-def]
    ROWS: tl.constexpr = SPEC[0]
    FACTOR: tl.constexpr = SPEC[1]
    W: tl.constexpr = 4 * four.shape[0]
    x = codes(fields[0], first, left, four, T, ROWS, 1, SIGN)
    return tl.reshape(x, (T, W)), of_tokens(fields[1], first, left, T, 1, 0) * FACTOR


class SketchReader(Reader[SignSketch]):
    read = read_sketch
    names = ("signs", "rms")
    words = ("signs",)

    @staticmethod
    def why_not(form: SignSketch) -> str | None:
        return None if len(form.sketches) == 1 else f"{len(form.sketches)} sketches; allowed: 1"

    @property
    def spec(self) -> tuple[float, ...]:
        return (self.form.sketches[0], self.form.gains[0] * math.sqrt(self.form.head_dim))
