"""The recent windows' cache group, as vLLM plans it. Importing this module makes it known to vLLM."""

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from kvfold.engines.vllm.manager import RecentManager
from kvfold.engines.vllm.windows import Window

MOST_TOKENS = 2**31 - 1
"""More than a request has, and a whole number of 32 bits, which is what vLLM's worker keeps it in."""

# Without this the first spec that is registered would leave vLLM's own without managers.
KVCacheSpecRegistry._ensure_registered()


@register_kv_cache_spec(manager_class=RecentManager)
@dataclass(frozen=True, kw_only=True)
class RecentSpec(SlidingWindowSpec):
    """Raw keys and values of a request's first ``sink`` and newest tokens.

    vLLM's own window spec reserves all tokens that may be in flight, several times a budget of thousands, because it attends to
    a chunk from the cache. Here a chunk attends to itself as it is given, so the window holds what is left of it afterwards.

    Attributes
    ----------
    recent, sink : int
        Of the method.
    drafts : int
        Tokens of a step that may be taken back.
    """

    recent: int
    sink: int
    drafts: int = 0

    @property
    def window(self) -> Window:
        return Window(self.recent, self.sink, self.drafts, self.block_size)

    @property
    def num_retained_tokens(self) -> int:
        """Tokens before a step that it may read: all, for sinks are the oldest.

        From 0.33 on, vLLM's worker puts null blocks in place of older ones, and what is null here is read packed.
        """
        return MOST_TOKENS

    @property
    def prefix_cacheable(self) -> bool:
        """Sinks are shared with a prefix; recent tokens are not, what replaces them lies in the pages."""
        return self.sink > 0

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Most blocks that a request holds at a time."""
        return self.window.most(max_model_len)
