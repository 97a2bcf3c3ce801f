"""How many tokens fit: vLLM's own arithmetic of blocks and groups, without vLLM.

One pool of blocks serves all groups. A block is as large as the largest group needs it: packed pages of 128 tokens of all
layers, or 16 raw tokens of as many windows as fit beside them. A request holds its pages, and its window's blocks of every
group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.engines.vllm.settings import PAGE, WINDOW_BLOCK, Stored
from kvfold.engines.vllm.windows import Window


@dataclass(frozen=True)
class Capacity:
    """What fits into the memory that one GPU has for caches.

    Attributes
    ----------
    block_bytes : int
        Of a block of the pool.
    blocks : int
        Of the pool.
    request_blocks : int
        That a request of ``context`` tokens holds at most.
    page_blocks : int
        Of these, its pages.
    context : int
    """

    block_bytes: int
    blocks: int
    request_blocks: int
    page_blocks: int
    context: int

    @property
    def sequences(self) -> float:
        """Requests of ``context`` tokens that fit."""
        return self.blocks / self.request_blocks

    @property
    def tokens(self) -> int:
        """The number that vLLM logs as its cache's size."""
        return int(self.sequences * self.context)

    @property
    def window_bytes(self) -> int:
        """Of a request's window, on one GPU."""
        return (self.request_blocks - self.page_blocks) * self.block_bytes


def dense(
    kv_bytes: int, context: int, layers: int, heads: int, head_dim: int, itemsize: int, block: int = 16
) -> Capacity:
    """Of a cache that stores vectors, as vLLM's own do.

    Parameters
    ----------
    kv_bytes : int
        Memory for caches on one GPU.
    heads : int
        KV heads on one GPU.
    block : int
        Tokens of a block.
    """
    block_bytes = layers * heads * block * 2 * head_dim * itemsize
    held = -(-context // block)
    return Capacity(block_bytes, kv_bytes // block_bytes, held, held, context)


def folded(kv_bytes: int, context: int, stored: Sequence[Stored], heads: int, drafts: int = 0) -> Capacity:
    """Of folded caches.

    Parameters
    ----------
    stored : sequence of Stored
        Of every layer.
    heads : int
        KV heads on one GPU.
    """
    method = stored[0].method
    pages = [heads * layer.page_bytes for layer in stored]
    window = heads * WINDOW_BLOCK * max(layer.window_bytes for layer in stored)
    groups, widest = 1, len(stored)
    if {window} != set(pages):  # alike, vLLM makes one group of each
        room = max(sum(pages), window) // window
        groups = -(-len(stored) // max(room, 1))
        widest = -(-len(stored) // groups)
    block_bytes = max(sum(pages), widest * window)
    held = Window(method.recent, method.sink, drafts, WINDOW_BLOCK).most(context)
    page_blocks = -(-context // PAGE)
    return Capacity(block_bytes, kv_bytes // block_bytes, page_blocks + groups * held, page_blocks, context)
