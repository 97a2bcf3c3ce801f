"""Which blocks of a request's window exist: arithmetic that the manager, the spec and the plan share."""

from dataclasses import dataclass

BLOCK = 32
"""Tokens that are packed together."""


def overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


@dataclass(frozen=True)
class Window:
    """Tokens that lie raw in window blocks: the first ``sink``, and the newest from ``P(n)`` on.

    Parameters
    ----------
    recent, sink : int
    drafts : int
        Tokens that may be taken back after a step.
    block : int
        Tokens of a window block; divides 32.
    """

    recent: int
    sink: int
    drafts: int
    block: int

    @property
    def sink_blocks(self) -> int:
        return self.sink // self.block

    def packed(self, tokens: int) -> int:
        """P(n): tokens of a request of ``n`` that are read packed, the sink's included."""
        return max(0, (tokens - self.recent) // BLOCK * BLOCK)

    def tail(self, tokens: int) -> int:
        """First block that a request needs for its newest tokens, when a step has brought it to ``tokens``."""
        return self.packed(tokens - self.drafts) // self.block

    def blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` span, whether they exist or not."""
        return -(-tokens // self.block)

    def exists(self, index: int, tail: int) -> bool:
        return index < self.sink_blocks or index >= tail

    def new(self, have: int, tokens: int) -> int:
        """Blocks to allocate for a request that has entries for ``have`` and grows to ``tokens``."""
        span, tail = (have, self.blocks(tokens)), self.tail(tokens)
        sink = overlap(span, (0, min(self.sink_blocks, tail)))
        return sink + overlap(span, (tail, span[1]))

    def most(self, max_tokens: int) -> int:
        """Most blocks that a request of up to ``max_tokens`` holds: its sink, what its last chunk reads, and what it leaves."""
        tail = self.blocks(self.recent + self.drafts + BLOCK)
        return min(self.sink_blocks + (2 if not self.drafts else 3) * tail, self.blocks(max_tokens))
