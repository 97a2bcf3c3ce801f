"""CommVQ: additive codebooks that commute with RoPE, learned per model (Li et al., 2025, arXiv 2506.18879)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from kvfold.arithmetic import beside
from kvfold.formats import Fields
from kvfold.formats.binary import BinaryCodes, BitGains, BitSearch, ValueRows, ValueSteps, bit_gains
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, stages_for
from kvfold.methods.base import LayerSpec, State
from kvfold.methods.learned import LearnedMethod
from kvfold.methods.options import Numbers, Problem

POWERS = (2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class CommVQ(LearnedMethod):
    """Keys before RoPE as sums of codebook vectors ``z_a + i z_b`` (eq. 24) times a norm, values as ``bits @ C`` (eq. 9).

    Parameters
    ----------
    levels : int
        N_c' of the paper: vectors per key codebook. R follows from the bits: the nearest to ``bits * head_dim / (2 log2 N)``.
    passes : int
        Times that stages of a key are chosen again, each given the others (:func:`kvfold.formats.codebook.choices`); 0 as
        published.
    flips : int
        Greedy bit flips that may improve a value's code after the encoder; 0 as published.
    joint : bool
        One value code for all KV heads of a token, as published; false: one per head, which can be split over devices.
    """

    levels: int = 64
    passes: int = 1
    flips: int = 32
    joint: bool = False

    name = "commvq"
    summary = "keys and values as sums of learned codebook vectors that commute with RoPE"
    source = "CommVQ: Commutative Vector Quantization for KV Cache Compression (arXiv 2506.18879)"
    url = "https://arxiv.org/abs/2506.18879"
    pre_rope = True
    maps_values = True

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for field, most in (("passes", 100), ("flips", 4096)):
            if getattr(self, field) not in Numbers(0, most):
                yield Problem(field, Numbers(0, most))
        if self.levels not in POWERS:
            yield Problem("levels", POWERS)

    # ---- storage -----------------------------------------------------------------------------------------------------

    def stages(self, head_dim: int) -> int:
        """R of the paper."""
        return stages_for(self.key_bits, head_dim, self.levels)

    def value_codes(self, head_dim: int) -> int:
        """N_c of the paper, per KV head."""
        return self.value_bits * head_dim

    def formats(self, spec: LayerSpec, book: KeyCodebook | None = None) -> tuple[AdditiveCodes, BinaryCodes]:
        """Both formats; without a codebook they know sizes only."""
        with self.refusing():
            return (
                AdditiveCodes(
                    spec.head_dim, self.block, "key", self.stages(spec.head_dim), self.levels, self.passes, book
                ),
                BinaryCodes(
                    spec.head_dim,
                    self.block,
                    spec.operand("value"),
                    self.value_codes(spec.head_dim),
                    spec.num_kv_heads if self.joint else 1,
                ),
            )

    def shapes(self, spec: LayerSpec) -> None:
        self.formats(spec)

    def key_format(self, spec: LayerSpec) -> AdditiveCodes:
        return self.formats(spec, self._layer(spec)[0])[0]

    def value_format(self, spec: LayerSpec) -> BinaryCodes:
        return self.formats(spec)[1]

    def effective_bits(self, head_dim: int = 128, num_layers: int = 32) -> float:
        return sum(f.bits for f in self.formats(LayerSpec(0, num_layers, 1, 1, head_dim))) / 2

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        keys, values = self._layer(spec)
        place = torch.empty(0, device=device).device
        held = {f"key.{name}": t for name, t in keys.on(place).tensors().items()}
        return held | {f"value.{name}": t for name, t in values.on(place).tensors.items()}

    def _layer(self, spec: LayerSpec) -> tuple[KeyCodebook, ValueCodebook]:
        keys, values = self.learned(spec)
        return keys, values

    def learned_shape(self) -> dict[str, object]:
        return {**super().learned_shape(), "levels": self.levels, "joint": self.joint}

    def build(self, parts: dict[str, torch.Tensor], rotary: int) -> tuple[KeyCodebook, ValueCodebook]:
        keys = {name.removeprefix("key."): t for name, t in parts.items() if name.startswith("key.")}
        values = {name.removeprefix("value."): t for name, t in parts.items() if name.startswith("value.")}
        return KeyCodebook.rounded(keys["centres"], keys["metric"], rotary), ValueCodebook(values)

    def blank(self, num_kv_heads: int, head_dim: int) -> dict[str, torch.Tensor]:
        """With the scalar encoder of values, which is the default."""
        d, half, short = head_dim, torch.float16, torch.int16
        heads, dim = (1, num_kv_heads * d) if self.joint else (num_kv_heads, d)
        codes = self.value_codes(d) * (num_kv_heads if self.joint else 1)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "key.centres": ((num_kv_heads, self.stages(d), self.levels, d), half),
            "key.metric": ((num_kv_heads, d, d), half),
            "value.codebook": ((heads, codes, dim), half),
            "value.offset": ((heads, dim), half),
            "value.metric": ((heads, dim, dim), half),
            "value.axes": ((heads, dim, dim), half),
            "value.shift": ((heads, dim), half),
            "value.top": ((heads, dim), half),
            "value.component": ((heads, codes), short),
            "value.place": ((heads, codes), short),
        }
        return {name: torch.ones(size, dtype=dtype) for name, (size, dtype) in shapes.items()}

    # ---- maps --------------------------------------------------------------------------------------------------------

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        return keys if spec.rope is None else spec.rope.unrotate(keys, positions)

    def restore_keys(self, stored: torch.Tensor, spec: LayerSpec, positions: torch.Tensor) -> torch.Tensor:
        return stored if spec.rope is None else spec.rope.rotate(stored, positions)

    def encode_values(
        self, values: torch.Tensor, state: State, spec: LayerSpec, prompt: bool, page: Fields | None = None
    ) -> Fields:
        book = self._layer(spec)[1].on(values.device)
        batch, heads, tokens, _ = values.shape
        if self.joint:
            flat = values.transpose(1, 2).flatten(-2).flatten(0, 1).unsqueeze(0)  # [1, batch * tokens, heads * d]
            bits = book.bits(flat, self.flips)[0].unflatten(0, (batch, tokens)).unflatten(-1, (heads, -1))
            return self.value_format(spec).encode(bits.transpose(1, 2))
        bits = book.bits(values.transpose(0, 1).flatten(1, 2), self.flips).unflatten(1, (batch, tokens))
        return self.value_format(spec).encode(bits.transpose(0, 1))

    @property
    def kernel_encodes(self) -> bool:
        return True

    def value_tables(self, spec: LayerSpec, device: torch.device) -> tuple[ValueCodebook, int]:
        return self._layer(spec)[1].on(device), self.flips

    def value_map(self, spec: LayerSpec, device: torch.device) -> ValueRows:
        return self._layer(spec)[1].on(device).value_map(spec.num_kv_heads)

    def value_search(self, spec: LayerSpec, device: torch.device) -> BitSearch:
        return self._layer(spec)[1].on(device).search(self.flips)

    def unproject_values(self, values: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Eq. 22: sums of bits times the codebook; the last column of ``values`` weighs the offset."""
        return values @ self._layer(spec)[1].on(values.device).rows(spec.num_kv_heads)


class ValueCodebook:
    """One layer's value encoder and codebook.

    Parameters
    ----------
    tensors : dict
        ``codebook`` [heads, codes, dim], ``offset`` [heads, dim], ``metric`` [heads, dim, dim]; the paper's encoder ``w1``,
        ``b1``, ``w2``, ``b2``, or scalar codes of principal components ``axes``, ``shift``, ``top``, ``component``, ``place``.
        A joint code has heads = 1 and dim = num_kv_heads * head_dim.
    steps : ValueSteps or None
        The codebook in whole steps, which all methods mean by it, as they mean the offset with ``rest``; None: the nearest to
        that of ``tensors``.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], steps: ValueSteps | None = None) -> None:
        self.tensors = tensors
        self.steps = ValueSteps.of(tensors["codebook"]) if steps is None else steps

    def on(self, device: torch.device) -> ValueCodebook:
        """The same tables on another device; moved once."""
        return self if device == self.tensors["codebook"].device else self._moved(device)

    @beside
    def _moved(self, device: torch.device) -> ValueCodebook:
        held = {name: t.to(device) for name, t in self.tensors.items()}
        return ValueCodebook(held, self.steps.to(device))

    def _get(self, name: str) -> torch.Tensor:
        if name == "codebook":
            return self.steps.codebook
        return self.tensors[name].float() + self.steps.rest if name == "offset" else self.tensors[name].float()

    @beside
    def rows(self, num_kv_heads: int) -> torch.Tensor:
        """Codebook and, last, offset, as each KV head's decoded columns meet them: float32 [num_kv_heads, codes + 1, d].

        Made once: every step of a layer asks for it.
        """
        rows = torch.cat((self._get("codebook"), self._get("offset").unsqueeze(1)), 1)
        if rows.shape[0] != num_kv_heads:  # joint: every head reads its channels of the joint vector
            rows = rows[0].unflatten(-1, (num_kv_heads, -1)).transpose(0, 1)
        return rows

    def value_map(self, num_kv_heads: int) -> ValueRows:
        """:meth:`rows` as a map; with steps where each KV head has a code of its own."""
        own = len(self.steps.numbers) == num_kv_heads
        return ValueRows(self.rows(num_kv_heads), self.steps if own else None)

    def first_bits(self, y: torch.Tensor) -> torch.Tensor:
        """What the encoder says, without noise: float32 [heads, tokens, codes] of 0 and 1; ``y`` lies under the metric."""
        if self.is_network:
            hidden = F.silu(y @ self._get("w1") + self._get("b1").unsqueeze(1))
            return (hidden @ self._get("w2") + self._get("b2").unsqueeze(1) > 0).float()
        level = y @ self._get("axes").transpose(-1, -2) + self._get("shift").unsqueeze(1)
        level = torch.minimum(level.round().clamp_min(0), self._get("top").unsqueeze(1)).to(torch.int32)
        index = self.tensors["component"].long().unsqueeze(1).expand(-1, y.shape[1], -1)
        return ((level.gather(-1, index) >> self.tensors["place"].int().unsqueeze(1)) & 1).float()

    def bits(self, values: torch.Tensor, flips: int) -> torch.Tensor:
        """Codes of values: the encoder's, then up to ``flips`` times the one bit flip that lowers the error most.

        Parameters
        ----------
        values : Tensor, float32 [heads, tokens, dim]

        Returns
        -------
        Tensor, float32 [heads, tokens, codes]
            0 or 1.
        """
        bits, slope, gram = self.start(values, flips > 0)
        square = gram.diagonal(dim1=-1, dim2=-2).unsqueeze(1)
        for _ in range(flips):
            direction = 1 - 2 * bits
            gain, which = (2 * direction * slope - square).max(-1, keepdim=True)
            step = direction.gather(-1, which) * (gain > 1e-6 * square.amax(-1, keepdim=True))
            if step.device.type == "cpu" and not step.any():
                break
            bits = bits.scatter_add(-1, which, step)
            slope = slope - step * gram.gather(1, which.expand(-1, -1, gram.shape[-1]))
        return bits

    @property
    def is_network(self) -> bool:
        """Whether the paper's network chooses bits, instead of levels of principal components."""
        return "w1" in self.tensors

    @beside
    def search(self, flips: int) -> BitSearch:
        """The same choice for kernels; made once."""
        if self.is_network:
            metric = self._get("metric")
            encoder = (metric @ self._get("w1"), *(self._get(name) for name in ("b1", "w2", "b2")))
            tables = (*encoder, *self._flip_tables())
        else:
            tables = self.level_tables()
        hidden = self.tensors["w1"].shape[-1] if self.is_network else 0
        return BitSearch(tuple(t.contiguous() for t in tables), flips, hidden)

    def gains(self) -> BitGains:
        """What kernels multiply to find the bits that flips begin with, of levels; made once."""
        on_gpu = self.tensors["codebook"].device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():  # what a graph makes holds nothing until it runs
            return self._make_gains()
        return self._kept_gains()

    @beside
    def _kept_gains(self) -> BitGains:
        return self._make_gains()

    def _make_gains(self) -> BitGains:
        return bit_gains(self.level_tables(), self._get("codebook"), self._get("offset"))

    def level_tables(self) -> tuple[torch.Tensor, ...]:
        """Seven tables of :class:`kvfold.formats.binary.BitSearch`, of levels."""
        metric, component = self._get("metric"), self.tensors["component"].long()
        every = component.unsqueeze(1).expand(-1, metric.shape[1], -1)
        matrix = (metric @ self._get("axes").mT).gather(-1, every)
        shift, top = (self._get(name).gather(-1, component) for name in ("shift", "top"))
        return matrix, shift, top, self._get("place"), *self._flip_tables()

    def _flip_tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        metric = self._get("metric")
        book = self._get("codebook") @ metric
        origin = (self._get("offset").unsqueeze(1) @ metric @ book.mT).squeeze(1)
        return metric @ book.mT, origin, book @ book.mT

    def start(self, values: torch.Tensor, flips: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The encoder's bits of values, float32 [heads, tokens, dim]; and, where bits are to be flipped, what a search needs.

        Returns
        -------
        bits, slope : Tensor, float32 [heads, tokens, codes]
            0 or 1; products of what the bits miss with all codes, under the metric.
        gram : Tensor, float32 [heads, codes, codes]
            Products of codes.
        """
        metric = self._get("metric")
        # one product per block of tokens: the same codes whatever the call's length
        whole = values.shape[1] % 32 == 0
        y = ((values.unflatten(1, (-1, 32)) @ metric.unsqueeze(1)).flatten(1, 2)) if whole else values @ metric
        bits = self.first_bits(y)
        book = self._get("codebook") @ metric
        gram = book @ book.transpose(-1, -2)
        if not flips:
            return bits, bits, gram
        rest = y - bits @ book - (self._get("offset").unsqueeze(1) @ metric)
        return bits, rest @ book.transpose(-1, -2), gram

    def decode(self, bits: torch.Tensor) -> torch.Tensor:
        """Bits [heads, tokens, codes] to values, float32 [heads, tokens, dim]."""
        return bits @ self._get("codebook") + self._get("offset").unsqueeze(1)
