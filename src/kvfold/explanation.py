"""What folding a model with a method would do, layer by layer, without running it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from kvfold import kernels
from kvfold.attention import plan_layers
from kvfold.cache import choose_encoder
from kvfold.formats import Format, PagedFormat
from kvfold.formats.paged import plain
from kvfold.methods import DEFAULT_METHOD, Method, get


@dataclass(frozen=True)
class LayerReport:
    """One layer's row.

    ``kind`` is the attention's, ``effective_bits`` the packed part's (16 or 32 where the layer is not folded),
    ``windows`` what stays in full precision, ``kernel`` what attends and ``reason`` why it and not another, or why not
    folded; ``encoder`` what encodes ("triton", "torch") and why.
    """

    layer_idx: int
    kind: str
    folded: bool
    key_format: str
    value_format: str
    effective_bits: float
    windows: str
    kernel: str
    reason: str
    encoder: str = "-"


@dataclass(frozen=True)
class Explanation:
    """Rows for all layers, bytes per token in the packed part and in full precision, and notes on what does not fit."""

    method: str
    layers: list[LayerReport]
    bytes_per_token: float
    full_bytes_per_token: float
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return dataclasses.asdict(self)


def explain(model: PreTrainedModel, method: str | Method = DEFAULT_METHOD) -> Explanation:
    """Say what ``fold(model, method)`` would do.

    Raises
    ------
    MethodError, UnsupportedModelError
        As :func:`kvfold.fold`.
    """
    method = get(method)
    dtype_bits = 8 * model.dtype.itemsize
    rows, notes = [], []
    packed = full = 0.0
    tables: dict[int, int] = {}
    limits: dict[str, str] = {}
    formats: list[Format] = []
    for index, item in enumerate(plan_layers(model, method)):
        if item.spec is None:
            rows.append(
                LayerReport(
                    index, item.reason.split(" is ")[0], False, "-", "-", dtype_bits, "all", "sdpa", item.reason
                )
            )
            continue
        spec = item.spec
        keys, values = method.key_format(spec), method.value_format(spec)
        formats += [keys, values]
        choice = kernels.choose(plain(keys), values, model.device, method.pre_rope, dtype=model.dtype)
        windows = f"sink {method.sink}, recent {method.recent} to {method.recent + method.block - 1}"
        rows.append(
            LayerReport(
                index,
                "full attention",
                True,
                keys.describe(),
                values.describe(),
                (keys.bits + values.bits) / 2,
                windows,
                choice.kernel.name,
                choice.reason,
                str(choose_encoder(method, spec, model.device)),
            )
        )
        if choice.kernel.limits:
            limits[choice.kernel.name] = choice.kernel.limits
        tables.update((t.data_ptr(), t.nbytes) for t in method.tables(spec, model.device).values())
        packed += spec.num_kv_heads * spec.head_dim * (keys.bits + values.bits) / 8
        full += 2 * spec.num_kv_heads * spec.head_dim * model.dtype.itemsize
    notes += [f"kernel {name}: {text}" for name, text in limits.items()]
    notes += [f"encoded by {text}" for text in sorted({row.encoder for row in rows if row.folded})]
    kept = [r for r in rows if not r.folded]
    if kept:
        notes.append(f"{len(kept)} of {len(rows)} layers stay in full precision: {sorted({r.reason for r in kept})}")
    pages = {form.page for form in formats if isinstance(form, PagedFormat)}
    if pages - {0}:
        notes.append(
            f"statistics (means, norms, bases) belong to pages of 128 tokens, are taken of a page's first {method.seen}, "
            "and are stored in the page"
        )
    if 0 in pages:
        notes.append("paper=true: statistics belong to the sequence, from all tokens of the call that first packs")
    if method.query_window and not method.paper:
        notes.append(
            "the encoder follows the queries: its state is made anew at 128, 256, 512, 1,024, 2,048, ... tokens, from the "
            f"newest {method.query_window}; attention never reads it"
        )
    elif method.query_window:
        notes.append("paper=true: the encoder's state comes from the queries before the first packing, once")
    if method.pre_rope:
        notes.append("keys are stored before RoPE and rotated as they are read")
    if tables:
        notes.append(f"tables shared by all sequences: {sum(tables.values()):,} bytes")
    return Explanation(str(method), rows, packed, full, notes)
