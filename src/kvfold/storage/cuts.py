"""Blocks that a crop cut: what was left of them, as it was decoded, for the next crop to the same place.

What is left of a cut block goes into the ring, and is packed again with the tokens that follow. To decode that once more would
add an error at every cut. A prefix that many requests follow is cut at its end by each of them.
"""

from collections.abc import Callable, Iterator

import torch

from kvfold.storage.ring import Pair

MOST = 8
"""Blocks of a sequence that are remembered, those that were cut last."""


class Cuts:
    """Tokens of cut blocks, by sequence: of each block, by its first packed token, keys and values as they were decoded,
    [num_kv_heads, n, head_dim] in the windows' dtype. Nothing writes to these tensors.

    They hold for as long as the tokens do, which only a crop changes.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.rows: list[dict[int, Pair]] = []

    def start(self, batch: int) -> None:
        """Begin with nothing cut."""
        self.rows = [{} for _ in range(batch)]

    def shorten(self, row: int, body: int) -> None:
        """A sequence has ``body`` tokens after its sink from now on."""
        held = self.rows[row]
        self.rows[row] = {
            start: (keys[:, : body - start], values[:, : body - start])
            for start, (keys, values) in held.items()
            if start < body
        }

    def tail(
        self, row: int, start: int, stop: int, decode: Callable[[int, int, int], Pair], dtype: torch.dtype
    ) -> Pair:
        """Packed tokens ``start`` to ``stop`` of a sequence, from the first of the block that is cut: those of an earlier cut,
        and the rest as ``decode`` (of sequence, start, stop) gives it; remembered.

        Returns
        -------
        keys, values : Tensor, ``dtype`` [num_kv_heads, stop - start, head_dim]
        """
        held = self.rows[row].pop(start, None)
        have = 0 if held is None else held[0].shape[1]
        if have < stop - start:
            fresh = [
                t.to(dtype, copy=True) for t in decode(row, start + have, stop)
            ]  # not views of all that was decoded
            keys, values = fresh if held is None else (torch.cat(pair, 1) for pair in zip(held, fresh, strict=True))
            held = keys, values
        assert held is not None
        self.rows[row][start] = held
        while len(self.rows[row]) > MOST:
            del self.rows[row][next(iter(self.rows[row]))]
        return held

    def select(self, rows: list[int]) -> None:
        """Rearrange the batch: ``rows`` says which old sequence each new one is."""
        self.rows = [dict(self.rows[row]) for row in rows]

    def move(self, device: torch.device) -> None:
        self.rows = [{at: (k.to(device), v.to(device)) for at, (k, v) in row.items()} for row in self.rows]

    def tensors(self) -> Iterator[torch.Tensor]:
        """What is held; sequences that were one share it."""
        return iter({id(t): t for row in self.rows for pair in row.values() for t in pair}.values())
