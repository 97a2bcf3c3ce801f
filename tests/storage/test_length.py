"""Errors do not grow with the length of a sequence.

Keys of real models (Qwen2's are the worst) have biases many times as large as what varies. RoPE turns them: fast channel pairs
within a page, slow ones over thousands of tokens. Statistics that were taken once, of a sequence's first tokens, fit less and
less.
"""

import pytest
import torch

import kvfold
from helpers import feed, layer, spec
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.formats import PagedFormat
from kvfold.methods import get
from kvfold.rope import Rope

DIM, HEADS, LONG, SHORT = 64, 2, 16_384, 2048
SHAPE = spec(DIM, heads=HEADS, kv_heads=HEADS, rope=Rope(10_000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)))
PAIRS = {1: 10.0, 20: 10.0, 28: 30.0, 29: 30.0, 30: 25.0, 31: 30.0}
"""Channel pairs with a bias, of turns from 8 to 47,000 tokens, and its size."""

EXCLUDED = {
    "kivi:paper=true": "the same as kivi but for its windows",
    "squat:paper=true": "the paper's subspace is that of the first call, with a weight that grows with its length",
    "squat_pre:paper=true": "the paper's subspace is that of the first call, with a weight that grows with its length",
    "innerq:paper=true": "the paper's norms are those of the first call",
    "qjl:paper=true": "the published sketch is of keys with their biases, which nothing of theirs survives",
    "qjl_outliers": "the paper's outlier channels are those of the first call",
    "turboquant:paper=true": "the published norms are those of keys with their biases",
    "gear:paper=true": "the paper's basis is that of the first call",
    "zipcache:paper=true": "the paper's probes and norms are those of the first call",
}
"""Published methods that have no statistics per page, each with its reason."""

TESTED = [name for name in kvfold.DEFAULT if name not in EXCLUDED]


@pytest.fixture(scope="module")
def sequence():
    """Keys, values and queries after RoPE, [1, HEADS, LONG, DIM]."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    bias = torch.zeros(HEADS, DIM)
    for pair, size in PAIRS.items():
        for channel in (pair, pair + DIM // 2):
            bias[:, channel] = size * randn(HEADS).sign() * (0.5 + torch.rand(HEADS, generator=generator))
    keys = randn(1, HEADS, LONG, DIM) + bias.unsqueeze(-2)
    values, queries = randn(1, HEADS, LONG, DIM), randn(1, HEADS, LONG, DIM)
    for pair in PAIRS:  # queries say little where keys are large: attention stays wide
        queries[..., [pair, pair + DIM // 2]] *= 0.05
    positions = torch.arange(LONG)[None, None]
    return SHAPE.rope.rotate(keys, positions), values, SHAPE.rope.rotate(1.5 * queries, positions)


def divergence(of: FoldedLayer, sequence, length: int) -> float:
    """Mean of KL(exact || folded) of the attention that the newest 64 queries pay to all tokens."""
    keys, _, queries = (t[0, :, :length] for t in sequence)
    asked = queries[:, -64:] / DIM**0.5
    exact, folded = ((asked @ k.transpose(-1, -2)).log_softmax(-1) for k in (keys, of.decoded(0)[0]))
    assert float((-(exact.exp() * exact).sum(-1)).mean()) > 4  # wide: hundreds of tokens count
    return float((exact.exp() * (exact - folded)).sum(-1).mean())


def divergences(name: str, sequence) -> tuple[float, float]:
    of = layer(name, SHAPE)
    part = lambda a, b: tuple(t[:, :, a:b] for t in sequence)  # noqa: E731
    feed(of, part(0, SHORT))
    short = divergence(of, sequence, SHORT)
    feed(of, part(SHORT, LONG), [LONG // 2 - SHORT, LONG // 2], start=SHORT)
    return short, divergence(of, sequence, LONG)


def test_every_method_is_tested_or_excluded_for_a_reason():
    assert set(TESTED) | EXCLUDED.keys() == set(kvfold.DEFAULT) and not set(TESTED) & EXCLUDED.keys()
    assert all(get(name).paper and why for name, why in EXCLUDED.items())
    assert not any(get(name).paper for name in TESTED)


@pytest.mark.parametrize("name", TESTED)
def test_divergence_does_not_grow_with_length(name, sequence):
    short, long = divergences(name, sequence)
    if name == "none":
        assert max(short, long) < 1e-6
        return
    assert 0 < long < 2 * short, f"{short:.4f} at {SHORT} tokens, {long:.4f} at {LONG}"


@pytest.mark.parametrize("name", ["fold", "innerq:mode=asym", "innerq:bits=4", "turboquant", "qjl"])
def test_statistics_of_the_first_page_alone_would_be_noticed(name, sequence, monkeypatch):
    """What the test above is for: the same formats with every page's statistics those of the first."""
    made = PagedFormat.statistics_of
    first: dict = {}

    def frozen(self, x):
        found = made(self, x)
        kept = first.setdefault(self.operand, {n: t[:, :, :1].clone() for n, t in found.items()})
        return {n: t.expand(-1, -1, found[n].shape[2], *t.shape[3:]) for n, t in kept.items()}

    monkeypatch.setattr(PagedFormat, "statistics_of", frozen)
    short, long = divergences(name, sequence)
    assert long > 2 * short, f"{short:.4f} at {SHORT} tokens, {long:.4f} at {LONG}"
