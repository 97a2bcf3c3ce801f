"""A captured step's small operations, in one kernel each where the model's own code takes two to ten.

Which code that is, is found by running it: a module, or a function, whose results are those of a definition of
:mod:`kvfold.engines.transformers.ops.small` to the last bit is replaced while a step is captured. Everything else stays the
model's own.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel

from kvfold.arithmetic import ordinary
from kvfold.engines.transformers import rows
from kvfold.engines.transformers.compiled import plain
from kvfold.engines.transformers.ops import product, small

ROTATE = "apply_rotary_pos_emb"
"""What Transformers' models call it, each in a module of its own."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Of a gated MLP, as Transformers' models call them."""
PROBE = 64
"""Channels of the heads by which a rotation is known."""
HALVES = (torch.float16, torch.bfloat16)

Style = tuple[small.Rounding, float]


class Found(NamedTuple):
    """What one kernel each serves: norms, gates, by Python module the function that rotates, and products of one row."""

    norms: list[tuple[nn.Module, Style]]
    gates: list[nn.Module]
    turned: dict[Any, Callable[..., Any]]
    products: list[nn.Linear]


_known: dict[tuple[Any, ...], small.Rounding | None] = {}
"""How norms round, by class, weight's size and dtype, and device."""


def serves(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take these: of one 16-bit dtype, on a GPU."""
    return all(t.is_cuda and t.dtype == tensors[0].dtype and t.dtype in HALVES for t in tensors)


def _draw(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Random numbers that leave the program's own generators alone."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device).to(dtype)


def _is_plain(module: nn.Module) -> bool:
    """Whether calling a module is calling its class's forward, and nothing else."""
    more = module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl
    return not more and getattr(module.forward, "__func__", None) is type(module).forward


@torch.no_grad()
def norm_style(module: nn.Module) -> Style | None:
    """How a module rounds, and its epsilon, if it is a norm of the root mean square; None for anything else."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("Norm") or not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return None
    if weight.ndim != 1 or not serves(weight) or not _is_plain(module) or len(module.state_dict()) != 1:
        return None
    key = (type(module), len(weight), weight.dtype, weight.device, eps)
    if key not in _known:
        _known[key] = _rounding(module, weight, eps)
    found = _known[key]
    return None if found is None else (found, eps)


@ordinary
def _rounding(module: nn.Module, weight: torch.Tensor, eps: float) -> small.Rounding | None:
    """How a norm rounds, by trying."""
    draw = _draw(weight.device, weight.dtype)
    x, other = 3 * draw(4, len(weight)), draw(len(weight))  # weights of a fresh model are all one
    got = torch.func.functional_call(module, {"weight": other}, (x,))
    return next((how for how in small.ROUNDINGS if _same(got, small.norm_by_definition(x, other, eps, how))), None)


def _same(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)


def _is_of_the_device(error: Exception) -> bool:
    """Whether an error says nothing about shapes: memory does not suffice, or the device failed. Both are RuntimeErrors."""
    own = isinstance(error, RuntimeError) and type(error) is not RuntimeError
    return own or "CUDA error" in str(error) or "can't allocate memory" in str(error)


@torch.no_grad()
def is_rotation(function: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a function rotates queries and keys as :func:`kvfold.engines.transformers.ops.small.rotate` does."""
    draw = _draw(device, dtype)
    given = draw(2, 3, 1, PROBE), draw(2, 1, 1, PROBE), draw(2, 1, PROBE), draw(2, 1, PROBE)
    try:
        got = function(*given)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if _is_of_the_device(error):
            raise
        return False  # it wants something else
    want = small.rotate_by_definition(*given)
    return isinstance(got, tuple) and len(got) == 2 and all(map(_same, got, want))


@torch.no_grad()
def is_gated(module: nn.Module) -> bool:
    """Whether a module is two products, one through SiLU, and a third of what they give."""
    gate, up, down = (getattr(module, name, None) for name in PROJECTIONS)
    if not isinstance(gate, nn.Linear) or not isinstance(up, nn.Linear) or not isinstance(down, nn.Linear):
        return False
    weight = gate.weight
    if not serves(weight) or not _is_plain(module):
        return False
    x = _draw(weight.device, weight.dtype)(1, 1, weight.shape[1])
    try:
        return _same(module(x), down(small.gated_by_definition(gate(x), up(x))))
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if _is_of_the_device(error):
            raise
        return False  # it wants something else


def _gated(module: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args or kwargs or not serves(x):
        return type(module).forward(module, x, *args, **kwargs)
    gate, up, down = (getattr(module, name) for name in PROJECTIONS)
    if all(rows.is_served(m) and m.bias is None and rows.is_row(m, x) for m in (gate, up)):
        return down(product.gated_row_product(x, gate.weight, up.weight))
    return down(small.gated(gate(x), up(x)))


def _norm(module: nn.Module, style: Style, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    weight: Any = module.weight
    if type(x) is rows.Sum:
        if not args and not kwargs and serves(x, weight):
            return rows.norm(x, weight, style[1], style[0])
        x = rows.plain(x)
    if args or kwargs or not serves(x, weight) or not x.is_contiguous():
        return type(module).forward(module, x, *args, **kwargs)
    return small.rms_norm(x, weight, style[1], style[0])


def _rotation(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function in place of ``own``, which it calls for what the kernel does not take: other threads may meet it."""

    def rotate(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        fits = not args and not kwargs and q.ndim == 4 and q.shape[2] == 1 and serves(q, k, cos, sin)
        if not fits or cos.ndim != 3 or cos.shape[-1] != q.shape[-1] or len(cos) not in (1, len(q)):
            return own(q, k, cos, sin, *args, **kwargs)
        if q.stride(-1) != 1 or k.stride(-1) != 1:
            return own(q, k, cos, sin)
        return small.rotate(q, k, cos.contiguous(), sin.contiguous())

    rotate._kvfold_plain = own  # type: ignore[attr-defined]
    return rotate


def _places(model: nn.Module) -> set[Any]:
    """The Python modules that a model's classes come from."""
    return {sys.modules.get(type(module).__module__) for module in model.modules()}


def rotations(model: PreTrainedModel) -> dict[Any, Callable[..., Any]]:
    """The Python modules that a model's classes come from, and the function of each that rotates."""
    found: dict[Any, Callable[..., Any]] = {}
    for place in _places(model):
        function = getattr(place, ROTATE, None)
        own = getattr(function, "_kvfold_plain", function)
        if own is not None and is_rotation(own, model.device, model.dtype):
            found[place] = own
    return found


def _is_compiled(model: nn.Module) -> bool:
    """Whether somebody had ``torch.compile`` take the model or its forward: small operations are fused then."""
    whole = isinstance(model, OptimizedModule) or model._compiled_call_impl is not None
    return whole or hasattr(plain(model.forward), "_torchdynamo_orig_callable")


def find(model: PreTrainedModel) -> Found:
    """What a captured step of a model runs by kernels of kvfold. Modules and functions are run on random numbers for it.

    Raises
    ------
    torch.OutOfMemoryError
        There is no room to try one; other errors of the device pass, too.
    """
    norms = [(module, style) for module in model.modules() if (style := norm_style(module)) is not None]
    gates = [module for module in model.modules() if is_gated(module)]
    return Found(norms, gates, rotations(model) if model.dtype in HALVES else {}, products(model))


def products(model: nn.Module) -> list[nn.Linear]:
    """A model's products that :mod:`kvfold.engines.transformers.rows` runs where a step has one row; none within what somebody
    compiled."""
    inside = {id(m) for outer in model.modules() if outer._compiled_call_impl for m in outer.modules()}
    return [m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside and rows.serves(m)]


def described(model: PreTrainedModel) -> str:
    """How many of a model's norms, gates and rotations a decode graph runs by one kernel each."""
    if _is_compiled(model):
        return "a decode graph runs the model as torch.compile made it"
    found, modules = find(model), list(model.modules())
    norms = sum(type(module).__name__.endswith("Norm") for module in modules)
    gates = sum(all(hasattr(module, name) for name in PROJECTIONS) for module in modules)
    turns = sum(hasattr(place, ROTATE) for place in _places(model))
    kinds = (found.norms, norms, "norms"), (found.gates, gates, "gates"), (found.turned, turns, "rotations (functions)")
    named = [f"{len(served)} of {count} {kind}" for served, count, kind in kinds if count]
    if not any((found.norms, found.gates, found.turned)):
        return f"a decode graph runs the model's own operations ({', '.join(named)} by a kernel)" if named else ""
    each = "by one kernel each, where they are given 16 bits; the rest is the model's own"
    early = (
        f"; of one sequence, {len(found.products)} products whose weights are asked for early" if found.products else ""
    )
    return f"a decode graph runs {', '.join(named)} {each}{early}"


@contextmanager
def small_operations(model: PreTrainedModel, products: bool = True) -> Iterator[int]:
    """Have a model's norms, rotations and gates run by kernels of kvfold, and its products of one row, unless ``products`` is
    False; yields how many modules and functions were found."""
    if _is_compiled(model):
        yield 0
        return
    norms, gates, turned, linear = find(model)
    linear = linear if products else []
    waits = not any(module._compiled_call_impl for module in model.modules())  # what is compiled wants plain tensors
    head = model.get_output_embeddings()
    for module, style in norms:
        module.forward = partial(_norm, module, style)
    for module in gates:
        module.forward = partial(_gated, module)
    for module in linear:
        module.forward = partial(rows.forward, module, waits and module is not head)  # type: ignore[method-assign]
    for owner in model.modules():
        if three := rows.Three.of(owner, set(linear)):
            for index, module in enumerate(three.modules):
                module.forward = partial(three.forward, index)  # type: ignore[method-assign]
    for place, own in turned.items():
        setattr(place, ROTATE, _rotation(own))
    try:
        yield len(norms) + len(gates) + len(turned) + len(linear)
    finally:
        for module in (*(module for module, _ in norms), *gates, *linear):
            del module.forward
        for place, own in turned.items():
            setattr(place, ROTATE, own)
