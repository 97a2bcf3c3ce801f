"""A captured step of one sequence: its products, and the sums that follow them, by kernels that begin before their turn.

A model's code adds what a product gave to what went around it, and gives the sum to a norm. Such a sum waits, as a tensor that
knows its two parts, until something looks at it: a norm computes both in one launch, for anything else it is added first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kvfold.engines.transformers.ops import product, small

HALVES = (torch.float16, torch.bfloat16)
ADDS = (torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add)
FACTS = ("shape", "dtype", "device", "is_cuda", "ndim", "layout", "requires_grad")
LOOKS = {getattr(torch.Tensor, name).__get__ for name in FACTS}
"""What may be asked of a sum before it is computed."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl")


def plain(x: Any) -> Any:
    """``x``, or what is in it, as nothing but tensors; sums are computed."""
    if isinstance(x, Sum):
        x.settle()
    if isinstance(x, Product | Sum):
        return x.as_subclass(torch.Tensor)
    if type(x) in (tuple, list):
        return type(x)(map(plain, x))
    return {key: plain(value) for key, value in x.items()} if type(x) is dict else x


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*plain(args), **plain(kwargs or {}))


def _fit(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie alike."""
    alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return alike and a.is_contiguous() and b.is_contiguous()


class Product(torch.Tensor):
    """What a product gave. Added to its like it makes a :class:`Sum`; to all else it is any tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ADDS and len(args) == 2 and not kwargs and all(isinstance(x, torch.Tensor) for x in args):
            with torch._C.DisableTorchFunctionSubclass():
                parts = plain(args)
                if _fit(*parts):
                    return Sum.of(*parts)
        return _run(func, args, kwargs)


class Sum(torch.Tensor):
    """A sum of two tensors that is not computed before it is looked at."""

    parts: tuple[torch.Tensor, torch.Tensor] | None
    """None once it is."""

    @staticmethod
    def of(a: torch.Tensor, b: torch.Tensor) -> "Sum":
        total = torch.empty_like(a).as_subclass(Sum)
        total.parts = (a, b)
        return total

    def settle(self) -> None:
        """Compute it, if that was not done."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.parts is not None:
                parts, self.parts = self.parts, None
                torch.add(*parts, out=self.as_subclass(torch.Tensor))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if func in ADDS:
            return Product.__torch_function__(func, types, args, kwargs)
        return _run(func, args, kwargs)


def norm(x: Sum, weight: torch.Tensor, eps: float, rounding: small.Rounding) -> torch.Tensor:
    """The norm of a sum, which is computed with it if it was not before; as ``small.rms_norm``."""
    with torch._C.DisableTorchFunctionSubclass():
        total, parts = x.as_subclass(torch.Tensor), x.parts
        x.parts = None
        if parts is None:
            return small.rms_norm(total, weight, eps, rounding)
        return small.added_norm(*parts, total, weight, eps, rounding)


def serves(module: nn.Module) -> bool:
    """Whether a module is a product that the kernel takes, and nothing else."""
    if type(module) is not nn.Linear or any(getattr(module, name) for name in HOOKS) or "forward" in vars(module):
        return False
    weight = module.weight
    aligned = weight.is_contiguous() and weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0
    return weight.is_cuda and weight.dtype in HALVES and aligned


def is_served(module: nn.Module) -> bool:
    """Whether :func:`forward` stands in place of a module's own."""
    return getattr(vars(module).get("forward"), "func", None) is forward


def is_row(module: nn.Linear, x: torch.Tensor) -> bool:
    """Whether ``x`` is one row that a module's kernel takes."""
    weight = module.weight
    fits = x.numel() == x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype and x.device == weight.device
    return fits and x.is_contiguous() and x.data_ptr() % 16 == 0


def forward(module: nn.Linear, waits: bool, x: torch.Tensor) -> torch.Tensor:
    """In place of the forward of a module that :func:`serves`; ``waits``: sums of what it gives may wait for a norm."""
    x = plain(x)
    if not is_row(module, x):
        return type(module).forward(module, x)
    out = product.row_product(x, module.weight, module.bias)
    return out.as_subclass(Product) if waits else out


PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""Queries, keys and values of one row, as Transformers' models call them."""


class Three:
    """Three products that a model asks for one after the other. The first computes all, for those that are given its row."""

    def __init__(self, modules: list[nn.Linear]) -> None:
        self.modules = modules
        self.row: tuple[torch.Tensor, int] | None = None
        self.rest: dict[int, torch.Tensor] = {}

    @staticmethod
    def of(owner: nn.Module, served: set[nn.Linear]) -> "Three | None":
        """A module's three products, if it has them, all are ``served`` and of one kind."""
        modules: list[Any] = [getattr(owner, name, None) for name in PROJECTIONS]
        if len({id(m) for m in modules}) < len(PROJECTIONS) or not all(m in served for m in modules):
            return None
        weights = [m.weight for m in modules]
        alike = {(w.shape[1], w.dtype, w.device, m.bias is None) for w, m in zip(weights, modules, strict=True)}
        return Three(modules) if len(alike) == 1 else None

    def forward(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """In place of the forward of one of them."""
        x, module = plain(x), self.modules[index]
        if not is_row(module, x):
            return type(module).forward(module, x)
        if x.is_inference():  # whose changes are not counted: nobody knows whether the row is the same
            return product.row_product(x, module.weight, module.bias)
        same = self.row is not None and self.row[0].data_ptr() == x.data_ptr() and self.row[1] == x._version
        if not same or index not in self.rest:
            out = product.three_row_products(x, [m.weight for m in self.modules], [m.bias for m in self.modules])
            self.row, self.rest = (x, x._version), dict(enumerate(out))
        own = self.rest.pop(index)
        if not self.rest:
            self.row = None
        return own
