"""Full precision, through the same cache and the same attention as every method: the baseline."""

from dataclasses import dataclass

from kvfold.formats import Dense, Format
from kvfold.methods.base import LayerSpec, Method


@dataclass(frozen=True)
class NoFolding(Method):
    """Keys and values as the model makes them."""

    sink: int = 0
    recent: int = 0

    name = "none"
    summary = "full precision: the model's own dtype, the baseline of every comparison"
    source = "-"
    url = ""
    published = {}  # noqa: RUF012
    unused = ("bits", "k_bits", "v_bits", "center", "paper")

    @property
    def kernel_encodes(self) -> bool:
        return True

    def effective_bits(self, head_dim: int = 128, num_layers: int = 32) -> float:
        """Of a model in 16 bits, which others are compared with."""
        return 16.0

    def key_format(self, spec: LayerSpec) -> Format:
        return Dense(spec.head_dim, self.block, "key", spec.dtype)

    def value_format(self, spec: LayerSpec) -> Format:
        return Dense(spec.head_dim, self.block, "value", spec.dtype)
