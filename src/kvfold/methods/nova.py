"""NOVA-KV (arXiv 2608.04074) and TaSQ (arXiv 2610.03027): a byte for a few channels, codes learned for queries' distance."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvfold.artefact import load_cached
from kvfold.formats import AffineGroups, Format, GroupCodes, Hadamard, Projected
from kvfold.formats.grouped import GroupBook
from kvfold.formats.projected import HeadMaps
from kvfold.methods.base import LayerSpec, Method, State
from kvfold.methods.fold import CODED, Fold
from kvfold.methods.learned import SHORTEST, LearnedMethod, span
from kvfold.methods.options import Problem

CODES = 256
VALUES = ("affine", "codes", "fold")


@dataclass(frozen=True)
class Tables:
    """Tables of one layer; ``values`` None: values have none."""

    keys: GroupBook
    maps: HeadMaps | None
    values: GroupBook | None


@dataclass(frozen=True)
class ByteCodes(LearnedMethod):
    """What NOVA-KV and TaSQ share: keys, and perhaps values, as a byte for ``8 / bits`` channels.

    Parameters
    ----------
    values : {"affine", "codes", "fold"}
        ``affine``: v_bits of a rotated value, with a scale and a zero-point per token; ``codes``: as keys, with codebooks for
        the output projection's distance; ``fold``: as :class:`~kvfold.methods.fold.Fold` stores them, by its fixed codebook at
        1 and 2 bits. Of the last nothing is learned of values.
    refit : bool
        Store the scale that keeps a key's length and makes a value unbiased, instead of the root mean square; costs no bits.
    """

    values: str = "affine"
    refit: bool = True

    bit_widths = (1, 2, 4, 8)
    maps_keys: ClassVar[bool] = False
    """Whether keys are stored less a mean and under a learned map."""

    def centres(self, operand: str) -> bool:
        """Whether codes of "key" or "value" are of vectors less a static mean of the head."""
        return False

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.values not in VALUES:
            yield Problem("values", VALUES)
        for field, coded in (("k_bits", True), ("v_bits", self.values == "codes")):
            if coded and getattr(self, field) not in (None, *self.bit_widths):
                yield Problem(field, self.bit_widths, ": a byte stands for 8 / bits channels")

    # ---- storage -----------------------------------------------------------------------------------------------------

    def _codes(self, spec: LayerSpec, operand: str, book: GroupBook | None) -> GroupCodes:
        is_key = operand == "key"
        fit = ("size" if is_key else "unbiased") if self.refit else "rms"
        bits = self.key_bits if is_key else self.value_bits
        strided = is_key and self.pre_rope
        size = spec.head_dim, self.block, spec.operand(operand), 8 // bits, CODES
        return GroupCodes(*size, strided, fit, book, self.centres(operand))

    def formats(self, spec: LayerSpec, learned: Tables | None = None) -> tuple[Format, Format]:
        """Both formats; without what was learned they know sizes only."""
        d = spec.head_dim
        with self.refusing():
            keys: Format = self._codes(spec, "key", learned.keys if learned else None)
            if self.maps_keys:
                keys = Projected(d, self.block, keys.operand, keys, learned.maps if learned else None)
            if self.values == "codes":
                return keys, self._codes(spec, "value", learned.values if learned else None)
            if self.values == "fold":
                return keys, self._fold.value_format(spec)
            affine = AffineGroups(d, self.block, spec.operand("value"), self.value_bits, "channel", "asym", d)
            return keys, self.paged(affine, False, "", Hadamard(d, d & -d))

    @property
    def _fold(self) -> Fold:
        """What stores the values of ``values=fold``."""
        bits = self.value_bits
        return Fold(bits=bits, sink=self.sink, recent=self.recent, group=self.group, codebook=bits in CODED)

    def joined(self, values: Method) -> Method | None:
        if not isinstance(values, Fold):
            return None
        bits = values.value_bits
        own = None if bits == self.bits else bits
        found = replace(self, v_bits=own, values="fold")
        same = replace(values, bits=bits, k_bits=None, v_bits=None) == found._fold
        return found if same else None

    @property
    def of_values(self) -> Method:
        return self._fold if self.values == "fold" else self

    @property
    def kernel_encodes(self) -> bool:
        return True

    @property
    def page(self) -> int:
        """As published, too: nothing is a statistic of tokens that are stored."""
        return 128

    def shapes(self, spec: LayerSpec) -> None:
        self.formats(spec)

    def key_format(self, spec: LayerSpec) -> Format:
        return self.formats(spec, self._learned(spec))[0]

    def value_format(self, spec: LayerSpec) -> Format:
        return self.formats(spec, self._learned(spec))[1]

    def effective_bits(self, head_dim: int = 128, num_layers: int = 32) -> float:
        return sum(f.bits for f in self.formats(LayerSpec(0, num_layers, 1, 1, head_dim))) / 2

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        place, learned = torch.empty(0, device=device).device, self._learned(spec)
        held = {}
        for operand, book in (("key", learned.keys), ("value", learned.values)):
            if book is not None:
                here = book.on(place)
                held[f"{operand}.codes"] = here.codes
                named = {"metric": here.metric, "mean": here.mean}
                held |= {f"{operand}.{name}": x for name, x in named.items() if x is not None}
        if learned.maps is not None:
            maps = learned.maps.on(place)
            held |= {"key.mean": maps.mean, "key.map": maps.apply, "key.inverse": maps.restore}
        if self.values == "affine":
            held |= Hadamard(spec.head_dim, spec.head_dim & -spec.head_dim).tables(device)
        elif self.values == "fold":
            held |= {f"value.{name}": x for name, x in self._fold.tables(spec, device).items()}
        return held

    def _learned(self, spec: LayerSpec) -> Tables:
        learned: Tables = self.learned(spec)
        return learned

    def notes(self, config: object) -> list[str]:
        if not (self.maps_keys and self.artefact):
            return []
        learned = load_cached(self.artefact).calibration.get("positions", SHORTEST)
        if span(config) <= learned:
            return []
        return [
            f"artefact {self.artefact} was learned for {learned:,} positions of the model's {span(config):,}: keys at later "
            "ones lose two to three times as much; 'kvfold calibrate' learns it for all"
        ]

    def learned_shape(self) -> dict[str, object]:
        learned: dict[str, object] = {"k_bits": self.key_bits}
        return learned | ({"v_bits": self.value_bits} if self.values == "codes" else {})

    def blank(self, num_kv_heads: int, head_dim: int) -> dict[str, torch.Tensor]:
        heads, d = num_kv_heads, head_dim
        sides = [("key", self.key_bits), *([("value", self.value_bits)] if self.values == "codes" else [])]
        found = {}
        for side, bits in sides:
            vector = 8 // bits
            found[f"{side}.codes"] = torch.ones(heads, d // vector, CODES, vector, dtype=torch.float16)
            if side == "value" or not self.maps_keys:  # a map's coordinates have the plain distance
                found[f"{side}.metric"] = torch.ones(heads, d // vector, vector, vector)
            if self.centres(side):
                found[f"{side}.mean"] = torch.ones(heads, d, dtype=torch.float16)
        if self.maps_keys:
            found["key.mean"] = torch.ones(heads, d)
            found |= {f"key.{name}": torch.ones(heads, d, d) for name in ("map", "inverse")}
        return found

    def build(self, parts: dict[str, torch.Tensor], rotary: int) -> Tables:
        books = {
            operand: GroupBook(
                parts[f"{operand}.codes"],
                parts.get(f"{operand}.metric"),
                parts[f"{operand}.mean"] if self.centres(operand) else None,
            )
            for operand in ("key", "value")
            if f"{operand}.codes" in parts
        }
        maps = None
        if self.maps_keys:
            maps = HeadMaps(parts["key.mean"], parts["key.map"], parts["key.inverse"])
        return Tables(books["key"], maps, books["value"] if self.values == "codes" else None)


@dataclass(frozen=True)
class NOVA(ByteCodes):
    """Keys after RoPE, less a static mean, in coordinates in which the distance of queries is the plain one.

    From the source: ``r = (k - mean) M^(1/2) E`` with M the second moment of the queries that read the head and E the
    eigenvectors of what it makes of the keys' covariance; coordinates dealt out to groups of 4 in the order of their
    variance, so that groups weigh alike; 256 codes for a group, by k-means; one root mean square per token; values rotated,
    2 bits with a scale and a zero-point per token. Our reading: values are rotated by a Hadamard matrix instead of a
    learned one, moments are taken over positions as they would be over the model's context, and ``refit``.
    """

    name = "nova"
    summary = "keys in coordinates of the queries' distance, a byte for 4 channels; values 2 bits, rotated"
    source = "NOVA-KV: Spend Bits Where Queries Look, KV Cache Vector Quantization (arXiv 2608.04074)"
    url = "https://arxiv.org/abs/2608.04074"
    published: ClassVar[dict[str, object]] = {"sink": 64, "recent": 256, "refit": False}
    maps_keys = True


@dataclass(frozen=True)
class TaSQ(ByteCodes):
    """Keys before RoPE, a byte for 8 channels, whose codebooks are learned for the queries' distance.

    From the source, of which we know no more: keys before RoPE, codebooks of 8 channels weighted by queries, about 1.27 bits
    in all. Our reading: the channels of a group are whole pairs of RoPE, the weight is the second moment of the queries as a
    key before RoPE meets them, averaged over distances, and values have codebooks for the output projection's
    distance. Ours is ``mean``.

    Parameters
    ----------
    mean : bool
        Codes are of vectors less what all of a head's keys before RoPE, and all of its values, share; costs no bits.
    """

    bits: int = 1
    values: str = "codes"
    mean: bool = True

    name = "tasq"
    summary = "keys before RoPE and values less a mean, a byte for 8 channels, codebooks for queries' distance"
    source = "TaSQ: Tailoring the Quantization Space for 1-Bit KV Cache Compression (arXiv 2610.03027)"
    url = "https://arxiv.org/abs/2610.03027"
    published: ClassVar[dict[str, object]] = {"sink": 0, "recent": 128, "refit": False, "mean": False}
    pre_rope = True

    def centres(self, operand: str) -> bool:
        return self.mean and (operand == "key" or self.values == "codes")

    def learned_shape(self) -> dict[str, object]:
        return super().learned_shape() | {"mean": self.mean}

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        return keys if spec.rope is None else spec.rope.unrotate(keys, positions)

    def restore_keys(self, stored: torch.Tensor, spec: LayerSpec, positions: torch.Tensor) -> torch.Tensor:
        return stored if spec.rope is None else spec.rope.rotate(stored, positions)
