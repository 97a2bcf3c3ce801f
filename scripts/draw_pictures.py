"""Draw docs/pictures/: sequence, page, call and graph. Every size in them is what the package says it is.

    python scripts/draw_pictures.py [--check]

``--check`` draws nothing and ends with 1 if a picture is stale. A text that is wider than its box, or lies on another text, is
an error.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch

from kvfold import methods
from kvfold.formats import PAGE, Format, PagedFormat
from kvfold.methods import LayerSpec
from kvfold.storage.layout import Layout
from kvfold.storage.ring import Ring
from kvfold.storage.sequences import Sequences
from kvfold.storage.slabs import Slabs

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH = 960
INK, QUIET, LINE = "#1f2933", "#52606d", "#9aa5b1"
PACKED, DENSE, STATISTICS, PLAIN, FREE = "#bcd9f2", "#fbd9a5", "#c9e7c3", "#eef1f4", "#ffffff"
ADVANCE = 0.55
"""Width of a letter over the font's size, on average, in the widest of the fonts that may be taken."""


@dataclass
class Picture:
    """An SVG picture that refuses texts which do not fit."""

    name: str
    title: str
    height: int
    parts: list[str] = field(default_factory=list)
    texts: list[tuple[float, float, float, float, str]] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 12,
        anchor: str = "start",
        color: str = INK,
        bold: bool = False,
        room: float | None = None,
    ) -> None:
        """A line of text whose baseline is ``y``; it may be ``room`` wide."""
        width = len(words) * size * ADVANCE * (1.13 if bold else 1)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        if (room is not None and width > room) or left < 0 or left + width > WIDTH or y > self.height:
            raise ValueError(f"{self.name}: {words!r} takes {width:.0f}, which does not fit")
        box = (left, y - 0.8 * size, left + width, y + 0.2 * size, words)
        for a, b, c, d, other in self.texts:
            if a < box[2] and box[0] < c and b < box[3] and box[1] < d:
                raise ValueError(f"{self.name}: {words!r} lies on {other!r}")
        self.texts.append(box)
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{n(x)}" y="{n(y)}" font-size="{n(size)}" text-anchor="{anchor}" fill="{color}"{weight}>'
            f"{escape(words)}</text>"
        )

    def lines(self, x: float, y: float, lines: list[str], size: float = 12, room: float | None = None) -> float:
        """Quiet lines of text, the first at ``y``; where the next one would be."""
        for line in lines:
            self.text(x, y, line, size, color=QUIET, room=room)
            y += 1.5 * size
        return y

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = LINE, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}" fill="{fill}" stroke="{edge}"{dash}/>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, lines: list[str], fill: str = PLAIN, size: float = 12
    ) -> None:
        """A box with a bold first line and smaller ones below it."""
        self.rect(x, y, width, height, fill)
        step = size + 3
        top = y + (height - step * len(lines)) / 2 + size
        for i, line in enumerate(lines):
            self.text(
                x + width / 2, top + i * step, line, size if not i else size - 1, "middle",
                INK if not i else QUIET, not i, width - 4,
            )  # fmt: skip

    def arrow(self, *points: tuple[float, float], dashed: bool = False, color: str = INK) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{n(x)},{n(y)}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}"{dash} marker-end="url(#tip)"/>')

    def line(self, *points: tuple[float, float], color: str = LINE) -> None:
        path = " ".join(f"{n(x)},{n(y)}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}"/>')

    def bracket(self, left: float, right: float, y: float, words: str, size: float = 12) -> None:
        """What lies between two places of the bar above."""
        self.line((left + 1, y), (left + 1, y + 6), (right - 1, y + 6), (right - 1, y))
        self.text((left + right) / 2, y + 9 + size, words, size, "middle", QUIET)

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" '
                f'viewBox="0 0 {WIDTH} {self.height}" role="img" font-family="Helvetica, Arial, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
                f'<rect width="{WIDTH}" height="{self.height}" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def n(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


# ---- a sequence ------------------------------------------------------------------------------------------------------


def sequence(tokens: int = 500, scale: float = 1.6) -> Picture:
    """Where the tokens of a sequence lie, drawn to scale."""
    method = methods.get("fold")
    layout = Layout(method, LayerSpec(0, 1, 1, 1, 128))
    of = Sequences(method.sink, method.recent, method.block)
    of.start(1, torch.device("cpu"))
    of.lens, of.packed = [tokens], [of.packed_length(tokens)]
    slabs, ring = Slabs(layout), Ring(of, 1, 128)
    packed, block, page = of.packed[0], method.block, layout.page_blocks * method.block
    slabs.reserve(packed // block, 0, 1, torch.device("cpu"))
    first, after, held = method.sink, method.sink + packed, tokens - method.sink - packed
    waits = next(n for n in range(tokens, tokens + block + 1) if of.packed_length(n) > packed) - tokens

    p = Picture("sequence", f"A sequence of {tokens} tokens: sink, packed pages, recent ring", 372)
    left = 30.0

    def at(token: float) -> float:
        return left + token * scale

    def pages(x: float, y: float, blocks: int, filled: int) -> None:
        for i in range(blocks):
            here = x + i * block * scale
            p.rect(here, y, block * scale, 44, PACKED if i < filled else FREE)
            p.text(here + block * scale / 2, y + 27, f"{i}" if i < filled else "room", 11, "middle", QUIET)
        for i in range(0, blocks, layout.page_blocks):
            width = min(layout.page_blocks, blocks - i) * block * scale
            p.rect(x + i * block * scale, y, width, 44, "none", INK)

    p.text(left, 24, f"One sequence, one KV head, {tokens} tokens (to scale)", 14, bold=True)
    p.rect(at(0), 62, first * scale, 44, DENSE)
    p.text(at(first / 2), 89, "sink", 11, "middle")
    pages(at(first), 62, packed // block, packed // block)
    p.rect(at(after), 62, held * scale, 44, DENSE)
    whole = math.ceil(packed / page)
    ahead = first + whole * page  # where the last page will end
    p.text(at((ahead + tokens) / 2), 89, f"recent: {held} tokens", 11, "middle", room=(tokens - ahead) * scale)
    for i in range(whole):
        begin, end = first + i * page, first + (i + 1) * page
        words = f"page {i}: {page} tokens" + ("" if i else f" in blocks of {block}")
        p.text(at((begin + end) / 2), 54, words, 11, "middle", QUIET)
    if packed % page:  # the tokens that the last page still waits for
        p.rect(at(after), 58, (ahead - after) * scale, 52, "none", INK, dashed=True)
    for token in (0, first, after, ahead, tokens):
        p.line((at(token), 106), (at(token), 112))
        p.text(at(token), 124, str(token), 11, "middle", QUIET)
    p.text(at(first + packed / 2), 124, f"packed: {packed} tokens in {packed // block} blocks", 11, "middle", QUIET)

    top = 176.0
    p.text(left, top - 14, "Where they lie: three places, each filled as it is", 14, bold=True)
    room, slots = slabs[0].blocks, ring.base
    sink_at, slab_at = left, left + first * scale + 25
    ring_at = slab_at + room * block * scale + 25
    p.rect(sink_at, top, first * scale, 44, DENSE)
    p.text(sink_at + first * scale / 2, top + 27, f"0 - {first - 1}", 10, "middle")
    p.bracket(sink_at, sink_at + first * scale, top + 44, f"{first} slots", 11)
    pages(slab_at, top, room, packed // block)
    p.bracket(
        slab_at,
        slab_at + room * block * scale,
        top + 44,
        f"slab: room for {room} blocks ({room // layout.page_blocks} pages) of every sequence and head",
        11,
    )
    p.rect(ring_at, top, slots * scale, 44, FREE)
    wrap = (
        (packed + held) // slots * slots
    )  # the first token of the ring's second round, counted from the end of the sink
    for slot, stop, start in ((packed % slots, slots, packed), (0, packed + held - wrap, wrap)):
        p.rect(ring_at + slot * scale, top, (stop - slot) * scale, 44, DENSE)
        p.text(ring_at + (slot + stop) / 2 * scale, top + 20, f"{first + start}", 10, "middle")
        p.text(ring_at + (slot + stop) / 2 * scale, top + 34, f"- {first + start + stop - slot - 1}", 10, "middle")
    p.bracket(ring_at, ring_at + slots * scale, top + 44, f"ring: {slots} slots, {slots - held} free", 11)

    counted = f"({tokens} - {first} - {method.recent}) // {block} x {block} = {packed}"
    y = p.lines(
        left,
        top + 96,
        [
            f"How many tokens are packed follows from the length n alone: (n - sink - recent) // block x block = {counted}.",
            f"The ring: token t lies in slot (t - sink) % {slots}. Nothing moves; the newest token takes a free slot. "
            f"{waits} tokens later block {packed // block} is closed.",
            f"The last page: its last {ahead - after} tokens (dashed) wait in the ring. Its mean and norms are of all "
            f"{method.seen} tokens already.",
            "The slab: one tensor per field. When it is full, another one is added, an eighth of what exists.",
        ],
    )
    legend = ((DENSE, "full precision"), (PACKED, "packed"), (FREE, "room"))
    x = left
    for color, words in legend:
        p.rect(x, y - 4, 14, 12, color)
        p.text(x + 20, y + 6, words, 11, color=QUIET)
        x += 130
    return p


# ---- the bytes of a page ---------------------------------------------------------------------------------------------

HOLDS = {
    ("uniform", "codes"): "a code per channel and token",
    ("uniform", "scale"): "one per token",
    ("affine", "codes"): "a code per channel and token",
    ("affine", "meta key"): "scale and zero per channel and block",
    ("affine", "meta value"): "scale and zero per token and group",
    ("paged", "mean"): "one per channel",
    ("paged", "norm"): "one per channel, a logarithm",
}
"""What the fields of a kind of format are."""


@dataclass
class Field:
    """A stored tensor of a page."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    per_page: bool
    holds: str
    times: int

    @property
    def bytes(self) -> int:
        return self.times * math.prod(self.shape) * self.dtype.itemsize


def fields_of(form: Format) -> Iterator[Field]:
    """The tensors of a page of one KV head, as the format declares them."""
    inner = getattr(form, "inner", form)
    for name, (shape, dtype) in form.fields().items():
        what = HOLDS.get((inner.kind, name)) or HOLDS[inner.kind, f"{name} {form.operand}"]
        yield Field(name, shape, dtype, False, what, PAGE // form.block)
    if isinstance(form, PagedFormat):
        for name, (shape, dtype) in form.page_fields().items():
            yield Field(name, shape, dtype, True, HOLDS[form.kind, name], 1)


def page(head_dim: int = 128) -> Picture:
    """The bytes of a page of fold and of KIVI, field by field."""
    spec = LayerSpec(0, 1, 1, 1, head_dim, torch.float16)
    chosen = ("fold", "kivi")
    sides = {
        name: [(side, list(fields_of(form))) for side, form in
               (("keys", methods.get(name).key_format(spec)), ("values", methods.get(name).value_format(spec)))]
        for name in chosen
    }  # fmt: skip
    total = {name: sum(f.bytes for _, found in both for f in found) for name, both in sides.items()}
    none = methods.get("none")
    dense = PAGE // none.block * (none.key_format(spec).block_bytes + none.value_format(spec).block_bytes)
    rows = sum(len(found) for both in sides.values() for _, found in both)

    p = Picture("page", f"The bytes of a page of {PAGE} tokens of one KV head", 150 + 64 * len(chosen) + 24 * rows)
    left, scale = 30.0, 690 / dense
    p.text(
        left,
        24,
        f"A page: {PAGE} tokens of one KV head, {head_dim} channels, keys and values (to scale)",
        14,
        bold=True,
    )
    y = 40.0
    for words, size, fill in (("16 bits", dense, DENSE), *((name, total[name], PACKED) for name in chosen)):
        p.text(left, y + 13, words, 12)
        p.rect(left + 70, y, size * scale, 18, fill)
        more = (
            ""
            if size == dense
            else f": {dense / size:.2f} times less, {8 * size / (2 * PAGE * head_dim):.2f} bits an element"
        )
        p.text(left + 78 + min(size * scale, 690), y + 13, f"{size:,} bytes{more}", 12, color=QUIET)
        y += 26
    y += 22
    biggest = max(f.bytes for both in sides.values() for _, found in both for f in found)
    scale = 190 / biggest
    for name in chosen:
        method = methods.get(name)
        p.text(left, y, f"{name}: {method.key_bits}-bit keys, {method.value_bits}-bit values", 14, bold=True)
        for x, head in (
            (left + 60, "field"),
            (left + 116, "tensor"),
            (left + 260, "is stored"),
            (left + 372, "what it holds"),
        ):
            p.text(x, y + 20, head, 11, color=QUIET)
        p.text(left + 692, y + 20, "bytes", 11, "end", QUIET)
        y += 28
        for side, found in sides[name]:
            p.line((left, y), (WIDTH - left, y))
            for i, f in enumerate(found):
                base = y + 17
                if not i:
                    p.text(left, base, side, 12, bold=True, room=58)
                p.text(left + 60, base, f.name, 12, room=54)
                dtype = str(f.dtype).removeprefix("torch.").replace("float", "fp")
                p.text(left + 116, base, f"{dtype} {list(f.shape)}", 12, room=142)
                p.text(left + 260, base, "once a page" if f.per_page else f"in {f.times} blocks", 12, room=112)
                p.text(left + 372, base, f.holds, 11, room=282)
                p.text(left + 692, base, f"{f.bytes:,}", 12, "end", room=50)
                each = f.bytes * scale / f.times
                for part in range(f.times):
                    p.rect(left + 704 + part * each, y + 5, each, 14, STATISTICS if f.per_page else PACKED)
                y += 24
        y += 36
    y -= 14
    for x, color, words in ((left, PACKED, "a block's"), (left + 90, STATISTICS, "the page's")):
        p.rect(x, y - 10, 14, 12, color)
        p.text(x + 20, y, words, 11, color=QUIET)
    p.text(
        left + 200,
        y,
        "In a slab each field is one tensor [batch, heads, blocks or pages, ...], for all pages.",
        11,
        color=QUIET,
    )
    return p


# ---- a call ----------------------------------------------------------------------------------------------------------


def call() -> Picture:
    """The way of a call, and of a block that became full."""
    method = methods.get("fold")
    most = max(kernel.in_place_tokens for kernel in kernels())
    p = Picture(
        "call", "The way of a call from the attention module to the output, and of a closed block into a slab", 560
    )
    x, w, right = 30.0, 250.0, 690.0
    p.text(x, 24, "Reading: attention over what is cached", 14, bold=True)
    p.text(right, 24, "Writing: tokens, then blocks", 14, bold=True, room=WIDTH - right)

    p.box(x, 40, w, 44, ["attention module", "the model's: queries, keys, values"])
    p.arrow((x + w / 2, 84), (x + w / 2, 112))
    p.text(x + w / 2 + 8, 102, "update(keys, values)", 11, color=QUIET)
    p.box(x, 112, w, 44, ["FoldedLayer", "hands them on, itself attached"])
    p.arrow((x + w / 2, 156), (x + w / 2, 184))
    p.text(x + w / 2 + 8, 174, "keys that name their layer", 11, color=QUIET)
    p.box(x, 184, w, 44, ["attention_forward", "registered with Transformers"])
    p.arrow((x + w / 2, 228), (x + w / 2, 256))
    p.text(x + w / 2 + 8, 246, "something is cached", 11, color=QUIET)
    p.box(
        x,
        256,
        w,
        60,
        [
            "Reader.call: an AttentionCall",
            "query, spans, windows, new tokens,",
            "lengths on the device, formats, scale",
        ],
    )
    p.arrow((x + w / 2, 316), (x + w / 2, 344))
    p.text(x + w / 2 + 8, 334, "attend(call)", 11, color=QUIET)

    p.box(x + 390, 184, 120, 44, ["exact attention", "over the call"])
    p.arrow((x + w, 216), (x + 390, 216))
    p.text(x + w + 20, 210, "nothing is cached", 11, color=QUIET, room=118)
    p.arrow((x + w, 194), (x + 350, 194), (x + 350, 62), (right, 62))
    p.text(x + 360, 55, "append(keys, values, query)", 11, color=QUIET)

    p.box(x + 300, 256, 210, 60, ["plan.py", "kernel and encoder: chosen once,", "when the layer starts"])
    p.arrow((x + 405, 316), (x + 405, 344), dashed=True)
    p.arrow((x + 510, 286), (right, 286), dashed=True)

    p.rect(x, 344, 510, 104, PLAIN)
    p.text(x + 12, 364, "kernel", 12, bold=True)
    p.text(x + 80, 364, "pieces of the sequence, each with its own maximum and sum", 11, color=QUIET, room=420)
    p.box(x + 12, 376, 156, 60, ["packed spans", "read as they lie", "(readers, per format)"], PACKED)
    p.box(x + 177, 376, 156, 60, ["windows", "sink and ring", "in full precision"], DENSE)
    p.box(x + 342, 376, 156, 60, ["new tokens", "causal, if they do not", "lie in the ring yet"], DENSE)
    for at in (90, 255, 420):
        p.arrow((x + at, 436), (x + at, 476))
    p.box(x, 476, 510, 34, ["merge by log-sum-exp"])
    p.arrow((x + 255, 510), (x + 255, 536))
    p.text(x + 265, 528, "output [batch, tokens, heads, head_dim], back to the module", 11, color=QUIET)

    of = WIDTH - 30 - right
    p.box(right, 40, of, 44, ["Writer.append", "the call's keys and values"])
    p.arrow((right + 60, 84), (right + 60, 112))
    p.arrow((right + 180, 84), (right + 180, 112))
    p.box(right, 112, 112, 44, ["sink", f"first {method.sink}"], DENSE)
    p.box(right + 124, 112, of - 124, 44, ["ring", "the newest"], DENSE)
    p.arrow((right + 180, 156), (right + 180, 256))
    p.text(right + 172, 184, "a block of", 11, "end", QUIET)
    p.text(right + 172, 199, f"{method.block} tokens that", 11, "end", QUIET)
    p.text(right + 172, 214, f"{method.recent} newer ones", 11, "end", QUIET)
    p.text(right + 172, 229, "follow", 11, "end", QUIET)
    p.box(right, 256, of, 60, ["encoder", "the page's statistics, then codes:", "Torch, or kernels on a GPU"])
    p.arrow((right + of / 2, 316), (right + of / 2, 376))
    p.text(right + of / 2 + 8, 350, "written once", 11, color=QUIET, room=112)
    p.box(right, 376, of, 60, ["slab", "fields [batch, heads, blocks, ...]", "never rewritten"], PACKED)
    p.arrow((right + of / 2, 436), (right + of / 2, 462), (x + 530, 462), (x + 530, 406), (x + 510, 406), dashed=True)
    p.text(x + 540, 455, "read by the next calls", 11, color=QUIET)
    p.lines(
        right,
        506,
        [
            f"On a GPU, calls of up to {most} tokens are",
            "written first, attended, and then",
            "blocks are closed. Others attend first.",
        ],
        11,
        of,
    )
    return p


def kernels() -> list:
    from kvfold.kernels import REGISTRY

    return list(REGISTRY.values())


# ---- a step in a graph -----------------------------------------------------------------------------------------------


def graph() -> Picture:
    """A decode step as one CUDA graph: what the host does, and what the device does."""
    p = Picture("graph", "A decode step in a CUDA graph: host and device", 404)
    left = 30.0
    p.text(left, 24, "Host: four things a step", 14, bold=True)
    p.box(left, 40, 210, 44, ["copy token id, position", "into fixed tensors"])
    p.arrow((left + 210, 62), (left + 240, 62))
    p.box(left + 240, 40, 240, 44, ["states and blocks that are due", "where no kernel makes them"])
    p.arrow((left + 480, 62), (left + 510, 62))
    p.box(left + 510, 40, 170, 44, ["replay", "one launch"])
    p.arrow((left + 680, 62), (left + 710, 62))
    p.box(left + 710, 40, 190, 44, ["count the step", "logits are a fixed tensor"])
    p.arrow((left + 595, 84), (left + 595, 136), (left + 65, 136), (left + 65, 160))

    p.text(left, 124, "Device: the captured step, the same launches every time", 14, bold=True, room=520)
    y = 160.0
    p.box(left, y, 130, 64, ["lengths.begin", "lengths after", "this step"])
    p.arrow((left + 130, y + 32), (left + 158, y + 32))
    p.rect(left + 148, y - 10, 598, 84, "none", INK, dashed=True)
    p.text(left + 740, y + 88, "once a layer", 11, "end", QUIET)
    for at, width, lines, fill in (
        (158, 118, ["model", "projections, RoPE"], PLAIN),
        (292, 152, ["append and close", "one kernel: see below"], PACKED),
        (460, 132, ["attention", "and its merge"], PACKED),
        (608, 128, ["model", "output, MLP"], PLAIN),
    ):
        p.box(left + at, y, width, 64, lines, fill)
        p.arrow((left + at + width, y + 32), (left + at + width + (16 if at < 608 else 28), y + 32))
    p.box(left + 764, y, 136, 64, ["lengths.end", "logits,", "positions + 1"])

    p.text(left, 274, "Append and close, by lengths that lie on the device", 14, bold=True)
    p.lines(
        left,
        296,
        [
            "1. A block that is due by the lengths before the step is read from the ring, encoded, and written into the slab",
            "    (where a kernel encodes the format; otherwise the host has had it closed before the replay).",
            "2. The new token goes into the sink, or into slot (t - sink) % slots of the ring.",
            "3. Attention reads by the lengths after the step (packed, sink, recent); lengths.begin made them for all layers.",
            "The slab has room for all tokens of the graph, so addresses do not change. The grid covers that room;",
            "what lies beyond the lengths is not read. While a graph owns a cache, the cache refuses everything else.",
        ],
    )
    return p


PICTURES = (sequence, page, call, graph)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 if a picture is stale")
    check = parser.parse_args().check
    stale = []
    for draw in PICTURES:
        picture = draw()
        path = FOLDER / f"{picture.name}.svg"
        if not path.exists() or path.read_text(encoding="utf-8") != picture.svg():
            stale.append(path.name)
            if not check:
                path.write_text(picture.svg(), encoding="utf-8")
    if stale:
        print(f"{'stale' if check else 'written'}: {', '.join(stale)}")
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
