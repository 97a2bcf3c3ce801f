"""Devices that are there, and tensors on another one."""

from typing import Any

import torch

from kvfold.errors import CacheStateError


def present(device: torch.device | str | int) -> torch.device:
    """A device that is there, by its full name ("cuda" is "cuda:0").

    Raises
    ------
    CacheStateError
    """
    try:
        if device is not None:  # which torch takes for its default
            return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError):
        pass
    there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
    raise CacheStateError(f"cache: to({device!r}): there is no such device here; allowed: {there}")


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, also in tuples, lists and dicts, on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    return value
