"""KIVI: keys quantized per channel, values per token (Liu et al., ICML 2024)."""

from dataclasses import dataclass

from kvfold.formats import Format
from kvfold.methods.base import LayerSpec, Method


@dataclass(frozen=True)
class KIVI(Method):
    """Asymmetric groups: ``group`` tokens of one channel for keys, ``group`` channels of one token for values.

    Published KIVI keeps the newest 128 tokens and no first ones (``paper=true``). It quantizes values token by token as they
    leave that window; here both leave it in blocks of ``group`` tokens, which reads the same but for the newest block.
    """

    name = "kivi"
    summary = "asymmetric groups, keys per channel, values per token"
    source = "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (arXiv 2402.02750)"
    url = "https://arxiv.org/abs/2402.02750"

    @property
    def kernel_encodes(self) -> bool:
        return not self.pre_rope

    def key_format(self, spec: LayerSpec) -> Format:
        return self.affine(spec, "key", axis="token")

    def value_format(self, spec: LayerSpec) -> Format:
        return self.affine(spec, "value", axis="channel")
