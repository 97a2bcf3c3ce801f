"""What the start-up log says."""

from typing import Any

from vllm.logger import init_logger

from kvfold.engines.vllm.settings import PAGE, Stored

logger = init_logger("vllm.kvfold")
_said: set[object] = set()


def started(name: str, stored: Stored, config: Any) -> None:
    """Say once what layers store."""
    what = str(stored.method), stored.page_bytes
    if what in _said:
        return
    _said.add(what)
    spec = stored.spec
    keys, values = stored.formats
    raw = 2 * spec.head_dim * spec.dtype.itemsize
    logger.info(
        "kvfold: %s: keys %s, values %s; %.1f bytes per token and KV head instead of %d",
        stored.method,
        keys.describe(),
        values.describe(),
        stored.page_bytes / PAGE,
        raw,
    )
