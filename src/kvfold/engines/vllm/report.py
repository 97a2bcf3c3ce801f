"""What the start-up log says."""

from typing import Any

from vllm.logger import init_logger

from kvfold.artefact import load_cached
from kvfold.engines.vllm import capacity
from kvfold.engines.vllm.settings import PAGE, Stored, method_of, subspace_of
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
    if warning := adapted(stored, config):
        logger.warning("kvfold: %s", warning)


def artefact_of(stored: Stored, config: Any) -> str:
    """Where what was learned beforehand lies; empty: nothing was."""
    if stored.update is not None:
        return subspace_of(config.additional_config)
    return str(getattr(stored.method, "artefact", ""))


def adapted(stored: Stored, config: Any) -> str | None:
    """What to know of adapters beside something that was learned for the model without them."""
    if config.lora_config is None or not (place := artefact_of(stored, config)):
        return None
    return f"LoRA: {place} was calibrated without adapters, which change keys and values; check the answers"


def kept_layers(config: Any, count: int) -> list[int]:
    """Layers in full precision."""
    method = method_of(config.additional_config)
    return [i for i in range(count) if (own := method.at(i)) is None or own.name == "none"]


def lines(stored: Stored, window: Window, config: Any, kernel: str) -> list[str]:
    """What a user wants to know of layers that store alike."""
    spec, (keys, values) = stored.spec, stored.formats
    raw = 2 * spec.head_dim * spec.dtype.itemsize
    layers, context = spec.num_layers, config.model_config.max_model_len
    room = 1 << 40  # the ratio is what counts
    ours = capacity.folded(room, context, [stored] * layers, spec.num_kv_heads, window.drafts)
    theirs = capacity.dense(room, context, layers, spec.num_kv_heads, spec.head_dim, spec.dtype.itemsize)
    more = []
    if place := artefact_of(stored, config):
        more.append(f"artefact {place}, SHA-256 {load_cached(place).metadata()['sha256'][:12]}")
    if stored.follows:
        more.append("keys: steered by the queries of a page's own tokens, packed once the page is whole")
    if kept := kept_layers(config, layers):
        more.append(f"layers in full precision: {', '.join(map(str, kept))}")
    return [
        f"method {stored.method}, {(keys.bits + values.bits) / 2:.2f} effective bits",
        *more,
        f"keys: {keys.describe()}",
        f"values: {values.describe()}",
        f"kernel and encoder: {kernel}",
        f"{stored.page_bytes / PAGE:.1f} bytes per token and KV head instead of {raw}, in pages of {PAGE} tokens",
        f"raw: the first {window.sink} and the newest {window.recent} tokens of a request, at most {ours.window_bytes:,} bytes "
        f"per GPU",
        f"capacity at {context:,} tokens: {ours.tokens / theirs.tokens:.2f} times that of {str(spec.dtype)[6:]}",
    ]
