"""What kernels are given that encode vectors of a call: those that search for codes or pick elements."""

from dataclasses import dataclass
from typing import Any

import torch

from kvfold.formats import Fields
from kvfold.rope import Rope

ORDERS = {"key": 0, "value": 1, "plain": 2}
"""Of packed codes, as kernels know them."""


@dataclass(frozen=True)
class Source:
    """What is encoded of one side.

    Attributes
    ----------
    x : Tensor [batch, num_kv_heads, tokens, head_dim]
        fp16, bf16 or fp32; channels lie side by side.
    fields : Fields
        Contiguous storage ``[sequences, num_kv_heads, blocks, ...]``, filled in place.
    first_block : int
        Where in it the first token goes.
    rows : Tensor or None, integer [batch]
        Which sequence of ``fields`` each sequence of ``x`` is; None: the same one.
    angles : tuple of Tensor or None, float32 [batch, tokens, rotary_dim / 2]
        Cosines and sines of keys that are stored before RoPE.
    factor : float
        Multiplies what was un-rotated.
    tables : object
        What the method has to encode values with, where the format has none.
    """

    x: torch.Tensor
    fields: Fields
    first_block: int
    rows: torch.Tensor | None = None
    angles: tuple[torch.Tensor, torch.Tensor] | None = None
    factor: float = 1.0
    tables: Any = None

    def arguments(self) -> tuple[Any, ...]:
        """As kernels take them: the vectors, sequences, angles."""
        some = next(iter(self.fields.values()))
        cosines, sines = self.angles or (some, some)
        turns = 0 if self.angles is None else cosines.stride(0)
        x = self.x if self.x.stride(-1) == 1 else self.x.contiguous()
        return (x, *x.stride()[:3], some if self.rows is None else self.rows, cosines, sines, turns, self.factor)

    def constants(self) -> dict[str, Any]:
        return {
            "D": self.x.shape[-1],
            "HALF": 0 if self.angles is None else self.angles[0].shape[-1],
            "PICKED": self.rows is not None,
        }


def angles(rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of tokens at ``positions``, integer [batch, tokens], with the bits of :class:`kvfold.rope.Rope`."""
    turned = positions[..., None].float() * rope.inv_freq.to(positions.device)
    return turned.cos(), turned.sin()


def misfit(*checks: tuple[str, Any, tuple[Any, ...]]) -> str | None:
    """What of (name, value, allowed values) is not allowed; None if all are."""
    for name, value, allowed in checks:
        if value not in allowed:
            return f"{name}={value}; allowed: {', '.join(map(str, allowed))}"
    return None
