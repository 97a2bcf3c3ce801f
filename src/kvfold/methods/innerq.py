"""InnerQ: groups along the contraction of attention's products (Tayaranian et al.)."""

from dataclasses import dataclass

import torch

from kvfold.errors import MethodError
from kvfold.formats import AffineGroups, Fields, Format
from kvfold.methods.base import LayerSpec, Method, Observation, State

MODES = ("asym", "sym", "hybrid", "hybrid_prefill")

FLOOR = 0.03
"""Smallest norm of a channel, relative to its head's largest; binds where a channel is below a thousandth of another."""


@dataclass(frozen=True)
class InnerQ(Method):
    """Keys per token (``group`` channels), values per channel (``group`` tokens): a scale multiplies an accumulator.

    Parameters
    ----------
    mode : {"asym", "sym", "hybrid", "hybrid_prefill"}
        Zero-point and unsigned code, sign and magnitude, the better of the two per group, or that for the prompt (the
        sequence's first call) and ``sym`` afterwards.
    normalize : bool
        Divide keys by ``n_c = sqrt(max_t |K_tc|)`` per sequence, head and channel, and multiply queries by it (sec.
        4.3).
    """

    sink: int = 32
    recent: int = 96
    center: bool = True
    mode: str = "hybrid"
    normalize: bool = True

    name = "innerq"
    summary = "groups along the inner dimension, hybrid symmetric/asymmetric, normalized key channels"
    paper = "InnerQ: Hardware-aware Tuning-free Quantization of KV Cache for Large Language Models"
    url = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise MethodError(f"{self.name}: mode={self.mode} is not allowed; allowed: {', '.join(MODES)}")

    @property
    def stateful(self) -> bool:
        return self.center or self.normalize

    @property
    def kernel_encodes(self) -> bool:
        return True

    def group_mode(self, prompt: bool) -> str | None:
        return "sym" if self.mode == "hybrid_prefill" and not prompt else None

    @property
    def _stored_mode(self) -> str:
        return "hybrid" if self.mode == "hybrid_prefill" else self.mode

    def key_format(self, spec: LayerSpec) -> AffineGroups:
        return self.affine(spec, "key", axis="channel", mode=self._stored_mode)

    def value_format(self, spec: LayerSpec) -> AffineGroups:
        return self.affine(spec, "value", axis="token", mode=self._stored_mode)

    def observe(self, seen: Observation, spec: LayerSpec) -> State:
        state = super().observe(seen, spec)
        if self.normalize:
            low, high = seen.key_range()
            mean = state["mean"] if self.center else 0.0
            norm = (high - mean).maximum(mean - low).sqrt()  # of the largest |key - mean|
            # a channel near zero in the first tokens would make outliers of later ones, or, left as it is among small
            # channels, get an error of their groups' size times one: it is held at a fraction of the head's largest
            floor = FLOOR * norm.amax(-1, keepdim=True)
            state["norm"] = torch.where(floor > 0, norm.maximum(floor), torch.ones_like(norm))
        return state

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        keys = super().transform_keys(keys, state, spec, positions)
        return keys / state["norm"].unsqueeze(-2) if self.normalize else keys

    def restore_keys(
        self, stored: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        stored = stored * state["norm"].unsqueeze(-2) if self.normalize else stored
        return super().restore_keys(stored, state, spec, positions)

    def project_queries(
        self, queries: torch.Tensor, state: State, spec: LayerSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        projected, bias = super().project_queries(queries, state, spec)
        return (projected * state["norm"].unsqueeze(-2) if self.normalize else projected), bias

    def _encode(self, form: Format, x: torch.Tensor, prompt: bool) -> Fields:
        assert isinstance(form, AffineGroups)
        return form.encode(x, mode=self.group_mode(prompt))

    def encode_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor, prompt: bool
    ) -> Fields:
        return self._encode(self.key_format(spec), self.transform_keys(keys, state, spec, positions), prompt)

    def encode_values(self, values: torch.Tensor, state: State, spec: LayerSpec, prompt: bool) -> Fields:
        return self._encode(self.value_format(spec), values, prompt)
