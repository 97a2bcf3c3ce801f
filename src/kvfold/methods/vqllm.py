"""VQLLM: residual vector quantization (Kumar, 2024, arXiv 2410.15704; not the later system of a similar name)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvfold.formats.residual import Codebook, ResidualCodes
from kvfold.methods.base import LayerSpec, State
from kvfold.methods.commvq import POWERS
from kvfold.methods.learned import LearnedMethod
from kvfold.methods.options import Numbers, Problem


@dataclass(frozen=True)
class VQLLM(LearnedMethod):
    """32 channels at a time as a sum of one code per stage; one codebook per layer for keys, one for values.

    A token's vector is divided by its root mean square, cut into groups, and each group is coded stage by stage. Keys are
    coded before RoPE, in groups of channels that do not lie together (the paper's Table 3). Stages follow from the bits:
    ``bits * vector / log2(codes)``, so 4 for 1 bit and 8 for 2.

    Parameters
    ----------
    vector : int
        Channels coded together.
    codes : int
        C of the paper, codes per stage; a power of two up to 256. An index is stored in a byte.
    """

    vector: int = 32
    codes: int = 256

    name = "vqllm"
    summary = "residual vector quantization, 32 channels at a time"
    source = "Residual vector quantization for KV cache compression in large language model (arXiv 2410.15704)"
    url = "https://arxiv.org/abs/2410.15704"
    pre_rope = True

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.codes not in POWERS:
            yield Problem("codes", POWERS)
        least = -(-int(math.log2(max(self.codes, 2))) // min(self.key_bits, self.value_bits))
        if self.vector < least:
            yield Problem(
                "vector", Numbers(least, text=f"{least} or more that divide head_dim"), " holds no whole stage"
            )

    def stages(self, bits: int) -> int:
        """K of the paper."""
        return bits * self.vector // int(math.log2(self.codes))

    def format(self, spec: LayerSpec, operand: str, book: Codebook | None = None) -> ResidualCodes:
        """A format; without a codebook it knows its size only."""
        return self._format(spec, operand, book, "rms")

    def _format(self, spec: LayerSpec, operand: str, book: Codebook | None, fit: str) -> ResidualCodes:
        bits = self.key_bits if operand == "key" else self.value_bits
        with self.refusing():
            return ResidualCodes(
                spec.head_dim,
                self.block,
                spec.operand(operand),
                self.vector,
                self.codes,
                self.stages(bits),
                operand == "key",
                book,
                fit,
            )

    def shapes(self, spec: LayerSpec) -> None:
        self.format(spec, "key")
        self.format(spec, "value")

    def key_format(self, spec: LayerSpec) -> ResidualCodes:
        return self.format(spec, "key", self._books(spec)["key"])

    def value_format(self, spec: LayerSpec) -> ResidualCodes:
        return self.format(spec, "value", self._books(spec)["value"])

    def effective_bits(self, head_dim: int = 128, num_layers: int = 32) -> float:
        spec = LayerSpec(0, num_layers, 1, 1, head_dim)
        return (self.format(spec, "key").bits + self.format(spec, "value").bits) / 2

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        place = torch.empty(0, device=device).device
        return {f"{operand}.codes": book.on(place).codes for operand, book in self._books(spec).items()}

    def _books(self, spec: LayerSpec) -> dict[str, Codebook]:
        books: dict[str, Codebook] = self.learned(spec)
        return books

    def learned_shape(self) -> dict[str, object]:
        return {**super().learned_shape(), "vector": self.vector, "codes": self.codes}

    def build(self, parts: dict[str, torch.Tensor], rotary: int) -> dict[str, Codebook]:
        return {operand: Codebook.rounded(parts[f"{operand}.codes"]) for operand in ("key", "value")}

    def blank(self, num_kv_heads: int, head_dim: int) -> dict[str, torch.Tensor]:
        sides = (("key", self.key_bits), ("value", self.value_bits))
        return {
            f"{side}.codes": torch.ones(self.stages(bits), self.codes, self.vector, dtype=torch.float16)
            for side, bits in sides
        }

    @property
    def kernel_encodes(self) -> bool:
        return True

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        return keys if spec.rope is None else spec.rope.unrotate(keys, positions)

    def restore_keys(self, stored: torch.Tensor, spec: LayerSpec, positions: torch.Tensor) -> torch.Tensor:
        return stored if spec.rope is None else spec.rope.rotate(stored, positions)
