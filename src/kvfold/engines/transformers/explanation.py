"""What folding a model with a method would do, layer by layer, without running it."""

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from transformers import PreTrainedModel

from kvfold.arithmetic import outside_autocast
from kvfold.engines.transformers.placing import device_of
from kvfold.engines.transformers.planning import CAPS_ALONE, KEPT, plan_layers, transformer
from kvfold.engines.transformers.profiles import origin, resolved
from kvfold.formats import Format, PagedFormat
from kvfold.kernels.cpu.importing import try_elsewhere
from kvfold.methods import DEFAULT_METHOD, Method, get
from kvfold.plan import choose_encoder, choose_kernel
from kvfold.sheet import Column, Sheet


@dataclass(frozen=True)
class LayerReport:
    """One layer's row.

    ``kind`` is the attention's, ``effective_bits`` the packed part's (16 or 32 where the layer is not folded),
    ``windows`` what stays in full precision, ``kernel`` what attends and ``reason`` why it and not another, or why not
    folded; ``encoder`` what encodes ("triton", "torch") and why; ``method`` the layer's, "-" where it is not folded.
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
    method: str = "-"


@dataclass(frozen=True)
class Explanation:
    """Rows for all layers, bytes per token in the packed part and in full precision (in ``dtype``, the model's), and notes on
    what does not fit.

    ``print`` shows it as a table, as wide as the terminal; so do notebooks.
    """

    method: str
    layers: list[LayerReport]
    bytes_per_token: float
    full_bytes_per_token: float
    notes: list[str]
    dtype: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return dataclasses.asdict(self)

    def sheet(self, title: str = "") -> Sheet:
        """A row for every run of layers that are treated alike."""
        several = len({row.method for row in self.layers if row.folded}) > 1
        columns = [
            Column("layers", key=True),
            *([Column("method", wraps=True)] if several else []),
            Column("kind", wraps=True, rank=4, below=True),
            Column("folded", rank=2, below=True),
            Column("keys", wraps=True),
            Column("values", wraps=True),
            Column("bits", right=True),
            Column("windows", wraps=True, rank=3, below=True),
            Column("kernel", rank=1, below=True),
            Column("why", wraps=True, rank=5, below=True),
        ]
        sheet = Sheet(columns, title or self.method, fields=True)
        for first, last, row in _runs(self.layers):
            layers = str(first) if first == last else f"{first}-{last}"
            folded, bits = "yes" if row.folded else "no", f"{row.effective_bits:.2f}"
            stored = (row.key_format, row.value_format, bits, row.windows, row.kernel, row.reason)
            sheet.add(layers, *([row.method] if several else []), row.kind, folded, *stored)
        return sheet

    def summary(self) -> list[str]:
        """Sentences that follow the table: bytes per token, layers that are not folded, notes."""
        folded, full = self.bytes_per_token, self.full_bytes_per_token
        left = [str(layer.layer_idx) for layer in self.layers if not layer.folded]
        return [
            f"{folded:,.0f} bytes per token once packed, {full:,.0f} in {self.dtype or 'full precision'}: "
            f"{full / max(folded, 1e-9):.2f}x smaller",
            f"not folded: {('layers ' if len(left) > 1 else 'layer ') + ', '.join(left) if left else 'nothing'}",
            *(f"note: {note}" for note in self.notes),
        ]

    def __str__(self) -> str:
        return "\n".join([self.sheet().text(), "", *self.summary()])

    def _repr_html_(self) -> str:
        return self.sheet().html() + "".join(f"<p>{escape(line)}</p>" for line in self.summary())


def _runs(layers: Sequence[LayerReport]) -> Iterator[tuple[int, int, LayerReport]]:
    """Neighbouring layers that differ in nothing but their index, as (first, last, layer)."""
    start = 0
    for i, layer in enumerate(layers):
        following = layers[i + 1] if i + 1 < len(layers) else None
        if following is None or dataclasses.replace(following, layer_idx=layer.layer_idx) != layer:
            yield layers[start].layer_idx, layer.layer_idx, layer
            start = i + 1


@outside_autocast
def explain(model: PreTrainedModel, method: str | Method = DEFAULT_METHOD) -> Explanation:
    """Say what ``fold(model, method)`` would do.

    Raises
    ------
    MethodError, UnsupportedModelError
        As :func:`kvfold.fold`.
    """
    model = transformer(model)
    asked = get(method)
    method = resolved(model, asked)
    device = device_of(model)
    if device.type == "cpu":
        try_elsewhere()
    item_bits = 8 * model.dtype.itemsize
    rows: list[LayerReport] = []
    said: list[str] = []
    stored: list[float] = []
    own: list[int] = []
    tables: dict[int, int] = {}
    limits: list[str] = []
    for index, item in enumerate(plan_layers(model, method)):
        if item.spec is None:
            kind = "full attention" if item.reason == KEPT else item.reason.split(" is ")[0]
            rows.append(LayerReport(index, kind, False, "-", "-", item_bits, "all", "sdpa", item.reason))
            continue
        chosen, spec = item.method, item.spec
        keys, values = chosen.key_format(spec), chosen.value_format(spec)
        choice = choose_kernel(chosen, spec, device)
        rows.append(
            LayerReport(
                index,
                "full attention",
                True,
                keys.describe(),
                values.describe(),
                (keys.bits + values.bits) / 2,
                f"sink {chosen.sink}, recent {chosen.recent} to {chosen.recent + chosen.block - 1}",
                choice.kernel.name,
                choice.reason,
                str(choose_encoder(chosen, spec, device)),
                str(chosen),
            )
        )
        told = [f"kernel {choice.kernel.name}: {text}" for text in (choice.kernel.limits, choice.many_tokens) if text]
        limits += [note for note in told if note not in limits]
        tables.update({t.data_ptr(): t.nbytes for t in chosen.tables(spec, device).values()})
        stored.append(spec.num_kv_heads * spec.head_dim * (keys.bits + values.bits) / 8)
        own.append(2 * spec.num_kv_heads * spec.head_dim * model.dtype.itemsize)
        told = [*_notes(chosen, keys, values, spec.softcap), *([CAPS_ALONE] if item.caps_alone else [])]
        said += [note for note in told if note not in said]
    notes = limits + [f"encoded by {text}" for text in sorted({row.encoder for row in rows if row.folded})]
    kept = [row for row in rows if not row.folded]
    if kept:
        notes.append(
            f"{len(kept)} of {len(rows)} layers stay in full precision: {'; '.join(sorted({r.reason for r in kept}))}"
        )
    # layers kept by wish grow with every token, as folded ones do; those that cannot be folded do not count
    wished = max(own, default=0) * sum(row.reason == KEPT for row in kept)
    config = model.config.get_text_config(decoder=True)
    notes += [*said, *(note for part in method.parts() for note in part.notes(config))]
    if asked.spreads:
        notes.append(f"{asked}: {origin(model, asked)}")
    if tables:
        notes.append(f"tables shared by all sequences: {sum(tables.values()):,} bytes")
    if device.type == "cuda" and len(kept) < len(rows):
        notes += _in_graphs(model)
    dtype = str(model.dtype).removeprefix("torch.")
    return Explanation(str(asked), rows, sum(stored) + wished, sum(own) + wished, notes, dtype)


def _in_graphs(model: PreTrainedModel) -> list[str]:
    """What becomes of a model's small operations in decode graphs, which need Triton."""
    if importlib.util.find_spec("triton") is None:
        return []
    from kvfold.engines.transformers.fused import described

    return [said] if (said := described(model)) else []


def _notes(method: Method, keys: Format, values: Format, softcap: float | None) -> list[str]:
    """What is to be said of a layer's method."""
    notes = []
    pages = {form.page for form in (keys, values) if isinstance(form, PagedFormat)}
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
    if softcap is not None:
        notes.append(f"scores are soft-capped at {softcap:g}, which only the kernels cpu and reference compute")
    if method.pre_rope:
        notes.append("keys are stored before RoPE and rotated as they are read")
    return notes
