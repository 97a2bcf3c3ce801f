"""InnerQ: groups along the contraction of attention's products (Tayaranian et al., 2026, arXiv 2602.23200)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvfold.formats import AffineGroups, Fields, Format
from kvfold.methods.base import LayerSpec, Method, State, store
from kvfold.methods.options import Problem

MODES = ("asym", "sym", "hybrid", "hybrid_prefill")


@dataclass(frozen=True)
class InnerQ(Method):
    """Keys per token (``group`` channels), values per channel (``group`` tokens): a scale multiplies an accumulator.

    Parameters
    ----------
    mode : {"asym", "sym", "hybrid", "hybrid_prefill"}
        Zero-point and unsigned code, sign and magnitude, the better of the two per group, or that for the prompt (the
        sequence's first call) and ``sym`` afterwards.
    normalize : bool
        Divide keys by ``n_c = sqrt(max_t |K_tc|)`` per page, head and channel, and multiply queries by it (sec. 4.3). The
        paper's norms, one per sequence from its whole prompt, are those of ``paper=true``.
    """

    center: str = "page"
    mode: str = "hybrid"
    normalize: bool = True

    name = "innerq"
    summary = "groups along the inner dimension, hybrid symmetric/asymmetric, normalized key channels"
    source = "InnerQ: Hardware-aware Tuning-free Quantization of KV Cache for Large Language Models (arXiv 2602.23200)"
    url = "https://arxiv.org/abs/2602.23200"
    published = {"center": "false"}  # noqa: RUF012
    centers = True

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.mode not in MODES:
            yield Problem("mode", MODES)

    @property
    def kernel_encodes(self) -> bool:
        return True

    def group_mode(self, prompt: bool) -> str | None:
        return "sym" if self.mode == "hybrid_prefill" and not prompt else None

    @property
    def _stored_mode(self) -> str:
        return "hybrid" if self.mode == "hybrid_prefill" else self.mode

    def key_format(self, spec: LayerSpec) -> Format:
        inner = self.affine(spec, "key", axis="channel", mode=self._stored_mode)
        return self.paged(inner, self.centered, "max" if self.normalize else "")

    def value_format(self, spec: LayerSpec) -> AffineGroups:
        return self.affine(spec, "value", axis="token", mode=self._stored_mode)

    def encode_keys(
        self,
        keys: torch.Tensor,
        state: State,
        spec: LayerSpec,
        positions: torch.Tensor,
        prompt: bool,
        page: Fields | None = None,
    ) -> Fields:
        return store(self.key_format(spec), keys, page, mode=self.group_mode(prompt))

    def encode_values(
        self, values: torch.Tensor, state: State, spec: LayerSpec, prompt: bool, page: Fields | None = None
    ) -> Fields:
        return self.value_format(spec).encode(values, mode=self.group_mode(prompt))
