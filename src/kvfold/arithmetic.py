"""What is computed and stored whatever is around the model: autocast, inference mode, gradients."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes matrix products in on a device; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def outside_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function compute as if there were no autocast around the call."""

    @wraps(function)
    def as_declared(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return function(*args, **kwargs)
        around = [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]
        with torch.autocast(around[0], enabled=False), torch.autocast(around[-1], enabled=False):
            return function(*args, **kwargs)

    return as_declared


def storing(function: Callable[P, R]) -> Callable[P, R]:
    """For what makes tensors that last: they are ordinary ones, also where the caller's are made in inference mode, which
    nobody could write to later, or are traced for gradients."""

    @wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled() and not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return outside
