"""What a user asks of the engine: the method in ``--additional-config``, and what of it each layer stores."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvfold import methods
from kvfold.arithmetic import lasting
from kvfold.artefact import load_cached
from kvfold.engines.vllm import subspace
from kvfold.errors import KVFoldError
from kvfold.formats import Dense, Fields
from kvfold.formats.paged import PAGE
from kvfold.kernels.paged import Following, Maps, PageLayout, Steering, serving, unsupported, why_not, why_not_stored
from kvfold.methods import LayerSpec, Method
from kvfold.methods.base import Observation
from kvfold.methods.learned import places
from kvfold.methods.profile import recipe
from kvfold.rope import Rope

FIELD = "kvfold"
EXAMPLE = """--additional-config '{"kvfold": "fold"}'"""
SERVED = ("fold", "kivi", "squat", "innerq", "qjl", "turboquant")
"""Methods whose pages hold nothing but what their own tokens say, by kernels."""
WINDOW_BLOCK = 16
"""Tokens of a block of the recent window."""


def method_of(additional_config: object, config: object = None) -> Method:
    """The method that vLLM's ``additional_config`` names; one with a budget is its profile's recipe.

    Parameters
    ----------
    config
        The model's, which a profile has to be for; None: not checked here.

    Raises
    ------
    KVFoldError
        If there is none, what is named cannot be served, or a budget names no profile, or another model's.
    """
    spec = additional_config.get(FIELD) if isinstance(additional_config, Mapping) else None
    if not isinstance(spec, str):
        raise KVFoldError(f"additional_config: {FIELD}={spec!r} names no method; allowed: a method, as in {EXAMPLE}")
    method = methods.get(spec)
    if not method.spreads:
        return method
    if not (place := next(places(method), "")):
        raise KVFoldError(
            f"{method}: a server takes a profile that is there: make it with 'kvfold calibrate --model MODEL --method "
            f"{method} --out FILE.safetensors' and give artefact=FILE.safetensors"
        )
    profile = load_cached(place)
    if config is not None:
        profile.check_model(config)
    return recipe(method, profile)


def subspace_of(additional_config: object) -> str:
    """Where SQuat's calibrated subspace is; empty: there is none."""
    found = additional_config.get(subspace.FIELD, "") if isinstance(additional_config, Mapping) else ""
    if not isinstance(found, str):
        raise KVFoldError(f"additional_config: {subspace.FIELD}={found!r} is not a file's name")
    return found


def unservable(method: Method, calibrated: str = "") -> str | None:
    """Why a method cannot be served, whatever the model; None if it can.

    Parameters
    ----------
    calibrated : str
        Where SQuat's subspace is.
    """
    if calibrated and not any(part.name == "squat" for part in method.parts()):
        return f"{subspace.FIELD}: {method} has no subspace; leave it out"
    for part in method.parts():
        if part.name == "none":
            return "none folds nothing; leave --attention-backend CUSTOM out"
        if part.paper:
            return (
                f"{part}: paper=true takes statistics of a whole first call; allowed: paper=false, statistics per page"
            )
        if part.name == "squat" and not calibrated and part.recent < PAGE - 32:
            allowed = f"{PAGE - 32} or more, or a subspace of a text: {subspace.HOW}"
            return f"squat: recent={part.recent}: a page waits for its {PAGE} tokens; allowed: {allowed}"
        if part.query_window and part.name != "squat":
            return f"{part.name}: its encoder follows each request's queries; allowed: {', '.join(SERVED)}"
        if part.block != 32:
            return f"{part.name}: group={part.group}: blocks of {part.block} tokens; allowed: groups of up to 32"
        if part.values_need_keys:
            return f"{part.name}: what it stores of values depends on keys; allowed: {', '.join(SERVED)}"
        if getattr(part, "joint", False):
            return f"{part.name}: joint=true makes one code of all KV heads, a page is one head's; allowed: joint=false"
    if method.sink % 32 or method.sink > 96:
        return f"sink={method.sink}: allowed: 0, 32, 64, 96"
    return None


@dataclass(frozen=True)
class Stored:
    """What a layer stores per page of 128 tokens and KV head.

    Attributes
    ----------
    method : Method
        The layer's.
    spec : LayerSpec
    layout : PageLayout
    update : Tensor or None
        SQuat's.
    follows : bool
        Whether keys of a page are steered by the page's own queries.
    """

    method: Method
    spec: LayerSpec
    layout: PageLayout
    update: torch.Tensor | None = None
    follows: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one KV head, as vLLM allocates them: each token has as many, and whole elements of the dtype."""
        least = PAGE * self.spec.dtype.itemsize
        return -(-self.layout.bytes // least) * least

    @property
    def window_bytes(self) -> int:
        """Of a token of one KV head in the window: key and value, and a query where pages follow theirs."""
        return (2 + self.follows) * self.spec.head_dim * self.spec.dtype.itemsize

    @property
    def formats(self) -> tuple[Any, Any]:
        return self.layout.key_format, self.layout.value_format

    @property
    def steering(self) -> Steering | Following | None:
        """How keys are moved before they are encoded; None: not at all."""
        if self.follows:
            squat = subspace.steers(self.method)
            assert squat is not None
            return Following(squat.slice_width(self.spec.head_dim), squat.rank, squat.lam, self._encode_followed)
        if self.update is None:
            return None
        return Steering(self.spec.head_dim - self.update.shape[-1], self.update, self._encode_keys)

    def maps(self, device: torch.device) -> dict[str, Any]:
        """What a call needs beside formats where keys are stored before RoPE, or values as bits of a product."""
        if self.follows:
            return {"following": self.steering}
        if self.update is not None:
            return {"encode_keys": self._encode_keys, "update": self.update}
        if not (self.method.pre_rope or self.method.maps_values):
            return {}
        device = torch.empty(0, device=device).device  # with its number, as tensors have it: tables are made once
        found: dict[str, Any] = {}
        if self.method.pre_rope:
            found["rope"] = self.spec.rope
            found["encode_keys"] = self._encode_keys
        if self.method.maps_values:
            found["encode_values"] = self._encode_values
            found["unproject"] = self.method.value_map(self.spec, device)
            found["bits"] = self.method.value_search(self.spec, device)
        return found

    def why_not(self, device: torch.device) -> str | None:
        """Why no kernel attends to the layer's pages on a device; None if one does."""
        return why_not(*self.formats, device, self.method.pre_rope, self.steering, self._tables(device))

    def kernel(self, device: torch.device) -> str:
        """What attends to the layer's pages on a device where :meth:`why_not` is None; see
        :func:`kvfold.kernels.paged.serving`."""
        heads_per_kv = self.spec.num_heads // self.spec.num_kv_heads
        return serving(*self.formats, device, heads_per_kv, self._tables(device))

    def why_not_stored(self, device: torch.device) -> str | None:
        """Why no kernel encodes the layer's pages; None if one does."""
        return why_not_stored(*self.formats, steering=self.steering, maps=self._tables(device))

    def _tables(self, device: torch.device) -> Maps | None:
        given = {} if self.steering is not None else self.maps(device)
        return Maps.of(self.spec.num_kv_heads, given) if given else None

    def _encode_keys(self, keys: torch.Tensor, positions: torch.Tensor, page: Fields | None) -> Fields:
        state = {} if self.update is None else {"update": self.update[None]}
        return self.method.encode_keys(keys, state, self.spec, positions, False, page)

    def _encode_followed(self, keys: torch.Tensor, positions: torch.Tensor, queries: torch.Tensor) -> Fields:
        heads = queries.shape[1]
        spec = replace(self.spec, num_heads=heads, num_kv_heads=heads)
        state = self.method.observe(Observation(queries, positions[0]), spec)
        return self.method.encode_keys(keys, state, spec, positions, False, None)

    def _encode_values(self, values: torch.Tensor, positions: torch.Tensor, page: Fields | None) -> Fields:
        return self.method.encode_values(values, {}, self.spec, False, page)


def stored(method: Method, spec: LayerSpec, calibrated: str = "", device: torch.device | str = "cpu") -> Stored | None:
    """What a layer stores; None where it is kept in full precision.

    Parameters
    ----------
    calibrated : str
        Where SQuat's subspace is; empty: keys of a page are steered by its own queries.
    device : device
        Of SQuat's update.

    Raises
    ------
    KVFoldError
        If the method does not suit the layer's shape, or its formats cannot be stored page by page.
    """
    own = method.at(spec.layer_idx)
    if own is None or own.name == "none":
        return None
    own.check_shape(spec)
    formats = own.key_format(spec), own.value_format(spec)
    if why := unsupported(*formats, own.recent, own.sink):
        raise KVFoldError(f"{own}: {why}")
    update = subspace.update_of(calibrated, own, spec) if calibrated else None
    if update is not None:
        update = update.to(device)
    return Stored(own, spec, PageLayout(*formats), update, subspace.steers(own) is not None and not calibrated)


def kept(method: Method, spec: LayerSpec) -> Stored:
    """A layer in full precision as pages of vectors, where vLLM's own attention cannot take it: on a CPU."""
    formats = tuple(Dense(spec.head_dim, method.block, side, spec.dtype) for side in ("key", "value"))
    return Stored(method, spec, PageLayout(*formats))


@lasting()
def layer_spec(
    layer_idx: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    on_gpu: bool,
    rope: Rope | None = None,
) -> LayerSpec:
    return LayerSpec(layer_idx, num_layers, num_heads, num_kv_heads, head_dim, dtype, rope, fragments=on_gpu)


__all__ = ["PAGE", "WINDOW_BLOCK", "Stored", "kept", "layer_spec", "method_of", "stored", "subspace_of", "unservable"]
