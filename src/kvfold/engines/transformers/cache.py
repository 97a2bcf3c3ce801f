"""The folded cache: folded layers and Transformers' own, behind Transformers' ``Cache`` interface."""

import copy
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvfold.arithmetic import storing
from kvfold.engines.transformers.layer import ANOTHER_MODEL, NOT_ATTENDED, NOT_READ, FoldedLayer
from kvfold.engines.transformers.originals import is_folded
from kvfold.engines.transformers.rollback import Call, attending, crop_layers, fed, forget_keys
from kvfold.engines.transformers.states import forget_states, select_states, states_of
from kvfold.engines.transformers.tracing import NOT_TRACED, refuse_tracing
from kvfold.errors import CacheStateError, KVFoldWarning, UnsupportedModelError
from kvfold.formats import PagedFormat
from kvfold.methods import Method
from kvfold.storage.columns import AS_IT_BEGINS
from kvfold.storage.devices import moved, present

AnyLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin


class ModelReference:
    """The model that a cache was folded for, without keeping it alive. A copy refers to the same model, a pickle to none."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.weak = None if model is None else weakref.ref(model)

    def __call__(self) -> torch.nn.Module | None:
        return None if self.weak is None else self.weak()

    def __deepcopy__(self, memo: object) -> "ModelReference":
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ModelReference, ()


PREFIXES = (
    "a folded cache takes no keys that were made elsewhere; allowed: adapters that change the model or its input (LoRA, IA3, "
    "prompt tuning), or kvfold.unfold(model)"
)


class _NoLength(UnsupportedModelError, AttributeError):
    """An attribute that there is none of; tools that only look whether there is one go on."""


class FoldedCache(Cache):
    """A Transformers cache whose full-attention layers are folded; made by :func:`kvfold.fold`.

    Parameters
    ----------
    layers : list of cache layers
        One per layer of the model: :class:`FoldedLayer`, or Transformers' own where a layer stays in full precision.
    method : Method
    model : Module or None
        Whose cache it is: :meth:`save` asks, and its configuration is looked at when a call begins.

    Attributes
    ----------
    restarts : int
        How often a model's ``generate`` emptied it to read all tokens again, as Phi-3's does where its frequencies change.

    Notes
    -----
    A call of the model that dies (out of memory, an interrupt, an error in a hook) before every layer has its tokens counts
    for nothing: the next call finds the cache as it was, with a :class:`~kvfold.errors.KVFoldWarning`. A call that dies
    after its last layer is in the cache; ``get_seq_length()`` counts whole calls only, and says how many tokens to pass on.
    """

    def __init__(self, layers: list[AnyLayer], method: Method, model: torch.nn.Module | None = None) -> None:
        super().__init__(layers=list(layers))
        self.method = method
        self._model = ModelReference(model)
        self._config = attending(model)
        self._fed = fed(model, self.layers)
        self._call: Call | None = None
        self._cut: tuple[str, int | None] | None = None
        self.restarts = 0

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that it was folded for; None when that is gone."""
        return self._model()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what the cache holds to a safetensors file, in one step; :func:`kvfold.load_cache` reads it.

        Stored are the tokens (no spare capacity), padding, what an encoder follows, the method, hashes of the model as it is
        now and of what the method learned, and a checksum.

        Parameters
        ----------
        path : str or path
            Replaced if it exists.

        Raises
        ------
        CacheFileError
            If it cannot be written.
        CacheStateError
            If the model is gone, a call is under way, or a decode graph owns the cache.
        """
        from kvfold.engines.transformers.saving import save

        self.settle("save()")
        save(self, path)

    @storing
    def to(self, device: torch.device | str | int | None) -> "FoldedCache":
        """Move the cache to a device, in place, and choose what attends and encodes there; returns itself. None: nothing moves.

        ``cache.to("cpu")`` frees a GPU between two calls, ``cache.to(model.device)`` goes on. Content stays as it is, also the
        order in which codes are packed: on a CPU the float32 reference reads what was packed for tensor cores.

        Within a call of the model (accelerate's hooks move what a layer is given) its tokens move too, and it goes on.

        Raises
        ------
        CacheStateError
            For a dtype: windows have the model's, and codes none. For what is no device, or none that is there.
        KVFoldError
            If a kernel was insisted on that the device does not have.
        """
        if isinstance(device, torch.dtype):
            raise CacheStateError(
                f"cache: to({device}) is not allowed: windows have the model's dtype, and codes have none; allowed: a device"
            )
        if device is None:  # as tensors take it, and accelerate's hooks of offloaded models give it
            return self
        target = present(device)
        if any(layer.pending and layer.device != target for layer in self.folded):
            self.settle("to()")
        before = self._call.before if self._call is not None else {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, FoldedLayer):
                layer.to(target)
                continue
            for attributes in (vars(layer), before.get(index, {})):
                for name, value in attributes.items():
                    attributes[name] = target if isinstance(value, torch.device) else moved(value, target)
        return self

    @property
    def max_cache_len(self) -> int:
        """Nothing that a folded cache has; PEFT asks for it, to put a cache of its own in its place."""
        raise _NoLength(
            "cache: max_cache_len is what PEFT's prefix tuning asks a cache for before it puts a DynamicCache with keys of its "
            f"own in its place; {PREFIXES}"
        )

    @property
    def folded(self) -> list[FoldedLayer]:
        """The layers that are folded."""
        return [layer for layer in self.layers if isinstance(layer, FoldedLayer)]

    # ---- calls of the model ------------------------------------------------------------------------------------------

    @torch.compiler.disable(reason=NOT_TRACED)
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`FoldedLayer.update`; a call that died is taken back before the next one begins.

        Keys of layers that are not folded and share the folded layers' mask are marked.

        Raises
        ------
        CacheStateError
            If the model does not attend through kvfold, or if a call that died cannot be taken back.
        UnsupportedModelError
            If the model is being exported or traced.
        """
        if layer_idx >= len(self.layers):
            raise CacheStateError(
                f"cache: has {len(self.layers)} layers, the model passes layer {layer_idx}; {ANOTHER_MODEL}"
            )
        layer = self.layers[layer_idx]
        if isinstance(layer, FoldedLayer) and layer.static is not None:
            return layer.update(key_states, value_states)
        call = self._enter(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not isinstance(layer, FoldedLayer):
            if call is not None:
                call.finish(layer_idx)
            if self._shares_mask(layer_idx):
                keys._kvfold_kept = True  # type: ignore[attr-defined]
        return keys, values

    def _shares_mask(self, layer_idx: int) -> bool:
        """Whether a layer gets the mask that folded layers get."""
        sliding = getattr(self.layers[layer_idx], "is_sliding", False)
        return not sliding and any(isinstance(layer, FoldedLayer) for layer in self.layers)

    def _enter(self, index: int) -> Call | None:
        """The call in which layer ``index`` gets tokens: the one under way, or a new one. None for layers outside of calls."""
        if index not in self._fed:
            return None
        call = self._call
        if call is None or not call.missing or index in call.before:
            self.settle()
            self._check_begin(index)
            refuse_tracing()
            self._check_attention()
            call = self._call = Call(self.layers, self._fed, super().get_seq_length())
        elif call.last is not None and getattr(self.layers[call.last], "pending", False):
            raise CacheStateError(NOT_ATTENDED.format(call.last))
        call.reach(index)
        return call

    def _check_begin(self, index: int) -> None:
        """Refuse what looks like a call that begins at layer ``index``, and is the rest of one that was under way when a method
        of the cache took it back: calls begin where the one before began."""
        cut, self._cut = self._cut, None
        if cut is not None and index != cut[1]:
            self._cut = cut
            raise CacheStateError(
                f"cache: {cut[0]} was called within a call of the model, before layer {index} had its tokens, and took back "
                f"those of the layers before; allowed: {cut[0]} between calls"
            )

    def settle(self, by: str | None = None) -> None:
        """If the newest call died, take it back; ``by`` which of the cache's methods, between calls, or (None) the next call.

        If the call did not die, and goes on, it is refused.

        Raises
        ------
        CacheStateError
            If a layer that is not folded cannot go back; ``reset()`` remains.
        """
        call = self._call
        if call is None or not call.missing:
            return
        changed = call.take_back(by is None)
        self._call, self._cut = None, None if by is None else (by, call.first)
        if changed:
            warnings.warn(
                "kvfold: the last call of the model ended before all layers had its tokens; it was taken back, and the "
                f"cache holds the {call.length} tokens before it. If it did not die, the model has fewer layers than the cache",
                KVFoldWarning,
                stacklevel=3,
            )

    def _check_attention(self) -> None:
        """Refuse before anything is computed, where the model's configuration says already who will attend."""
        if self._config is not None and not is_folded(self._config):
            raise CacheStateError(NOT_READ)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the calls that all layers took; of a call under way, or one that died, none."""
        if self._call is not None and self._call.missing:
            return self._call.length
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns and their offset. An offset of False, which counts as 0, tells the mask function that a folded layer will
        read the mask.

        Raises
        ------
        CacheStateError
            If a call has no tokens: ``generate`` was given a prompt that is not longer than what the cache holds.
        """
        if query_length == 0:
            raise CacheStateError(
                f"input_ids: no new token follows the {self.get_seq_length()} that the cache holds; {AS_IT_BEGINS}"
            )
        if self._call is not None and self._call.missing and layer_idx in self._call.before:
            columns, offset = self._call.mask_sizes(layer_idx, query_length)
        else:
            columns, offset = super().get_mask_sizes(query_length, layer_idx)
        return columns, False if self._shares_mask(layer_idx) else offset

    def reset(self) -> None:
        """Forget everything, also a call that died; past recording is over."""
        for layer in self.layers:
            if isinstance(layer, FoldedLayer):
                layer.reset()
            else:
                forget_keys(layer)
            if hasattr(layer, "record_past"):
                layer.record_past = False
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                forget_states(layer)
        if self._call is not None and self._call.missing:
            self._cut = "reset()", self._call.first
        self._call = None

    def crop(self, tokens_to_remove: int) -> None:
        """See :meth:`FoldedLayer.crop`.

        Raises
        ------
        CacheStateError
            If a layer holds a recurrent state, which tokens cannot be taken out of, or a sliding window or a convolution whose
            older tokens are gone. Nothing has changed then.
        ValueError
            If the number is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({int(tokens_to_remove)}): pass a negative number of tokens to remove")
        self.settle("crop()")
        fixed = [i for i, layer in enumerate(self.layers) if states_of(layer) and not layer.is_croppable]
        if tokens_to_remove != 0 and fixed:
            raise CacheStateError(
                f"cache: crop({int(tokens_to_remove)}) is not possible: layers {', '.join(map(str, fixed))} hold recurrent "
                "states, which tokens cannot be taken out of; reset() the cache and prefill again"
            )
        crop_layers(self.layers, -int(tokens_to_remove), self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make sequence ``beam_idx[i]`` the i-th; int64 [batch].

        Raises
        ------
        CacheStateError
            For none, or one that the cache does not hold. Nothing has changed then.
        """
        self._check_rows("beam_idx", beam_idx, 0)
        self.settle("reorder_cache()")
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every sequence ``repeats`` times, one after the other.

        Raises
        ------
        CacheStateError
            For less than once.
        """
        if repeats < 1:
            raise CacheStateError(f"repeats: {repeats}: a cache holds one sequence or more; allowed: 1 or more")
        self.settle("batch_repeat_interleave()")
        self._each(lambda t: t.repeat_interleave(repeats, dim=0), lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences ``indices``, int64 [new batch] or bool [batch].

        Raises
        ------
        CacheStateError
            For none, or one that the cache does not hold. Nothing has changed then.
        """
        self._check_rows("indices", indices, None)
        self.settle("batch_select_indices()")
        self._each(lambda t: t[indices.to(t.device), ...], lambda layer: layer.batch_select_indices(indices))

    def _check_rows(self, name: str, rows: torch.Tensor, least: int | None) -> None:
        """Refuse sequences that are not there, before a layer moves any; ``least``: None, or the smallest number allowed."""
        held = [layer for layer in self.layers if isinstance(layer, FoldedLayer) and layer.is_initialized]
        if not held:
            return
        count, rows = len(held[0].sequences), rows.cpu()
        least = -count if least is None else least
        if rows.dtype == torch.bool:
            if rows.shape != (count,) or not rows.any():
                raise CacheStateError(
                    f"{name}: {rows.tolist()}; allowed: one of {count} or more, of as many as there are"
                )
        elif not rows.numel() or int(rows.min()) < least or int(rows.max()) >= count:
            allowed = f"one or more of {least} to {count - 1}"
            raise CacheStateError(f"{name}: {rows.tolist()}: the cache holds {count} sequences; allowed: {allowed}")

    def _each(self, pick: Callable[[torch.Tensor], torch.Tensor], select: Callable[[Any], None]) -> None:
        """Rearrange the batch of every layer; those of states alone have no method for it."""
        for layer in self.layers:
            if hasattr(layer, "batch_select_indices"):
                select(layer)
            else:
                select_states(layer, pick)

    def activate_past_recording(self) -> None:
        """See :meth:`FoldedLayer.activate_past_recording`."""
        self.settle("activate_past_recording()")
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    @storing
    def __deepcopy__(self, memo: dict[int, Any]) -> "FoldedCache":
        """Holds what whole calls brought; a call that is under way goes on."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, value if name == "_config" else copy.deepcopy(value, memo))
        if twin._call is not None:
            if twin._call.missing:
                twin._call.take_back()
            twin._call = None
        return twin

    # ---- sizes -------------------------------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        """Bytes of the tensors that exist: ``packed``, ``windows`` (sink, recent, and what is kept in full precision),
        ``state`` (per sequence), ``tables`` (per model, shared ones once) and their ``total``."""
        sizes = {"packed": 0, "windows": 0, "state": 0, "tables": 0}
        tables: dict[int, torch.Tensor] = {}
        for layer in self.layers:
            sizes["windows"] += sum(t.nbytes for t in states_of(layer))
            if isinstance(layer, FoldedLayer):
                for name, tensors in layer.tensors().items():
                    sizes[name] += sum(t.nbytes for t in tensors)
                tables.update((t.data_ptr(), t) for t in layer.tables())
            else:
                kept = (getattr(layer, "keys", None), getattr(layer, "values", None))
                sizes["windows"] += sum(t.nbytes for t in kept if isinstance(t, torch.Tensor))
        sizes["tables"] = sum(t.nbytes for t in tables.values())
        return {**sizes, "total": sum(sizes.values())}

    def full_nbytes(self) -> int:
        """Bytes that the same tokens take in a full-precision cache of the model's dtype, without padding."""
        total = sum(t.nbytes for layer in self.layers for t in states_of(layer))
        for layer in self.layers:
            if isinstance(layer, FoldedLayer) and layer.is_initialized:
                layer.own()
                per_token = 2 * layer.spec.num_kv_heads * layer.spec.head_dim * layer.dtype.itemsize
                total += per_token * sum(layer.lens)
            elif not isinstance(layer, FoldedLayer):
                kept = (getattr(layer, "keys", None), getattr(layer, "values", None))
                total += sum(t.nbytes for t in kept if isinstance(t, torch.Tensor))
        return total

    def effective_bits(self, tables: bool = True) -> float:
        """Bits per element of the packed tokens: storage, per-sequence state and tables, without the windows.

        NaN while nothing is packed. With ``tables=False`` without what all sequences of a model share (codebooks), whose
        part falls with the number of tokens.
        """
        elements = bits = 0.0
        for layer in self.folded:
            layer.own()
            tokens = sum(layer.packed)
            elements += 2 * layer.spec.num_kv_heads * layer.spec.head_dim * tokens
            for form in (layer.key_format, layer.value_format):
                stored = form.block_bytes * (tokens // layer.block)
                if isinstance(form, PagedFormat) and form.page:
                    stored += form.page_bytes * sum(form.pages(n // layer.block) for n in layer.packed)
                bits += 8 * layer.spec.num_kv_heads * stored
        sizes = self.nbytes()
        bits += 8 * (sizes["state"] + (sizes["tables"] if tables else 0))
        return bits / elements if elements else float("nan")
