"""What is computed and stored whatever is around the model: autocast, inference mode, gradients, tracing.

What the package makes once and keeps goes through :func:`lasting` or :func:`beside`, and through nothing else (a test looks).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


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


# ---- what is made once -----------------------------------------------------------------------------------------------


def is_watched() -> bool:
    """Whether tensors that are made now would be others than they are declared: fake or functional ones, recorded as an
    operation's result (``torch.export``), one level of a transformation (``vmap``), or on a device of somebody's choice."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


@contextmanager
def unwatched() -> Iterator[None]:
    """Within it tensors are what they are declared, whatever :func:`is_watched` says of the caller's."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def ordinary(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function make ordinary tensors, whatever is around the call."""
    made = outside_autocast(storing(function))

    @wraps(function)
    def unseen(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_watched():
            return made(*args, **kwargs)
        with unwatched():
            return made(*args, **kwargs)

    return unseen


class Lasting(Protocol[P, R_co]):
    """A function whose results are kept; otherwise it is called as it is declared."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def cache_clear(self) -> None:
        """Forget all results."""


def lasting(most: int | None = 128) -> Callable[[Callable[P, R]], Lasting[P, R]]:
    """Have a function's results made once, as ordinary tensors, and kept: those of the ``most`` newest arguments, or of all."""

    def keeping(function: Callable[P, R]) -> Lasting[P, R]:
        return cast("Lasting[P, R]", functools.lru_cache(maxsize=most)(ordinary(function)))

    return keeping


def beside(function: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """As :func:`lasting`, of an object that is the first argument, for as long as it lives."""
    found: WeakKeyDictionary[Any, dict[Any, R]] = WeakKeyDictionary()
    made = ordinary(function)

    @wraps(function)
    def keeping(of: T, *args: P.args, **kwargs: P.kwargs) -> R:
        own = found.setdefault(of, {})
        if args not in own:
            own[args] = made(of, *args, **kwargs)
        return own[args]

    return keeping
