"""What a method is: a frozen dataclass whose fields are its options, and four maps from keys and queries to formats."""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvfold.errors import MethodError
from kvfold.formats import AffineGroups, Fields, Format
from kvfold.formats.packing import PLANES, UNIT
from kvfold.rope import Rope

State = dict[str, torch.Tensor]
"""A sequence's side data by name, each ``[batch, num_kv_heads, ...]``; computed once from its first tokens."""


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """What a method may know of the attention layer it serves.

    Parameters
    ----------
    layer_idx, num_layers : int
    num_heads, num_kv_heads, head_dim : int
    dtype : torch.dtype
        Of the model's keys and values.
    rope : Rope or None
        The layer's rotation; None where the layer has none, or where the method does not need it.
    fragments : bool
        Whether codes are packed for tensor cores; if not, in plain order, as a CPU reads them.
    """

    layer_idx: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    rope: Rope | None = None
    fragments: bool = True

    def operand(self, side: str) -> str:
        """Packing of the keys' ("key") or values' ("value") codes on this layer's device."""
        return side if self.fragments else "plain"


PIECE = 4096
"""Tokens of which there are float32 copies at a time, where all of a prompt's are gone through."""


def finite(x: torch.Tensor) -> torch.Tensor:
    """Float32, within +-1e18: beyond what any format stores, and small enough that norms and means stay finite."""
    return x.float().clamp(-1e18, 1e18)


@dataclass(frozen=True)
class Observation:
    """The first tokens of one or more sequences, from which a method computes its per-sequence state.

    :attr:`keys`, :attr:`values` and :attr:`queries` are float32 copies, made anew whenever they are asked for. Statistics of
    all keys of a prompt need none: :meth:`key_mean`, :meth:`key_range`.

    Parameters
    ----------
    model_keys, model_values : Tensor [batch, num_kv_heads, tokens, head_dim]
        In the model's dtype, after RoPE; padding and sink tokens excluded.
    model_queries : Tensor or None [batch, num_heads, tokens + sink, head_dim]
        After RoPE, sink tokens included; None unless the method sets ``needs_queries``.
    key_positions, query_positions : Tensor, int64 [batch, tokens], [batch, tokens + sink]
    """

    model_keys: torch.Tensor
    model_values: torch.Tensor
    model_queries: torch.Tensor | None
    key_positions: torch.Tensor
    query_positions: torch.Tensor

    @property
    def keys(self) -> torch.Tensor:
        return finite(self.model_keys)

    @property
    def values(self) -> torch.Tensor:
        return finite(self.model_values)

    @property
    def queries(self) -> torch.Tensor | None:
        return None if self.model_queries is None else finite(self.model_queries)

    def key_mean(self) -> torch.Tensor:
        """Float32 [batch, num_kv_heads, head_dim]."""
        parts = self.model_keys.split(PIECE, -2)
        return torch.stack([finite(part).sum(-2) for part in parts]).sum(0) / self.model_keys.shape[-2]

    def key_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest of every channel, float32 [batch, num_kv_heads, head_dim]."""
        return finite(self.model_keys.amin(-2)), finite(self.model_keys.amax(-2))


@dataclass(frozen=True)
class Method(ABC):
    """A way to fold keys and values. The fields are its options; every method has the ones below.

    Parameters
    ----------
    bits : {1, 2, 3, 4, 8}
        Bits per code of keys and values.
    k_bits, v_bits : int or None
        Bits of keys and values separately; None: ``bits``.
    sink : int
        First tokens kept in full precision.
    recent : int
        Newest tokens kept in full precision; they are packed in whole blocks once ``recent`` newer ones exist.
    group : int
        Elements that share a scale.
    center : bool
        Subtract a per-sequence, per-head, per-channel mean of the first tokens' keys before quantizing. Softmax ignores
        the shift of all scores that this causes, so it costs one vector per head and changes nothing else.
    warmup : int
        Number of first tokens whose statistics fix a sequence's state (mean, norms, outlier channels, subspace).
        Nothing is packed before they are there, so the cache does not depend on how calls were cut. 0: all tokens of
        the call that first packs, as the papers have it.
    """

    bits: int = 2
    k_bits: int | None = None
    v_bits: int | None = None
    sink: int = 0
    recent: int = 128
    group: int = 32
    center: bool = False
    warmup: int = 256

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    url: ClassVar[str]
    needs_queries: ClassVar[bool] = False
    pre_rope: ClassVar[bool] = False
    maps_values: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in ("bits", "k_bits", "v_bits"):
            value = getattr(self, field)
            if value is not None and value not in PLANES:
                raise MethodError(
                    f"{self.name}: {field}={value} is not allowed; allowed: {', '.join(map(str, PLANES))}"
                )
        for field in ("sink", "recent", "warmup"):
            if getattr(self, field) < 0:
                raise MethodError(f"{self.name}: {field}={getattr(self, field)} is not allowed; allowed: 0 or more")
        if self.group < 16 or self.group % 16 or (self.group > UNIT and self.group % UNIT):
            raise MethodError(
                f"{self.name}: group={self.group} is not allowed; allowed: 16 or a multiple of 32 that divides head_dim"
            )
        if self.center and self.pre_rope:
            raise MethodError(
                f"{self.name}: center=true is not allowed: a mean of keys before RoPE shifts scores by position; "
                "allowed: center=false"
            )

    # ---- options -----------------------------------------------------------------------------------------------------

    @property
    def key_bits(self) -> int:
        return self.bits if self.k_bits is None else self.k_bits

    @property
    def value_bits(self) -> int:
        return self.bits if self.v_bits is None else self.v_bits

    @property
    def block(self) -> int:
        """Tokens that are encoded together."""
        return max(UNIT, self.group)

    @property
    def stateful(self) -> bool:
        """Whether a sequence's first tokens determine anything; if not, ``warmup`` has no effect."""
        return self.center

    @property
    def kernel_encodes(self) -> bool:
        """Whether ``transform_keys`` is no more than what the state's ``mean``, ``norm`` and ``update`` say, in this order,
        and values are encoded as they are, so that the encoding kernels can do it."""
        return False

    def slice_width(self, head_dim: int) -> int | None:
        """Channels of a slice of the state's ``update``; None where there is none."""
        return None

    def group_mode(self, prompt: bool) -> str | None:
        """Mode of the groups of blocks that do, or do not, belong to the sequence's first call; None: the format's."""
        return None

    def __str__(self) -> str:
        """Canonical spec: the name and the options that differ from their defaults."""
        options = [
            f"{f.name}={_render(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(options) if options else "")

    # ---- storage -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def key_format(self, spec: LayerSpec) -> Format:
        """Where keys go."""

    @abstractmethod
    def value_format(self, spec: LayerSpec) -> Format:
        """Where values go."""

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Constant tensors shared by all sequences of a layer; the same objects where layers share them."""
        return {}

    def effective_bits(self, head_dim: int = 128, num_layers: int = 32) -> float:
        """Bits per element of the packed part in the limit of long contexts, averaged over layers and K and V."""
        specs = [LayerSpec(i, num_layers, 1, 1, head_dim) for i in range(num_layers)]
        return sum((self.key_format(s).bits + self.value_format(s).bits) / 2 for s in specs) / num_layers

    def check_model(self, config: object) -> None:
        """Refuse a model, given its configuration, that what the method learned is not for; most methods learn nothing."""
        return

    # ---- maps --------------------------------------------------------------------------------------------------------

    def observe(self, seen: Observation, spec: LayerSpec) -> State:
        """Per-sequence state from the first tokens; override together with ``stateful``."""
        return {"mean": seen.key_mean()} if self.center else {}

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        """Keys as the key format is to encode them.

        Parameters
        ----------
        keys : Tensor, float32 [batch, num_kv_heads, tokens, head_dim]
            After RoPE; whole blocks.
        positions : Tensor, int64 [batch, 1, tokens]
        """
        return keys - state["mean"].unsqueeze(-2) if self.center else keys

    def restore_keys(
        self, stored: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        """Inverse of :meth:`transform_keys` up to quantization: float32 keys after RoPE."""
        return stored + state["mean"].unsqueeze(-2) if self.center else stored

    def project_queries(
        self, queries: torch.Tensor, state: State, spec: LayerSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries as decoded keys meet them.

        Parameters
        ----------
        queries : Tensor, float32 or the model's dtype [batch, num_kv_heads, rows, head_dim]
            After RoPE; rows are query tokens x query heads of the KV head.

        Returns
        -------
        projected : Tensor, float32 [batch, num_kv_heads, rows, key_format.width]
            Or ``queries`` itself.
        bias : Tensor or None, float32 [batch, num_kv_heads, rows]
            The score of a query and a packed key is ``projected . decoded + bias``.
        """
        if not self.center:
            return queries, None
        return queries, (queries * state["mean"].unsqueeze(-2)).sum(-1)

    def unproject_values(self, values: torch.Tensor, state: State, spec: LayerSpec) -> torch.Tensor:
        """Decoded values, or sums of them, as values of the model; linear. Override together with ``maps_values``.

        Parameters
        ----------
        values : Tensor, float32 [batch, num_kv_heads, n, value_format.width]

        Returns
        -------
        Tensor, float32 [batch, num_kv_heads, n, head_dim]
        """
        return values

    def encode_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor, prompt: bool
    ) -> Fields:
        """Transform and encode whole blocks; ``prompt`` says whether they belong to the sequence's first call.

        ``state`` is a dict of the caller's own, and :meth:`encode_values` gets the same one right afterwards with the values
        of these tokens: what keys determine for values may be left in it.
        """
        return self.key_format(spec).encode(self.transform_keys(keys, state, spec, positions))

    def encode_values(self, values: torch.Tensor, state: State, spec: LayerSpec, prompt: bool) -> Fields:
        """Encode whole blocks of values, float32 [batch, num_kv_heads, tokens, head_dim]."""
        return self.value_format(spec).encode(values)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def affine(self, spec: LayerSpec, operand: str, axis: str, mode: str = "asym") -> AffineGroups:
        """An affine format with this method's options; refuses shapes by name.

        Raises
        ------
        MethodError
            If ``head_dim`` does not suit the group size.
        """
        bits = self.key_bits if operand == "key" else self.value_bits
        try:
            return AffineGroups(spec.head_dim, self.block, spec.operand(operand), bits, axis, mode, self.group)
        except ValueError as error:
            raise MethodError(f"{self.name}: {error}") from None


def _render(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
