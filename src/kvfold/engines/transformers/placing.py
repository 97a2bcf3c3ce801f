"""Where a model computes, also one whose weights Accelerate brings there for each call (``cpu_offload``, ``device_map``)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Accelerate's hooks of a module itself."""
    hook = getattr(module, "_hf_hook", None)
    yield from getattr(hook, "hooks", [hook] if hook is not None else [])


def _computes_on(module: nn.Module) -> torch.device | None:
    """Device that Accelerate brings a module's weights to; None if it brings none."""
    for part in module.modules():
        for hook in _hooks(part):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.empty(0, device=device).device
    return None


def has_weights(model: nn.Module) -> bool:
    """Whether a model has weights, on some device or in Accelerate's keeping."""
    kept = any(getattr(hook, "offload", False) for module in model.modules() for hook in _hooks(module))
    return kept or not all(parameter.is_meta for parameter in model.parameters())


def device_of(model: Any) -> torch.device:
    """Where a model's first layer computes; the meta device for a model without weights."""
    device: torch.device = model.device
    return (_computes_on(model) or device) if device.type == "meta" else device


def layer_devices(model: nn.Module, count: int) -> list[torch.device]:
    """Where each of a model's ``count`` attention layers computes."""
    found: dict[int, torch.device] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and index not in found:
            device, parameter = _computes_on(module), next(module.parameters(), None)
            if device is not None:
                found[index] = device
            elif parameter is not None and not parameter.is_meta:
                found[index] = parameter.device
    default = device_of(model)
    return [found.get(i, default) for i in range(count)]
