"""Pages: what they hold is read from their own bytes, and their statistics suit the tokens they have."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfold
from helpers import OF_FIRST_PACKING, assert_same_content, feed, layer, spec, tokens
from kvfold.formats import (
    PAGE,
    AffineGroups,
    Dense,
    Hadamard,
    Lookup,
    LowRank,
    Paged,
    PagedFormat,
    Rotation,
    SignSketch,
    Sketch,
    SketchedResidual,
    SplitSketch,
    UniformTokens,
)
from kvfold.formats.paged import NORM_STEPS, norms
from kvfold.formats.uniform import FITS, STEP

VARIANTS = ("fold:group=64", "fold:rotation=1", "qjl:outliers=8,normalize=false", "innerq:recent=10", "gear:group=64")
PAGED = [name for name in (*kvfold.DEFAULT, *VARIANTS) if name not in OF_FIRST_PACKING]
"""All methods but those whose statistics belong to a sequence, which test_cache.py lists with their reasons."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- pages in a layer ------------------------------------------------------------------------------------------------


def stored(of):
    """Packed vectors of all sequences as formats decode them, before rotations, [batch, heads, pages, 128, width]."""
    sides = []
    for form, side in ((of.key_format, "keys"), (of.value_format, "values")):
        decoded = torch.cat([form.decode(getattr(slab, side)) for slab in of.slabs], 2)
        sides.append(decoded[:, :, : decoded.shape[2] // PAGE * PAGE].unflatten(2, (-1, PAGE)))
    return sides


@pytest.mark.parametrize("name", PAGED)
def test_a_page_decodes_from_its_own_bytes(name):
    """Pages that are moved between positions and sequences, all their fields together, decode as before, bit for bit."""
    count = 6
    length = 32 + 96 + PAGE * count
    of = layer(name, max_length=length)
    method = of.method
    new = tuple(t * (1 + torch.arange(length).div(PAGE).view(-1, 1)) for t in tokens(2, length, seed=3))
    feed(of, new)
    (slab,) = of.slabs
    before = stored(of)
    whole = of.packed[0] // PAGE
    assert whole >= count - 1 and method.page in (0, PAGE)
    order = torch.randperm(2 * whole, generator=torch.Generator().manual_seed(1))
    for form, fields in ((of.key_format, slab.keys), (of.value_format, slab.values)):
        own = form.page_fields() if isinstance(form, PagedFormat) else {}
        for field, tensor in fields.items():
            per_page = 1 if field in own else PAGE // of.block
            pages = tensor[:, :, : whole * per_page].unflatten(2, (whole, per_page))
            flat = pages.transpose(1, 2).flatten(0, 1)[order]  # pages of both sequences, all heads together
            moved = flat.unflatten(0, (2, whole)).transpose(1, 2).flatten(2, 3)
            fields[field][:, :, : whole * per_page] = moved
    for old, now in zip(before, stored(of), strict=True):
        flat = old[:, :, :whole].transpose(1, 2).flatten(0, 1)[order]
        assert torch.equal(now[:, :, :whole].transpose(1, 2).flatten(0, 1), flat)
        assert not torch.equal(now[:, :, :whole], old[:, :, :whole])


@pytest.mark.parametrize("name", PAGED)
def test_a_sequences_state_is_not_read(name):
    """What encoders know of a sequence is gone: nothing that was stored reads any different."""
    of = feed(layer(name), tokens(2, 500))
    before = [of.decoded(row) for row in range(2)]
    of.following.state = {n: torch.full_like(t, float("nan")) for n, t in of.following.state.items()}
    of.following.ring = None
    assert not any(of.slabs.shared)
    for row in range(2):
        assert all(torch.equal(a, b) for a, b in zip(before[row], of.decoded(row), strict=True))


@pytest.mark.parametrize(
    "name", ["fold", "innerq", "qjl", "turboquant", "gear", "zipcache", "qjl:outliers=8,normalize=false"]
)
@pytest.mark.parametrize("kept", [1, 31, 32, 33, 95, 127, 128, 129, 150, 256])
def test_a_crop_into_a_page_makes_its_statistics_anew_if_nothing_of_it_stays(name, kept):
    """The blocks that stay keep their bytes and their page's statistics; a page of which none stays is a new one."""
    new, later = tokens(1, 600, seed=1), tuple(5 * t for t in tokens(1, 600, seed=2))
    of = feed(layer(name), new)
    before = of.decoded(0)
    length = 32 + kept
    of.crop(-(600 - length))
    whole = kept // of.block * of.block
    assert of.packed == [whole]
    left = of.decoded(0)
    feed(of, later, [7, 300, 293], start=length)
    now = of.decoded(0)
    for a, b in zip(before, now, strict=True):
        assert torch.equal(a[:, : 32 + whole], b[:, : 32 + whole])  # what stays packed
    # from the first page that is wholly new on, it is as in a sequence that began with what is there now
    fresh = layer(name)
    keys = torch.cat([left[0][None], later[0]], 2)
    values = torch.cat([left[1][None], later[1]], 2)
    queries = torch.cat([new[2][:, :, :length], later[2]], 2)
    feed(fresh, (keys, values, queries))
    start = 32 + -(-whole // PAGE) * PAGE
    if name != "zipcache":  # whose probes looked at other queries when the blocks were packed before
        for a, b in zip(now, fresh.decoded(0), strict=True):
            assert torch.equal(a[:, start:], b[:, start:])
    for a, x in zip(now, (later[0], later[1]), strict=True):
        assert a.isfinite().all()
        assert float((a[:, length:] - x[0]).norm() / x.norm()) < 1.5


@pytest.mark.parametrize("name", [n for n in PAGED if n != "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_layers_store_what_float32_ones_do_of_the_same_tokens(name, dtype):
    new = tuple(t.to(dtype) for t in tokens(1, 450, seed=2))
    half, full = feed(layer(name, spec(dtype=dtype)), new), feed(layer(name), tuple(t.float() for t in new))
    assert half.dtype == dtype
    for a, b in zip(half.decoded(0), full.decoded(0), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["fold", "squat", "zipcache", "gear", "qjl"])
def test_inference_mode_and_gradients_make_no_difference(name):
    new = tokens(1, 450, seed=2)
    with torch.inference_mode():
        inside = feed(layer(name), tuple(t.clone() for t in new), [300, 1, 149])
    with torch.enable_grad():
        graded = feed(layer(name), tuple(t.clone().requires_grad_() for t in new), [300, 1, 149])
    assert_same_content(inside, graded)


# ---- Paged -----------------------------------------------------------------------------------------------------------


def dense(page: int = PAGE, seen: int = PAGE, block: int = 32, **options) -> Paged:
    return Paged(64, block, "key", Dense(64, block, "key", torch.float32), page=page, seen=seen, **options)


@pytest.mark.parametrize("seen", [32, 64, 128])
def test_statistics_are_those_of_the_tokens_that_are_seen(seen):
    x = randn(2, 3, 300 // 32 * 32 + 32, 64) * (1 + randn(1, 3, 1, 64, seed=1).abs()) + 3
    form = dense(seen=seen, norm="rms")
    fields = form.encode(x)
    assert fields["mean"].shape == fields["norm"].shape == (2, 3, 3, 64)
    for page in range(3):
        first = x[:, :, PAGE * page : PAGE * page + seen]
        mean = first.mean(-2).half()
        assert torch.equal(fields["mean"][:, :, page], mean)
        size = (first - mean.float().unsqueeze(-2)).square().mean(-2).pow(0.25)
        found = norms(fields["norm"][:, :, page])
        assert ((found / (size / size.amax(-1, keepdim=True))).log2().abs() <= 0.5 / NORM_STEPS + 1e-4).all()
    changed = x.clone()
    for page in range(3):
        changed[:, :, PAGE * page + seen : PAGE * (page + 1)] *= 7  # what is not seen
    again = form.encode(changed)
    assert all(torch.equal(fields[n], again[n]) for n in ("mean", "norm"))
    torch.testing.assert_close(form.decode(again), changed, atol=1e-4, rtol=1e-5)


def test_a_last_page_may_be_shorter_than_what_is_seen():
    x = randn(1, 2, 160, 64)
    form = dense(norm="max")
    whole, short = form.encode(x), form.encode(x[:, :, 128:])
    assert torch.equal(whole["mean"][:, :, 1:], short["mean"]) and torch.equal(whole["norm"][:, :, 1:], short["norm"])


@pytest.mark.parametrize("norm", ["rms", "max"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_norms_have_a_floor(norm, scale):
    """A channel that is silent where statistics are taken is divided by 1/40 of the largest norm, not by nothing."""
    x = scale * randn(1, 1, 128, 64)
    x[..., 7] = 0
    x[..., 9] *= 1e-9
    form = dense(norm=norm, mean=False)
    codes = form.statistics_of(x)["norm"][0, 0, 0]
    assert codes[7] == codes[9] == 255
    assert norms(codes).min() == pytest.approx(2 ** (-255 / NORM_STEPS)) and norms(codes).max() == 1
    assert (form.statistics_of(torch.zeros(1, 1, 128, 64))["norm"] == 0).all()  # norms of 1


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    growth=st.sampled_from([1.0, 10.0, 1000.0]),
    name=st.sampled_from(["fold", "innerq", "turboquant", "qjl", "gear", "zipcache", "fold:bits=8", "kivi"]),
    recent=st.sampled_from([0, 40, 96]),
    silent=st.booleans(),
)
def test_tokens_that_outgrow_their_pages_statistics_stay_finite_and_near(growth, name, recent, silent):
    joint = "," if ":" in name else ":"
    keys, values, queries = tokens(1, 700, seed=4)
    if silent:
        keys[:, :, :, 3] = 0
    seen = (torch.arange(700) - 32) % PAGE < 32
    grown = torch.where(seen, 1.0, growth).view(-1, 1)
    if silent:
        keys[..., 3] = torch.where(seen, 0.0, 1.0) * queries[:, :2, :, 3]
    keys, values = keys * grown, values * grown
    of = feed(layer(f"{name}{joint}recent={recent}"), (keys, values, queries))
    for decoded, x in zip(of.decoded(0), (keys[0], values[0]), strict=True):
        assert decoded.isfinite().all()
        error = (decoded - x).norm(dim=-1) / x.norm(dim=-1)
        assert float(error[:, ~seen].max()) < 4 and float(error[:, ~seen].mean()) < 1.2


@pytest.mark.parametrize("value", [6e4, 1e10, 3e38])
@pytest.mark.parametrize("name", ["fold", "innerq", "turboquant", "qjl", "gear", "zipcache"])
def test_one_huge_token_of_a_page_leaves_the_others_finite(name, value):
    keys, values, queries = tokens(1, 500)
    keys[:, :, 100], values[:, :, 100] = value, -value
    of = feed(layer(name), (keys, values, queries))
    assert all(side.isfinite().all() for side in of.decoded(0))


def test_pages_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="block=96: a page of 128 tokens is no multiple"):
        dense(block=96)
    with pytest.raises(ValueError, match="seen=16: allowed: from the block's 32 to the page's 128"):
        dense(seen=16)
    with pytest.raises(ValueError, match="norm=sum: allowed: none, rms, max"):
        dense(norm="sum")
    with pytest.raises(ValueError, match="inner: needs the block and operand"):
        Paged(64, 32, "value", Dense(64, 32, "key", torch.float32))


# ---- bases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "block"), [(64, 1), (64, 2), (64, 32), (64, 64), (80, 16), (96, 32), (128, 64), (256, 256)]
)
def test_hadamard_is_orthonormal_and_its_rows_do_not_mix(dim, block):
    basis = Hadamard(dim, block)
    matrix = basis.apply(torch.eye(dim))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=1e-6, rtol=0)
    torch.testing.assert_close(basis.restore(matrix), torch.eye(dim), atol=1e-6, rtol=0)
    inside = torch.arange(dim) // block
    assert ((matrix != 0) == (inside[:, None] == inside)).all()
    x = randn(3, 77, dim)
    whole = basis.apply(x)
    for at in (0, 5, 76):
        assert torch.equal(basis.apply(x[1, at]), whole[1, at])
    assert torch.equal(basis.apply(x.flatten(0, 1)[3:100]), whole.flatten(0, 1)[3:100])
    assert block == 1 or not torch.equal(Hadamard(dim, block, seed=1).apply(x), whole)


def test_hadamard_refuses_blocks_by_name():
    for dim, block in ((64, 128), (80, 32), (64, 24)):
        with pytest.raises(
            ValueError, match=rf"rotation={block}: head_dim={dim} is not divisible by it; allowed: \[1, 2"
        ):
            Hadamard(dim, block)


@pytest.mark.parametrize("basis", [Rotation(64, 3), Sketch(64, 128, 3)], ids=["rotation", "sketch"])
def test_matrix_bases_do_not_depend_on_how_tokens_are_cut(basis):
    x = randn(2, 2, 256, 64)
    whole = basis.apply(x)
    for start, stop in ((0, 32), (32, 96), (128, 256)):
        assert torch.equal(basis.apply(x[:, :, start:stop]), whole[:, :, start:stop])
    assert torch.equal(basis.apply(x[1:]), whole[1:])


def test_a_rotation_is_undone_and_a_sketch_estimates():
    x = randn(1, 2, 64, 64)
    torch.testing.assert_close(Rotation(64, 3).restore(Rotation(64, 3).apply(x)), x, atol=1e-5, rtol=1e-5)
    sketch = Sketch(64, 128, 3)
    projected = sketch.apply(x)
    assert torch.equal(projected[..., 128], x.norm(dim=-1))
    torch.testing.assert_close(sketch.restore(projected[..., :128]), 128 * x, atol=1e-3, rtol=1e-4)  # two rotations


# ---- uniform levels --------------------------------------------------------------------------------------------------

BITS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("fit", FITS)
def test_the_scale_is_fitted_to_the_codes(bits, fit):
    form = UniformTokens(64, 32, "key", bits, fit)
    x = randn(2, 2, 64, 64) * randn(2, 2, 64, 1, seed=1).exp()
    decoded = form.decode(form.encode(x)).double()
    dot, square, size = (
        (a * b).sum(-1) for a, b in ((x.double(), decoded), (decoded, decoded), (x.double(), x.double()))
    )
    target = {"least": dot / square, "size": (size / square).sqrt(), "unbiased": size / dot}[fit]
    assert (target - 1).abs().max() < 2**-10  # the scale is fp16
    error = ((decoded - x).square().sum(-1) / size).mean()
    assert error < {1: 0.4, 2: 0.13, 3: 0.042, 4: 0.013, 8: 1e-4}[bits] * (1 if fit == "least" else 1.6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_search_of_scales_would_gain_little(bits):
    """Least squares over a fine grid of scales, with the nearest codes of each; a search of all would gain this much."""
    form = UniformTokens(64, 32, "key", bits)
    x = randn(1, 1, 64, 64)
    error = (form.decode(form.encode(x)) - x).square().sum(-1)
    base = x.square().mean(-1, keepdim=True).sqrt() * STEP[bits]
    best = torch.full_like(error, math.inf)
    for factor in torch.linspace(0.5, 1.6, 221):
        levels = form._levels(x, base * factor)
        scale = (x * levels).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True)
        best = torch.minimum(best, (scale * levels - x).square().sum(-1))
    assert (error / best).mean() < {1: 1.02, 2: 1.02, 3: 1.05, 4: 1.2}[bits]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    bits=st.sampled_from(BITS),
    fit=st.sampled_from(FITS),
    kind=st.sampled_from(["zero", "huge", "tiny", "denormal", "spike", "constant", "mixed"]),
    dim=st.sampled_from([16, 64, 80, 128]),
    operand=st.sampled_from(["key", "value", "plain"]),
)
def test_uniform_levels_of_extreme_vectors_are_finite_and_bounded(bits, fit, kind, dim, operand):
    form = UniformTokens(dim, 32, operand, bits, fit)
    noise = randn(1, 2, 64, dim)
    x = {
        "zero": lambda: torch.zeros_like(noise),
        "huge": lambda: 3e4 * noise.sign(),
        "tiny": lambda: 1e-6 * noise,
        "denormal": lambda: 1e-40 * noise,
        "spike": lambda: torch.where(noise > 2, 6e4, 1e-3 * noise),
        "constant": lambda: torch.full_like(noise, 3.7),
        "mixed": lambda: noise * torch.logspace(-8, 4, 64).view(-1, 1),
    }[kind]()
    fields = form.encode(x)
    decoded = form.decode(fields)
    assert decoded.isfinite().all() and decoded.shape == x.shape
    assert sum(t.nbytes for t in fields.values()) == 2 * 2 * form.block_bytes
    assert form.bits == pytest.approx(bits + 16 / dim)
    if kind == "zero":
        assert (decoded == 0).all()
    sizes, found = x.norm(dim=-1), decoded.norm(dim=-1)
    assert (found <= 3 * sizes + dim * 2**-24).all()
    if kind == "huge":  # magnitudes that are equal are a level of one bit
        assert bits != 1 or torch.allclose(decoded, x, rtol=2**-10)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 1000.0, 6e4])
@pytest.mark.parametrize("bits", BITS)
def test_constant_channels_of_a_page_are_exact(value, bits):
    """The page's mean is all there is of them, and what is left is zero."""
    x = torch.full((1, 2, 256, 64), value)
    inner = UniformTokens(64, 32, "key", bits)
    form = Paged(64, 32, "key", inner, norm="rms", basis=Hadamard(64, 32))
    assert torch.equal(form.decode(form.encode(x)), x)


def test_uniform_levels_refuse_by_name():
    for options, message in (
        ((64, 32, "key", 5), "bits=5"),
        ((64, 32, "key", 2, "most"), "fit=most: allowed: least, size, unbiased"),
        ((72, 32, "key", 2), "head_dim=72"),
        ((64, 48, "key", 2), "block=48"),
    ):
        with pytest.raises(ValueError, match=message):
            UniformTokens(*options)


# ---- low rank, sketches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 8])
@pytest.mark.parametrize("seen", [32, 128])
def test_low_rank_finds_what_its_inner_format_misses(rank, seen):
    """A residual of that rank comes back but for rounding; any other gets smaller; the best of rank r is nearly reached."""
    inner = AffineGroups(64, 32, "key", 2, "token")
    form = LowRank(64, 32, "key", inner, rank, loops=5, seen=seen)
    x = randn(2, 2, 256, 64) * torch.linspace(0.2, 4, 64)
    fields = form.encode(x)
    assert fields["basis"].shape == (2, 2, 2, 64, rank) and fields["row"].shape == (2, 2, 8, 32, rank)
    missed = x - inner.decode(inner.encode(x))
    left = x - form.decode(fields)
    assert (left.square().sum((-1, -2)) < missed.square().sum((-1, -2))).all()
    pages = missed.unflatten(-2, (-1, PAGE))
    if seen == PAGE:
        best = torch.linalg.svd(pages).S[..., rank:].square().sum(-1)
        assert (left.unflatten(-2, (-1, PAGE)).square().sum((-1, -2)) < 1.06 * best).all()
    basis = fields["basis"].float()
    torch.testing.assert_close(basis.mT @ basis, torch.eye(rank).expand(2, 2, 2, rank, rank), atol=2e-3, rtol=0)
    zero = form.encode(torch.zeros(1, 1, 128, 64))
    assert (form.decode(zero) == 0).all()


@pytest.mark.parametrize("outliers", [1, 8])
def test_a_split_sketch_reads_back_directions_and_keeps_its_page_apart(outliers):
    form = SplitSketch(64, 32, "key", (512, 512), outliers)
    x = randn(1, 2, 256, 64) + 3
    x[..., :128, 5] *= 20
    x[..., 128:, 9] *= 20
    fields = form.encode(x)
    assert (fields["outlier"][:, :, 0] == 5).any(-1).all() and (fields["outlier"][:, :, 1] == 9).any(-1).all()
    decoded = form.decode(fields)
    centred = x - fields["mean"].float().repeat_interleave(PAGE, 2)
    read = decoded - fields["mean"].float().repeat_interleave(PAGE, 2)
    similar = torch.nn.functional.cosine_similarity(centred, read, dim=-1)
    assert similar.mean() > 0.9
    assert form.page_bytes == 2 * 64 + outliers
    queries = randn(1, 2, 64, 64, seed=2)
    off = queries @ (decoded - x).mT
    assert off.mean().abs() < 0.05 * (queries @ centred.mT).std()  # unbiased


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_sketched_residual_is_unbiased_and_its_parts_are_those_of_its_formats(bits):
    levels = torch.linspace(-1.5, 1.5, 1 << bits)
    inner = Lookup(64, 32, "key", bits, tuple(levels.tolist()))
    form = SketchedResidual(64, 32, "key", inner, 1)
    x = randn(2, 2, 64, 64)
    fields = form.encode(x)
    own = {n: fields[n] for n in inner.fields()}
    assert fields.keys() == form.fields().keys()
    assert sum(t.nbytes for t in fields.values()) == 2 * 2 * 2 * form.block_bytes
    missed = x - inner.decode(own)
    signs = SignSketch(64, 32, "key", (64,), form.signs.gains)
    rest = signs.decode({n: fields[n] for n in signs.fields()})
    torch.testing.assert_close(form.decode(fields), inner.decode(own) + form.basis.restore(rest))
    torch.testing.assert_close(
        fields["rms"][..., 0].float().flatten(-2) * 8, missed.norm(dim=-1), rtol=2**-10, atol=1e-6
    )
    shrunk, read = ((x * d).sum() / x.square().sum() for d in (inner.decode(own), form.decode(fields)))
    assert abs(float(read) - 1) < 0.02 and abs(float(read) - 1) < abs(float(shrunk) - 1) + 0.02
