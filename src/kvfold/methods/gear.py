"""GEAR: quantization, a low-rank approximation of its residual, and sparse outliers (Kang et al., 2024)."""

from dataclasses import dataclass

from kvfold.errors import MethodError
from kvfold.formats import Format, LowRank, Outliers
from kvfold.formats.outliers import outlier_count
from kvfold.methods.base import LayerSpec, Method


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

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("rank", "loops"):
            if getattr(self, field) < 1:
                raise MethodError(f"{self.name}: {field}={getattr(self, field)} is not allowed; allowed: 1 or more")
        if not 0 <= self.outliers <= 0.25:
            raise MethodError(f"{self.name}: outliers={self.outliers} is not allowed; allowed: 0 to 0.25")

    def _format(self, spec: LayerSpec, operand: str) -> LowRank:
        if self.rank > spec.head_dim:
            raise MethodError(f"{self.name}: rank={self.rank} is not allowed; allowed: up to head_dim={spec.head_dim}")
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
