"""Blocks of the recent windows: allocated for what is left of a chunk, freed when it is packed, sinks shared with a prefix."""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager


class RecentManager(SlidingWindowManager):
    """A request's entries are its window blocks by position; null where tokens are packed, were never raw, or came with a hit.

    vLLM's worker keeps the entries that it was sent: below ``P(n)`` they are stale, and are not read.
    """

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.window = kv_cache_spec.window
        self._freed: dict[str, int] = {}

    # ---- growing -----------------------------------------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        **later: Any,
    ) -> int:
        """Blocks that :meth:`allocate_new_blocks` will take, and those of a hit that leave the free list.

        Frees what the step does not read. Steps run in the order in which they are scheduled, so what an earlier one reads may
        be freed before it has run; only tokens that are taken back need it again.
        """
        if not self.window.drafts:
            self._release(request_id, total_computed_tokens)
        held = self.req_to_blocks.get(request_id)
        have = len(held) if held else total_computed_tokens // self.block_size
        count = self.window.new(have, num_tokens)
        if apply_admission_cap:
            count = min(max(count, self.window.most(num_tokens)), self.window.blocks(num_tokens))
        return count + self._get_num_evictable_blocks(new_computed_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        blocks = self.req_to_blocks[request_id]
        have, need, tail = len(blocks), self.window.blocks(num_tokens), self.window.tail(num_tokens)
        fresh: Iterator[KVCacheBlock] = iter(self.block_pool.get_new_blocks(self.window.new(have, num_tokens)))
        added = [next(fresh) if self.window.exists(i, tail) else self._null_block for i in range(have, need)]
        blocks.extend(added)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in added if not block.is_null)
        return added

    # ---- shrinking ---------------------------------------------------------------------------------------------------

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        self._release(request_id, processed_computed_tokens)

    def _release(self, request_id: str, tokens: int) -> None:
        """Free what is packed when a request has ``tokens``."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        start = self._freed.get(request_id, self.window.sink_blocks)
        stop = min(self.window.packed(tokens) // self.block_size, len(blocks))
        if start >= stop:
            return
        self.block_pool.free_blocks([block for block in blocks[start:stop] if not block.is_null])
        blocks[start:stop] = [self._null_block] * (stop - start)
        self._freed[request_id] = stop

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._freed.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    # ---- prefixes ----------------------------------------------------------------------------------------------------

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Take the sink of a hit, where it is still there, and nothing for its other tokens: they are read packed."""
        assert not num_external_computed_tokens, "KV connectors are refused at start-up"
        blocks = self.req_to_blocks[request_id]
        assert not blocks
        count = num_local_computed_tokens // self.block_size
        sink = list(new_computed_blocks[: self.window.sink_blocks])
        self.block_pool.touch([block for block in sink if not block.is_null])
        blocks.extend(sink + [self._null_block] * (count - len(sink)))
        self.num_cached_block[request_id] = count

    def cache_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Nothing, where no block is shared: vLLM 0.29 asks all the same, and its hashes then are of whole pages."""
        if self.kv_cache_spec.prefix_cacheable:
            super().cache_blocks(*args, **kwargs)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **later: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """All of ``max_length``: a window shortens no hit. Blocks are null but for sinks that are still there."""
        length = max_length // alignment_tokens * alignment_tokens
        block = kv_cache_spec.block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block)
        found: tuple[list[KVCacheBlock], ...] = tuple(
            [block_pool.null_block] * (length // block) for _ in kv_cache_group_ids
        )
        for i in range(min(kv_cache_spec.window.sink_blocks, length // block)):
            if cached := block_pool.get_cached_block(hashes[i], kv_cache_group_ids):
                for blocks, hit in zip(found, cached, strict=True):
                    blocks[i] = hit
        return found, length

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: Any,
        *args: Any,
        **later: Any,
    ) -> list[bool]:
        """Sinks alone are worth a place in the prefix cache."""
        return [i < kv_cache_spec.window.sink_blocks for i in range(start_block, end_block)]
