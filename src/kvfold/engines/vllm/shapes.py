"""What the plan needs to know of a model: read from its configuration, without its weights."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from kvfold import methods, models
from kvfold.artefact import load_cached
from kvfold.engines.vllm import capacity
from kvfold.engines.vllm.capacity import Capacity
from kvfold.engines.vllm.rotation import rope_of_config
from kvfold.engines.vllm.settings import Stored, layer_spec, stored, unservable
from kvfold.errors import KVFoldError, MethodError
from kvfold.methods import Method
from kvfold.methods.learned import LearnedMethod, places
from kvfold.methods.profile import recipe, stand_in


@dataclass(frozen=True)
class Shape:
    """A model's caches on one of ``tp`` GPUs."""

    name: str
    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tp: int
    weight_bytes: int
    config: Any = None

    @property
    def context(self) -> int | None:
        """Tokens that the model is made for, where its configuration says so."""
        return None if self.config is None else getattr(self.config.get_text_config(), "max_position_embeddings", None)


def of_model(model: str | None, tp: int) -> Shape:
    """The shape of a model.

    Raises
    ------
    KVFoldError
        If its caches are not what is served, or its heads do not divide among GPUs.
    """
    name, config, weight_bytes = models.outline(model)
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise KVFoldError(
            f"model: {name} has layers of {', '.join(sorted(kinds))}; allowed: full attention in all of them"
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        raise KVFoldError(f"tp: {tp} GPUs do not share {heads} heads and {kv_heads} KV heads; give what divides both")
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    dtype = text.dtype if text.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    return Shape(
        name, text.num_hidden_layers, heads // tp, max(1, kv_heads // tp), dim, dtype, tp, weight_bytes, config
    )


def sized(shape: Shape, spec: str) -> Method:
    """A method, with tables of the right shapes where one is to be learned and no artefact is named, and with bits by layer of
    the right sum where a budget names no profile: a plan needs sizes."""
    method = methods.get(spec)
    if method.spreads:
        place = next(places(method), "")
        return recipe(method, load_cached(place)) if place else stand_in(method, shape.layers, shape.head_dim)

    def change(part: Method) -> Method:
        return part.by_shapes() if isinstance(part, LearnedMethod) and not part.artefact else part

    return method.mapped(change)


def tables(shape: Shape, spec: str) -> tuple[int, bool]:
    """Bytes of learned tables that lie beside the caches on a GPU, and whether they are counted from their shapes alone."""
    method = sized(shape, spec)
    parts = [part for part in method.parts() if isinstance(part, LearnedMethod)]
    if not parts:
        return 0, False
    held = {id(x): x for layer in layers_of(shape, spec) for x in layer.method.tables(layer.spec, "cpu").values()}
    return sum(x.nbytes for x in held.values()), any(part.shapes_only for part in parts)


def layers_of(shape: Shape, spec: str) -> list[Stored]:
    """What every layer stores.

    Raises
    ------
    KVFoldError
        If the method cannot be served, or does not suit the model.
    """
    method = sized(shape, spec)
    calibrated = "any" if unservable(method) and any(part.name == "squat" for part in method.parts()) else ""
    if why := unservable(method, calibrated):
        raise KVFoldError(why)
    if shape.tp > 1 and any(isinstance(part, LearnedMethod) for part in method.parts()):
        raise KVFoldError(f"tp={shape.tp}: {method.name}'s tables are of all KV heads; allowed: 1")
    before = shape.config is not None and any(part.pre_rope for part in method.parts())
    rope = rope_of_config(shape.config) if before else None
    facts: Any = (shape.layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype, True, rope)
    found = [stored(method, layer_spec(index, *facts)) for index in range(shape.layers)]
    if any(layer is None for layer in found):
        raise KVFoldError(f"{spec}: layers in full precision are served, but not counted here; leave keep= out")
    return [replace(layer, follows=layer.follows and not calibrated) for layer in found if layer is not None]


def knows_kernels() -> bool:
    """Whether :func:`unstored` can tell: kernels are read of, which needs Triton."""
    return find_spec("triton") is not None


def unstored(shape: Shape, spec: str) -> str | None:
    """Why a GPU does not encode a method's pages; None if it does, or if that is not known here (:func:`knows_kernels`)."""
    if not knows_kernels():
        return None
    device = torch.device("cpu")  # tables are made there; the answer is a GPU's
    for layer in layers_of(shape, spec):
        if layer.why_not_stored(device) is None:
            continue
        plain = stored(layer.method, replace(layer.spec, fragments=False))  # what a server takes then
        if plain is not None and (why := plain.why_not_stored(device)):
            return why
    return None


def fits(shape: Shape, spec: str) -> bool:
    """Whether a method suits the model."""
    try:
        layers_of(shape, spec)
    except MethodError:
        return False
    return True


def page_bytes(shape: Shape, spec: str) -> tuple[int, int]:
    """Bytes of a page of one KV head in all layers: what a method stores, and what vLLM allocates for it."""
    layers = layers_of(shape, spec)
    return sum(layer.layout.bytes for layer in layers), sum(layer.page_bytes for layer in layers)


def dense(shape: Shape, kv_bytes: int, context: int) -> Capacity:
    """Of vLLM's own caches in 16 bits."""
    size = shape.dtype.itemsize
    return capacity.dense(kv_bytes, context, shape.layers, shape.num_kv_heads, shape.head_dim, size)


def folded(shape: Shape, kv_bytes: int, context: int, spec: str) -> Capacity:
    """Of folded caches."""
    return capacity.folded(kv_bytes, context, layers_of(shape, spec), shape.num_kv_heads)
