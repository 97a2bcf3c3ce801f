"""Rotating and un-rotating keys with the frequencies of the model that rotated them (RoPE, half-split pairs)."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvfold.errors import UnsupportedModelError

FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Types of rotary scaling whose frequencies do not depend on the length seen so far."""


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Pair (x_j, x_{j + n/2}) -> (-x_{j + n/2}, x_j)."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotary embedding of one model.

    Parameters
    ----------
    inv_freq : Tensor, float32 [rotary_dim / 2]
        Angle per position of each pair, radians.
    scaling : float
        Factor the model multiplies cos and sin with (yarn); 1 for most.
    """

    inv_freq: torch.Tensor
    scaling: float = 1.0

    def _cos_sin(self, positions: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.to(device)[..., None].float() * self.inv_freq.to(device)
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    def _apply(self, x: torch.Tensor, positions: torch.Tensor, sign: float, factor: float) -> torch.Tensor:
        cos, sin = self._cos_sin(positions, x.device)
        rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        rotated = (rotary * cos + sign * rotate_half(rotary) * sin) * factor
        return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate float32 ``x`` [batch, heads, tokens, head_dim] by ``positions`` [batch or 1, heads or 1, tokens]."""
        return self._apply(x, positions, 1.0, self.scaling)

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`rotate`."""
        return self._apply(x, positions, -1.0, 1.0 / self.scaling)


def find_rotary_module(model: nn.Module) -> nn.Module:
    """The model's rotary embedding module.

    Raises
    ------
    UnsupportedModelError
        If the model has none.
    """
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            return module
    raise UnsupportedModelError(
        f"model: {type(model).__name__} has no rotary position embeddings; methods that store keys before RoPE do not fold it"
    )


def rope_of(model: nn.Module) -> Rope:
    """The model's rotation as kvfold applies it, for methods that store keys before RoPE.

    Raises
    ------
    UnsupportedModelError
        If the frequencies change with length, or the model pairs channels in another way than in halves. The latter is
        found by comparing with the model's own ``apply_rotary_pos_emb`` on random input.
    """
    module: Any = find_rotary_module(model)
    kind = getattr(module, "rope_type", "default")
    if not isinstance(getattr(module, "inv_freq", None), torch.Tensor):
        raise UnsupportedModelError(
            f"model: {type(model).__name__} rotates its layers with different frequencies; methods that store keys before "
            "RoPE do not fold it"
        )
    if kind not in FIXED_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope_type={kind}: methods that store keys before RoPE need frequencies that do not change with length; "
            f"allowed: {', '.join(FIXED_ROPE_TYPES)}"
        )
    if module.inv_freq.device.type == "meta":
        raise UnsupportedModelError(
            f"model: {type(model).__name__} is on the meta device, without numbers to rotate by; load it for methods that "
            "store keys before RoPE"
        )
    alike: list[Any] = [m for m in model.modules() if type(m) is type(module)]
    if any(not torch.equal(m.inv_freq.cpu(), module.inv_freq.cpu()) for m in alike):
        raise UnsupportedModelError(
            f"model: {type(model).__name__} rotates its layers with different frequencies; methods that store keys before "
            "RoPE do not fold it"
        )
    scaling = float(getattr(module, "attention_scaling", 1.0))
    rope = Rope(module.inv_freq.detach().float().clone(), scaling)
    theirs = getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None)
    if theirs is None:
        raise UnsupportedModelError(f"model: {type(model).__name__} has no apply_rotary_pos_emb to compare RoPE with")
    device = rope.inv_freq.device
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 4, 2 * rope.inv_freq.numel(), generator=draw, dtype=torch.float32, device="cpu").to(device)
    positions = torch.tensor([[0, 1, 17, 300]], device=device)
    try:
        cos, sin = module(x, positions)
        expected, _ = theirs(x, x, cos, sin)
        same = torch.allclose(expected, rope.rotate(x, positions[:, None]), atol=1e-3, rtol=1e-3)
    except (TypeError, RuntimeError, ValueError, IndexError):
        same = False
    if not same:
        raise UnsupportedModelError(
            f"model: {type(model).__name__} rotates channels in another way than Llama's half-split RoPE; methods that "
            "store keys before RoPE do not fold it"
        )
    return rope
