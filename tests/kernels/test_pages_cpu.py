"""Pages on the CPU: its kernel, which scales and rotates the query once per page, against attention over decoded keys."""

import pytest
import torch

from helpers import feed, layer, spec, tokens
from kvfold.kernels import REGISTRY, NewTokens

pytest.importorskip("numba")

SERVED = (
    "fold",
    "fold:bits=1",
    "fold:bits=2",
    "fold:bits=4",
    "fold:bits=8",
    "fold:rotation=1",
    "fold:rotation=64",
    "fold:normalize=false",
    "fold:center=false",
    "fold:group=64",
    "innerq",
    "innerq:mode=asym",
    "innerq:mode=sym,group=16",
    "innerq:normalize=false",
)


def plain(head_dim: int = 64):
    return spec(head_dim, fragments=False, dtype=torch.float32)


def over_decoded(of, queries, keys, values):
    """Attention of new tokens over everything as :meth:`FoldedLayer.decoded` gives it, and over themselves."""
    count = queries.shape[2]
    old = [of.decoded(row) for row in range(len(of.lens))]
    longest = max(of.lens)
    outs = []
    for row, (k, v) in enumerate(old):
        k, v = torch.cat([k, keys[row]], 1), torch.cat([v, values[row]], 1)
        per_kv = queries.shape[1] // k.shape[0]
        k, v = (t.repeat_interleave(per_kv, 0) for t in (k, v))
        mask = torch.ones(count, k.shape[1], dtype=torch.bool).tril(k.shape[1] - count)
        outs.append(torch.nn.functional.scaled_dot_product_attention(queries[row], k, v, attn_mask=mask, scale=0.125))
    assert longest
    return torch.stack(outs)


def call(of, count: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    batch, shape = len(of.lens), of.spec
    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (torch.randn(batch, n, count, shape.head_dim, generator=generator) for n in sizes)
    return of.reader.call(q, NewTokens(k, v), 0.125), over_decoded(of, q, k, v)


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got - truth).norm() / truth.norm())


@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("method", SERVED)
def test_the_kernel_attends_as_over_decoded_keys_and_values(method, count):
    of = feed(layer(method, plain()), tokens(2, 600, shape=plain()), [200, 1, 399])
    assert of.kernel.name == "cpu"
    attention, truth = call(of, count)
    assert error(of.kernel.attend(attention), truth) < 3e-6


@pytest.mark.parametrize("head_dim", [80, 96, 128])
def test_other_head_sizes(head_dim):
    of = feed(layer("fold", plain(head_dim)), tokens(1, 400, shape=plain(head_dim)))
    assert of.kernel.name == "cpu"
    attention, truth = call(of, 2)
    assert error(of.kernel.attend(attention), truth) < 3e-6


@pytest.mark.parametrize(
    "method", ["fold", "innerq", "qjl", "turboquant", "gear", "zipcache", "kivi", "innerq:paper=true"]
)
def test_long_calls_read_each_piece_with_its_own_pages(method):
    """More than 64 query tokens are attended to in pieces of 2,048 packed ones; a piece must bring its own statistics."""
    of = feed(layer(method, plain()), tokens(1, 4700, shape=plain()))
    assert of.packed[0] > 2 * 2048
    attention, truth = call(of, 70)
    assert error(of.kernel.attend(attention), truth) < 3e-6
    assert error(REGISTRY["reference"].attend(attention), truth) < 3e-6


def test_storage_that_grew_to_several_slabs():
    of = feed(layer("fold", plain()), tokens(1, 900, shape=plain()), [300, *[1] * 600])
    assert len(of.slabs) > 1 and all(slab.first % 4 == 0 for slab in of.slabs)
    attention, truth = call(of, 1)
    assert error(of.kernel.attend(attention), truth) < 3e-6


def test_fields_are_cut_at_pages_only():
    form = layer("fold", plain()).key_format
    fields = form.encode(torch.randn(1, 1, 512, 64))
    assert form.take(fields, 6, 4)["mean"].shape[2] == 2 and form.take(fields, 6, 4)["codes"].shape[2] == 6
    with pytest.raises(ValueError, match="a page begins every 4 blocks"):
        form.take(fields, 4, 2)
