"""KVQuant: keys before RoPE per channel in a learned datatype, sparse outliers (Hooper et al., 2024)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvfold.formats import Fields, Format, Lookup, Outliers
from kvfold.formats.lookup import ChannelScales
from kvfold.formats.outliers import outlier_count
from kvfold.methods.base import LayerSpec, State
from kvfold.methods.gear import SHARE
from kvfold.methods.learned import LearnedMethod
from kvfold.methods.options import Problem


@dataclass(frozen=True)
class KVQuant(LearnedMethod):
    """2^b levels per layer, learned by sensitivity-weighted k-means (sec. 3.3); keys scaled per channel, values per token.

    Keys are stored before RoPE (sec. 3.2), their channels' ranges are learned beforehand (sec. 3.1, 3.6); a token's range
    of values is computed when it is stored. Outliers stay in fp16 (sec. 3.4): here the ``outliers`` most deviating
    elements of a block rather than all beyond a threshold, so that storage is static.

    Parameters
    ----------
    outliers : float
        Fraction of elements kept in fp16 (32 bits each, index included).
    """

    outliers: float = 0.01

    name = "kvquant"
    summary = "keys before RoPE per channel, values per token, learned levels, outliers in fp16"
    source = "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization (arXiv 2401.18079)"
    url = "https://arxiv.org/abs/2401.18079"
    published = {"sink": 1, "recent": 128}  # noqa: RUF012 -- the first token in full precision (sec. 3.5)
    pre_rope = True

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.outliers not in SHARE:
            yield Problem("outliers", SHARE)

    # ---- storage -----------------------------------------------------------------------------------------------------

    def format(self, spec: LayerSpec, operand: str, learned: "Learned | None" = None) -> Format:
        """A format; without what was learned it knows its size only."""
        is_key = operand == "key"
        bits = self.key_bits if is_key else self.value_bits
        if learned is None:
            levels = tuple(float(i) for i in range(1 << bits))
        else:
            levels = learned.key_levels if is_key else learned.value_levels
        with self.refusing():
            inner = Lookup(
                spec.head_dim,
                self.block,
                spec.operand(operand),
                bits,
                levels,
                "channel" if is_key else "range",
                learned.channels if is_key and learned is not None else None,
            )
            count = outlier_count(self.outliers, self.block, spec.head_dim)
            if not count:
                return inner
            return Outliers(spec.head_dim, self.block, inner.operand, inner, count, "token" if is_key else "channel")

    def shapes(self, spec: LayerSpec) -> None:
        self.format(spec, "key")
        self.format(spec, "value")

    def key_format(self, spec: LayerSpec) -> Format:
        return self.format(spec, "key", self.learned(spec))

    def value_format(self, spec: LayerSpec) -> Format:
        return self.format(spec, "value", self.learned(spec))

    def effective_bits(self, head_dim: int = 128, num_layers: int = 32) -> float:
        spec = LayerSpec(0, num_layers, 1, 1, head_dim)
        return (self.format(spec, "key").bits + self.format(spec, "value").bits) / 2

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        place = torch.empty(0, device=device).device
        learned = self.learned(spec)
        channels = learned.channels.on(place)
        return {"key.center": channels.center, "key.spread": channels.spread, "levels": learned.levels}

    def build(self, parts: dict[str, torch.Tensor], rotary: int) -> "Learned":
        key_levels, value_levels = (tuple(parts[f"{operand}.levels"].tolist()) for operand in ("key", "value"))
        return Learned(key_levels, value_levels, ChannelScales(parts["key.center"], parts["key.spread"]))

    def blank(self, num_kv_heads: int, head_dim: int) -> dict[str, torch.Tensor]:
        levels = {
            f"{side}.levels": torch.arange(1 << bits, dtype=torch.float32)
            for side, bits in (("key", self.key_bits), ("value", self.value_bits))
        }
        return levels | {f"key.{name}": torch.ones(num_kv_heads, head_dim) for name in ("center", "spread")}

    # ---- maps --------------------------------------------------------------------------------------------------------

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        return keys if spec.rope is None else spec.rope.unrotate(keys, positions)

    def restore_keys(self, stored: torch.Tensor, spec: LayerSpec, positions: torch.Tensor) -> torch.Tensor:
        return stored if spec.rope is None else spec.rope.rotate(stored, positions)

    @property
    def kernel_encodes(self) -> bool:
        return True

    def encode_keys(
        self,
        keys: torch.Tensor,
        state: State,
        spec: LayerSpec,
        positions: torch.Tensor,
        prompt: bool,
        page: Fields | None = None,
    ) -> Fields:
        form = self.key_format(spec)
        keys = self.transform_keys(keys, state, spec, positions)
        if not isinstance(form, Outliers):
            return form.encode(keys)
        channels = self.learned(spec).channels.on(keys.device)
        return form.encode(keys, beyond(keys, channels))


class Learned:
    """What calibration found for one layer.

    Parameters
    ----------
    key_levels, value_levels : tuple of float
        Ascending, of normalized channels and tokens.
    channels : ChannelScales
        Of keys before RoPE.
    """

    def __init__(self, key_levels: tuple[float, ...], value_levels: tuple[float, ...], channels: ChannelScales) -> None:
        self.key_levels, self.value_levels, self.channels = key_levels, value_levels, channels
        self.levels = torch.tensor(key_levels + value_levels, dtype=torch.float32, device="cpu")


def beyond(keys: torch.Tensor, channels: ChannelScales) -> torch.Tensor:
    """How far elements lie outside their channel's range, negative inside; of the shape of ``keys``."""
    return (keys - channels.center.unsqueeze(-2)).abs() - channels.spread.unsqueeze(-2)
