"""Taking tokens in: the first into the sink window, the newest into the ring, and blocks that became full into slabs."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from kvfold.methods import State
from kvfold.plan import Encoder
from kvfold.storage.cuts import Cuts
from kvfold.storage.encoders import TorchEncoder, Unpacked, kernel_encoder
from kvfold.storage.following import BlockStates, Following
from kvfold.storage.reader import Reader
from kvfold.storage.sequences import ALL, Rows

STATES = 256
"""Encoder states, of all sequences, that there are at a time while a prompt is packed."""


class Writer:
    """Writes the tokens of calls into a layer's storage.

    Parameters
    ----------
    reader : Reader
        The layer's storage.
    following : Following
        What its encoder knows of queries.
    max_length : int or None
        Allocate packed storage for this many tokens at once instead of growing.

    Attributes
    ----------
    encoder : Encoder
        What encodes blocks.
    cuts : Cuts
        What is remembered of blocks that were cut.
    recording : bool
        Keep the newest call's tokens out of packed storage, so that they can be taken back exactly.
    """

    def __init__(self, reader: Reader, following: Following, max_length: int | None) -> None:
        self.reader, self.following, self.max_length = reader, following, max_length
        self.layout, self.sequences, self.slabs = reader.layout, reader.sequences, reader.slabs
        self.sink, self.ring = reader.sink, reader.ring
        self.by_torch, self.by_kernel = TorchEncoder(reader, following), kernel_encoder(reader, following)
        self.encoder = Encoder("torch", "no device is known yet")
        self.cuts = Cuts()
        self.recording = False

    def append(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor,
        valid: torch.Tensor | None,
        first_call: bool,
        pack: bool,
    ) -> None:
        """Take a call's tokens in, and pack the blocks that became full.

        Parameters
        ----------
        key, value : Tensor [batch, num_kv_heads, tokens, head_dim]
            After RoPE.
        query : Tensor [batch, num_heads, tokens, head_dim]
        valid : Tensor or None, bool [batch, tokens]
            False at padding.
        first_call : bool
            Whether nothing came before.
        pack : bool
            False: leave packing to :meth:`pack_due`; while past recording is on, only the blocks of earlier calls are due, and
            are packed at once.
        """
        for ids, rows, columns in self.sequences.groups(valid, key.shape[-2]):
            if rows is ALL and columns is ALL:
                self._append(ids, rows, key, value, query, first_call, pack)
            else:
                k, v, q = (t[rows][:, :, columns] for t in (key, value, query))
                self._append(ids, rows, k, v, q, first_call, pack)

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
        """Take tokens of sequences of one length in."""
        sequences, sink = self.sequences, self.sequences.sink
        lens = list(sequences.lens)
        before = lens[ids[0]]
        after = before + key.shape[-2]
        if first_call:
            for row in ids:
                sequences.prompt[row] = after
        if before < sink:
            stop = min(after, sink)
            self.sink.fit(stop)
            for window, new in zip(self.sink, (key, value), strict=True):
                window[rows, :, before:stop] = new[:, :, : stop - before]
            key, value = key[:, :, sink - before :], value[:, :, sink - before :]
        # indices from here on count from the end of the sink
        old, new_stop = max(before - sink, 0), max(after - sink, 0)
        for group, some in sequences.alike(ids, rows):
            tokens = Unpacked(group, some, old, key, value, query)
            if len(group) != len(ids):
                pick = sequences.index([ids.index(row) for row in group])
                tokens = Unpacked(group, some, old, key[pick], value[pick], query[pick])
            self.take(tokens, new_stop, pack)
            for row in group:
                sequences.lens[row] = after
        if self.recording:  # states are made when the tokens are sure to stay, of queries that must last until then
            self._follow(ids, before, None)
            self.following.hold(ids, before, query.shape[-2], lens)
        else:
            self._follow(ids, after, query, None if pack else before)
        self.following.remember(ids, rows, query, before)
        if not self.recording:
            self.ring.shrink()

    def take(self, tokens: Unpacked, stop: int, pack: bool) -> None:
        """Pack what is due of tokens up to ``stop``, and keep the rest in the ring."""
        sequences, old = self.sequences, tokens.old
        packed = sequences.packed[tokens.ids[0]]
        due = packed
        if pack or self.recording:  # recorded: before the states of later blocks are made
            due = max(packed, sequences.packed_length((old if self.recording else stop) + sequences.sink))
        if due > packed:
            self._pack(self._waiting(tokens.ids, tokens.rows, old) if self.recording else tokens, packed, due)
        keep = max(due, old)
        self.ring.fit(stop - due)
        self.ring.write(tokens.rows, keep, stop, tokens.keys[:, :, keep - old :], tokens.values[:, :, keep - old :])

    def _waiting(self, ids: list[int], rows: Rows, stop: int) -> Unpacked:
        """Tokens up to ``stop`` alone, all in the ring: statistics, too, are those of the tokens that stay."""
        none, nothing = (t[rows, :, :0] for t in self.ring)
        return Unpacked(ids, rows, stop, none, nothing, None)

    def pack_due(self) -> None:
        """Pack the blocks that became full, from the ring; while past recording is on, :meth:`append` packed what stays."""
        sequences = self.sequences
        if self.recording:
            return
        for ids, rows, _ in sequences.groups(None, 0):
            tokens = sequences.lens[ids[0]]
            due = sequences.packed_length(tokens)
            for group, some in sequences.alike(ids, rows):
                packed = sequences.packed[group[0]]
                if due > packed:
                    self._pack(self._waiting(group, some, tokens - sequences.sink), packed, due)
            self._follow(ids, tokens, None)

    def _pack(self, tokens: Unpacked, start: int, stop: int) -> None:
        """Pack tokens ``start`` to ``stop``."""
        sequences, ids = self.sequences, tokens.ids
        self._fix(tokens, start)
        self._reserve(stop // self.layout.block)  # at once, however often the encoder's state changes on the way
        segments = self.following.segments(start, stop)
        most = max(1, STATES // len(ids))
        for at in range(0, len(segments), most):
            ends, bounds = zip(*segments[at : at + most], strict=True)
            states = self._make(ids, bounds, tokens.stop + sequences.sink, tokens.queries)
            self._encode(tokens, start, ends[-1], BlockStates(states, ends, self.layout.block))
            start = ends[-1]
        for row in ids:
            sequences.packed[row] = stop

    def _reserve(self, blocks: int) -> None:
        at_first = 0 if self.max_length is None else self.sequences.packed_length(self.max_length) // self.layout.block
        self.slabs.reserve(blocks, at_first, len(self.sequences), self.sequences.device)

    def _fix(self, tokens: Unpacked, start: int) -> None:
        """Take the statistics of whole sequences that pack for the first time, each from all of its tokens by now."""
        if all(self.slabs.fixed[row] for row in tokens.ids):
            return
        keys, values = tokens.read(self.ring, start, tokens.stop)
        for i, row in enumerate(tokens.ids):
            if not self.slabs.fixed[row]:
                self.slabs.fix(row, keys[i : i + 1], values[i : i + 1])

    def _encode(self, tokens: Unpacked, start: int, stop: int, states: BlockStates) -> None:
        """Encode tokens ``start`` to ``stop`` into their slabs."""
        block = self.layout.block
        boundary = self.sequences.boundary(tokens.ids[0])
        encoder = self.by_kernel if self.encoder.name == "triton" else self.by_torch
        cuts = {start, stop, *(slab.first * block for slab in self.slabs), boundary}
        for low, high in pairwise(sorted(cut for cut in cuts if start <= cut <= stop)):
            encoder.encode(self.slabs.at(low), tokens, low, high, high <= boundary, states)

    # ---- what the encoder follows ------------------------------------------------------------------------------------

    def _follow(self, ids: list[int], tokens: int, query: torch.Tensor | None, packed: int | None = None) -> None:
        """Make the encoder's state of the last boundary, before the queries it is made of are forgotten. ``packed``: only if
        blocks before the boundary do not wait, those due at so many tokens being packed."""
        at = self.following.latest(tokens)
        if at and (packed is None or at <= packed) and any(self.following.made[row] < at for row in ids):
            self._make(ids, (at,), tokens, query)

    def _make(self, ids: list[int], bounds: Sequence[int], tokens: int, query: torch.Tensor | None) -> State:
        """See :meth:`Following.make`; ``query``: of the newest tokens, None where the ring has them all."""
        if not self.following.active:
            return {}
        if query is None:
            spec = self.layout.spec
            shape = (len(ids), spec.num_heads, 0, spec.head_dim)
            query = torch.empty(shape, dtype=torch.float32, device=self.sequences.device)
        before = tokens - query.shape[-2]
        return self.following.make(ids, bounds, tokens, query, before, self.sequences.first_position)

    def follow_steps(self, steps: int) -> None:
        """After ``steps`` tokens that a decode graph wrote: make the encoder's states that are due now, in place."""
        following, sequences = self.following, self.sequences
        if following.ring is None:
            return
        nothing = following.ring[:1, :, :0]
        for row, (before, packed) in enumerate(zip(sequences.lens, sequences.packed, strict=True)):
            tokens = before + steps
            due = sequences.packed_length(tokens)
            asked = following.segments(due - self.layout.block, due)[-1][1] if due > packed else 0
            at = max(asked, following.latest(tokens))
            if at > following.made[row]:
                following.kept[row] = max(following.kept[row], tokens - following.slots)
                following.make([row], (at,), tokens, nothing, tokens, sequences.first_position, in_place=True)

    def encode_steps(self, steps: int) -> None:
        """After ``steps`` tokens that a decode graph wrote: encode the blocks that its next step counts as packed."""
        sequences = self.sequences
        for ids, rows, _ in sequences.groups(None, 0):
            tokens = sequences.lens[ids[0]] + steps
            due = sequences.packed_length(tokens)
            for group, some in sequences.alike(ids, rows):
                packed = sequences.packed[group[0]]
                if steps:
                    packed = max(packed, sequences.packed_length(tokens - 1))
                if due > packed:
                    state = {name: t[some].unsqueeze(1) for name, t in self.following.state.items()}
                    states = BlockStates(state, (due,), self.layout.block)
                    self._encode(self._waiting(group, some, tokens - sequences.sink), packed, due, states)

    # ---- taking tokens back ------------------------------------------------------------------------------------------

    def truncate(self, row: int, length: int) -> None:
        """Shorten one sequence to ``length`` tokens. What is left of a packed block goes back into the ring, decoded: the first
        time that it is cut, for it is packed again of that."""
        sequences, block = self.sequences, self.layout.block
        body = max(length - sequences.sink, 0)
        sequences.prompt[row] = min(sequences.prompt[row], length)
        self.cuts.shorten(row, body)
        if body < sequences.packed[row]:
            whole = body // block * block
            if body > whole:
                tail = self.cuts.tail(row, whole, body, self.reader.decode, self.ring.dtype)
                sequences.packed[row], sequences.lens[row] = whole, whole + sequences.sink  # the ring holds nothing now
                self.ring.fit(body - whole)
                self.ring.write(slice(row, row + 1), whole, body, *(t.unsqueeze(0) for t in tail))
            sequences.packed[row] = whole
        sequences.lens[row] = length
        self.following.truncate(row, length)
        if not sequences.packed[row]:
            self.slabs.unfix(row)
