"""A format and a method of your own, compared with others on real text: a byte per channel, a scale per token.

python examples/own_method.py [hub id, local folder or .gguf file]
"""

import sys
from dataclasses import dataclass

import torch

from kvfold import models
from kvfold.evaluation import Row, compare, load_text
from kvfold.formats import Format
from kvfold.methods import LayerSpec, Method


@dataclass(frozen=True)
class Bytes(Format):
    """How it lies: fields of a block of tokens, and the maps from and to vectors. Sizes follow from the fields."""

    kind = "bytes"

    def fields(self):
        return {"codes": ((self.block, self.head_dim), torch.int8), "scale": ((self.block,), torch.float32)}

    def encode(self, x):  # float32 [batch, num_kv_heads, tokens, head_dim], whole blocks
        blocks = x.unflatten(-2, (-1, self.block))
        scale = (blocks.abs().amax(-1) / 127).clamp_min(1e-30)
        return {"codes": (blocks / scale.unsqueeze(-1)).round().to(torch.int8), "scale": scale}

    def decode(self, fields):
        return (fields["codes"] * fields["scale"].unsqueeze(-1)).flatten(-3, -2)


@dataclass(frozen=True)
class ByteMethod(Method):
    """What is stored. Its fields are its options (here every method's ``sink`` and ``recent``); formats say how it lies."""

    name, summary, source, url = "bytes", "a byte per channel, a scale per token", "this example", ""
    unused = ("bits", "k_bits", "v_bits", "group", "center", "paper")

    def key_format(self, spec: LayerSpec) -> Format:
        return self.paged(Bytes(spec.head_dim, self.block, spec.operand("key")), mean=True)  # a mean per page

    def value_format(self, spec: LayerSpec) -> Format:
        return Bytes(spec.head_dim, self.block, spec.operand("value"))


def main(name: str | None = None, prefix: int = 512, tokens: int = 128) -> list[Row]:
    model, tokenizer, info = models.load(name)
    chosen = (ByteMethod(), "fold", "kivi")
    rows = compare(model, tokenizer, info, chosen, load_text(), prefix=prefix, tokens=tokens, new_tokens=4).rows
    for row in rows:
        print(f"{row.method:6} {row.effective_bits:6.2f} bits, {row.cache_bytes:,} bytes, KL divergence {row.kld:.4f}")
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
