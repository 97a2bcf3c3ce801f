"""ZipCache: salient tokens with more bits (He et al., NeurIPS 2024, arXiv 2405.14256)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import Fields, Format, MixedTokens
from kvfold.formats.affine import to_fp16
from kvfold.methods.base import QUERY_WINDOW, LayerSpec, Method, Observation, State, store
from kvfold.methods.options import Numbers, Problem

RATIO = Numbers(0, 1, 0)
EXTRA = (1, 2, 4)
"""Bits that a salient token may have more."""

SCORES = "salience"
"""Entry of a call's state under which the keys leave their tokens' scores for the values."""


@dataclass(frozen=True)
class ZipCache(Method):
    """Of every block, the share ``ratio`` of tokens that attention favours has ``salient_bits``, the others ``bits``.

    Keys are quantized per channel over the block, values per token after each channel was divided by the square root of
    its largest magnitude (channel-separable token-wise quantization, sec. 4.1).

    The paper ranks all tokens by the mean attention that probe tokens pay them (5 % random, 5 % newest; eq. 8), and
    anew every 100 tokens. A page that never changes cannot follow. So here the probes are random ones of the newest queries
    before 128, 256, 512, ... tokens (under ``paper=true``: of all before the first packing), which look at every block when it
    is packed; the number of salient tokens per block is fixed; and each KV head has its own. The norms of values' channels
    belong to a page (``paper=true``: to the sequence).

    Parameters
    ----------
    ratio : float
        Share of salient tokens (the paper: 0.6; its published script calls 0.4 the ``unimportant_ratio``).
    salient_bits : int
        Bits of a salient token: 1, 2 or 4 more than ``bits``.
    probes : int
        Queries per KV head that find salient tokens.
    seed : int
        Of their choice.
    """

    group: int = 128
    ratio: float = 0.6
    salient_bits: int = 4
    probes: int = 32
    seed: int = 0

    name = "zipcache"
    summary = "salient tokens at 4 bits, the others at 2"
    source = (
        "ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification (arXiv 2405.14256)"
    )
    url = "https://arxiv.org/abs/2405.14256"
    query_window = QUERY_WINDOW
    values_need_keys = True

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.ratio not in RATIO:
            yield Problem("ratio", RATIO)
        if self.probes < 1:
            yield Problem("probes", Numbers(1))
        for bits in (self.key_bits, self.value_bits):
            if self.salient_bits - bits not in EXTRA:
                yield Problem("salient_bits", [bits + more for more in EXTRA], f" is not allowed beside {bits} bits")

    def _format(self, spec: LayerSpec, operand: str) -> MixedTokens:
        bits, axis = (self.key_bits, "token") if operand == "key" else (self.value_bits, "channel")
        salient = round(self.ratio * self.block)
        with self.refusing():
            extra = self.salient_bits - bits
            return MixedTokens(spec.head_dim, self.block, spec.operand(operand), bits, extra, salient, axis)

    def key_format(self, spec: LayerSpec) -> MixedTokens:
        return self._format(spec, "key")

    def value_format(self, spec: LayerSpec) -> Format:
        return self.paged(self._format(spec, "value"), mean=False, norm="max")

    @property
    def kernel_encodes(self) -> bool:
        return True

    @property
    def most_probes(self) -> int:
        return self.probes

    def observe(self, seen: Observation, spec: LayerSpec) -> State:
        queries = seen.queries.unflatten(1, (spec.num_kv_heads, -1)).flatten(2, 3)  # all query heads of a KV head
        picked = _picked(queries.shape[2], self.probes, self.seed, queries.device)
        return {"probe": to_fp16(queries[..., picked, :])}

    def salience(self, keys: torch.Tensor, state: State, head_dim: int) -> torch.Tensor:
        """Mean attention that the probes pay each token of a block, float32 [batch, num_kv_heads, tokens] (eq. 8).

        A probe's attention is normalized over the block, since only the order within a block counts. Probes keep the
        rotation of where they stood.
        """
        blocks = keys.unflatten(-2, (-1, self.block))  # one product per block, whatever the call's length
        probe = state["probe"] if state["probe"].dim() == 5 else state["probe"].unsqueeze(2)
        scores = blocks @ probe.float().transpose(-1, -2) / math.sqrt(head_dim)
        return scores.softmax(-2).mean(-1).flatten(-2)

    def encode_keys(
        self,
        keys: torch.Tensor,
        state: State,
        spec: LayerSpec,
        positions: torch.Tensor,
        prompt: bool,
        page: Fields | None = None,
    ) -> Fields:
        score = self.salience(keys, state, spec.head_dim)
        state[SCORES] = score
        return self.key_format(spec).encode(keys, score)

    def encode_values(
        self, values: torch.Tensor, state: State, spec: LayerSpec, prompt: bool, page: Fields | None = None
    ) -> Fields:
        return store(self.value_format(spec), values, page, score=state[SCORES])


@lasting(64)
def _picked(queries: int, probes: int, seed: int, device: torch.device) -> torch.Tensor:
    """Which queries are probes, int64 [probes], ascending; to bring them to a device waits for it."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randperm(queries, generator=draw, device="cpu")[:probes].sort().values.to(device)
