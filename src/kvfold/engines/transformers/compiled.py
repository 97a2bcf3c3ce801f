"""A decode step whose layers are compiled: `torch.compile` fuses what lies around their attention.

Storing a token and attending stay kvfold's kernels, one opaque operator per layer (``kvfold::step``). What is compiled knows no
cache, and no layer by its number: the operator finds both when it runs. So the layers of a model share their code, which takes
seconds to compile where a model in one piece takes a minute, and so do its caches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from transformers import AttentionInterface, PreTrainedModel

from kvfold.arithmetic import outside_autocast
from kvfold.engines.transformers import names, originals
from kvfold.errors import UnsupportedModelError
from kvfold.kernels.compiling import compiling

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache
    from kvfold.engines.transformers.layer import FoldedLayer

IMPLEMENTATION = "kvfold_step"
OPTIONS: dict[str, Any] = {"triton.cudagraphs": False, "coordinate_descent_tuning": True}
"""Of Inductor. The graph is kvfold's own. Tuning takes seconds, and has products with one row made by kernels that fuse with
what is around them."""

_running: list[Iterator["FoldedLayer"]] = []
"""Layers of the cache whose step runs, those that have attended left out."""


@torch.library.custom_op("kvfold::step", mutates_args=())
@outside_autocast
def step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Store one token per sequence in the next layer of the cache whose step runs, and attend.

    Parameters
    ----------
    query : Tensor [batch, num_heads, 1, head_dim]
    key, value : Tensor [batch, num_kv_heads, 1, head_dim]
    sinks : Tensor or None, float [num_heads]
    scale : float
        Of the scores.

    Returns
    -------
    Tensor [batch, 1, num_heads, head_dim]
    """
    held = next(_running[-1])
    assert held.static is not None
    key, value, asked = key.to(held.dtype), value.to(held.dtype), query.to(held.dtype)
    out = held.static_step(key, value, asked, scale, held.static, sinks)
    return out.transpose(1, 2).to(query.dtype).contiguous()


@step.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, scale: float
) -> torch.Tensor:
    batch, heads, tokens, dim = query.shape
    return query.new_empty(batch, tokens, heads, dim)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of steps that are compiled; see :func:`step`."""
    if softcap is not None:
        raise UnsupportedModelError("compiled step: scores are capped; allowed: compile=False")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return step(query, key, value, s_aux, scale), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)  # and no mask: decode steps look at none


class Passing:
    """In place of a cache while a step is traced: keys and values go to the attention function as they are."""

    is_compileable = False
    is_sliding = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


PASSING = Passing()


def plain(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What was in place of a model's forward before kvfold's ``decoding`` blocks."""
    while (before := getattr(forward, "_kvfold_plain", None)) is not None:
        forward = before
    return forward


def pieces(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that are compiled: those of a list of layers in which folded attention is.

    Raises
    ------
    UnsupportedModelError
        If a folded layer is in none of them, or they are not in the order of the cache's layers.
    """
    found: list[nn.Module] = []
    numbers: list[int] = []
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for layer in layers:
            own: list[Any] = [m.layer_idx for m in layer.modules() if getattr(m, "kvfold_folds", False)]
            found += [layer] if own else []
            numbers += own
    folds = sum(bool(getattr(module, "kvfold_folds", False)) for module in model.modules())
    if numbers != list(range(folds)) or not folds:
        raise UnsupportedModelError(
            f"compiled step: {type(model).__name__} has no list of layers in the cache's order; allowed: compile=False"
        )
    return found


def around(model: PreTrainedModel) -> list[nn.Module]:
    """Small modules outside of the layers that are compiled with them: norms, and what makes rotations of positions."""
    inside = {id(module) for layer in pieces(model) for module in layer.modules()}
    return [
        m for m in model.modules() if id(m) not in inside and type(m).__name__.endswith(("Norm", "RotaryEmbedding"))
    ]


def check(model: PreTrainedModel) -> None:
    """Refuse a model whose layers are not what their classes say (hooks of others): only that is compiled.

    Raises
    ------
    UnsupportedModelError
    """
    for module in (model, *pieces(model), *around(model)):
        if getattr(plain(module.forward), "__func__", None) is not type(module).forward:
            raise UnsupportedModelError(
                f"compiled step: something stands in place of {type(module).__name__}.forward; allowed: compile=False"
            )


_compiled: WeakKeyDictionary[PreTrainedModel, dict[int, Callable[..., Any]]] = WeakKeyDictionary()
"""By model and batch size."""


def _own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _forward(model: PreTrainedModel, batch: int) -> Callable[..., Any]:
    """The forward of a model's modules, for a batch size; each kind of them is compiled at its first call."""
    made = _compiled.setdefault(model, {})
    if batch not in made:
        # Dynamo keeps what it compiled by code object, and allows a few for each
        own = FunctionType(_own.__code__.replace(), globals(), _own.__name__)
        made[batch] = torch.compile(own, fullgraph=True, dynamic=False, options=OPTIONS)
    return made[batch]


@contextmanager
def _attending(model: PreTrainedModel, batch: int) -> Iterator[None]:
    """Have a folded model's layers be compiled ones, which attend by :func:`step`."""
    changed, forward, modules = [], _forward(model, batch), (*pieces(model), *around(model))
    attentions = [module for module in model.modules() if getattr(module, "kvfold_folds", False)]
    for config in originals.configurations(model, attentions):
        if originals.is_folded(config):
            changed.append((config, config._attn_implementation))
            config._attn_implementation_internal = IMPLEMENTATION
    for module in modules:
        module.forward = partial(forward, module)
    try:
        yield
    finally:
        for config, before in changed:
            config._attn_implementation_internal = before
        for module in modules:
            del module.forward


def run(model: PreTrainedModel, cache: "FoldedCache", ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A step of ``model`` over ``cache``, whose layers a decode graph owns.

    Parameters
    ----------
    ids, positions : Tensor, int64 [batch, 1]

    Returns
    -------
    Tensor [batch, 1, vocabulary]

    Raises
    ------
    UnsupportedModelError
        If a layer cannot be compiled; the message says what of it.
    """
    check(model)
    known = len(ids) in _compiled.get(model, {})
    _running.append(iter(cache.folded))
    try:
        with nullcontext() if known else compiling.model(), _attending(model, len(ids)):
            out: Any = type(model).forward(
                model, input_ids=ids, position_ids=positions, **names.passing(model, PASSING), use_cache=True
            )
        return out.logits
    except (TorchDynamoException, InductorError) as error:
        _compiled[model].pop(len(ids), None)
        why = next(line for line in str(error).splitlines() if line.strip())
        raise UnsupportedModelError(
            f"compiled step: torch.compile cannot take a layer of {type(model).__name__} in one piece ({why.strip()}); "
            "allowed: compile=False"
        ) from error
    finally:
        _running.pop()
