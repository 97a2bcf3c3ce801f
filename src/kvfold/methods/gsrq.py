"""GSRQ: VQLLM's residual codes from gain-shape k-means, and a scale that repairs shrinkage (Kim et al., 2026)."""

from dataclasses import dataclass

from kvfold.formats.residual import Codebook, ResidualCodes
from kvfold.methods.base import LayerSpec
from kvfold.methods.vqllm import VQLLM


@dataclass(frozen=True)
class GSRQ(VQLLM):
    """VQLLM with codebooks of gain-shape k-means, weighted by attention, and a token's scale fitted to its codes.

    From the source: a centre is a gain times a unit shape, both updated by turns, from a start by spherical k-means;
    residual stages; tokens weighted by the logarithm of their importance. Our reading: importance is how much an error
    of the token moves attention outputs (the source takes gradients), groups and stages are VQLLM's, and ``refit``.

    Parameters
    ----------
    refit : bool
        Store the scale that keeps a key's length and makes a value unbiased, instead of the root mean square; costs no bits.
    """

    refit: bool = True

    name = "gsrq"
    summary = "VQLLM with gain-shape codebooks and a scale that repairs their shrinkage"
    source = "GSRQ: Gain-Shape Residual Quantization for Sub-1-bit KV Cache (arXiv 2607.01065)"
    url = "https://arxiv.org/abs/2607.01065"
    published = {"sink": 0, "recent": 128, "refit": False}  # noqa: RUF012

    def format(self, spec: LayerSpec, operand: str, book: Codebook | None = None) -> ResidualCodes:
        fit = ("size" if operand == "key" else "unbiased") if self.refit else "rms"
        return self._format(spec, operand, book, fit)
