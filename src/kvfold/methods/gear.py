"""GEAR: quantization, a low-rank approximation of its residual, and sparse outliers (Kang et al., 2024)."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvfold.formats import Format, LowRank, Outliers
from kvfold.formats.outliers import outlier_count
from kvfold.methods.base import LayerSpec, Method
from kvfold.methods.options import Numbers, Problem

LOOPS = Numbers(1, 100)
SHARE = Numbers(0, 0.25, 0)
"""Of a block's elements."""


@dataclass(frozen=True)
class GEAR(Method):
    """``x = D + A B' + S``: KIVI's groups D, a rank-r approximation of what they miss, outliers S (sec. 3).

    B (head_dim x r) belongs to a page and KV head, and is computed from what D and S miss of the page; under
    ``paper=true`` it belongs to the sequence, from all tokens that are packed first. A token stores its row of A in fp16.

    Parameters
    ----------
    rank : int
        r of the paper, per head.
    loops : int
        Power iterations (Algorithm 2).
    outliers : float
        s of the paper: fraction of elements kept in fp16 (32 bits each, index included); 0: GEAR-L.
    seed : int
        Of the power iteration's start.
    """

    rank: int = 2
    loops: int = 3
    outliers: float = 0.0
    seed: int = 0

    name = "gear"
    summary = "KIVI's groups, a low-rank approximation of their residual, optional outliers"
    source = "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference (arXiv 2403.05527)"
    url = "https://arxiv.org/abs/2403.05527"

    @property
    def kernel_encodes(self) -> bool:
        return True

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.rank < 1:
            yield Problem("rank", Numbers(1, text="1 to head_dim"))
        if self.loops not in LOOPS:
            yield Problem("loops", LOOPS)
        if self.outliers not in SHARE:
            yield Problem("outliers", SHARE)

    def shape_problems(self, spec: LayerSpec) -> Iterator[Problem]:
        if self.rank > spec.head_dim:
            yield Problem("rank", range(1, spec.head_dim + 1))

    def _format(self, spec: LayerSpec, operand: str) -> LowRank:
        axis = "token" if operand == "key" else "channel"
        inner: Format = self.affine(spec, operand, axis)
        count = outlier_count(self.outliers, self.block, spec.head_dim)
        with self.refusing():
            if count:
                inner = Outliers(spec.head_dim, self.block, inner.operand, inner, count, axis)
            return LowRank(
                spec.head_dim,
                self.block,
                inner.operand,
                inner,
                self.rank,
                self.loops,
                self.seed,
                page=self.page,
                seen=self.seen,
            )

    def key_format(self, spec: LayerSpec) -> LowRank:
        return self._format(spec, "key")

    def value_format(self, spec: LayerSpec) -> LowRank:
        return self._format(spec, "value")
