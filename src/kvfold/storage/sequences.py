"""Who has how many tokens: the sequences of a batch, each counted without padding.

After n tokens of a sequence the first ``sink`` lie in the sink window, then whole blocks in packed storage, and the newest in
the ring, at least ``recent`` of them once anything is packed. How many are packed follows from n alone, so the content does
not depend on how calls were cut.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvfold.errors import CacheStateError
from kvfold.kernels.lengths import Lengths
from kvfold.storage.lengths import lengths_of, on_device

Rows = slice | torch.Tensor
"""Which sequences of a batch: all of them, or an int64 tensor of indices."""

ALL = slice(None)


class Sequences:
    """Lengths of a batch's sequences, on the host.

    Parameters
    ----------
    sink, recent, block : int
        Tokens of the sink window, least tokens of the recent one, and tokens of a block.

    Attributes
    ----------
    lens : list of int
        Tokens.
    packed : list of int
        Tokens in packed storage.
    prompt : list of int
        Tokens of the first call.
    first_position : list of int
        Position of a sequence's first token.
    """

    def __init__(self, sink: int, recent: int, block: int) -> None:
        self.sink, self.recent, self.block = sink, recent, block
        self.start(0, torch.device("cpu"))

    def start(self, batch: int, device: torch.device) -> None:
        """Begin with empty sequences."""
        self.device = device
        self.lens, self.packed, self.prompt = [0] * batch, [0] * batch, [0] * batch
        self.first_position = [0] * batch

    def __len__(self) -> int:
        return len(self.lens)

    # ---- what follows from the lengths -------------------------------------------------------------------------------

    @property
    def lengths(self) -> Lengths:
        """Lengths as the device needs them."""
        return lengths_of(tuple(self.lens), tuple(self.packed), self.sink, self.device)

    @property
    def held(self) -> int:
        """Most tokens that a sequence has in the ring."""
        return max(n - self.sink - p for n, p in zip(self.lens, self.packed, strict=True))

    def packed_length(self, tokens: int) -> int:
        """How many tokens of a sequence of ``tokens`` are packed."""
        return max(0, (tokens - self.sink - self.recent) // self.block * self.block)

    def boundary(self, row: int) -> int:
        """Packed tokens whose blocks belong wholly to the sequence's first call."""
        return max(self.prompt[row] - self.sink, 0) // self.block * self.block

    # ---- sequences that can be handled together ----------------------------------------------------------------------

    def groups(self, valid: torch.Tensor | None, tokens: int) -> Iterator[tuple[list[int], Rows, Rows]]:
        """Sequences of the same length so far and the same real columns among the new ones: their numbers, the same as an
        index, and these columns."""
        everyone = list(range(len(self.lens)))
        if valid is None and len(set(self.lens)) == 1:
            yield everyone, ALL, ALL
            return
        patterns = [None] * len(everyone) if valid is None else [tuple(row) for row in valid.tolist()]
        groups: dict[tuple[int, object], list[int]] = {}
        for row in everyone:
            groups.setdefault((self.lens[row], patterns[row]), []).append(row)
        for (_, pattern), ids in groups.items():
            columns = range(tokens) if pattern is None else [i for i, real in enumerate(pattern) if real]  # type: ignore[arg-type, var-annotated]
            if columns or pattern is None:
                yield ids, self.index(ids), self.index(columns) if tokens else ALL

    def alike(self, ids: list[int], rows: Rows) -> list[tuple[list[int], Rows]]:
        """Sequences of one length split by what is packed (they differ after a crop) and by where their prompt ends."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row in ids:
            groups.setdefault((self.packed[row], self.prompt[row]), []).append(row)
        if len(groups) == 1:
            return [(ids, rows)]
        return [(group, self.index(group)) for group in groups.values()]

    def index(self, numbers: Sequence[int]) -> Rows:
        """A slice where the numbers follow one another, so that what is picked is a view."""
        if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
            return slice(numbers[0], numbers[0] + len(numbers))
        return torch.tensor(numbers, device=self.device)

    # ---- positions ---------------------------------------------------------------------------------------------------

    def positions(self, ids: list[int], start: int, stop: int) -> torch.Tensor:
        """Positions of packed tokens, int64 [len(ids), 1, stop - start]."""
        first = on_device(tuple(self.first_position[row] for row in ids), self.device)
        steps = torch.arange(start, stop, device=self.device) + self.sink
        return (first[:, None] + steps)[:, None]

    @property
    def first_packed(self) -> torch.Tensor:
        """Position of each sequence's first packed token, int64 [batch]."""
        return on_device(tuple(p + self.sink for p in self.first_position), self.device)

    def note_positions(self, position_ids: torch.Tensor, valid: torch.Tensor | None, name: str) -> None:
        """Learn each sequence's first position and check that its tokens follow one another.

        Parameters
        ----------
        position_ids : Tensor, int64 [batch or 1, tokens]
        name : str
            Of the method that needs it.
        """
        positions = position_ids.expand(len(self.lens), -1).tolist()
        real = [[True] * len(line) for line in positions] if valid is None else valid.tolist()
        for row, (line, mask) in enumerate(zip(positions, real, strict=True)):
            line = [p for p, keep in zip(line, mask, strict=True) if keep]
            if not line:
                continue
            if not self.lens[row]:
                self.first_position[row] = line[0]
            expected = self.first_position[row] + self.lens[row]
            wanted = range(expected, expected + len(line))
            if line != list(wanted):
                found, due = next(pair for pair in zip(line, wanted, strict=True) if pair[0] != pair[1])
                raise CacheStateError(
                    f"position_ids: {name} stores keys before RoPE and needs consecutive positions; "
                    f"sequence {row} continues at {found}, expected {due}"
                )

    # ---- as a batch --------------------------------------------------------------------------------------------------

    def select(self, rows: list[int]) -> None:
        """Rearrange the batch: ``rows`` says which old sequence each new one is."""
        for name in COUNTS:
            setattr(self, name, [getattr(self, name)[row] for row in rows])

    def move(self, device: torch.device) -> None:
        self.device = device

    def snapshot(self) -> tuple[Any, ...]:
        """What there is."""
        return self.lens.copy(), self.packed.copy(), self.prompt.copy(), self.first_position.copy()

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Be again what :meth:`snapshot` saw."""
        self.lens, self.packed, self.prompt, self.first_position = snapshot


COUNTS = ("lens", "packed", "prompt", "first_position")
"""What is known of every sequence."""
