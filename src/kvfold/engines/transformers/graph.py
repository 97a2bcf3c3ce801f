"""Decoding in a CUDA graph: one capture of the model's step, replayed without a decision on the host.

Lengths live on the device. A step closes the blocks that the step before left due, writes the new token into the windows,
and attends; what every layer needs to know of the lengths is computed once, at the start of the step. Where no kernel encodes a
layer, its blocks are encoded between two steps, whenever the host knows one to be due; the step does the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from kvfold.arithmetic import storing
from kvfold.engines.transformers import compiled, names
from kvfold.errors import CacheStateError, KVFoldError, UnsupportedModelError, warn_once
from kvfold.kernels import REGISTRY
from kvfold.kernels.lengths import Lengths
from kvfold.storage.lengths import StaticLengths

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache
    from kvfold.engines.transformers.layer import FoldedLayer


def is_ready(layer: "FoldedLayer") -> bool:
    """Whether a layer has what a graph of it reads of every sequence. Statistics of pages come with their pages; those of a
    whole sequence, and an encoder's state, must be there."""
    if layer.following.active:
        waits = layer.method.paper and not all(layer.following.made)
        return len(layer.slabs) > 0 and not waits and all(layer.slabs.fixed)
    return layer.is_initialized and all(layer.slabs.fixed)


def why_not(layer: "FoldedLayer") -> str | None:
    """Why a layer cannot decode in a graph; None if it can."""
    if not layer.is_initialized:
        return "it holds nothing yet; prefill a prompt first"
    if layer.static is not None:
        return "another decode graph owns it"
    if layer.writer.recording:
        return "it keeps the newest call's tokens for a crop (assisted generation)"
    if not layer.kernel.captures:
        allowed = ", ".join(name for name, kernel in REGISTRY.items() if kernel.captures)
        return f"its kernel is {layer.kernel.name}; allowed: {allowed}"
    if not is_ready(layer):
        return "nothing is packed yet, and its statistics are those of what is; prefill a longer prompt first"
    return None


def _check_alike(folded: "list[FoldedLayer]") -> None:
    """Refuse layers whose lengths, or rings of queries, move differently: a step computes them once."""
    first = folded[0]
    windows = (first.method.sink, first.method.recent, first.block)
    slots = {layer.following.slots for layer in folded if layer.following.ring is not None}
    for layer in folded:
        own = (layer.method.sink, layer.method.recent, layer.block)
        if own != windows:
            raise UnsupportedModelError(
                f"decode graph: layer {layer.spec.layer_idx}: its sink, recent and block are {own}, those of layer "
                f"{first.spec.layer_idx} {windows}; allowed: the same for all layers"
            )
    if len(slots) > 1:
        raise UnsupportedModelError(
            f"decode graph: layers keep {sorted(slots)} queries; allowed: the same for all layers"
        )


def _devices(model: PreTrainedModel, folded: "list[FoldedLayer]") -> set[torch.device]:
    """Where a model and the layers of its cache lie."""
    return {layer.device for layer in folded if layer.is_initialized} | {p.device for p in model.parameters()}


def _check_device(model: PreTrainedModel, folded: "list[FoldedLayer]") -> None:
    """Refuse a model that is split over devices (``device_map``): a capture records one device's launches."""
    places = _devices(model, folded)
    if len(places) > 1:
        raise UnsupportedModelError(
            f"decode graph: the model lies on {', '.join(sorted(map(str, places)))}; allowed: one device (without a graph, "
            "split models decode step by step)"
        )


class DecodeGraph:
    """A captured decode step of a model over a folded cache.

    Parameters
    ----------
    model : PreTrainedModel
        On a CUDA device, folded.
    cache : FoldedCache
        Holding the prompt, of any length. Storage for all tokens is taken now, unless it was by a ``max_length``. Until
        :meth:`finish` only this object may use it: the cache refuses others with a ``CacheStateError``.
    room : int
        Tokens that will be decoded at most.
    compile : bool
        Have ``torch.compile`` fuse what lies between the layers' attention; see :func:`decoding`.

    Raises
    ------
    UnsupportedModelError
        If a layer cannot decode in a graph, or the model's step cannot be compiled; the message says why.

    Notes
    -----
    Sequences may have different lengths. Every call decodes one token per sequence. A call that dies (an interrupt) counts for
    nothing: the next one decodes the same token again.
    """

    @storing
    def __init__(self, model: PreTrainedModel, cache: "FoldedCache", room: int, compile: bool = False) -> None:
        cache.settle()
        folded = cache.folded
        if len(folded) != len(cache.layers):
            raise UnsupportedModelError("decode graph: every layer must be folded")
        _check_device(model, folded)
        if compile:
            compiled.check(model)
        for layer in folded:
            if why := why_not(layer):
                raise UnsupportedModelError(f"decode graph: layer {layer.spec.layer_idx}: {why}")
        first = folded[0]
        _check_alike(folded)
        for layer in folded:
            layer.following.make_room()
            layer.make_room(room)
        self.model, self.cache, self.room, self.compile = model, cache, room, compile
        self.method = first.method
        sink = self.method.sink
        before, after = (Lengths.of(first.lens, first.packed, sink, first.device) for _ in range(2))
        self.lengths = StaticLengths(before, after)
        keeps = next((layer.following for layer in folded if layer.following.ring is not None), None)
        if keeps is not None:
            self.lengths.ring = keeps.slots
            self.lengths.slots = torch.zeros(len(first.lens), 1, 1, 1, dtype=torch.int64, device=first.device)
        self.ids = torch.zeros(len(first.lens), 1, dtype=torch.long, device=first.device)
        self.positions = torch.tensor([[n] for n in first.lens], device=first.device)
        self._began: int | None = None  # steps before the one under way
        try:
            for layer in folded:
                layer.enter_static(self.lengths)
            self._capture()
        except BaseException:  # lengths on the host are as they were, and what the warm-up wrote lies beyond them
            for layer in folded:
                layer.static = layer.static_boundary = None
                layer.pending = False
            raise

    @property
    def steps(self) -> int:
        """Tokens decoded so far."""
        return self.lengths.steps

    def _step(self) -> torch.Tensor:
        method = self.method
        self.lengths.begin(1, method.sink, method.recent, method.block)
        self.lengths.running = True
        try:
            logits = self._logits()
        finally:
            self.lengths.running = False
        self.lengths.end()
        self.positions.add_(1)
        return logits

    def _logits(self) -> torch.Tensor:
        if self.compile:
            return compiled.run(self.model, self.cache, self.ids, self.positions)
        out: Any = self.model(
            input_ids=self.ids, position_ids=self.positions, **names.passing(self.model, self.cache), use_cache=True
        )
        return out.logits

    def _capture(self) -> None:
        from kvfold.engines.transformers.fused import small_operations  # which needs Triton, as a graph's kernels do

        with nullcontext() if self.compile else small_operations(self.model):
            self._capture_step()

    def _capture_step(self) -> None:
        saved = self._save()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(2):  # compile and warm up
                self._step()
                self._restore(saved)  # each writes the next token only: one more could take the slot of a token in use
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.logits = self._step()
        self._restore(saved)

    def _save(self) -> list[torch.Tensor]:
        """What the warm-up changes and must not: lengths and positions. The tokens it wrote are written over."""
        return [t.clone() for t in self._moving()]

    def _restore(self, saved: list[torch.Tensor]) -> None:
        for tensor, value in zip(self._moving(), saved, strict=True):
            tensor.copy_(value)

    def _moving(self) -> list[torch.Tensor]:
        of = self.lengths.before
        return [of.total, of.packed, of.sink, of.recent, self.positions]

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Decode one token.

        Parameters
        ----------
        ids : Tensor, int64 [batch, 1]
        positions : Tensor or None, int64 [batch or 1, 1]
            None: as many as the sequence has tokens, padding aside.

        Returns
        -------
        Tensor [batch, 1, vocabulary]
            Logits; overwritten by the next call.
        """
        if self.steps == self.room:
            raise ValueError(f"decode graph: room={self.room} tokens are decoded")
        if ids.shape != self.ids.shape:
            raise ValueError(
                f"decode graph: input_ids {list(ids.shape)} is not allowed; allowed: {list(self.ids.shape)}"
            )
        self._take_back()
        self._began = self.steps
        self.ids.copy_(ids)
        if positions is not None:
            self.positions.copy_(positions)
        for layer in self.cache.folded:
            layer.follow_static(self.steps)
        self.graph.replay()
        self.lengths.steps += 1
        self._began = None
        return self.logits

    def _take_back(self) -> None:
        """If a step died, go back to before it, whether or not the device ran it. The host does not wait to know: a block that
        the step closed was due anyway, and its token will be written over."""
        if self._began is None:
            return
        before, (layer, *_) = self.lengths.before, self.cache.folded
        counts = [n + self._began for n in layer.lens]
        total = torch.tensor(counts, dtype=before.total.dtype, device="cpu").to(before.total.device)
        self.positions.sub_((before.total - total).unsqueeze(-1))
        before.total.copy_(total)
        before.sink.copy_(total.clamp_max(self.method.sink))
        before.recent.copy_(total - before.sink - before.packed)
        self.lengths.steps, self._began = self._began, None

    def finish(self) -> None:
        """Give the cache back: close what is due and bring its lengths on the host up to date. If it is interrupted, call it
        again."""
        self._take_back()
        for layer in self.cache.folded:
            if layer.static is self.lengths:
                layer.leave_static(self.steps)


REFUSED = ("inputs_embeds", "labels", "output_attentions", "output_hidden_states")


class Decoding:
    """What :func:`decoding` does with the calls of a model.

    Attributes
    ----------
    graph : DecodeGraph or None
        While it decodes.
    replayed : int
        Tokens decoded by graphs so far.
    reason : str or None
        Why steps run one by one, kernel for kernel; None once a graph decodes.
    """

    def __init__(
        self, model: PreTrainedModel, cache: "FoldedCache", room: int, required: bool, compile: bool = False
    ) -> None:
        self.model, self.cache, self.room, self.required, self.compile = model, cache, room, required, compile
        self.graph: DecodeGraph | None = None
        self.replayed, self.done = 0, 0
        self.reason: str | None = "no token was decoded yet"
        self._plain = model.forward
        self.called = self._busy = False

    def __str__(self) -> str:
        if self.replayed:
            return f"{self.replayed} tokens decoded in a {'compiled ' if self.compile else ''}CUDA graph"
        return f"decoded step by step: {self.reason}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's own."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        given = ids if ids is not None else kwargs.get("inputs_embeds")
        if self._busy or names.given(kwargs) is not self.cache:
            return self._plain(*args, **kwargs)
        self.called = True
        single = given is not None and given.shape[1] == 1
        asked = [name for name in REFUSED if self._asks(name, kwargs)]
        if single and asked and self.required:
            raise UnsupportedModelError(f"decode graph: {asked[0]} is not supported; allowed: input_ids")
        if asked or ids is None or not single or not self._ready(kwargs.get("attention_mask")):
            self.finish()
            return self._plain(*args, **kwargs)
        assert self.graph is not None
        positions = kwargs.get("position_ids")
        if positions is None:  # as the model counts them, padding included
            positions = torch.full_like(ids, self.cache.get_seq_length())
        logits = self.graph(ids, positions).clone()
        self.replayed, self.done = self.replayed + 1, self.done + 1
        out = names.output(logits, self.cache)
        as_dict = kwargs.get("return_dict")
        if as_dict is None:
            as_dict = getattr(self.model.config, "return_dict", True)
        return out if as_dict else out.to_tuple()

    def _asks(self, name: str, kwargs: dict[str, Any]) -> bool:
        """Whether a call, or where it is silent the model's configuration, asks for what a graph does not have."""
        value = kwargs.get(name)
        if value is None and name.startswith("output_"):
            value = getattr(self.model.config, name, None)
        return value is not None and value is not False

    def _ready(self, mask: torch.Tensor | None) -> bool:
        """Have a graph, if that is possible by now.

        Its steps look at no mask, so this one is looked at: of cached tokens it must say what the cache knows.
        """
        if self.done >= self.room:
            self.reason = f"room={self.room} tokens were decoded before"
            if self.required:
                raise UnsupportedModelError(f"decode graph: {self.reason}; give a larger room")
            return False
        if self.graph is not None:
            return True
        self.cache.settle()
        folded = self.cache.folded
        if folded and not all(map(is_ready, folded)):
            self.reason, self.done = "nothing is packed yet, and statistics are those of what is", self.done + 1
            return False
        self._busy = True  # the capture runs the model
        try:
            self.graph = DecodeGraph(self.model, self.cache, max(1, self.room - self.done), self.compile)
        except UnsupportedModelError as error:
            if self.required:
                raise
            self.reason, self.done = str(error), self.done + 1
            return False
        finally:
            self._busy = False
        self.reason = None
        if mask is not None and mask.ndim == 2:
            try:
                folded[0].check_mask(mask)
            except CacheStateError:
                self.finish()
                raise
        return True

    def finish(self) -> None:
        """Give the cache back, if a graph has it."""
        if self.graph is not None:
            self.graph.finish()
            self.graph = None


def release(model: Any, cache: "FoldedCache") -> None:
    """Give ``cache`` back where graphs of :func:`decoding` blocks of ``model`` have it: their next step captures another."""
    forward = getattr(model, "forward", None)
    while (state := getattr(forward, "_kvfold_decoding", None)) is not None:
        if state.cache is cache:
            state.finish()
        forward = forward._kvfold_plain  # type: ignore[union-attr]


@contextmanager
def decoding(
    model: PreTrainedModel, cache: "FoldedCache", room: int, required: bool = True, compile: bool = False
) -> Iterator[Decoding]:
    """Within it the model decodes over ``cache`` in a CUDA graph, also inside of ``model.generate``.

    Calls of one token per sequence replay a graph, which is captured when the first of them comes (for methods that know
    something of a whole sequence: when something is packed); up to then, and for calls of many tokens, the model runs as it
    always does.

    Parameters
    ----------
    model : PreTrainedModel
        On a CUDA device, folded.
    cache : FoldedCache
        To be given to the model by name, as ``past_key_values`` (``cache`` from Transformers 5.24 on); a block whose calls
        never bring it ends with a warning.
        Every decoded token counts: attention masks of decode steps are not looked at. While a
        graph decodes, what would change the cache otherwise (beam search, assisted generation) is refused.
    room : int
        Tokens that will be decoded at most.
    required : bool
        False: where a graph is refused, decode step by step, and say why in ``reason``.
    compile : bool
        Have ``torch.compile`` fuse the model's small operations within the graph (norms, rotations, activations); attention
        and the cache stay kvfold's. The first graph of a model and batch size waits for the compiler, about 15 s.

    Raises
    ------
    KVFoldError
        If ``room`` is no number of tokens.
    UnsupportedModelError
        At the first step, if a layer cannot decode in a graph, or the model's step cannot be compiled.

    Examples
    --------
    >>> cache = kvfold.fold(model, "kivi")  # doctest: +SKIP
    >>> with decoding(model, cache, room=512):  # doctest: +SKIP
    ...     model.generate(**inputs, past_key_values=cache, max_new_tokens=512)
    """
    given: Any = room
    if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
        raise KVFoldError(f"room: {room!r} is not allowed; allowed: a number of tokens from 1 on")
    state = Decoding(model, cache, room, required, compile)
    own = model.__dict__.get("forward")  # a hook's, perhaps

    @wraps(state._plain)  # `generate` looks at its signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        return state.forward(*args, **kwargs)

    forward._kvfold_plain, forward._kvfold_decoding = state._plain, state  # type: ignore[attr-defined]
    model.forward = forward
    try:
        yield state
    finally:
        model.__dict__.pop("forward", None)
        if own is not None:
            model.forward = own
        try:
            state.finish()
        except KeyboardInterrupt:
            state.finish()  # nobody else could
            raise
    if required and not state.called:
        warn_once(
            "kvfold: decoding: no call of this model brought its cache, so nothing was decoded in a graph; pass it as "
            f"{names.CACHE}=cache, by name"
        )
