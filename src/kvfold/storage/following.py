"""What an encoder knows of a sequence's queries (SQuat's subspace, ZipCache's probes). Attention never reads it.

It follows the sequence: the state is made anew when a sequence has 128, 256, 512, 1,024, 2,048, 3,072, ... tokens, from
its newest queries then.
A block is encoded with the state of the last such boundary before the block was complete and ``recent`` newer tokens were
there. So what is stored depends on the tokens alone, not on how calls were cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch

from kvfold.arithmetic import storing
from kvfold.methods import LayerSpec, Method, Observation, State
from kvfold.methods.base import boundary
from kvfold.storage.lengths import on_device
from kvfold.storage.sequences import Rows

ONCE = 1
"""In place of a boundary under ``paper=true``: the state is made at the first packing and stays."""


STEP = 32
"""Slots by which the ring of a young sequence grows."""

SPARE = 32
"""Tokens that may be taken back without a trace in states; a draft of assisted generation has fewer."""

MATRICES = 144
"""Matrices, one for each state and KV head, that are made together: about as many as a GPU has multiprocessors."""


@dataclass(frozen=True)
class BlockStates:
    """The encoder states of blocks that are packed one after the other.

    Attributes
    ----------
    each : State
        Tensors ``[sequences, states, num_kv_heads, ...]``; empty where a method follows nothing.
    ends : tuple of int
        Packed tokens at which the blocks of each state end, ascending.
    block : int
    """

    each: State
    ends: tuple[int, ...]
    block: int

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Which states the blocks of packed tokens ``start`` to ``stop`` have: (state, blocks), in order."""
        found = []
        for number, end in enumerate(self.ends):
            if (high := min(end, stop)) > start:
                found.append((number, (high - start) // self.block))
                start = high
        return found

    def of(self, start: int, stop: int) -> State:
        """States of packed tokens ``start`` to ``stop`` as :meth:`~kvfold.methods.Method.encode_keys` takes them: one for all
        blocks, or one for each. A dict of the caller's own."""
        runs = self.runs(start, stop)
        if len(runs) == 1:
            return {name: t[:, runs[0][0]] for name, t in self.each.items()}
        return {
            name: torch.cat([t[:, n].unsqueeze(2).expand(-1, -1, count, *t.shape[3:]) for n, count in runs], 2)
            for name, t in self.each.items()
        }

    def numbers(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Number of the state of each block of packed tokens ``start`` to ``stop``, int64 [blocks]."""
        return on_device(tuple(n for n, count in self.runs(start, stop) for _ in range(count)), device)


@dataclass(frozen=True)
class Window:
    """Queries of one sequence that a state is made of.

    Attributes
    ----------
    queries : Tensor [1, num_heads, n, head_dim]
    position : int
        Of the first one.
    """

    queries: torch.Tensor
    position: int

    @property
    def count(self) -> int:
        return self.queries.shape[-2]


class Following:
    """Encoder states of a batch, and the queries they will be made of.

    The ring holds the queries of the newest tokens: token t lies in slot ``t % slots``. It has :data:`SPARE` slots more than a
    state is made of. A state replaces the one before when the first block asks for it, at the latest when the sequence is
    ``SPARE`` tokens beyond the boundary. So a crop of up to ``SPARE`` tokens loses nothing. Where it goes back to blocks of the
    state before, no block had asked for the new one. Where the new one was made of tokens that are gone, the ring has the
    queries to make it anew. (Blocks of 16 tokens with ``recent`` below 16: a crop of up to ``16 + recent``.)

    Parameters
    ----------
    method : Method
    spec : LayerSpec
    """

    def __init__(self, method: Method, spec: LayerSpec) -> None:
        self.method, self.spec = method, spec
        self.active = method.query_window > 0
        self.clear()

    def clear(self) -> None:
        self.state: State = {}
        self.ring: torch.Tensor | None = None
        self.made: list[int] = []  # boundary of a sequence's state; 0: none
        self.kept: list[int] = []  # first token whose query is there

    def start(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        """Begin with empty sequences."""
        self.made, self.kept = [0] * batch, [0] * batch
        self.dtype, self.device = dtype, device
        self._allocate()

    def _allocate(self) -> None:
        if self.active and self.ring is None:
            shape = (len(self.made), self.spec.num_heads, 0, self.spec.head_dim)
            self.ring = torch.empty(shape, dtype=self.dtype, device=self.device)

    def make_room(self, tokens: int | None = None) -> None:
        """Have slots for sequences of ``tokens`` tokens, or (None) all that will ever be needed. While there are fewer, token t
        lies in slot t."""
        if self.ring is None:
            return
        most, have = self.most_slots, self.ring.shape[2]
        wanted = most if tokens is None else min(most, -(-tokens // STEP) * STEP)
        if wanted > have:
            ring = self.ring.new_empty(*self.ring.shape[:2], wanted, self.ring.shape[3])
            ring[:, :, :have] = self.ring
            self.ring = ring

    @property
    def _packs_at(self) -> int:
        """Tokens of a sequence when it packs first."""
        return self.method.sink + self.method.recent + self.method.block

    @property
    def most_slots(self) -> int:
        """Slots of the ring once a sequence is long enough."""
        return self._packs_at if self.method.paper else self.method.query_window + SPARE

    @property
    def slots(self) -> int:
        return self.most_slots if self.ring is None else self.ring.shape[2]

    def boundary(self, tokens: int) -> int:
        """Boundary of the state for what is encoded when a sequence has ``tokens`` tokens."""
        return ONCE if self.method.paper else boundary(tokens)

    def segments(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Packed tokens ``start`` to ``stop``, cut where the state changes: (end, boundary), in order."""
        if not self.active:
            return [(stop, 0)]
        method = self.method
        found: list[tuple[int, int]] = []
        lag = method.sink + method.recent
        for end in range(start + method.block, stop + 1, method.block):
            at = self.boundary(lag + end)
            if found and found[-1][1] == at:
                found[-1] = (end, at)
            else:
                found.append((end, at))
        return found

    @storing
    def make(
        self,
        ids: list[int],
        bounds: Sequence[int],
        tokens: int,
        query: torch.Tensor,
        before: int,
        first: list[int],
        in_place: bool = False,
    ) -> State:
        """Have the states of some boundaries, or of a later one, for the sequences ``ids``, each from its own queries; those of
        the last one stay.

        Parameters
        ----------
        bounds : sequence of int
            Ascending.
        tokens : int
            Tokens of the sequences by now, those of ``query`` included.
        query : Tensor [len(ids), num_heads, n, head_dim]
            Of the tokens from ``before`` on, which the ring does not hold yet.
        first : list of int
            Position of each sequence's first token.
        in_place : bool
            Write into the tensors that hold the states; a decode graph knows their addresses. If not, what a snapshot refers
            to stays as it is.

        Returns
        -------
        State
            The states of every boundary, [len(ids), len(bounds), num_kv_heads, ...].
        """
        if not self.active or not bounds[-1]:
            return {}
        windows: list[Window] = []
        uses: list[list[int]] = []  # window of each sequence's state at each boundary; -1: it has that already
        for i, row in enumerate(ids):
            uses.append([])
            newest = -1
            for at in bounds:
                if self.made[row] < at:
                    self.made[row] = at
                    window = self._window(i, row, at, tokens, query, before, first[row])
                    if window is not None:  # gone after a long crop: what was made before serves on
                        newest = len(windows)
                        windows.append(window)
                uses[-1].append(newest)
        made = self._observe(windows)
        states = self._spread(ids, uses, made)
        self._keep(ids, uses, made, in_place)
        if self.method.paper and all(self.made):
            self.ring = None  # never asked for again
        return states

    def _window(
        self, i: int, row: int, at: int, tokens: int, query: torch.Tensor, before: int, first: int
    ) -> Window | None:
        """Queries that the state of a sequence at a boundary is made of; None: none of them is there any more."""
        stop = tokens if at == ONCE else at
        start = 0 if at == ONCE else max(0, at - self.method.query_window)
        low = max(start, self.kept[row])
        if low >= stop:
            return None
        parts = []
        if low < min(before, stop):
            assert self.ring is not None
            slots = torch.arange(low, min(before, stop), device=self.ring.device) % self.ring.shape[2]
            parts.append(self.ring[row : row + 1, :, slots])
        if stop > before:
            parts.append(query[i : i + 1, :, max(low - before, 0) : stop - before])
        return Window(torch.cat(parts, -2) if len(parts) > 1 else parts[0], first + low)

    def _observe(self, windows: list[Window]) -> State:
        """States of windows, [len(windows), num_kv_heads, ...], as many at a time as make :data:`MATRICES` matrices.

        A GPU's libraries choose how they multiply and factorize by the number of matrices, and with that the last bits. So on
        a GPU there are always equally many: the last window is repeated. How many states a call makes does not matter then.
        """
        most = max(1, MATRICES // self.spec.num_kv_heads)
        made: dict[str, list[torch.Tensor]] = {}
        for count, alike in groupby(windows, lambda window: window.count):
            some = list(alike)
            for at in range(0, len(some), most):
                part = some[at : at + most]
                real = len(part)
                if self.repeats:
                    part += part[-1:] * (most - real)
                queries = part[0].queries if len(part) == 1 else torch.cat([window.queries for window in part])
                starts = on_device(tuple(window.position for window in part), queries.device)
                positions = starts.unsqueeze(1) + torch.arange(count, device=queries.device)
                for name, tensor in self.method.observe(self._seen(queries, positions), self.spec).items():
                    made.setdefault(name, []).append(tensor[:real])
        return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in made.items()}

    def _seen(self, queries: torch.Tensor, positions: torch.Tensor) -> Observation:
        """Of a whole prompt, on a GPU, with kernels: its products are many, and nothing should wait for them."""
        if self.device.type != "cuda" or not self.method.paper or find_spec("triton") is None:
            return Observation(queries, positions)
        from kvfold.storage.prompts import PromptObservation

        return PromptObservation(queries, positions)

    @property
    def repeats(self) -> bool:
        """Whether states are made in equal numbers; papers' are made once, of a whole call."""
        return self.device.type == "cuda" and not self.method.paper

    def _spread(self, ids: list[int], uses: list[list[int]], made: State) -> State:
        """States by sequence and boundary, of those that were made and those that were there."""
        if all(use >= 0 for row in uses for use in row):  # each boundary has a window of its own
            return {name: t.unflatten(0, (len(ids), -1)) for name, t in made.items()}
        return {
            name: torch.stack(
                [
                    torch.stack([made[name][use] if use >= 0 else self.state[name][row] for use in numbers])
                    for row, numbers in zip(ids, uses, strict=True)
                ]
            )
            for name in (made or self.state)
        }

    def _keep(self, ids: list[int], uses: list[list[int]], made: State, in_place: bool) -> None:
        """Have the states of the last boundary from now on."""
        if made and not in_place:
            self.state = {name: tensor.clone() for name, tensor in self.state.items()}
        for name, tensor in made.items():
            if name not in self.state:
                self.state[name] = tensor.new_zeros(len(self.made), *tensor.shape[1:])
            for row, numbers in zip(ids, uses, strict=True):
                if numbers[-1] >= 0:
                    self.state[name][row] = tensor[numbers[-1]]

    def latest(self, tokens: int) -> int:
        """Boundary whose state must be made before the ring of a sequence of ``tokens`` tokens forgets its queries; 0: none.
        The first that is asked for may lie long before the first packing, which waits for ``recent`` tokens."""
        sure = tokens - SPARE
        if self.method.paper or sure < self.boundary(self._packs_at):
            return 0
        at = self.boundary(tokens)
        return at if at <= sure else 0

    def remember(self, ids: list[int], rows: Rows, query: torch.Tensor, before: int) -> None:
        """Take the queries of tokens ``before`` and after, float [len(ids), num_heads, n, head_dim], into the ring."""
        self.make_room(before + query.shape[-2])
        if self.ring is None:
            return
        slots, count = self.ring.shape[2], query.shape[-2]
        after, new = before + count, min(count, slots)
        at = torch.arange(after - new, after, device=query.device) % slots
        if isinstance(rows, slice):
            self.ring[rows, :, at] = query[:, :, count - new :]
        else:
            self.ring[rows[:, None], :, at] = query[:, :, count - new :].transpose(1, 2)
        for row in ids:
            self.kept[row] = max(self.kept[row], after - slots)

    def hold(self, ids: list[int], before: int, count: int, lens: list[int]) -> None:
        """Have room for the queries of a call of ``count`` tokens that may be taken back, beside all that the ring held before.

        ``lens``: tokens of each sequence whose queries were remembered.
        """
        if self.ring is None or (self.method.paper and all(self.made[row] for row in ids)):
            return
        old, slots = self.ring, self.slots
        tokens = (before if self.method.paper else self.most_slots) + count
        if tokens <= slots:
            return
        self.ring = old.new_empty(old.shape[0], old.shape[1], tokens, old.shape[3])
        for row, (kept, length) in enumerate(zip(self.kept, lens, strict=True)):
            held = torch.arange(max(kept, length - slots), length, device=old.device)
            self.ring[row, :, held % tokens] = old[row, :, held % slots]

    def truncate(self, row: int, tokens: int) -> None:
        """A sequence was cut to ``tokens`` tokens. Under ``paper=true`` a state serves on until nothing is left of it."""
        self.kept[row] = min(self.kept[row], tokens)
        if tokens < self.made[row]:
            self.made[row] = 0
            self._allocate()

    def select(self, rows: list[int], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Rearrange the batch: ``rows`` says which old sequence each new one is, ``pick`` does it to a tensor."""
        self.made, self.kept = [self.made[row] for row in rows], [self.kept[row] for row in rows]
        self.state = {name: pick(t) for name, t in self.state.items()}
        self.ring = pick(self.ring) if self.ring is not None else None

    def move(self, device: torch.device) -> None:
        self.device = device
        self.state = {name: t.to(device) for name, t in self.state.items()}
        self.ring = self.ring.to(device) if self.ring is not None else None

    def snapshot(self) -> dict[str, Any]:
        """What there is; tensors are not copied. See :meth:`keep_old`."""
        return {"made": list(self.made), "kept": list(self.kept), "ring": self.ring, "state": dict(self.state)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Be again what :meth:`snapshot` saw."""
        for name, value in snapshot.items():
            setattr(self, name, value)

    def keep_old(self, snapshot: dict[str, Any], lens: list[int], tokens: int, recording: bool) -> None:
        """Before the queries of ``tokens`` more tokens write over what ``snapshot`` refers to, go on with a copy. One token's
        writes over the oldest, which no state that is still to be made needs: then note in the snapshot which remain. A ring
        that is to grow is copied by that: nothing is written over."""
        if self.ring is None or self.slots < self.most_slots or max(lens) + tokens <= self.slots:
            return
        if self.method.paper or recording or tokens > 1:
            self.ring = self.ring.clone()
        else:
            snapshot["kept"] = [max(k, n + tokens - self.slots) for k, n in zip(snapshot["kept"], lens, strict=True)]
