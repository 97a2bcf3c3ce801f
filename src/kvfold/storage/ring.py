"""Windows in full precision: the first tokens of every sequence, and a ring of the newest."""

from collections.abc import Callable, Iterator

import torch

from kvfold.storage.sequences import Rows, Sequences

Pair = tuple[torch.Tensor, torch.Tensor]


class Window:
    """Keys and values of some tokens of every sequence, [batch, num_kv_heads, slots, head_dim] each; iterating gives both.

    Parameters
    ----------
    sequences : Sequences
    heads, head_dim : int
        KV heads, and channels of one.
    """

    def __init__(self, sequences: Sequences, heads: int, head_dim: int) -> None:
        self.sequences, self.heads, self.head_dim = sequences, heads, head_dim
        self.clear()

    def clear(self) -> None:
        self.start(torch.float32, torch.device("cpu"))

    def start(self, dtype: torch.dtype, device: torch.device) -> None:
        """Begin without slots."""
        self.dtype, self.device = dtype, device
        self.widen(0)

    def widen(self, slots: int) -> None:
        """Have so many slots, which hold nothing."""
        self.pair = self._empty(slots)

    def _empty(self, slots: int) -> Pair:
        shape = (len(self.sequences), self.heads, slots, self.head_dim)
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return keys, values

    @property
    def keys(self) -> torch.Tensor:
        return self.pair[0]

    @property
    def values(self) -> torch.Tensor:
        return self.pair[1]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.pair)

    @property
    def slots(self) -> int:
        return self.pair[0].shape[-2]

    def copy(self) -> None:
        """Go on with copies: what refers to the tensors of now keeps them as they are."""
        self.pair = (self.pair[0].clone(), self.pair[1].clone())

    def select(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Rearrange the batch."""
        self.pair = (pick(self.pair[0]), pick(self.pair[1]))

    def move(self, device: torch.device) -> None:
        self.device = device
        self.pair = (self.pair[0].to(device), self.pair[1].to(device))


class Sink(Window):
    """The first tokens of every sequence: position p lies in slot p."""

    def fit(self, needed: int) -> None:
        """Have ``needed`` slots; the window grows by blocks up to its length."""
        have = self.slots
        if needed > have:
            block = self.sequences.block
            wider = self._empty(min(self.sequences.sink, -(-needed // block) * block))
            for new, old in zip(wider, self.pair, strict=True):
                new[:, :, :have] = old
            self.pair = wider


class Ring(Window):
    """The newest tokens of every sequence: token t, counted from the end of the sink, lies in slot ``t % slots``.

    Attributes
    ----------
    in_place : int
        Most tokens of a call that the kernel takes from the windows.
    longest : int
        Longest call that was written before it attended, in tokens.
    """

    def clear(self) -> None:
        super().clear()
        self.in_place, self.longest = 0, 1

    @staticmethod
    def _runs(start: int, stop: int, capacity: int) -> Iterator[tuple[int, int, int]]:
        """(slot, slot after, offset of its first token from ``start``) of the at most two runs of slots."""
        at = start
        while at < stop:
            slot = at % capacity
            count = min(capacity - slot, stop - at)
            yield slot, slot + count, at - start
            at += count

    def read(self, rows: Rows, start: int, stop: int) -> Pair:
        """Tokens ``start`` to ``stop`` of some sequences, copied."""
        runs = list(self._runs(start, stop, self.slots)) if stop > start else [(0, 0, 0)]
        keys, values = (torch.cat([side[rows, :, a:b] for a, b, _ in runs], -2) for side in self.pair)
        return keys, values

    def write(self, rows: Rows, start: int, stop: int, *new: torch.Tensor) -> None:
        """Store tokens ``start`` to ``stop`` of some sequences: keys and values [len(rows), num_kv_heads, n, head_dim]."""
        for side, tokens in zip(self.pair, new, strict=True):
            for a, b, offset in self._runs(start, stop, side.shape[-2]):
                side[rows, :, a:b] = tokens[:, :, offset : offset + b - a]

    @property
    def base(self) -> int:
        """Slots that hold the window, what waits for a whole block, and the longest call so far that was written first, or
        one token: when a single token closes a block, nothing of the block is overwritten, and it can be taken back."""
        of = self.sequences
        return of.recent + of.block - 1 + max(1, min(self.longest, self.in_place))

    def fit(self, needed: int) -> None:
        """Have ``needed`` slots. A sequence that packs nothing yet has no more of them than it needs, in whole blocks."""
        base = self.base
        least = base if any(self.sequences.packed) else 0
        if max(needed, least) > self.slots:
            whole = -(-needed // self.sequences.block) * self.sequences.block
            self.resize(max(least, min(whole, base) if needed <= base else whole))

    def shrink(self) -> None:
        """Give back what waiting for a sequence's state needed beyond the window."""
        if self.slots > self.base >= self.sequences.held and any(self.sequences.packed):
            self.resize(self.base)

    def resize(self, slots: int) -> None:
        """Have so many slots, with the same tokens."""
        old = self.pair
        new = self._empty(slots)
        for row, (packed, length) in enumerate(zip(self.sequences.packed, self.sequences.lens, strict=True)):
            rows, stop = slice(row, row + 1), length - self.sequences.sink
            if stop > packed:
                self.pair = old
                tokens = self.read(rows, packed, stop)
                self.pair = new
                self.write(rows, packed, stop, *tokens)
        self.pair = new
