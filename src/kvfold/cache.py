"""The folded cache: per sequence ``[sink | packed | recent]``, behind Transformers' ``Cache`` interface.

A layer counts real tokens per sequence; padding never enters it. After n tokens of a sequence the first ``sink`` lie in
the sink window, then whole blocks in packed storage, and the newest in a ring buffer, at least ``recent`` of them once
anything is packed. How many are packed follows from n alone, so the content does not depend on how calls were cut.

Packed storage is a list of slabs that are filled in place and never copied; a new slab is an eighth of what exists.
"""

import copy
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvfold import kernels
from kvfold.arithmetic import autocast_dtype, outside_autocast
from kvfold.errors import CacheStateError, KVFoldWarning
from kvfold.following import Following
from kvfold.formats import AffineGroups, Fields, Format, PagedFormat
from kvfold.formats.paged import norms, plain
from kvfold.graph import StaticLengths
from kvfold.kernels import AttentionCall, Span, Windows
from kvfold.methods import LayerSpec, Method
from kvfold.methods.base import PIECE, finite
from kvfold.originals import is_folded
from kvfold.rollback import Call, attending, fed, storing

AnyLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin

Rows = slice | torch.Tensor
"""Which sequences of a batch: all of them, or an int64 tensor of indices."""


@dataclass
class Slab:
    """Packed storage of blocks ``first`` to ``first + blocks`` of every sequence; whole pages, where formats have pages."""

    first: int
    blocks: int
    keys: Fields
    values: Fields

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.keys.values()
        yield from self.values.values()


@dataclass(frozen=True)
class Lengths:
    """Lengths of a batch's sequences on the device, int32 [batch]: in all, packed, and in the windows."""

    total: torch.Tensor
    packed: torch.Tensor
    sink: torch.Tensor
    recent: torch.Tensor


@dataclass(frozen=True)
class Encoder:
    """What encodes a layer, and why: the kernels of :mod:`kvfold.kernels.encode` ("triton") or the method's and formats'
    own operations ("torch")."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_encoder(method: Method, spec: LayerSpec, device: torch.device) -> Encoder:
    """What encodes a layer on this device."""
    if device.type == "cpu":
        return Encoder("torch", "encoding kernels run on cuda")
    if not method.kernel_encodes:
        return Encoder("torch", f"{method.name} transforms what it stores in a way that no kernel computes")
    from kvfold.kernels import encode

    keys, values = plain(method.key_format(spec)), method.value_format(spec)
    width = method.slice_width(spec.head_dim)
    for side, form, cut in (("keys", keys, width), ("values", values, None)):
        if why := encode.why_not(form, device, cut):
            return Encoder("torch", f"{side}: {why}")
    assert isinstance(keys, AffineGroups) and isinstance(values, AffineGroups)
    if torch.cuda.is_available() and (wrong := encode.self_test(keys, values, width, device)):
        return Encoder("torch", wrong)
    return Encoder("triton", "first choice")


@lru_cache(maxsize=8)
@storing
def _device_lengths(total: tuple[int, ...], packed: tuple[int, ...], sink: int, device: torch.device) -> Lengths:
    """Made once a step, not once a layer, and without waiting for the device."""
    rows = [
        total,
        packed,
        [min(n, sink) for n in total],
        [n - min(n, sink) - p for n, p in zip(total, packed, strict=True)],
    ]
    return Lengths(*_send(torch.tensor(rows, dtype=torch.int32, device="cpu"), device))


@lru_cache(maxsize=64)
@storing
def _on_device(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64, made once for all layers and steps; not to be written to."""
    return _send(torch.tensor(values, device="cpu"), device)


def _send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To the device, without waiting for it."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


NOT_READ = (
    "cache: the model did not attend through kvfold, so its folded cache was not read; call kvfold.fold(model, method) on "
    "this model, and do not change its attention implementation afterwards"
)

ANOTHER_MODEL = "make a cache for this model: kvfold.fold(model, method)"

AS_IT_BEGINS = (
    "generate() takes a prompt that begins with what the cache holds and is longer. For another prompt call cache.reset(), "
    "or make a new cache; to go back in this one, cache.crop(-number of tokens)"
)


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
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(
        self, method: Method, spec: LayerSpec, kernel: str | None = None, max_length: int | None = None
    ) -> None:
        super().__init__()
        self.method, self.spec = method, spec
        self.kernel_name, self.max_length = kernel, max_length
        self.key_format, self.value_format = method.key_format(spec), method.value_format(spec)
        self.block = method.block
        self.page_blocks = max(
            [form.page // form.block for form in (self.key_format, self.value_format) if isinstance(form, PagedFormat)]
            + [1]
        )
        self.recording = False
        self._clear()

    def _clear(self) -> None:
        self.running: tuple[Call, int] | None = None  # the model's call that is under way, and this layer's index
        self.columns = 0  # of the padded batch, as the model counts
        self.lens: list[int] = []  # real tokens
        self.packed: list[int] = []  # tokens in packed storage
        self.prompt: list[int] = []  # tokens of the first call
        self.first_position: list[int] = []  # position of a sequence's first token
        self.following = Following(self.method, self.spec)
        self.fixed: list[bool] = []  # whether the statistics of a whole sequence are there, if its format has any
        self.shared: tuple[Fields, Fields] = ({}, {})  # these statistics, of keys and of values
        self.slabs: list[Slab] = []
        self.sink: tuple[torch.Tensor, torch.Tensor] | None = None
        self.ring: tuple[torch.Tensor, torch.Tensor] | None = None
        self.calls: list[tuple[int, torch.Tensor | None]] = []  # columns and their validity, for crop
        self.newest = 0  # columns of the last call
        self.longest = 1  # call that was written to the windows before attending, in tokens
        self.pending = False
        self.static: StaticLengths | None = None  # while a decode graph owns the layer
        self.static_boundary: torch.Tensor | None = None  # where the prompt ends, if groups' modes depend on it
        self.home: torch.device | None = None  # while offloaded: where it belongs
        self.is_initialized = False

    # ---- Transformers' interface -------------------------------------------------------------------------------------

    @storing
    @outside_autocast
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch = key_states.shape[0]
        self.dtype, self.device = key_states.dtype, key_states.device
        self._choose()
        self.lens, self.packed, self.prompt = [0] * batch, [0] * batch, [0] * batch
        self.first_position, self.fixed = [0] * batch, [not self._of_sequence] * batch
        self.following.start(batch, self.dtype, self.device)
        self.sink = self._dense(batch, 0)
        self.ring = self._dense(batch, 0)
        self.is_initialized = True

    def _choose(self) -> None:
        """What attends and what encodes on the layer's device."""
        self.kernel = self._kernel_on(self.device)
        self.encoder = choose_encoder(self.method, self.spec, self.device)

    def _kernel_on(self, device: torch.device) -> kernels.AttentionKernel:
        formats = plain(self.key_format), self.value_format
        return kernels.choose(
            *formats, device, self.method.pre_rope, self.kernel_name, self.dtype, self.spec.softcap
        ).kernel

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
            raise CacheStateError(NOT_READ)
        if self.static is None or not self.static.running:
            self._own()
        dtype = self.dtype if self.is_initialized else autocast_dtype(key_states.device) or key_states.dtype
        if key_states.dtype != dtype or value_states.dtype != dtype:
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.device != self.device:
            raise CacheStateError(
                f"cache: layer {self.spec.layer_idx} lies on {self.device}, the model passes tensors on {key_states.device}; "
                f"call cache.to({str(key_states.device)!r})"
            )
        if key_states.shape[0] != len(self.lens):
            raise CacheStateError(f"cache: holds a batch of {len(self.lens)}, the model passes {key_states.shape[0]}")
        if (key_states.shape[1], key_states.shape[3]) != (self.spec.num_kv_heads, self.spec.head_dim):
            raise CacheStateError(
                f"cache: layer {self.spec.layer_idx} was folded for {self.spec.num_kv_heads} heads of {self.spec.head_dim} "
                f"channels, the model passes {key_states.shape[1]} of {key_states.shape[3]}; {ANOTHER_MODEL}"
            )
        self.pending = True
        key_states._kvfold_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    @property
    def _of_sequence(self) -> bool:
        """Whether a format has statistics of a whole sequence."""
        return any(isinstance(form, PagedFormat) and not form.page for form in (self.key_format, self.value_format))

    def _own(self) -> None:
        """Refuse to go on where a decode graph keeps the lengths, and the addresses, of what the layer holds."""
        if self.static is not None:
            raise CacheStateError(
                "cache: a decode graph owns it, and decodes one token per sequence and step; allowed before the graph's "
                "finish(), or the end of `decoding`: nothing else (no beam search, assisted generation, crop or reorder)"
            )

    def get_seq_length(self) -> int:
        return self.columns + (self.static.steps if self.static is not None else 0)

    def get_max_length(self) -> int:
        return self.max_length if self.max_length is not None else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reset(self) -> None:
        self._own()
        self.recording = False
        self._clear()

    def activate_past_recording(self) -> None:
        """Keep the newest call's tokens out of packed storage, so that ``crop`` can take them back exactly."""
        self._own()
        self.recording = True

    @storing
    @outside_autocast
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns (a negative number, as in Transformers).

        Tokens in the recent window, and all tokens of the last call while past recording is on, go without a trace. A
        cut that reaches into packed storage decodes the rest of its block back into the recent window: those tokens
        keep the precision they were stored with.
        """
        self._own()
        tokens_to_remove = int(tokens_to_remove)  # assisted generation passes a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number of tokens to remove")
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        removed = self._remove_columns(min(-tokens_to_remove, self.columns))
        for row, count in enumerate(removed):
            if count:
                self._truncate(row, self.lens[row] - count)

    @storing
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist(), lambda t: t.index_select(0, beam_idx.to(t.device)))

    @storing
    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = [row for row in range(len(self.lens)) for _ in range(repeats)]
        self._select(rows, lambda t: t.repeat_interleave(repeats, dim=0))

    @storing
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        rows = torch.arange(len(self.lens), device="cpu")[indices.cpu()].tolist()
        self._select(rows, lambda t: t[indices.to(t.device), ...])

    def to(self, device: torch.device | str | int) -> None:
        """Move everything to a device; see :meth:`FoldedCache.to`."""
        self._own()
        if not self.is_initialized:
            return
        target = present(device)
        if target == self.device:
            return
        self._kernel_on(target)  # where a kernel is insisted on that the device does not have, nothing moves
        for name in ("sink", "ring", "shared", "calls"):
            setattr(self, name, moved(getattr(self, name), target))
        for slab in self.slabs:
            slab.keys, slab.values = moved(slab.keys, target), moved(slab.values, target)
        if self.spec.rope is not None:
            self.spec = replace(self.spec, rope=replace(self.spec.rope, inv_freq=self.spec.rope.inv_freq.to(target)))
        following = self.following
        following.spec, following.device = self.spec, target
        following.state, following.ring = moved(following.state, target), moved(following.ring, target)
        self.device = target
        self._choose()

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

    # ---- reading -----------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return self.columns == 0

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
        if mask.shape[1] < self.columns + count:
            raise CacheStateError(
                f"attention_mask: has {mask.shape[1]} columns; the cache holds {self.columns} and {count} are new, which "
                f"needs {self.columns + count}; {AS_IT_BEGINS}"
            )
        step = count == 1 and self.columns > 0 and self.device.type != "cpu"
        if not step or self.newest > 1:
            self.check_mask(mask)
        if step:
            return None
        valid = mask[:, self.columns : self.columns + count].bool()
        return None if bool(valid.all()) else valid

    def check_prompt(self, position_ids: torch.Tensor | None, count: int) -> None:
        """Refuse a prompt that is not longer than what the cache holds: of ``n`` tokens that follow ``columns`` others,
        ``generate`` passes on those from ``columns - n`` on, to be read a second time. Steps on accelerators are not looked at.
        """
        skipped = (self.columns - count) // 2
        if (
            position_ids is None
            or position_ids.ndim != 2
            or count > self.columns
            or 2 * skipped != self.columns - count
        ):
            return
        if count == 1 and self.columns > 1 and self.device.type != "cpu":
            return
        if self.running is not None and len(self.running[0].before) > 1:
            return  # the first layer has looked
        held = self.lens[0]
        if held < min(count, 2):  # padding, or a token that padding follows
            return
        ends = position_ids[0, :: max(count - 1, 1)].tolist()
        if (ends[0], ends[-1]) == (skipped, held - 1 - skipped):
            raise CacheStateError(
                f"input_ids: a prompt of {skipped + count} tokens, not more than the {self.columns} that the cache holds: "
                f"they have the positions of tokens that it holds; {AS_IT_BEGINS}"
            )

    def check_mask(self, mask: torch.Tensor) -> None:
        """Refuse a mask, bool [batch, columns], that says otherwise of cached columns than the calls they came with."""
        call = self.running[0] if self.running is not None else None
        if call is not None and call.mask is mask:
            return  # another layer has looked
        at = 0
        for columns, valid in self.calls:
            shown = mask[:, at : at + columns].to(self.device).bool()
            if not (bool(shown.all()) if valid is None else torch.equal(shown, valid)):
                before = torch.ones_like(shown) if valid is None else valid
                row, column = (shown != before).nonzero()[0].tolist()
                hides = "hides a token that the cache holds" if before[row, column] else "shows what was padding"
                raise CacheStateError(
                    f"attention_mask: {hides}, in column {at + column} of sequence {row}; allowed: the mask of the calls "
                    "before, with columns for the new tokens. What a folded cache holds stays visible; crop() takes the "
                    "newest tokens away"
                )
            at += columns
        if call is not None:
            call.mask = mask

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor | None,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> AttentionCall:
        """What a kernel needs to attend over cache and new tokens; ``query`` [batch, num_heads, tokens, head_dim]."""
        assert self.sink is not None and self.ring is not None
        rows = query.float().unflatten(1, (self.spec.num_kv_heads, -1)).flatten(2, 3)
        longest = max(self.packed)
        packed_queries, bias = self.project(rows) if longest else (None, None)
        return AttentionCall(
            rows=rows,
            packed_queries=packed_queries,
            packed_bias=bias,
            scale=scale,
            key_format=plain(self.key_format),
            value_format=self.value_format,
            spans=self.spans(longest // self.block),
            packed_len=self.lengths.packed,
            uniform=len(set(self.packed)) == 1,
            dense=self.windows(),
            new_keys=key,
            new_values=value,
            new_valid=valid,
            first_position=_on_device(tuple(p + self.method.sink for p in self.first_position), self.device),
            rope=self.spec.rope if self.method.pre_rope else None,
            unproject=self._unproject if self.method.maps_values else None,
            softcap=softcap,
            sinks=sinks,
        )

    def project(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries as stored keys meet them, where statistics belong to whole sequences; see :func:`plain`.

        Parameters
        ----------
        queries : Tensor, float32 or the model's dtype [batch, num_kv_heads, rows, head_dim]

        Returns
        -------
        projected : Tensor, float32, of the same shape; or ``queries`` itself
        bias : Tensor or None, float32 [batch, num_kv_heads, rows]
            The score of a query and a packed key is ``projected . decoded + bias``.
        """
        if plain(self.key_format) is self.key_format:
            return queries, None
        shared, bias = self.shared[0], None
        if "mean" in shared:
            bias = (queries * shared["mean"].float()).sum(-1)
        return (queries * norms(shared["norm"]) if "norm" in shared else queries), bias

    def _unproject(self, values: torch.Tensor) -> torch.Tensor:
        return self.method.unproject_values(values, self.spec)

    def spans(self, blocks: int | None = None) -> list[Span]:
        """Packed storage: all of it, or what holds the first ``blocks`` blocks."""
        formats = self.key_format, self.value_format
        found = []
        for slab in self.slabs:
            used = slab.blocks if blocks is None else min(slab.blocks, blocks - slab.first)
            if used > 0:
                sides = [
                    form.take(side, used) | shared
                    for form, side, shared in zip(formats, (slab.keys, slab.values), self.shared, strict=True)
                ]
                found.append(Span(slab.first * self.block, *sides))
        return found

    def windows(self, lengths: Any = None) -> Windows:
        """What is in full precision, as kernels read it; ``lengths``: others than the layer's own."""
        assert self.sink is not None and self.ring is not None
        lengths = lengths or self.lengths
        return Windows(self.sink, self.ring, lengths.sink, lengths.packed, lengths.recent)

    @property
    def lengths(self) -> Lengths:
        """Lengths as the device needs them."""
        return _device_lengths(tuple(self.lens), tuple(self.packed), self.method.sink, self.device)

    @property
    def is_contiguous(self) -> bool:
        """Whether all packed storage is one slab, as a decode graph needs."""
        return len(self.slabs) == 1

    def writes_first(self, tokens: int, valid: torch.Tensor | None) -> bool:
        """Whether a call of ``tokens`` new ones can be written to the windows before attending, so that one kernel reads
        everything: few tokens, no padding, something packed, and no statistics that wait for them."""
        return tokens <= self.kernel.in_place_tokens and valid is None and bool(self.slabs) and all(self.fixed)

    def decoded(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys after RoPE and values of a sequence as attention sees them, float32 [num_kv_heads, len, head_dim]."""
        self._own()
        assert self.sink is not None
        length, sink = self.lens[row], min(self.lens[row], self.method.sink)
        parts = [tuple(t[row, :, :sink].float() for t in self.sink)]
        if self.packed[row]:
            parts.append(self._decode(row, 0, self.packed[row]))
        if length > sink + self.packed[row]:
            recent = self._read_ring(slice(row, row + 1), self.packed[row], length - self.method.sink)
            parts.append(tuple(t[0].float() for t in recent))
        keys, values = (torch.cat(side, -2) for side in zip(*parts, strict=True))
        return keys, values

    def _decode(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed tokens ``start`` to ``stop`` of one sequence, float32 [num_kv_heads, n, head_dim]."""
        keys, values = [], []
        for span in self.spans(-(-stop // self.block)):
            keys.append(self.key_format.decode({n: t[row : row + 1] for n, t in span.keys.items()}))
            values.append(self.value_format.decode({n: t[row : row + 1] for n, t in span.values.items()}))
        stored = torch.cat(keys, -2)[:, :, start:stop]
        restored = self.method.restore_keys(stored, self.spec, self._positions([row], start, stop))
        decoded = self.method.unproject_values(torch.cat(values, -2)[:, :, start:stop], self.spec)
        return restored[0], decoded[0]

    # ---- appending ---------------------------------------------------------------------------------------------------

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
            False: leave packing to :meth:`pack_due`.
        """
        self.pending = False
        self.newest = tokens = key.shape[-2]
        first_call = self.is_empty
        if not pack:
            self.longest = max(self.longest, tokens)
        if self.running is not None and not self.is_empty:
            self._keep_old(tokens)
        if query.requires_grad and not self.is_empty:  # what was attended to is read again for gradients
            self.sink, self.ring = _copies(self.sink), _copies(self.ring)
        if self.method.pre_rope:
            self._note_positions(position_ids, valid, tokens)
        for ids, rows, columns in self._groups(valid, tokens):
            k, v, q = (t[rows][:, :, columns] for t in (key, value, query))
            self._append(ids, rows, k, v, q, first_call, pack)
        self._log_columns(tokens, valid)

    def static_step(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor,
        scale: float,
        lengths: StaticLengths,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A decode step that decides nothing on the host (see :mod:`kvfold.graph`); returns like ``query``."""
        self.pending = False
        if self.following.ring is not None:
            assert lengths.slots is not None
            self.following.ring.scatter_(2, lengths.slots.expand(-1, *query.shape[1:]), query)
        self._close(key, value, lengths.before)
        return self.kernel.attend_in_place(self, query, scale, lengths.after, sinks)

    def _close(self, key: torch.Tensor | None, value: torch.Tensor | None, lengths: Any) -> None:
        from kvfold.kernels.encode import append_and_close

        assert self.sink is not None and self.ring is not None
        (slab,) = self.slabs
        append_and_close(
            key,
            value,
            lengths,
            self.sink,
            self.ring,
            self.method.recent,
            slab.keys,
            plain(self.key_format),
            slab.values,
            self.value_format,
            self._transform(slice(None)),
            self.static_boundary,
        )

    def enter_static(self, lengths: StaticLengths) -> None:
        """From now on a decode graph owns the layer."""
        assert self.ring is not None
        if self.ring[0].shape[-2] < self._base_capacity:  # nothing was waiting for a block so far
            self._resize_ring(self._base_capacity)
        self.static, self.static_boundary = lengths, None
        if self.method.group_mode(True) != self.method.group_mode(False):
            ends = [self._boundary(row) for row in range(len(self.lens))]
            self.static_boundary = torch.tensor(ends, dtype=torch.int32, device=self.device)

    def leave_static(self, steps: int) -> None:
        """After ``steps`` decoded tokens: close what is due and count again on the host."""
        assert self.static is not None
        self.follow_static(steps)
        self._close(None, None, self.static.before)
        lens = [n + steps for n in self.lens]
        packed = [max(p, self.packed_length(n)) for n, p in zip(lens, self.packed, strict=True)]
        kept = [max(k, n - self.following.slots) for k, n in zip(self.following.kept, lens, strict=True)]
        calls, columns = [*self.calls, (steps, None)], self.columns + steps
        # together, without a call in between at which an interrupt could come
        self.lens, self.packed, self.following.kept = lens, packed, kept
        self.calls, self.columns, self.newest = calls, columns, 1
        self.static = self.static_boundary = None

    def follow_static(self, steps: int) -> None:
        """Within a decode graph, after ``steps`` decoded tokens: make the encoder's states that are due now, in place."""
        if self.following.ring is None:
            return
        for row, before in enumerate(self.lens):
            tokens = before + steps
            if at := self.following.latest(tokens):
                nothing = self.following.ring[:1, :, :0]
                self.following.kept[row] = max(self.following.kept[row], tokens - self.following.slots)
                self.following.make([row], at, tokens, nothing, tokens, self.first_position, in_place=True)

    @storing
    def pack_due(self) -> None:
        """Pack the blocks that became full, from the ring; while past recording is on, without the newest call's tokens."""
        assert self.ring is not None
        back = self.newest if self.recording else 0
        for ids, rows, _ in self._groups(None, 0):
            stay = self.lens[ids[0]] - back
            for group in self._alike(ids):
                packed, due = self.packed[group[0]], self.packed_length(stay)
                if due > packed:
                    some = self._rows(group, rows, ids)
                    none, nothing = (t[some, :, :0] for t in self.ring)
                    self._pack(group, some, none, nothing, None, packed, stay - self.method.sink, due)
            self._follow(ids, stay, None)

    def _groups(self, valid: torch.Tensor | None, tokens: int) -> Iterator[tuple[list[int], Rows, Rows]]:
        """Sequences that can be handled together: same length so far, same real columns among the new ones."""
        everyone = list(range(len(self.lens)))
        if valid is None and len(set(self.lens)) == 1:
            yield everyone, slice(None), slice(None)
            return
        patterns = [None] * len(everyone) if valid is None else [tuple(row) for row in valid.tolist()]
        groups: dict[tuple[int, object], list[int]] = {}
        for row in everyone:
            groups.setdefault((self.lens[row], patterns[row]), []).append(row)
        for (_, pattern), ids in groups.items():
            columns = range(tokens) if pattern is None else [i for i, real in enumerate(pattern) if real]  # type: ignore[arg-type, var-annotated]
            if columns or pattern is None:
                yield ids, self._index(ids), self._index(columns) if tokens else slice(None)

    def packed_length(self, tokens: int) -> int:
        """How many tokens of a sequence of ``tokens`` are packed."""
        return max(0, (tokens - self.method.sink - self.method.recent) // self.block * self.block)

    def _append(
        self,
        ids: list[int],
        rows: Rows,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor,
        first_call: bool,
        pack: bool,
    ) -> None:
        assert self.sink is not None and self.ring is not None
        before, after, lens = self.lens[ids[0]], self.lens[ids[0]] + key.shape[-2], list(self.lens)
        if first_call:
            for row in ids:
                self.prompt[row] = after
        sink = self.method.sink
        if before < sink:
            stop = min(after, sink)
            self._fit_sink(stop)
            for window, new in zip(self.sink, (key, value), strict=True):
                window[rows, :, before:stop] = new[:, :, : stop - before]
        # indices from here on count from the end of the sink
        old, new_stop = max(before - sink, 0), max(after - sink, 0)
        key, value = key[:, :, max(sink - before, 0) :], value[:, :, max(sink - before, 0) :]
        for group in self._alike(ids):
            self._take(group, self._rows(group, rows, ids), key, value, query, old, new_stop, ids, pack)
            for row in group:
                self.lens[row] = after
        if self.recording:  # states are made when the tokens are sure to stay, of queries that must last until then
            self._follow(ids, before, None)
            self.following.hold(ids, before, query.shape[-2], lens)
        elif pack:
            self._follow(ids, after, query)
        self.following.remember(ids, rows, query, before)
        self._shrink_ring()

    def _follow(self, ids: list[int], tokens: int, query: torch.Tensor | None) -> None:
        """Make the encoder's state of the last boundary, before the queries it is made of are forgotten."""
        if at := self.following.latest(tokens):
            self._make(ids, at, tokens, query)

    def _make(self, ids: list[int], at: int, tokens: int, query: torch.Tensor | None) -> None:
        """See :meth:`Following.make`; ``query``: of the newest tokens, None where the ring has them all."""
        if not self.following.active or all(self.following.made[row] == at for row in ids):
            return
        if query is None:
            query = torch.empty(
                len(ids), self.spec.num_heads, 0, self.spec.head_dim, dtype=torch.float32, device=self.device
            )
        self.following.make(ids, at, tokens, query, tokens - query.shape[-2], self.first_position)

    def _alike(self, ids: list[int]) -> list[list[int]]:
        """Sequences of one length split by what is packed (they differ after a crop) and by where their prompt ends."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row in ids:
            groups.setdefault((self.packed[row], self.prompt[row]), []).append(row)
        return list(groups.values())

    def _rows(self, group: list[int], rows: Rows, ids: list[int]) -> Rows:
        return rows if len(group) == len(ids) else self._index(group)

    def _index(self, numbers: Sequence[int]) -> Rows:
        """A slice where the numbers follow one another, so that what is picked is a view."""
        if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
            return slice(numbers[0], numbers[0] + len(numbers))
        return torch.tensor(numbers, device=self.device)

    def _take(
        self,
        ids: list[int],
        rows: Rows,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor,
        old: int,
        stop: int,
        parents: list[int],
        pack: bool,
    ) -> None:
        """Take tokens ``old`` to ``stop``, from the end of the sink, of ``ids``: pack what is due, keep the rest."""
        if len(ids) != len(parents):
            pick = self._index([parents.index(row) for row in ids])
            key, value, query = key[pick], value[pick], query[pick]
        packed = self.packed[ids[0]]
        due = self.packed_length((old if self.recording else stop) + self.method.sink)
        due = max(packed, due) if pack else packed
        if due > packed and self.recording:  # statistics, too, are those of the tokens that stay
            none, nothing = key[:, :, :0], value[:, :, :0]
            self._pack(ids, rows, none, nothing, None, packed, old, due)
        elif due > packed:
            self._pack(ids, rows, key, value, query, packed, old, due)
        keep = max(due, old)
        self._fit_ring(stop - due)
        self._write_ring(rows, keep, stop, key[:, :, keep - old :], value[:, :, keep - old :])

    def _pack(
        self,
        ids: list[int],
        rows: Rows,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor | None,
        start: int,
        old: int,
        stop: int,
    ) -> None:
        """Pack tokens ``start`` to ``stop``; those up to ``old`` lie in the ring, ``key``, ``value`` and ``query`` follow."""
        tokens = old + self.method.sink + key.shape[-2]
        self._fix(ids, rows, key, value, start, old)
        self._reserve(stop // self.block)  # at once, however often the encoder's state changes on the way
        for end, at in self.following.segments(start, stop):
            self._make(ids, at, tokens, query)
            self._encode(ids, rows, key, value, start, old, end)
            start = end
        for row in ids:
            self.packed[row] = stop

    def _encode(
        self, ids: list[int], rows: Rows, key: torch.Tensor, value: torch.Tensor, start: int, old: int, stop: int
    ) -> None:
        """Encode tokens ``start`` to ``stop`` into their slabs: up to ``old`` from the ring, then ``key`` and ``value``."""
        boundary = self._boundary(ids[0])
        cuts = {start, stop, *(slab.first * self.block for slab in self.slabs), boundary}
        for low, high in pairwise(sorted(cut for cut in cuts if start <= cut <= stop)):
            slab = max((slab for slab in self.slabs if slab.first * self.block <= low), key=lambda slab: slab.first)
            if self.encoder.name == "triton":
                self._encode_by_kernel(slab, rows, key, value, low, old, high, high <= boundary)
            else:
                self._encode_by_torch(slab, ids, rows, key, value, low, old, high, high <= boundary)

    def _boundary(self, row: int) -> int:
        """Packed tokens whose blocks belong wholly to the sequence's first call."""
        return max(self.prompt[row] - self.method.sink, 0) // self.block * self.block

    def _encode_by_torch(
        self,
        slab: Slab,
        ids: list[int],
        rows: Rows,
        key: torch.Tensor,
        value: torch.Tensor,
        start: int,
        old: int,
        stop: int,
        prompt: bool,
    ) -> None:
        """With the method's own operations, on float32 copies of :data:`~kvfold.methods.base.PIECE` at a time."""
        state = self.following.of(rows)
        for low in range(start, stop, PIECE // self.block * self.block):
            high = min(low + PIECE // self.block * self.block, stop)
            first, last = low // self.block - slab.first, high // self.block - slab.first
            far = self._seen(first, last, slab)  # statistics look beyond the blocks of a page that are due
            k, v = (finite(t) for t in self._read(rows, key, value, low, old, max(high, far)))
            pages = [
                self._statistics(form, fields, shared, rows, x, first, last)
                for form, fields, shared, x in zip(
                    (self.key_format, self.value_format), (slab.keys, slab.values), self.shared, (k, v), strict=True
                )
            ]
            k, v = k[:, :, : high - low], v[:, :, : high - low]
            keys = self.method.encode_keys(k, state, self.spec, self._positions(ids, low, high), prompt, pages[0])
            values = self.method.encode_values(v, state, self.spec, prompt, pages[1])
            for target, source in ((slab.keys, keys), (slab.values, values)):
                for name, tensor in source.items():
                    target[name][rows, :, first:last] = tensor

    def _seen(self, first: int, last: int, slab: Slab) -> int:
        """End of the packed tokens that statistics of pages which begin with blocks ``first`` to ``last`` are taken of."""
        far = 0
        for form in (self.key_format, self.value_format):
            if isinstance(form, PagedFormat) and form.page:
                per_page = form.page // form.block
                page = (last - 1) // per_page
                if page * per_page >= first:
                    far = max(far, (slab.first + page * per_page) * self.block + form.seen)
        return far

    def _statistics(
        self, form: Format, fields: Fields, shared: Fields, rows: Rows, x: torch.Tensor, first: int, last: int
    ) -> Fields | None:
        """Statistics of the pages of blocks ``first`` to ``last`` of a slab; those of pages that begin here are made and
        stored. None where the format has none. ``x``: the blocks' tokens, and what follows as far as statistics look."""
        if not isinstance(form, PagedFormat):
            return None
        if not form.page:
            return {name: t[rows] for name, t in shared.items()}
        per_page = form.page // form.block
        begun = -(-first // per_page)  # the first page that begins here
        if begun * per_page < last:
            for name, tensor in form.statistics_of(x[:, :, (begun * per_page - first) * form.block :]).items():
                fields[name][rows, :, begun : begun + tensor.shape[2]] = tensor
        page = first // per_page
        used = {name: fields[name][rows, :, page : -(-last // per_page)] for name in form.page_fields()}
        return form.spread(used, first - page * per_page, last - first)

    def _encode_by_kernel(
        self,
        slab: Slab,
        rows: Rows,
        key: torch.Tensor,
        value: torch.Tensor,
        start: int,
        old: int,
        stop: int,
        prompt: bool,
    ) -> None:
        """Straight from the ring and the call. A block that begins in the one and ends in the other is completed in the
        ring, where those before it have made room."""
        whole = min(old // self.block * self.block, stop)
        if start < whole:
            self._launch(slab, rows, self.ring, start, whole, prompt, ring=True)
            start = whole
        if start < min(old, stop):
            end = start + self.block
            self._write_ring(rows, old, end, key[:, :, : end - old], value[:, :, : end - old])
            self._launch(slab, rows, self.ring, start, end, prompt, ring=True)
            start = end
        if start < stop:
            part = slice(start - old, stop - old)
            self._launch(slab, rows, (key[:, :, part], value[:, :, part]), start, stop, prompt, ring=False)

    def _launch(
        self,
        slab: Slab,
        rows: Rows,
        source: tuple[torch.Tensor, torch.Tensor] | None,
        start: int,
        stop: int,
        prompt: bool,
        ring: bool,
    ) -> None:
        """Encode whole blocks of the ring, or of a call's tokens from its first on."""
        from kvfold.kernels import encode

        assert source is not None
        index = None
        if isinstance(rows, torch.Tensor):
            index, rows = rows, slice(None)
        for form, x, fields, how in zip(
            (plain(self.key_format), self.value_format),
            source,
            (slab.keys, slab.values),
            (self._transform(rows), None),
            strict=True,
        ):
            encode.encode_blocks(
                x[rows] if ring else x,
                {name: t[rows] for name, t in fields.items()},
                form,
                start // self.block - slab.first,
                how,
                self.method.group_mode(prompt),
                index,
                slab.first,
                (stop - start) // self.block if ring else None,
            )

    def _transform(self, rows: slice) -> Any:
        """What the kernels do to keys before they encode them."""
        from kvfold.kernels.encode import KeyTransform

        shared, update = self.shared[0], self.following.state.get("update")
        mean = shared["mean"][rows, :, 0].float() if "mean" in shared else None
        norm = norms(shared["norm"][rows, :, 0]) if "norm" in shared else None
        return KeyTransform(mean=mean, norm=norm, update=None if update is None else update[rows])

    def _read(
        self, rows: Rows, key: torch.Tensor, value: torch.Tensor, start: int, old: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``start`` to ``stop``: up to ``old`` from the ring, then those of a call."""
        new = tuple(t[:, :, max(start - old, 0) : max(stop - old, 0)] for t in (key, value))
        if start >= old:
            return new  # type: ignore[return-value]
        waiting = self._read_ring(rows, start, min(old, stop))
        return tuple(torch.cat(pair, -2) for pair in zip(waiting, new, strict=True))  # type: ignore[return-value]

    def _reserve(self, blocks: int) -> None:
        """Have storage for ``blocks`` blocks; what exists is never copied."""
        have = sum(slab.blocks for slab in self.slabs)
        if blocks <= have:
            return
        wanted = max(blocks - have, have // 8)
        if self.max_length is not None and not have:
            wanted = max(wanted, self.packed_length(self.max_length) // self.block)
        wanted = -(-wanted // self.page_blocks) * self.page_blocks
        formats = (self.key_format, self.value_format)
        fields = [f.allocate(len(self.lens), self.spec.num_kv_heads, wanted, self.device) for f in formats]
        self.slabs.append(Slab(have, wanted, *fields))

    def _fix(self, ids: list[int], rows: Rows, key: torch.Tensor, value: torch.Tensor, start: int, old: int) -> None:
        """Take the statistics of whole sequences that pack for the first time, each from all of its tokens by now."""
        if all(self.fixed[row] for row in ids):
            return
        for row, (k, v) in zip(ids, self._each(ids, rows, key, value, start, old), strict=True):
            if self.fixed[row]:
                continue
            self.fixed[row] = True
            for form, shared, x in zip((self.key_format, self.value_format), self.shared, (k, v), strict=True):
                if isinstance(form, PagedFormat) and not form.page:
                    for name, tensor in form.statistics(finite(x).unsqueeze(2)).items():
                        if name not in shared:
                            shared[name] = tensor.new_zeros(len(self.lens), *tensor.shape[1:])
                        shared[name][row] = tensor[0]

    def _each(
        self, ids: list[int], rows: Rows, key: torch.Tensor, value: torch.Tensor, start: int, old: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Unpacked keys and values of each sequence, sink aside: [1, num_kv_heads, tokens, head_dim]."""
        keys, values = self._read(rows, key, value, start, old, old + key.shape[-2])
        for i in range(len(ids)):
            yield keys[i : i + 1], values[i : i + 1]

    # ---- the ring of recent tokens: token t, counted from the end of the sink, lies in slot t mod capacity -----------

    def _dense(self, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (batch, self.spec.num_kv_heads, tokens, self.spec.head_dim)
        return tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))  # type: ignore[return-value]

    @staticmethod
    def _pieces(start: int, stop: int, capacity: int) -> Iterator[tuple[int, int, int]]:
        """(slot, slot after, offset of its first token from ``start``) of the at most two runs of slots."""
        at = start
        while at < stop:
            slot = at % capacity
            count = min(capacity - slot, stop - at)
            yield slot, slot + count, at - start
            at += count

    def _read_ring(self, rows: Rows, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.ring is not None
        runs = list(self._pieces(start, stop, self.ring[0].shape[-2])) if stop > start else [(0, 0, 0)]
        keys, values = (torch.cat([side[rows, :, a:b] for a, b, _ in runs], -2) for side in self.ring)
        return keys, values

    def _write_ring(self, rows: Rows, start: int, stop: int, *new: torch.Tensor) -> None:
        assert self.ring is not None
        for side, tokens in zip(self.ring, new, strict=True):
            for a, b, offset in self._pieces(start, stop, side.shape[-2]):
                side[rows, :, a:b] = tokens[:, :, offset : offset + b - a]

    @property
    def _base_capacity(self) -> int:
        """Slots that hold the window, what waits for a whole block, and the longest call so far that was written first, or
        one token: when a single token closes a block, nothing of the block is overwritten, and it can be taken back."""
        return self.method.recent + self.block - 1 + max(1, min(self.longest, self.kernel.in_place_tokens))

    def _fit_ring(self, needed: int) -> None:
        """Have ``needed`` slots. A sequence that packs nothing yet has no more of them than it needs, in whole blocks."""
        assert self.ring is not None
        base = self._base_capacity
        least = base if any(self.packed) else 0
        if max(needed, least) > self.ring[0].shape[-2]:
            whole = -(-needed // self.block) * self.block
            self._resize_ring(max(least, min(whole, base) if needed <= base else whole))

    def _fit_sink(self, needed: int) -> None:
        """Have ``needed`` slots in the sink window, which grows by blocks up to its length."""
        assert self.sink is not None
        have = self.sink[0].shape[-2]
        if needed > have:
            sink = self._dense(len(self.lens), min(self.method.sink, -(-needed // self.block) * self.block))
            for new, old in zip(sink, self.sink, strict=True):
                new[:, :, :have] = old
            self.sink = sink

    def _shrink_ring(self) -> None:
        """Give back what waiting for a sequence's state needed beyond the window."""
        assert self.ring is not None
        held = max(n - self.method.sink - p for n, p in zip(self.lens, self.packed, strict=True))
        if self.ring[0].shape[-2] > self._base_capacity >= held and any(self.packed) and not self.recording:
            self._resize_ring(self._base_capacity)

    def _resize_ring(self, capacity: int) -> None:
        old = self.ring
        ring = self._dense(len(self.lens), capacity)
        for row in range(len(self.lens)):
            rows, start, stop = slice(row, row + 1), self.packed[row], self.lens[row] - self.method.sink
            if stop > start:
                self.ring = old
                tokens = self._read_ring(rows, start, stop)
                self.ring = ring
                self._write_ring(rows, start, stop, *tokens)
        self.ring = ring

    # ---- bookkeeping -------------------------------------------------------------------------------------------------

    def _positions(self, ids: list[int], start: int, stop: int) -> torch.Tensor:
        """Positions of packed tokens, int64 [len(ids), 1, stop - start]."""
        first = _on_device(tuple(self.first_position[row] for row in ids), self.device)
        steps = torch.arange(start, stop, device=self.device) + self.method.sink
        return (first[:, None] + steps)[:, None]

    def _note_positions(self, position_ids: torch.Tensor | None, valid: torch.Tensor | None, tokens: int) -> None:
        """Learn each sequence's first position and check that its tokens follow one another."""
        if position_ids is None or (tokens == 1 and self.columns and self.device.type != "cpu"):
            return
        positions = position_ids.expand(len(self.lens), -1).tolist()
        real = [[True] * tokens] * len(self.lens) if valid is None else valid.tolist()
        for row, (line, mask) in enumerate(zip(positions, real, strict=True)):
            line = [p for p, keep in zip(line, mask, strict=True) if keep]
            if not line:
                continue
            if not self.lens[row]:
                self.first_position[row] = line[0]
            expected = self.first_position[row] + self.lens[row]
            if line != list(range(expected, expected + len(line))):
                raise CacheStateError(
                    f"position_ids: {self.method.name} stores keys before RoPE and needs consecutive positions; "
                    f"sequence {row} continues at {line[0]}, expected {expected}"
                )

    def _log_columns(self, tokens: int, valid: torch.Tensor | None) -> None:
        self.columns += tokens
        if valid is None and self.calls and self.calls[-1][1] is None:
            self.calls[-1] = (self.calls[-1][0] + tokens, None)
        else:
            self.calls.append((tokens, None if valid is None else valid.clone()))  # not a view of the caller's mask

    def _remove_columns(self, count: int) -> list[int]:
        """Forget the last ``count`` columns; returns how many real tokens each sequence loses."""
        removed = [0] * len(self.lens)
        self.columns -= count
        while count:
            tokens, valid = self.calls.pop()
            gone = min(tokens, count)
            lost = [gone] * len(removed) if valid is None else valid[:, tokens - gone :].sum(-1).tolist()
            removed = [a + b for a, b in zip(removed, lost, strict=True)]
            if gone < tokens:
                self.calls.append((tokens - gone, None if valid is None else valid[:, : tokens - gone]))
            count -= gone
        return removed

    def _truncate(self, row: int, length: int) -> None:
        """Shorten one sequence to ``length`` tokens."""
        body = max(length - self.method.sink, 0)
        self.prompt[row] = min(self.prompt[row], length)
        if body < self.packed[row]:
            whole = body // self.block * self.block
            if body > whole:
                tail = self._decode(row, whole, body)
                self.packed[row], self.lens[row] = whole, whole + self.method.sink  # the ring holds nothing now
                self._fit_ring(body - whole)
                self._write_ring(slice(row, row + 1), whole, body, *(t.unsqueeze(0).to(self.dtype) for t in tail))
            self.packed[row] = whole
        self.lens[row] = length
        self.following.truncate(row, length)
        if not self.packed[row] and self._of_sequence:
            self.fixed[row] = False  # nothing depends on the statistics any more; they will be those of what follows

    def _select(self, rows: list[int], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Rearrange the batch: ``rows`` says which old sequence each new one is, ``pick`` does it to a tensor."""
        self._own()
        if not self.is_initialized:
            return
        assert self.sink is not None and self.ring is not None
        for name in ("lens", "packed", "prompt", "first_position", "fixed"):
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        self.following.select(rows, pick)
        keys, values = ({name: pick(t) for name, t in side.items()} for side in self.shared)
        self.shared = (keys, values)
        self.sink = (pick(self.sink[0]), pick(self.sink[1]))
        self.ring = (pick(self.ring[0]), pick(self.ring[1]))
        self.calls = [(n, valid if valid is None else pick(valid)) for n, valid in self.calls]
        for slab in self.slabs:
            slab.keys = {name: pick(t) for name, t in slab.keys.items()}
            slab.values = {name: pick(t) for name, t in slab.values.items()}

    # ---- calls that die ----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """What the layer is; tensors are not copied. See :meth:`_keep_old`."""
        if not self.is_initialized:
            return {"columns": 0, "is_initialized": False}
        return {  # in every step, for every layer
            "is_initialized": True,
            "columns": self.columns,
            "lens": self.lens.copy(),
            "packed": self.packed.copy(),
            "prompt": self.prompt.copy(),
            "first_position": self.first_position.copy(),
            "fixed": self.fixed.copy(),
            "slabs": self.slabs.copy(),
            "sink": self.sink,
            "ring": self.ring,
            "calls": self.calls.copy(),
            "newest": self.newest,
            "longest": self.longest,
            "shared": (self.shared[0].copy(), self.shared[1].copy()),
            "queries": self.following.snapshot() if self.following.active else None,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Be again what :meth:`snapshot` saw."""
        if not snapshot["is_initialized"]:
            self._clear()
            return
        if snapshot["queries"] is not None:
            self.following.restore(snapshot["queries"])
        for name, value in snapshot.items():
            if name != "queries":
                setattr(self, name, value)
        self.pending = False

    def _keep_old(self, tokens: int) -> None:
        """Before a call of ``tokens`` writes over what its snapshot refers to, go on with copies.

        One token overwrites nothing, and of a few tokens' queries enough remain, so steps of a decode copy nothing.
        """
        assert self.ring is not None and self.running is not None
        call, index = self.running
        held = max(n - self.method.sink - p for n, p in zip(self.lens, self.packed, strict=True))
        if held + tokens > self.ring[0].shape[-2]:
            self.ring = _copies(self.ring)
        if self.following.ring is not None:
            self.following.keep_old(call.before[index]["queries"], self.lens, tokens, self.recording)

    def finish(self) -> None:
        """The layer has a call's tokens and attended to them."""
        if self.running is not None:
            call, index = self.running
            call.finish(index)

    # ---- sizes -------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor the layer owns, by what it is for: packed, windows, state."""
        kept = self.following.ring
        windows = [*(self.sink or ()), *(self.ring or ()), *([kept] if kept is not None else [])]
        state = [*self.following.state.values(), *(t for side in self.shared for t in side.values())]
        if self.is_initialized:
            state += [valid for _, valid in self.calls if valid is not None]
        return {"packed": [t for slab in self.slabs for t in slab.tensors()], "windows": windows, "state": state}

    def tables(self) -> list[torch.Tensor]:
        """Constant tensors the layer reads; layers may share them."""
        return list(self.method.tables(self.spec, self.device).values()) if self.is_initialized else []


def _copies(window: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert window is not None
    return window[0].clone(), window[1].clone()


def present(device: torch.device | str | int) -> torch.device:
    """A device that is there, by its full name ("cuda" is "cuda:0").

    Raises
    ------
    CacheStateError
    """
    try:
        if device is not None:  # which torch takes for its default
            return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError):
        pass
    there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
    raise CacheStateError(f"cache: to({device!r}): there is no such device here; allowed: {there}")


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, also in tuples, lists and dicts, on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    return value


def states_of(layer: Any) -> list[torch.Tensor]:
    """Convolution and recurrent states that a layer holds."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return []
    return [t for states in (layer.conv_states, layer.recurrent_states) for t in states.values() if t is not None]


def select_states(layer: Any, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Rearrange the batch of a layer's states."""
    for states in (layer.conv_states, layer.recurrent_states):
        states.update({index: pick(t) for index, t in states.items() if t is not None})


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


class FoldedCache(Cache):
    """A Transformers cache whose full-attention layers are folded; made by :func:`kvfold.fold`.

    Parameters
    ----------
    layers : list of cache layers
        One per layer of the model: :class:`FoldedLayer`, or Transformers' own where a layer stays in full precision.
    method : Method
    model : Module or None
        Whose cache it is: :meth:`save` asks, and its configuration is looked at when a call begins.

    Notes
    -----
    A call of the model that dies (out of memory, an interrupt, an error in a hook) before every layer has its tokens counts
    for nothing: the next call finds the cache as it was, with a :class:`~kvfold.errors.KVFoldWarning`. A call that dies
    after its last layer is in the cache; ``get_seq_length()`` counts whole calls only, and says how many tokens to pass on.
    """

    def __init__(self, layers: "list[AnyLayer]", method: Method, model: torch.nn.Module | None = None) -> None:
        super().__init__(layers=list(layers))
        self.method = method
        self._model = ModelReference(model)
        self._config = attending(model)
        self._fed = fed(model, self.layers)
        self._call: Call | None = None

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
        from kvfold.saving import save

        self.settle()
        save(self, path)

    @storing
    def to(self, device: torch.device | str | int) -> "FoldedCache":
        """Move the cache to a device, in place, and choose what attends and encodes there; returns itself.

        ``cache.to("cpu")`` frees a GPU between two calls, ``cache.to(model.device)`` goes on. Content stays as it is, also the
        order in which codes are packed: on a CPU the float32 reference reads what was packed for tensor cores.

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
        self.settle()
        target = present(device)
        for layer in self.layers:
            if isinstance(layer, FoldedLayer):
                layer.to(target)
                continue
            for name, value in vars(layer).items():
                setattr(layer, name, target if isinstance(value, torch.device) else moved(value, target))
        return self

    @property
    def folded(self) -> list[FoldedLayer]:
        """The layers that are folded."""
        return [layer for layer in self.layers if isinstance(layer, FoldedLayer)]

    # ---- calls of the model ------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`FoldedLayer.update`; a call that died is taken back before the next one begins.

        Keys of layers that are not folded and share the folded layers' mask are marked.

        Raises
        ------
        CacheStateError
            If the model does not attend through kvfold, or if a call that died cannot be taken back.
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
            self.settle(within=True)
            self._check_attention()
            call = self._call = Call(self.layers, self._fed, super().get_seq_length())
        elif call.last is not None and getattr(self.layers[call.last], "pending", False):
            raise CacheStateError(NOT_READ)
        call.reach(index)
        return call

    def settle(self, within: bool = False) -> None:
        """If the newest call died, take it back; ``within`` the next call, or between calls.

        Raises
        ------
        CacheStateError
            If a layer that is not folded cannot go back; ``reset()`` remains.
        """
        call = self._call
        if call is None or not call.missing:
            return
        if call.take_back(within):
            warnings.warn(
                "kvfold: the last call of the model ended before all layers had its tokens; it was taken back, and the "
                f"cache holds the {call.length} tokens before it. If it did not die, the model has fewer layers than the cache",
                KVFoldWarning,
                stacklevel=3,
            )
        self._call = None

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
            columns, offset = self._call.layer_before(layer_idx).get_mask_sizes(query_length)
        else:
            columns, offset = super().get_mask_sizes(query_length, layer_idx)
        return columns, False if self._shares_mask(layer_idx) else offset

    def reset(self) -> None:
        """Forget everything, also a call that died."""
        super().reset()
        self._call = None

    def crop(self, tokens_to_remove: int) -> None:
        """See :meth:`FoldedLayer.crop`.

        Raises
        ------
        CacheStateError
            If a layer holds a recurrent state, which tokens cannot be taken out of.
        """
        self.settle()
        fixed = [i for i, layer in enumerate(self.layers) if states_of(layer) and not layer.is_croppable]
        if tokens_to_remove != 0 and fixed:
            raise CacheStateError(
                f"cache: crop({int(tokens_to_remove)}) is not possible: layers {', '.join(map(str, fixed))} hold recurrent "
                "states, which tokens cannot be taken out of; reset() the cache and prefill again"
            )
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make sequence ``beam_idx[i]`` the i-th; int64 [batch]."""
        self.settle()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every sequence ``repeats`` times, one after the other."""
        self._each(lambda t: t.repeat_interleave(repeats, dim=0), lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences ``indices``, int64 [new batch] or bool [batch]."""
        self._each(lambda t: t[indices.to(t.device), ...], lambda layer: layer.batch_select_indices(indices))

    def _each(self, pick: Callable[[torch.Tensor], torch.Tensor], select: Callable[[Any], None]) -> None:
        """Rearrange the batch of every layer; those of states alone have no method for it."""
        self.settle()
        for layer in self.layers:
            if hasattr(layer, "batch_select_indices"):
                select(layer)
            else:
                select_states(layer, pick)

    def activate_past_recording(self) -> None:
        """See :meth:`FoldedLayer.activate_past_recording`."""
        self.settle()
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    @storing
    def __deepcopy__(self, memo: dict[int, Any]) -> "FoldedCache":
        self.settle()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, value if name == "_config" else copy.deepcopy(value, memo))
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
                layer._own()
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
            layer._own()
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


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn, the first time only."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, KVFoldWarning, stacklevel=3)
