"""A layer of a folded cache, behind Transformers' interface: per sequence ``[sink | packed | recent]``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from kvfold.arithmetic import autocast_dtype, outside_autocast, storing
from kvfold.engines.transformers.rollback import Call
from kvfold.errors import CacheStateError, warn_once
from kvfold.formats import Format
from kvfold.kernels import AttentionKernel
from kvfold.kernels.cpu.importing import why_not as why_not_compiled
from kvfold.kernels.device import launching
from kvfold.kernels.lengths import Lengths
from kvfold.methods import LayerSpec, Method
from kvfold.plan import Encoder, choose_encoder, choose_kernel
from kvfold.storage.columns import Columns
from kvfold.storage.devices import moved, present
from kvfold.storage.following import Following
from kvfold.storage.layout import Layout
from kvfold.storage.lengths import StaticLengths
from kvfold.storage.reader import Reader
from kvfold.storage.ring import Ring, Sink
from kvfold.storage.sequences import Sequences
from kvfold.storage.slabs import Slabs
from kvfold.storage.writer import Writer

NOT_READ = (
    "cache: the model did not attend through kvfold, so its folded cache was not read; call kvfold.fold(model, method) on "
    "this model, and do not change its attention implementation afterwards"
)

NOT_ATTENDED = (
    "cache: layer {}: the keys that update() was given before never came to kvfold's attention. A folded cache takes tokens in "
    "calls of the model alone: neither update() by hand nor keys that were made elsewhere are served, and a model that did not "
    "attend through kvfold is not read; call kvfold.fold(model, method), and pass the tokens to the model"
)

ANOTHER_MODEL = "make a cache for this model: kvfold.fold(model, method)"


class Snapshot(NamedTuple):
    """What a layer was, in references to its tensors; ``parts``: None before it held anything."""

    columns: int
    parts: tuple[Any, ...] | None
    queries: dict[str, Any] | None

    def on(self, device: torch.device) -> "Snapshot":
        """On another device; slabs are the layer's own, which move with it."""
        return Snapshot(self.columns, moved(self.parts, device), moved(self.queries, device))


class FoldedLayer(CacheLayerMixin):
    """One layer's folded keys and values.

    Parameters
    ----------
    method : Method
    spec : LayerSpec
    kernel : str or None
        Name of the attention kernel to insist on; None: the first that supports the layer.
    max_length : int or None
        Allocate packed storage for this many tokens at once instead of growing.

    Attributes
    ----------
    layout : Layout
        Method, shapes and formats.
    sequences : Sequences
        Who has how many tokens.
    columns : Columns
        Columns of the padded batch.
    slabs : Slabs
        Packed storage.
    sink, ring : Sink, Ring
        Windows in full precision.
    following : Following
        What the encoder knows of queries.
    reader, writer : Reader, Writer
        What kernels are given of all that; and who takes tokens in.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    plain_encoder = False  # formats' own operations encode, on any device: nothing is compiled
    pending = False  # keys were handed on to the attention function, and did not arrive there yet

    def __init__(
        self, method: Method, spec: LayerSpec, kernel: str | None = None, max_length: int | None = None
    ) -> None:
        super().__init__()
        self.method, self.kernel_name, self.max_length = method, kernel, max_length
        self.layout = Layout(method, spec)
        self.block = method.block
        self.columns = Columns()
        self.sequences = Sequences(method.sink, method.recent, method.block)
        self.slabs = Slabs(self.layout)
        self.sink = Sink(self.sequences, spec.num_kv_heads, spec.head_dim)
        self.ring = Ring(self.sequences, spec.num_kv_heads, spec.head_dim)
        self.following = Following(method, spec)
        self.reader = Reader(self.layout, self.sequences, self.slabs, self.sink, self.ring)
        self.writer = Writer(self.reader, self.following, max_length)
        self._clear()

    def _clear(self) -> None:
        self.running: tuple[Call, int] | None = None  # the model's call that is under way, and this layer's index
        self._drop()
        self.static: StaticLengths | None = None  # while a decode graph owns the layer
        self.static_boundary: torch.Tensor | None = None  # where the prompt ends, if groups' modes depend on it
        self.home: torch.device | None = None  # while offloaded: where it belongs
        self.recorded = False  # tokens are held whose keys autograd had recorded: what is stored is a constant
        self.is_initialized = False
        self.sequences.start(0, torch.device("cpu"))
        for part in (self.columns, self.slabs, self.sink, self.ring, self.following, self.writer.cuts):
            part.clear()

    def _drop(self) -> None:
        """Forget keys that are on their way to the attention function."""
        self.dropped, self.pending = self.pending, False

    # ---- what others look at -----------------------------------------------------------------------------------------

    @property
    def spec(self) -> LayerSpec:
        return self.layout.spec

    @property
    def key_format(self) -> Format:
        return self.layout.key_format

    @property
    def value_format(self) -> Format:
        return self.layout.value_format

    @property
    def lens(self) -> list[int]:
        """Tokens of each sequence."""
        return self.sequences.lens

    @property
    def packed(self) -> list[int]:
        """Tokens of each sequence in packed storage."""
        return self.sequences.packed

    @property
    def encoder(self) -> Encoder:
        """What encodes."""
        return self.writer.encoder

    def packed_length(self, tokens: int) -> int:
        """How many tokens of a sequence of ``tokens`` are packed."""
        return self.sequences.packed_length(tokens)

    @property
    def is_empty(self) -> bool:
        return self.columns.count == 0

    # ---- Transformers' interface -------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.start(key_states.shape[0], key_states.dtype, key_states.device)

    @storing
    @outside_autocast
    def start(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        """Begin with empty sequences."""
        self.dtype, self.device = dtype, device
        self.layout.store_in(dtype)
        self.following.spec = self.layout.spec
        self._choose()
        self.sequences.start(batch, device)
        self.slabs.start(batch)
        self.writer.cuts.start(batch)
        self.following.start(batch, dtype, device)
        self.sink.start(dtype, device)
        self.ring.start(dtype, device)
        self.is_initialized = True

    def _choose(self) -> None:
        """What attends and what encodes on the layer's device."""
        self.choose_kernel()
        self.writer.encoder = choose_encoder(self.method, self.spec, self.device, self.plain_encoder)

    def choose_kernel(self) -> None:
        """What attends on the layer's device, as far as that is known by now.

        Raises
        ------
        KVFoldError
            If a kernel was insisted on that does not serve there.
        """
        self.kernel = self._kernel_on(self.device)
        self.ring.in_place = self.kernel.in_place_tokens

    def _kernel_on(self, device: torch.device) -> AttentionKernel:
        choice = choose_kernel(self.method, self.spec, device, self.kernel_name, self.dtype)
        if device.type == "cpu" and self.kernel_name is None and (why := why_not_compiled()):
            warn_once(f"kvfold: {why}; kernel {choice.kernel.name} attends on this CPU instead of cpu, which is faster")
        return choice.kernel

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand this call's keys and values on to the attention function, which reads the cache and then appends them.

        The layer keeps one dtype: that of the first keys, or autocast's where that is on. Others are converted to it.

        Raises
        ------
        CacheStateError
            If the attention function did not pick up the previous call's: the model does not attend through kvfold.
        """
        if self.pending:
            raise CacheStateError(NOT_ATTENDED.format(self.spec.layer_idx))
        if self.static is None or not self.static.running:
            self.own()
        dtype = self.dtype if self.is_initialized else autocast_dtype(key_states.device) or key_states.dtype
        if key_states.dtype != dtype or value_states.dtype != dtype:
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_shape(key_states)
        self.pending, self.dropped = True, False
        key_states._kvfold_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def _check_shape(self, key: torch.Tensor) -> None:
        """Refuse keys of another device, batch or model."""
        spec = self.spec
        if key.device != self.device:
            raise CacheStateError(
                f"cache: layer {spec.layer_idx} lies on {self.device}, the model passes tensors on {key.device}; "
                f"call cache.to({str(key.device)!r})"
            )
        if key.shape[0] != len(self.sequences):
            raise CacheStateError(f"cache: holds a batch of {len(self.sequences)}, the model passes {key.shape[0]}")
        if (key.shape[1], key.shape[3]) != (spec.num_kv_heads, spec.head_dim):
            raise CacheStateError(
                f"cache: layer {spec.layer_idx} was folded for {spec.num_kv_heads} heads of {spec.head_dim} "
                f"channels, the model passes {key.shape[1]} of {key.shape[3]}; {ANOTHER_MODEL}"
            )

    def own(self) -> None:
        """Refuse to go on where a decode graph keeps the lengths, and the addresses, of what the layer holds."""
        if self.static is not None:
            raise CacheStateError(
                "cache: a decode graph owns it, and decodes one token per sequence and step; allowed before the graph's "
                "finish(), or the end of `decoding`: nothing else (no beam search, assisted generation, crop or reorder)"
            )

    def get_seq_length(self) -> int:
        return self.columns.count + (self.static.steps if self.static is not None else 0)

    def get_max_length(self) -> int:
        return self.max_length if self.max_length is not None else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns.count + query_length, 0

    def reset(self) -> None:
        self.own()
        self.writer.recording = False
        self._clear()

    def activate_past_recording(self) -> None:
        """Keep the newest call's tokens out of packed storage, so that ``crop`` can take them back exactly."""
        self.own()
        self.writer.recording = True

    @storing
    @outside_autocast
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns (a negative number, as in Transformers).

        Tokens in the recent window, and all tokens of the last call while past recording is on, go without a trace. A
        cut that reaches into packed storage decodes the rest of its block back into the recent window: those tokens
        keep the precision they were stored with, however often the sequence is cut there again.
        """
        self.own()
        tokens_to_remove = int(tokens_to_remove)  # assisted generation passes a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number of tokens to remove")
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        removed = self.columns.remove(min(-tokens_to_remove, self.columns.count), len(self.sequences))
        self._shorten(removed)

    def _shorten(self, removed: list[int]) -> None:
        """Take so many of each sequence's newest tokens away."""
        with launching(self.device):
            for row, count in enumerate(removed):
                if count:
                    self.writer.truncate(row, self.lens[row] - count)

    @storing
    @outside_autocast
    def hide(self, mask: torch.Tensor, hidden: list[int]) -> None:
        """Drop each sequence's newest tokens, ``hidden`` many, which a mask says are padding."""
        self.own()
        self.columns.hide(mask, self.device)
        self._shorten(hidden)

    @storing
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist(), lambda t: t.index_select(0, beam_idx.to(t.device)))

    @storing
    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = [row for row in range(len(self.sequences)) for _ in range(repeats)]
        self._select(rows, lambda t: t.repeat_interleave(repeats, dim=0))

    @storing
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        rows = torch.arange(len(self.sequences), device="cpu")[indices.cpu()].tolist()
        self._select(rows, lambda t: t[indices.to(t.device), ...])

    def _select(self, rows: list[int], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Rearrange the batch: ``rows`` says which old sequence each new one is, ``pick`` does it to a tensor."""
        self.own()
        if not self.is_initialized:
            return
        self.sequences.select(rows)
        self.writer.cuts.select(rows)
        self.slabs.select(rows, pick)
        self.following.select(rows, pick)
        for part in (self.columns, self.sink, self.ring):
            part.select(pick)

    def to(self, device: torch.device | str | int) -> None:
        """Move everything to a device; see :meth:`FoldedCache.to`."""
        self.own()
        if not self.is_initialized:
            return
        target = present(device)
        if target == self.device:
            return
        self._kernel_on(target)  # where a kernel is insisted on that the device does not have, nothing moves
        self._place(target)
        self._choose()
        if self.running is not None:  # it goes on, or is taken back, on the new device
            call, index = self.running
            call.before[index] = call.before[index].on(target)

    def _place(self, device: torch.device) -> None:
        """Have everything on a device."""
        stored = (self.sequences, self.columns, self.slabs, self.sink, self.ring, self.writer.cuts)
        for part in (*stored, self.layout, self.following):
            part.move(device)
        self.following.spec, self.device = self.layout.spec, device

    def offload(self) -> None:
        """To the CPU; :meth:`prefetch` brings it back."""
        if self.is_initialized and self.device.type != "cpu":
            home = self.device
            self.to("cpu")
            self.home = home

    def prefetch(self) -> None:
        """Back to where :meth:`offload` found it."""
        if self.home is not None:
            home, self.home = self.home, None
            self.to(home)

    # ---- what a call brings, and whether it fits ---------------------------------------------------------------------

    def _steps_on(self, count: int) -> bool:
        """Whether a call of ``count`` tokens is a step on an accelerator, where to look at a tensor would stall the device."""
        return count == 1 and self.columns.count > 0 and self.device.type != "cpu"

    def new_columns(self, mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
        """Which of the next ``count`` columns hold real tokens: bool [batch, count], or None for all of them.

        A single new column is taken for a real token on accelerators: to look would stall the device in every step.

        Raises
        ------
        CacheStateError
            If the mask is too short, or if its older columns are not those of the calls before. On accelerators only calls
            of several tokens, and the first step after one, are looked at.
        """
        if mask is None:
            return None
        self.columns.check_width(mask, count)
        step = self._steps_on(count)
        if not step or self.columns.newest > 1:
            self.check_mask(mask)
        if step:
            return None
        valid = mask[:, self.columns.count : self.columns.count + count].bool()
        return None if bool(valid.all()) else valid

    def check_mask(self, mask: torch.Tensor) -> None:
        """Refuse a mask, bool [batch, columns], that says otherwise of cached columns than the calls they came with.

        What it hides at the end of a sequence is dropped, in all folded layers of the call; see :meth:`Columns.hidden`.
        """
        call = self.running[0] if self.running is not None else None
        if call is not None and call.mask is mask:
            return  # another layer has looked
        hidden = self.columns.hidden(mask, self.device)
        if hidden is not None:
            if call is None:
                self.own()
                self.hide(mask, hidden)
            else:
                call.hide(mask, hidden)
        if call is not None:
            call.mask = mask

    # ---- reading -----------------------------------------------------------------------------------------------------

    def writes_first(self, tokens: int, valid: torch.Tensor | None) -> bool:
        """Whether a call of ``tokens`` new ones can be written to the windows before attending, so that one kernel reads
        everything: few tokens, no padding, something packed, and no statistics that wait for them."""
        return tokens <= self.kernel.in_place_tokens and valid is None and len(self.slabs) > 0 and all(self.slabs.fixed)

    def decoded(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Reader.decoded`."""
        self.own()
        with launching(self.device):
            return self.reader.decoded(row)

    # ---- writing -----------------------------------------------------------------------------------------------------

    @storing
    def append(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor,
        valid: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        pack: bool = True,
    ) -> None:
        """Take a call's tokens into the cache and pack the blocks that became full.

        Parameters
        ----------
        key, value : Tensor [batch, num_kv_heads, tokens, head_dim]
            After RoPE.
        query : Tensor [batch, num_heads, tokens, head_dim]
        valid : Tensor or None, bool [batch, tokens]
            False at padding.
        position_ids : Tensor or None, int64 [batch or 1, tokens]
            Needed by methods that store keys before RoPE.
        pack : bool
            False: leave packing to :meth:`pack_due`; while past recording is on, only the blocks of earlier calls are due, and
            are packed at once.
        """
        self.pending = False
        tokens, first_call = key.shape[-2], self.is_empty
        self.columns.newest = tokens
        if not pack:
            self.ring.longest = max(self.ring.longest, tokens)
        if not first_call:
            if self.running is not None:
                self._keep_old(tokens)
            if query.requires_grad:  # what was attended to is read again for gradients
                self.sink.copy()
                self.ring.copy()
        if self.method.pre_rope and position_ids is not None and not self._steps_on(tokens):
            self.sequences.note_positions(position_ids, valid, self.method.name)
        self.writer.append(key, value, query, valid, first_call, pack)
        self.columns.log(tokens, valid)

    @storing
    def pack_due(self) -> None:
        """Pack the blocks that became full, from the ring; while past recording is on, :meth:`append` packed what stays."""
        self.writer.pack_due()

    # ---- in a decode graph -------------------------------------------------------------------------------------------

    def static_step(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor,
        scale: float,
        lengths: StaticLengths,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A decode step that decides nothing on the host (see :class:`DecodeGraph`); returns like ``query``."""
        self.pending = False
        if self.following.ring is not None:
            assert lengths.slots is not None
            self.following.ring.scatter_(2, lengths.slots.expand(-1, *query.shape[1:]), query)
        self._close(key, value, lengths.before)
        return self.kernel.attend(self.reader.call(query, None, scale, sinks=sinks, lengths=lengths.after))

    def _close(self, key: torch.Tensor | None, value: torch.Tensor | None, lengths: Lengths) -> None:
        if self.encoder.in_graphs:
            self.writer.by_kernel.close(key, value, lengths, self.static_boundary)
        elif key is not None and value is not None:
            self.writer.by_torch.append(key, value, lengths)

    @storing
    def make_room(self, tokens: int) -> None:
        """Have storage at fixed addresses for ``tokens`` more tokens of every sequence: one slab, and whole windows."""
        packed = self.sequences.packed_length(max(self.lens) + tokens)
        self.slabs.gather(packed // self.block, len(self.sequences), self.device)
        self.sink.fit(self.sequences.sink)
        if self.ring.slots < self.ring.base:  # nothing was waiting for a block so far
            self.ring.resize(self.ring.base)

    def enter_static(self, lengths: StaticLengths) -> None:
        """From now on a decode graph owns the layer."""
        self.static, self.static_boundary = lengths, None
        if self.method.group_mode(True) != self.method.group_mode(False):
            ends = [self.sequences.boundary(row) for row in range(len(self.sequences))]
            self.static_boundary = torch.tensor(ends, dtype=torch.int32, device=self.device)

    def leave_static(self, steps: int) -> None:
        """After ``steps`` decoded tokens: close what is due and count again on the host."""
        assert self.static is not None
        sequences, columns, following = self.sequences, self.columns, self.following
        self.follow_static(steps)
        self._close(None, None, self.static.before)
        lens = [n + steps for n in sequences.lens]
        packed = [max(p, sequences.packed_length(n)) for n, p in zip(lens, sequences.packed, strict=True)]
        kept = [max(k, n - following.slots) for k, n in zip(following.kept, lens, strict=True)]
        calls, count = [*columns.calls, (steps, None)], columns.count + steps
        # together, without a call in between at which an interrupt could come
        sequences.lens, sequences.packed, following.kept = lens, packed, kept
        columns.calls, columns.count, columns.newest = calls, count, 1
        self.static = self.static_boundary = None

    def follow_static(self, steps: int) -> None:
        """Within a decode graph, after ``steps`` decoded tokens: make the encoder's states that are due now, in place, and
        encode the blocks that the next step is to close where it cannot do that itself."""
        self.writer.follow_steps(steps)
        if not self.encoder.in_graphs:
            self.writer.encode_steps(steps)

    # ---- calls that die ----------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What the layer is; tensors are not copied. See :meth:`_keep_old`."""
        if not self.is_initialized:
            return Snapshot(0, None, None)
        parts = (  # in every step, for every layer
            self.sequences.snapshot(),
            self.columns.snapshot(),
            self.slabs.snapshot(),
            self.sink.pair,
            self.ring.pair,
            self.ring.longest,
        )
        return Snapshot(self.columns.count, parts, self.following.snapshot() if self.following.active else None)

    def restore(self, snapshot: Snapshot) -> None:
        """Be again what :meth:`snapshot` saw."""
        if snapshot.parts is None:
            self._clear()
            return
        sequences, columns, slabs, self.sink.pair, self.ring.pair, self.ring.longest = snapshot.parts
        if snapshot.queries is not None:
            self.following.restore(snapshot.queries)
        self.sequences.restore(sequences)
        self.columns.restore(columns)
        self.slabs.restore(slabs)
        self.slabs.move(self.device)  # those that the snapshot alone had stayed where the layer was
        self._drop()

    def _keep_old(self, tokens: int) -> None:
        """Before a call of ``tokens`` writes over what its snapshot refers to, go on with copies.

        One token overwrites nothing that is still needed, so steps of a decode copy nothing.
        """
        assert self.running is not None
        call, index = self.running
        if self.sequences.held + tokens > self.ring.slots:
            self.ring.copy()
        if self.following.ring is not None:
            self.following.keep_old(call.before[index].queries, self.lens, tokens, self.writer.recording)

    def finish(self) -> None:
        """The layer has a call's tokens and attended to them."""
        if self.running is not None:
            call, index = self.running
            call.finish(index)

    # ---- sizes -------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor the layer owns, by what it is for: packed, windows, state."""
        kept = self.following.ring
        windows = [*self.sink, *self.ring, *self.writer.cuts.tensors()] if self.is_initialized else []
        windows += [kept] if kept is not None else []
        state = [*self.following.state.values(), *(t for side in self.slabs.shared for t in side.values())]
        return {"packed": self.slabs.tensors(), "windows": windows, "state": state + self.columns.tensors()}

    def tables(self) -> list[torch.Tensor]:
        """Constant tensors the layer reads; layers may share them."""
        return list(self.method.tables(self.spec, self.device).values()) if self.is_initialized else []
