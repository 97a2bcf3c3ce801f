"""What the start-up log says."""

from typing import Any

from vllm.logger import init_logger

from kvfold.engines.vllm import capacity
from kvfold.engines.vllm.settings import PAGE, Stored
from kvfold.engines.vllm.windows import Window

logger = init_logger("vllm.kvfold")
_said: set[tuple[str, int]] = set()


def started(stored: Stored, window: Window, config: Any, kernel: str) -> None:
    """Say what layers store, once for those that store alike."""
    what = str(stored.method), stored.page_bytes
    if what in _said:
        return
    _said.add(what)
    for line in lines(stored, window, config, kernel):
        logger.info("kvfold: %s", line)


def lines(stored: Stored, window: Window, config: Any, kernel: str) -> list[str]:
    """What a user wants to know of layers that store alike."""
    spec, (keys, values) = stored.spec, stored.formats
    raw = 2 * spec.head_dim * spec.dtype.itemsize
    layers, context = spec.num_layers, config.model_config.max_model_len
    room = 1 << 40  # the ratio is what counts
    ours = capacity.folded(room, context, [stored] * layers, spec.num_kv_heads, window.drafts)
    theirs = capacity.dense(room, context, layers, spec.num_kv_heads, spec.head_dim, spec.dtype.itemsize)
    return [
        f"method {stored.method}, {(keys.bits + values.bits) / 2:.2f} effective bits",
        f"keys: {keys.describe()}",
        f"values: {values.describe()}",
        f"kernel and encoder: {kernel}",
        f"{stored.page_bytes / PAGE:.1f} bytes per token and KV head instead of {raw}, in pages of {PAGE} tokens",
        f"raw: the first {window.sink} and the newest {window.recent} tokens of a request, at most {ours.window_bytes:,} bytes "
        f"per GPU",
        f"capacity at {context:,} tokens: {ours.tokens / theirs.tokens:.2f} times that of {str(spec.dtype)[6:]}",
    ]
