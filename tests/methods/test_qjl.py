"""QJL: what its estimator promises, and what it costs."""

import math

import pytest
import torch

from helpers import feed, layer, packed_fields, relative, same_bytes, spec, tokens
from kvfold.errors import MethodError
from kvfold.formats import SplitSketch
from kvfold.formats.basis import gain, projection
from kvfold.methods import get


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pairs(d: int, count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit queries and keys from parallel to orthogonal to opposite."""
    a, b = torch.linalg.qr(torch.randn(count, d, 2, generator=generator(3)))[0].unbind(-1)
    angle = torch.linspace(0, math.pi, count).unsqueeze(-1)
    return a, a * angle.cos() + b * angle.sin()


def gaussian_estimates(q: torch.Tensor, k: torch.Tensor, m: int, trials: int) -> torch.Tensor:
    """Definition 1 and eq. 3 as they stand, [trials, pairs]."""
    s = torch.randn(trials, m, q.shape[-1], generator=generator(7))
    signs = torch.where(s @ k.T >= 0, 1.0, -1.0)
    return math.sqrt(math.pi / 2) / m * k.norm(dim=-1) * ((s @ q.T) * signs).sum(-2)


def our_estimates(q: torch.Tensor, k: torch.Tensor, bits: int, trials: int) -> torch.Tensor:
    """What a layer of ``qjl:center=false,normalize=false`` reads as scores, through its stored bytes, seed by seed."""
    d = q.shape[-1]
    shape, out = spec(d, 1, 1), []
    keys = torch.nn.functional.pad(k, (0, 0, 0, 32 - k.shape[0])).view(1, 1, 32, d)
    positions = torch.zeros(1, 1, 32, dtype=torch.long)
    for seed in range(trials):
        method = get(f"qjl:center=false,normalize=false,group=16,k_bits={bits},seed={seed}")
        form = method.key_format(shape)
        decoded = form.decode(method.encode_keys(keys, {}, shape, positions, True))[0, 0, : k.shape[0]]
        out.append((q * decoded).sum(-1))
    return torch.stack(out)


def test_lemma_2_the_papers_estimator_is_unbiased():
    q, k = pairs(32)
    estimates = gaussian_estimates(3 * q, 2 * k, 32, 20_000)
    off = estimates.mean(0) - 6 * (q * k).sum(-1)
    assert (off.abs() < 4 * estimates.std(0) / math.sqrt(20_000)).all()


def test_lemma_2_our_estimator_is_unbiased_with_its_own_gain():
    d, trials = 16, 800
    q, k = pairs(d)
    estimates = our_estimates(3 * q, 2 * k, 2, trials)
    exact = 6 * (q * k).sum(-1)
    error = estimates.std(0) / math.sqrt(trials)
    assert ((estimates.mean(0) - exact).abs() < 4 * error + 6 * 2**-11).all()
    with_the_papers_gain = estimates.mean(0) * math.sqrt(math.pi / 2) / gain(d)
    assert ((with_the_papers_gain - exact).abs() > 6 * error)[[0, -1]].all()  # the test is fine enough to tell


def test_the_gain_of_rows_of_one_length():
    """``1 / E|u_1|`` over the sphere of radius sqrt(d): a one-dimensional integral, done numerically."""
    for d in (16, 64, 128):
        angle = torch.linspace(0, math.pi, 200_001, dtype=torch.float64)
        density = angle.sin() ** (d - 2)
        mean = float((density * angle.cos().abs()).sum() / density.sum()) * math.sqrt(d)
        assert gain(d) == pytest.approx(1 / mean, rel=1e-5)
    assert gain(64) == pytest.approx(math.sqrt(math.pi / 2) * (1 - 1 / 256), rel=1e-3)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.1), (0.3, 0.05), (0.2, 0.2)])
def test_lemma_5_distortion(epsilon, delta):
    q, k = pairs(32)
    m = math.ceil(4 / 3 * (1 + epsilon) / epsilon**2 * math.log(2 / delta))
    missed = (gaussian_estimates(q, k, m, 4000) - (q * k).sum(-1)).abs() > epsilon
    assert (missed.float().mean(0) <= delta).all()


def test_lemma_5_the_variance_it_rests_on():
    """Eq. 4 at l = 2 gives ``(pi / 2 |q|^2 |k|^2 - <q, k>^2) / m``."""
    q, k = pairs(32)
    estimates = gaussian_estimates(q, k, 64, 10_000)
    expected = (math.pi / 2 - (q * k).sum(-1).square()) / 64
    assert torch.allclose(estimates.var(0), expected, rtol=0.08)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_orthogonal_rows_distort_less_than_gaussian_ones(bits):
    q, k = pairs(32)
    ours = our_estimates(q, k, bits, 200).var(0)
    expected = (math.pi / 2 - (q * k).sum(-1).square()) / (32 * bits)
    assert (ours < 1.2 * expected).all() and ours.mean() < 0.8 * expected.mean()
    missed = (our_estimates(q, k, bits, 200) - (q * k).sum(-1)).abs() > 3 * expected.sqrt()
    assert missed.float().mean() < 0.01


def score_errors(m: int, keys: torch.Tensor, query: torch.Tensor, trials: int) -> torch.Tensor:
    """Largest relative error of an attention score, per trial."""
    s = torch.randn(trials, m, keys.shape[-1], generator=generator(9))
    signs = torch.where(s @ keys.T >= 0, 1.0, -1.0)
    estimate = math.sqrt(math.pi / 2) / m * keys.norm(dim=-1) * ((s @ query).unsqueeze(-2) @ signs).squeeze(-2)
    exact = (keys @ query).softmax(-1)
    return ((estimate.softmax(-1) - exact).abs() / exact).amax(-1)


def test_theorem_6_scores_are_kept_relatively_and_the_better_the_longer_the_sketch():
    n, r, epsilon = 256, 1.0, 0.3
    keys = torch.nn.functional.normalize(torch.randn(n, 32, generator=generator(0)), dim=-1) * r
    query = torch.nn.functional.normalize(torch.randn(32, generator=generator(1)), dim=-1) * r
    enough = math.ceil(2 * r**2 / epsilon**2 * math.log(n))
    assert (score_errors(enough, keys, query, 100) <= 3 * epsilon).float().mean() >= 0.99
    # a sketch four times as long halves the distortion
    few, many = (score_errors(m, keys, query, 100).mean() for m in (enough, 4 * enough))
    assert 0.4 < many / few < 0.6


def test_projections_are_deterministic_rotations():
    projection.cache_clear()
    torch.manual_seed(1)
    first = projection(160, 64, 0, "cpu").clone()
    projection.cache_clear()
    torch.manual_seed(2)
    torch.randn(3)
    assert torch.equal(first, projection(160, 64, 0, "cpu"))
    assert not torch.equal(first, projection(160, 64, 1, "cpu"))
    assert first.shape == (160, 64) and first.dtype == torch.float32
    for chunk in first.split(64):
        assert torch.allclose(chunk @ chunk.T, 64 * torch.eye(len(chunk)), atol=1e-3)


@pytest.mark.targets
def test_the_same_tokens_give_the_same_bytes_in_every_process_state():
    new, fields = tokens(1, 400), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        projection.cache_clear()
        fields.append([packed_fields(feed(layer(name), new), 0) for name in ("qjl_outliers", "turboquant", "zipcache")])
    for left, right in zip(*fields, strict=True):
        for a, b in zip(left, right, strict=True):
            assert all(same_bytes(a[n], b[n]) for n in a)


def test_outlier_channels_are_those_of_largest_norm_of_their_page_and_have_their_own_sketch():
    keys = tokens(1, 256)[0]
    big = torch.tensor([[[3, 17, 40], [5, 6, 63]], [[1, 2, 62], [0, 17, 33]]])  # of two pages, two heads
    for page in range(2):
        for head in range(2):
            keys[0, head, 128 * page : 128 * page + 128, big[page, head]] *= 12
    shape = spec()
    method = get("qjl:outliers=3,center=false,normalize=false,outlier_sketch=96")
    form = method.key_format(shape)
    assert isinstance(form, SplitSketch) and form.rows == (128, 96) and form.signs.sketches == (128, 96)
    fields = method.encode_keys(keys, {}, shape, torch.arange(256).view(1, 1, -1), True)
    assert torch.equal(fields["outlier"][0].transpose(0, 1).long(), big)
    where = torch.zeros(2, 2, 64, dtype=torch.bool).scatter(-1, big, True).repeat_interleave(128, 0)
    where = where.transpose(0, 1)[None]  # [1, heads, tokens, channels]
    for i, part in enumerate((keys.masked_fill(where, 0), keys.masked_fill(~where, 0))):
        sizes = fields["rms"][..., i].flatten(-2).float() * 8
        assert torch.allclose(sizes, part.norm(dim=-1), rtol=2**-11 * 1.1, atol=1e-6)
    tables = list(method.tables(shape, "cpu").values())
    assert [tuple(t.shape) for t in tables] == [(128, 64), (96, 64)]
    assert not torch.equal(tables[0][:96], tables[1])


def test_the_papers_outlier_channels_are_those_of_the_whole_prompt():
    keys, values, queries = tokens(1, 400)
    keys[:, :, :40, 3] *= 30  # large at first only
    keys[..., 17] *= 12
    of = feed(layer("qjl:paper=true,outliers=1"), (keys, values, queries), [300, 100])
    expected = keys[0, :, :300].square().sum(-2).argmax(-1)
    assert of.slabs.shared[0]["outlier"][0, :, 0, 0].long().equal(expected)


@pytest.mark.targets
def test_splitting_outliers_off_reduces_the_error():
    keys, values, queries = tokens(1, 400)
    keys[..., [3, 17]] *= 15

    def error(name):
        decoded = feed(layer(name), (keys, values, queries)).decoded(0)[0]
        asked = queries[0, :2].float()
        return relative(asked @ decoded.transpose(-1, -2), asked @ keys[0].float().transpose(-1, -2))

    assert error("qjl:outliers=2,center=false,normalize=false") < 0.85 * error(
        "qjl:center=false,normalize=false,k_bits=4"
    )


def test_channels_that_a_byte_cannot_number_are_refused_as_outliers():
    method = get("qjl:outliers=8,normalize=false")
    method.check_shape(spec(256))
    with pytest.raises(MethodError, match="outliers=8: a channel's number is a byte, and head_dim=512; allowed: 0"):
        method.check_shape(spec(512))


def test_early_layers_have_longer_sketches():
    method = get("qjl_outliers")
    early, late = (method.key_format(spec(layer_idx=i, num_layers=32)).signs.sketches for i in (14, 15))
    assert early == (192, 128) and late == (128, 128)
