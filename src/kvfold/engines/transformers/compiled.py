"""A decode step whose model is compiled: `torch.compile` fuses what lies between the layers' attention.

Storing a token and attending stay kvfold's kernels, one opaque operator per layer (``kvfold::step``). What is compiled knows no
cache: which one a step belongs to is looked up when the operator runs, so caches of one model share its code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from transformers import AttentionInterface, PreTrainedModel

from kvfold.arithmetic import outside_autocast
from kvfold.engines.transformers import originals
from kvfold.errors import UnsupportedModelError
from kvfold.kernels.compiling import compiling

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache

IMPLEMENTATION = "kvfold_step"
OPTIONS: dict[str, Any] = {"triton.cudagraphs": False}
"""Of Inductor: the graph is kvfold's own."""

_running: list["FoldedCache"] = []
"""The cache whose step runs."""


@torch.library.custom_op("kvfold::step", mutates_args=())
@outside_autocast
def step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, scale: float, layer: int
) -> torch.Tensor:
    """Store one token per sequence in a layer of the cache whose step runs, and attend.

    Parameters
    ----------
    query : Tensor [batch, num_heads, 1, head_dim]
    key, value : Tensor [batch, num_kv_heads, 1, head_dim]
    sinks : Tensor or None, float [num_heads]
    scale : float
        Of the scores.
    layer : int

    Returns
    -------
    Tensor [batch, 1, num_heads, head_dim]
    """
    held: Any = _running[-1].layers[layer]
    key, value, asked = key.to(held.dtype), value.to(held.dtype), query.to(held.dtype)
    out = held.static_step(key, value, asked, scale, held.static, sinks)
    return out.transpose(1, 2).to(query.dtype).contiguous()


@step.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, scale: float, layer: int
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
    layer: Any = module.layer_idx
    return step(query, key, value, s_aux, scale, layer), None


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


@contextmanager
def _attending(model: PreTrainedModel) -> Iterator[None]:
    """Have a folded model's attention modules attend by :func:`step`."""
    changed = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and originals.is_folded(config):
            changed.append((config, config._attn_implementation))
            config._attn_implementation_internal = IMPLEMENTATION
    try:
        yield
    finally:
        for config, before in changed:
            config._attn_implementation_internal = before


_compiled: WeakKeyDictionary[PreTrainedModel, dict[int, Callable[..., torch.Tensor]]] = WeakKeyDictionary()
"""By model and batch size."""


def plain(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What was in place of a model's forward before kvfold's ``decoding`` blocks."""
    while (before := getattr(forward, "_kvfold_plain", None)) is not None:
        forward = before
    return forward


def check(model: PreTrainedModel) -> None:
    """Refuse a model whose step is not what its class says (a hook's): only that is compiled.

    Raises
    ------
    UnsupportedModelError
    """
    if getattr(plain(model.forward), "__func__", None) is not type(model).forward:
        raise UnsupportedModelError(
            f"compiled step: something stands in place of {type(model).__name__}.forward; allowed: compile=False"
        )


def _logits(model: Any, forward: Callable[..., Any], ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    out: Any = forward(model, input_ids=ids, position_ids=positions, past_key_values=PASSING, use_cache=True)
    return out.logits


def _forward(model: PreTrainedModel, batch: int) -> Callable[..., torch.Tensor]:
    """The step of a model and a batch size; it is compiled at its first call."""
    made = _compiled.setdefault(model, {})
    if batch not in made:
        # Dynamo keeps what it compiled by code object, and allows a few for each
        own = FunctionType(_logits.__code__.replace(), globals(), _logits.__name__)
        made[batch] = torch.compile(own, fullgraph=True, dynamic=False, options=OPTIONS)
    return made[batch]


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
        If the step cannot be compiled; the message says what of it.
    """
    check(model)
    compiling.tell_model()
    _running.append(cache)
    try:
        with _attending(model):
            return _forward(model, len(ids))(model, type(model).forward, ids, positions)
    except (TorchDynamoException, InductorError) as error:
        _compiled[model].pop(len(ids), None)
        why = next(line for line in str(error).splitlines() if line.strip())
        raise UnsupportedModelError(
            f"compiled step: torch.compile cannot take {type(model).__name__} in one piece ({why.strip()}); allowed: "
            "compile=False"
        ) from error
    finally:
        _running.pop()
