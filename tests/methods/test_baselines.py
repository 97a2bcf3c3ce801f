"""The baselines' formulas, each against a plain statement of it."""

import dataclasses
import itertools
import math

import pytest
import torch

import kvfold
from kvfold import methods
from kvfold.artefact import ArtefactError, read
from kvfold.calibration import kvquant, vqllm
from kvfold.calibration.collect import layer_specs
from kvfold.calibration.run import calibrate
from kvfold.errors import MethodError
from kvfold.evaluation.text import Text, python_prose
from kvfold.formats import AffineGroups, Lookup, MixedTokens, Outliers, ResidualCodes
from kvfold.formats.basis import rotation
from kvfold.formats.lookup import ChannelScales
from kvfold.formats.lowrank import row_space
from kvfold.formats.residual import Codebook, choose
from kvfold.methods import LayerSpec, Observation
from kvfold.methods.turboquant import lloyd_max
from tiny_model import byte_tokenizer, tiny_llama


def spec(head_dim: int = 64, heads: int = 2, rope=None) -> LayerSpec:
    return LayerSpec(0, 1, 2 * heads, heads, head_dim, rope=rope)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms(error: torch.Tensor, truth: torch.Tensor) -> float:
    return float(error.norm() / truth.norm())


def positions(tokens: int) -> torch.Tensor:
    return torch.arange(tokens).view(1, 1, -1)


def observed(method, queries: torch.Tensor, spec: LayerSpec) -> dict:
    return method.observe(Observation(queries, torch.arange(queries.shape[-2]).unsqueeze(0)), spec)


def read_back(method, keys: torch.Tensor, values: torch.Tensor, spec: LayerSpec, state: dict | None = None):
    """Keys and values as they are read after they were stored."""
    state = dict(state or {})
    k = method.key_format(spec).decode(method.encode_keys(keys, state, spec, positions(keys.shape[-2]), True))
    v = method.value_format(spec).decode(method.encode_values(values, state, spec, True))
    return method.restore_keys(k, spec, positions(keys.shape[-2])), method.unproject_values(v, spec)


def keys_and_values(tokens: int = 512, d: int = 64, rank: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Like a model's: a few strong directions and a few large channels over noise."""
    scale = torch.ones(d).index_fill(0, torch.tensor([3, 17, 40]), 8.0)
    x = [
        randn(1, 2, tokens, rank, seed=s) @ randn(1, 2, rank, d, seed=s + 1) + randn(1, 2, tokens, d, seed=s + 2)
        for s in (10, 20)
    ]
    return x[0] * scale, x[1]


# ---- lookup tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("scaling", ["rms", "range", "channel"])
def test_lookup_picks_the_nearest_level(bits, scaling):
    levels = tuple(sorted(randn(1 << bits, seed=bits).tolist()))
    channels = ChannelScales(randn(2, 48), randn(2, 48).abs() + 0.1)
    form = Lookup(48, 32, "key", bits, levels, scaling, channels if scaling == "channel" else None)
    x = randn(3, 2, 64, 48, seed=1)
    decoded = form.decode(form.encode(x))
    if scaling == "channel":
        offset, factor = channels.center.unsqueeze(-2), channels.spread.unsqueeze(-2)
    elif scaling == "rms":
        offset, factor = 0.0, x.square().mean(-1, keepdim=True).sqrt()
    else:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        offset, factor = (low + high) / 2, (high - low) / 2
    nearest = ((x - offset) / factor).unsqueeze(-1).sub(torch.tensor(levels)).abs().amin(-1) * factor
    # scales are rounded to fp16
    torch.testing.assert_close((decoded - x).abs(), nearest, rtol=0, atol=4e-3 * max(map(abs, levels)))


def test_lookup_decodes_constants_and_zeros():
    form = Lookup(32, 32, "value", 2, (-1.0, -0.3, 0.3, 1.0), "range")
    x = torch.full((1, 1, 32, 32), 0.5)
    assert torch.equal(form.decode(form.encode(x)), x)
    zeros = torch.zeros(1, 1, 32, 32)
    rms_form = Lookup(32, 32, "value", 2, (-1.5, -0.5, 0.5, 1.5))
    assert torch.equal(rms_form.decode(rms_form.encode(zeros)), zeros)


# ---- TurboQuant ------------------------------------------------------------------------------------------------------

# J. Max, Quantizing for minimum distortion (1960), Table I; S. Lloyd (1982): levels and mean squared error
GAUSSIAN = {
    1: ([0.7980], 0.3634),
    2: ([0.4528, 1.510], 0.1175),
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_lloyd_max_matches_the_published_constants(bits):
    levels = torch.tensor(lloyd_max(bits), dtype=torch.float64)
    expected, mse = GAUSSIAN[bits]
    torch.testing.assert_close(levels[len(levels) // 2 :], torch.tensor(expected).double(), rtol=0, atol=6e-4)
    assert torch.equal(levels, -levels.flip(0))
    x = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    density = (-x.square() / 2).exp()
    error = (x.unsqueeze(-1) - levels).abs().amin(-1).square()
    assert float((error * density).sum() / density.sum()) == pytest.approx(mse, rel=2e-3)


def test_lloyd_max_of_a_sphere_is_narrower_and_tends_to_the_gaussian():
    sphere, gauss = lloyd_max(3, 64), lloyd_max(3)
    assert sphere[-1] < gauss[-1]
    assert lloyd_max(3, 4096)[-1] == pytest.approx(gauss[-1], abs=2e-3)


def test_rotation_is_orthogonal_and_seeded():
    r = rotation(64, 3, "cpu")
    torch.testing.assert_close(r @ r.T, torch.eye(64), atol=1e-5, rtol=0)
    assert not torch.equal(r, rotation(64, 4, "cpu"))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_turboquant_has_the_error_of_its_codebook_whatever_the_data(bits):
    method = methods.get(f"turboquant:paper=true,bits={bits}")
    x = randn(1, 2, 512, 128).exp() * torch.linspace(0, 3, 128)  # nothing like a Gaussian
    for seen in read_back(method, x, x, spec(128)):
        assert rms(seen - x, x) ** 2 == pytest.approx(GAUSSIAN[bits][1], rel=0.08)


@pytest.mark.parametrize("bits", [2, 3])
def test_turboquant_residual_makes_inner_products_unbiased(bits):
    """Theorem 2: averaged over rotations, the estimate is the inner product; without the residual it is too small."""
    x = randn(1, 2, 32, 64, seed=1)
    sums = {True: torch.zeros(()), False: torch.zeros(())}
    for residual in sums:
        for seed in range(100):
            method = methods.get(f"turboquant:paper=true,k_bits={bits},residual={residual},seed={seed}")
            decoded, _ = read_back(method, x, x, spec())
            sums[residual] = sums[residual] + (x * decoded).sum() / x.square().sum() / 100
    assert float(sums[True]) == pytest.approx(1, abs=0.006)
    assert float(sums[False]) == pytest.approx(1 - GAUSSIAN[bits][1], abs=0.006)


@pytest.mark.parametrize("name", ["turboquant", "turboquant:residual=true,bits=3", "turboquant:bits=4"])
def test_turboquants_norms_and_mean_help_where_keys_have_constant_and_large_channels(name):
    """What kvfold adds to the published method costs nothing on Gaussian keys and much less on such keys."""
    joint = "," if ":" in name else ":"
    x = randn(1, 2, 256, 64)
    real = x * torch.ones(64).index_fill(0, torch.tensor([3, 17]), 6.0) + 20 * randn(1, 2, 1, 64, seed=3)
    queries = randn(1, 2, 100, 64, seed=4)

    def error(name, keys):
        decoded, _ = read_back(methods.get(name), keys, x, spec())
        off = queries @ (decoded - keys).transpose(-1, -2)
        return float((off - off.mean(-1, keepdim=True)).norm())

    assert error(name, x) < 1.1 * error(f"{name}{joint}paper=true", x)
    assert error(name, real) < 0.5 * error(f"{name}{joint}paper=true", real)


def test_turboquant_bits_are_counted():
    assert methods.get("turboquant:paper=true").effective_bits(128) == pytest.approx(2 + 16 / 128)
    assert methods.get("turboquant:paper=true,residual=true").effective_bits(128) == pytest.approx(
        2 + (32 + 16) / 2 / 128
    )
    # keys' mean and norms, values' mean, per page of 128 tokens
    assert methods.get("turboquant").effective_bits(128) == pytest.approx(2 + 16 / 128 + (16 + 8 + 16) / 128 / 2)
    with pytest.raises(MethodError, match="residual=true"):
        methods.get("turboquant:residual=true,bits=1")


def test_lloyd_max_is_exact_for_one_bit():
    assert lloyd_max(1)[1] == pytest.approx(math.sqrt(2 / math.pi), abs=1e-6)


# ---- outliers and GEAR -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_outliers_are_exact_and_widen_no_range(axis):
    inner = AffineGroups(64, 32, "key", 2, axis)
    form = Outliers(64, 32, "key", inner, 12, axis)
    x = randn(1, 2, 64, 64)
    where = torch.randperm(32 * 64, generator=torch.Generator().manual_seed(1))[:12]
    big = x.unflatten(-2, (-1, 32)).flatten(-2).clone()
    big[..., where] = 60 + torch.arange(12).float()
    big = big.view(1, 2, 2, 32, 64).flatten(-3, -2)
    decoded = form.decode(form.encode(big))
    assert torch.equal(decoded[big >= 60], big[big >= 60])
    plain = inner.decode(inner.encode(big))
    assert rms((decoded - big)[big < 60], x) < 0.5 * rms((plain - big)[big < 60], x)
    assert form.bits == pytest.approx(inner.bits + 32 * 12 / (32 * 64))


def test_unwritten_outliers_do_not_break_decoding():
    form = Outliers(64, 32, "key", AffineGroups(64, 32, "key", 2, "token"), 12, "token")
    fields = {name: torch.full((1, 1, 1, *shape), -1, dtype=dtype) for name, (shape, dtype) in form.fields().items()}
    assert form.decode(fields).shape == (1, 1, 32, 64)


def test_power_iteration_finds_the_top_directions():
    x = randn(2, 500, 64) * torch.linspace(0.1, 1, 64).pow(16)
    basis = row_space(x, 2, 3, seed=0)
    torch.testing.assert_close(basis.transpose(-1, -2) @ basis, torch.eye(2).expand(2, 2, 2), atol=1e-5, rtol=0)
    best = torch.linalg.svd(x).S[..., :2].square().sum(-1)
    assert ((x @ basis).square().sum((-1, -2)) > 0.97 * best).all()
    assert torch.isfinite(row_space(torch.zeros(1, 32, 64), 2, 3, 0)).all()


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("outliers", [0.0, 0.02])
def test_gear_errs_less_than_the_quantization_it_starts_from(bits, outliers):
    keys, values = keys_and_values()
    errors = {}
    names = (f"kivi:bits={bits}", f"gear:bits={bits},outliers={outliers}", f"gear:bits={bits},rank=8")
    for name in (*names, f"gear:paper=true,bits={bits}"):
        k, v = read_back(methods.get(name), keys, values, spec())
        errors[name] = rms(k - keys, keys), rms(v - values, values)
    kivi, *gears = errors.values()
    for gear in gears:
        assert gear[0] < kivi[0] and gear[1] < kivi[1]


def test_gears_basis_belongs_to_a_page_and_adds_the_residuals_projection():
    keys, _ = keys_and_values(256)
    method = methods.get("gear:rank=3,outliers=0.01")
    form = method.key_format(spec())
    fields = method.encode_keys(keys, {}, spec(), positions(256), True)
    inner = form.inner.decode({n: t for n, t in fields.items() if n not in ("basis", "row")})
    for page in range(2):
        at = slice(128 * page, 128 * page + 128)
        missed = keys[:, :, at] - inner[:, :, at]
        basis = row_space(missed, 3, 3, 0).half().float()
        assert torch.equal(fields["basis"][:, :, page].float(), basis)
        added = form.decode(fields)[:, :, at] - inner[:, :, at]
        torch.testing.assert_close(added, missed @ basis @ basis.transpose(-1, -2), atol=2e-2, rtol=1e-2)


def test_gear_bits_are_counted():
    assert methods.get("gear:paper=true").effective_bits(128) == pytest.approx(3 + 16 * 2 / 128)
    assert methods.get("gear").effective_bits(128) == pytest.approx(3 + 16 * 2 / 128 + 16 * 2 / 128)
    count = round(0.02 * 32 * 128)
    assert methods.get("gear:outliers=0.02").effective_bits(128) == pytest.approx(3.5 + 32 * count / (32 * 128))
    for wrong in ("gear:rank=0", "gear:outliers=0.5", "gear:loops=0"):
        with pytest.raises(MethodError, match=wrong.split(":")[1]):
            methods.get(wrong)


# ---- ZipCache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "extra", "salient"), [(2, 2, 19), (1, 1, 0), (2, 4, 64), (4, 4, 1)])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_mixed_tokens_give_each_token_its_bits(bits, extra, salient, axis):
    form = MixedTokens(48, 64, "key", bits, extra, salient, axis)
    x, score = randn(2, 3, 128, 48), randn(2, 3, 128, seed=1)
    decoded = form.decode(form.encode(x, score)).unflatten(-2, (-1, 64))
    blocks = x.unflatten(-2, (-1, 64))
    dim = -2 if axis == "token" else -1
    low, high = blocks.amin(dim, keepdim=True), blocks.amax(dim, keepdim=True)

    rank = score.unflatten(-1, (-1, 64)).argsort(-1, descending=True).argsort(-1)
    levels = torch.where(rank < salient, (1 << (bits + extra)) - 1, (1 << bits) - 1).unsqueeze(-1)
    step = (high - low) / levels
    # the nearest code, up to the rounding of scales to fp16
    assert ((decoded - blocks).abs() <= step / 2 + 0.005).all()
    nearest = (low + ((blocks - low) / step).round() * step - decoded).abs() < 0.005
    assert nearest.float().mean() > 0.98
    meta = 32 / 64 if axis == "token" else 32 / 48
    assert form.bits == pytest.approx(bits + extra * salient / 64 + meta + 1 / 48)


def test_zipcache_finds_the_tokens_that_queries_look_for():
    keys, values = randn(1, 2, 256, 64) * 0.3, randn(1, 2, 256, 64)
    wanted = randn(1, 2, 1, 64, seed=3)
    hot = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:20]
    keys[:, :, hot] += wanted
    queries = (3 * wanted + 0.1 * randn(1, 2, 256, 64, seed=4)).repeat_interleave(2, 1)
    method = methods.get("zipcache:ratio=0.25,group=64")
    state = observed(method, queries, spec())
    score = method.salience(keys, state, 64)
    for block in range(4):
        inside = hot[(hot >= 64 * block) & (hot < 64 * (block + 1))] - 64 * block
        best = score[..., 64 * block : 64 * (block + 1)].topk(len(inside)).indices.sort(-1).values
        assert torch.equal(best, inside.sort().values.expand_as(best))
    k, v = read_back(method, keys, values, spec(), state)
    error = (k - keys).square().mean(-1)
    assert error[..., hot].mean() < 0.1 * error.mean()
    error = (v - values).square().mean(-1)
    assert error[..., hot].mean() < 0.1 * error.mean()


def test_zipcache_bits_are_counted():
    salient = round(0.6 * 128) / 128
    expected = 2 + 2 * salient + (32 / 128 + 32 / 64) / 2 + 1 / 64
    assert methods.get("zipcache:paper=true").effective_bits(64) == pytest.approx(expected)
    assert methods.get("zipcache").effective_bits(64) == pytest.approx(expected + 8 / 128 / 2)  # values' norms per page
    for wrong in ("zipcache:ratio=1.5", "zipcache:salient_bits=2", "zipcache:probes=0"):
        with pytest.raises(MethodError, match=wrong.split(":")[1]):
            methods.get(wrong)


# ---- KVQuant ---------------------------------------------------------------------------------------------------------


def brute_force(x: torch.Tensor, weights: torch.Tensor, count: int) -> tuple[float, list[float]]:
    """Least weighted squared error over all ways to cut sorted points into ``count`` runs, and the runs' means."""
    x, order = x.sort()
    weights = weights[order]
    best, levels = math.inf, []
    for cuts in itertools.combinations(range(1, len(x)), count - 1):
        edges = [0, *cuts, len(x)]
        means, error = [], 0.0
        for a, b in itertools.pairwise(edges):
            mean = (weights[a:b] * x[a:b]).sum() / weights[a:b].sum()
            means.append(float(mean))
            error += float((weights[a:b] * (x[a:b] - mean).square()).sum())
        if error < best:
            best, levels = error, means
    return best, levels


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_the_datatype_is_the_best_there_is(bits, seed):
    x, weights = randn(11, seed=seed).double(), randn(11, seed=seed + 50).double().square() + 0.01
    error, expected = brute_force(x, weights, 1 << bits)
    levels = torch.tensor(kvquant.fit(x, weights, bits), dtype=torch.float64)
    torch.testing.assert_close(levels, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    nearest = (x.unsqueeze(-1) - levels).square().amin(-1)
    assert float((weights * nearest).sum()) == pytest.approx(error, rel=1e-9)


def test_the_datatype_follows_the_sensitivity():
    x = torch.cat([torch.full((50,), -1.0), torch.full((50,), 0.0), torch.full((50,), 1.0)])
    even = kvquant.fit(x, torch.ones(150), 1)
    assert even == pytest.approx((-1, 0.5)) or even == pytest.approx((-0.5, 1))
    heavy = torch.ones(150)
    heavy[50:100] = 1000
    heavy[100:] = 1000
    assert kvquant.fit(x, heavy, 1)[1] == pytest.approx(1, abs=1e-6)
    assert kvquant.fit(x, torch.zeros(150), 2) == pytest.approx((-1, 0, 1, 1))


def test_the_datatype_of_many_elements_is_that_of_their_density():
    levels = kvquant.fit(randn(300_000), torch.ones(300_000), 2)
    assert levels == pytest.approx(lloyd_max(2), abs=0.02)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def test_gradients_are_those_of_the_loss_before_rope(model):
    ids = torch.randint(256, (1, 24), generator=torch.Generator().manual_seed(0))
    found = kvquant.gradients(model, layer_specs(model), ids)[1]
    attention = model.model.layers[1].self_attn
    kept = {}

    def keep(name):
        def hook(module, args, output):
            output.retain_grad()
            kept[name] = output

        return hook

    hooks = [getattr(attention, f"{name}_proj").register_forward_hook(keep(name)) for name in "kv"]
    logits = model(ids, use_cache=False).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    for name, x, fisher in (("k", found.keys, found.key_fisher), ("v", found.values, found.value_fisher)):
        expected = kept[name].detach()[0].unflatten(-1, (2, 64)).transpose(0, 1)
        gradient = kept[name].grad[0].unflatten(-1, (2, 64)).transpose(0, 1)
        torch.testing.assert_close(x.float(), expected, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(fisher.float(), gradient.square(), atol=1e-6, rtol=2e-2)
    assert all(p.requires_grad for p in model.parameters())
    model.zero_grad()


def test_kvquant_clips_nothing_that_an_outlier_can_hold():
    method = methods.get("kvquant:bits=4,outliers=0.02")
    keys = randn(1, 2, 96, 64)
    keys[0, 0, 40, 7] = 50.0
    keys[0, 1, 3, 60] = -30.0
    found = kvquant.Gradients(randn(2, 512, 64), randn(2, 512, 64), torch.ones(2, 512, 64), torch.ones(2, 512, 64))
    learned = kvquant.learn(found, torch.arange(512) >= 448, method, spec())
    channels = ChannelScales(learned.tensors["key.center"], learned.tensors["key.spread"])
    levels = tuple(learned.tensors["key.levels"].tolist())
    form = method.format(spec(), "key", kvquant.Learned(levels, levels, channels))
    decoded = form.decode(form.encode(keys, kvquant.beyond(keys, channels)))
    assert decoded[0, 0, 40, 7] == 50 and decoded[0, 1, 3, 60] == -30
    # as good as the best 4-bit table for Gaussians, since 2 % of the tail is stored
    assert rms(decoded - keys, keys.clamp(-5, 5)) ** 2 < GAUSSIAN[4][1] * 1.1
    assert learned.errors["key"] < GAUSSIAN[4][1] * 1.1


# ---- VQLLM -----------------------------------------------------------------------------------------------------------


def test_residual_codes_are_chosen_stage_by_stage():
    book = randn(3, 16, 8)
    x = randn(100, 8, seed=1)
    codes = choose(x, book)
    rest = x
    for stage in range(3):
        distance = (rest.unsqueeze(1) - book[stage]).square().sum(-1)
        assert torch.equal(codes[:, stage], distance.argmin(-1))
        rest = rest - book[stage][codes[:, stage]]


@pytest.mark.parametrize("strided", [False, True])
def test_residual_codes_find_what_was_made_of_them(strided):
    book = torch.stack([randn(16, 8) * 4, randn(16, 8, seed=1) * 0.2])
    form = ResidualCodes(32, 32, "key", 8, 16, 2, strided, Codebook(book))
    drawn = torch.randint(16, (1, 2, 64, 4, 2), generator=torch.Generator().manual_seed(2))
    made = form.join(book[0][drawn[..., 0]] + book[1][drawn[..., 1]])
    made = made / made.square().mean(-1, keepdim=True).sqrt()  # a codebook for vectors of unit size
    vectors = form.split(made)
    assert torch.equal(vectors[..., 1, :], made[..., 1::4] if strided else made[..., 8:16])
    scaled = ResidualCodes(32, 32, "key", 8, 16, 2, strided, Codebook(book / 2))
    decoded = scaled.decode(scaled.encode(3 * made))
    assert decoded.shape == made.shape and torch.isfinite(decoded).all()
    # whatever the codebook, coding is scale-free
    torch.testing.assert_close(scaled.decode(scaled.encode(300 * made)), 100 * decoded, rtol=2e-3, atol=2e-3)


def test_kmeans_lowers_the_error_and_uses_every_centre():
    x = torch.cat([randn(2000, 4), 9 + 0.01 * randn(50, 4, seed=1)])
    errors = []
    for iterations in (0, 1, 5, 20):
        centres = vqllm.kmeans(x, 64, torch.Generator().manual_seed(0), iterations)
        errors.append(float(torch.cdist(x, centres).amin(-1).square().mean()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.8 * errors[0]
    assert len(vqllm.assign(x, centres).unique()) >= 62
    few = vqllm.kmeans(x[:3], 8, torch.Generator().manual_seed(0))
    assert few.shape == (8, 4) and torch.isfinite(few).all()


def test_every_stage_of_a_residual_codebook_lowers_the_error():
    x = randn(4000, 8)
    book = vqllm.residual_kmeans(x, 4, 32, torch.Generator().manual_seed(0))
    codes = choose(x, book)
    rest, errors = x, []
    for stage in range(4):
        rest = rest - book[stage][codes[:, stage]]
        errors.append(float(rest.square().mean()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.35 * errors[0]


def test_learned_methods_count_their_bits_without_an_artefact():
    outliers = round(0.01 * 32 * 128)
    expected = 2 + 32 * outliers / (32 * 128) + 32 / 128 / 2
    assert methods.get("kvquant").effective_bits(128) == pytest.approx(expected)
    assert methods.get("vqllm").effective_bits(128) == pytest.approx(2 + 16 / 128)
    assert methods.get("vqllm:bits=1").effective_bits(128) == pytest.approx(1 + 16 / 128)


@pytest.mark.parametrize("name", ["kvquant", "vqllm", "gsrq", "nova", "tasq"])
def test_a_learned_method_says_what_it_lacks(name, model):
    with pytest.raises(MethodError, match=f"{name}: artefact is missing.*kvfold calibrate"):
        kvfold.fold(model, name)
    assert name not in {methods.get(spec).name for spec in methods.DEFAULT}


@pytest.mark.parametrize(
    "name",
    [
        *("kvquant:bits=2", "kvquant:bits=1,v_bits=2,outliers=0", "vqllm:bits=1,codes=16", "gsrq:bits=1,codes=16"),
        *("nova", "nova:values=codes,refit=false", "tasq"),
    ],
)
def test_learned_methods_from_text_to_generation(name, model, tmp_path):
    """Calibrate, fold, generate; wrong options and other models are refused; a repeated run learns the same."""
    method = methods.get(name)
    text = Text(python_prose(), "prose")
    out = tmp_path / "a.safetensors"
    done = []
    made = calibrate(model, byte_tokenizer(), "tiny", method, [text], 1024, out, on_layer=done.append)
    if method.name in ("vqllm", "gsrq", "nova"):  # what draws random numbers
        again = calibrate(model, byte_tokenizer(), "tiny", method, [text], 1024, tmp_path / "b.safetensors")
        assert all(torch.equal(t, again.tensors[n]) for n, t in made.tensors.items())
    assert made.tensors.keys() == read(out).tensors.keys()
    blank = method.blank(2, 64)  # what sizes are counted from where there is no artefact
    assert {n: t.shape for n, t in blank.items()} == {n: t.shape for n, t in made.layer(0).items()}
    assert [d.layer_idx for d in done] == [0, 1] and 0 < made.mean_errors()["key"] < 1

    ready = dataclasses.replace(method, artefact=str(out))
    ids = byte_tokenizer()(text.text[:400], return_tensors="pt").input_ids
    cache = kvfold.fold(model, ready)
    try:
        with torch.inference_mode():
            model(ids[:, :-1], past_key_values=cache)
            logits = model(ids[:, -1:], past_key_values=cache).logits
    finally:
        kvfold.unfold(model)
    assert torch.isfinite(logits).all() and cache.folded[0].packed[0] > 0
    # what attention reads is near what the model computed
    with torch.inference_mode():
        full = model(ids, use_cache=True).past_key_values
    keys, values = cache.folded[1].decoded(0)
    errors = rms(keys - full.layers[1].keys[0], keys), rms(values - full.layers[1].values[0], values)
    assert max(errors) < 1
    assert cache.nbytes()["tables"] > 0

    with pytest.raises(MethodError, match="k_bits"):
        kvfold.fold(model, dataclasses.replace(ready, bits=4, k_bits=None))
    other = tiny_llama(num_key_value_heads=4)
    with pytest.raises(ArtefactError, match="made for tiny"):
        ready.check_model(other.config)


def test_eight_levels_are_whole_numbers_that_lose_nothing_to_speak_of():
    levels = methods.get("turboquant:bits=3").key_format(spec(128)).inner.levels
    assert [round(x / levels[4] * 13, 9) for x in levels] == [-113, -71, -40, -13, 13, 40, 71, 113]
    exact, x = lloyd_max(3, 128), torch.randn(1 << 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lost = []
    for some in (exact, levels):
        table = torch.tensor(some, dtype=torch.float64)
        lost.append(float((table[torch.bucketize(x, (table[1:] + table[:-1]) / 2)] - x).square().mean()))
    assert lost[1] / lost[0] == pytest.approx(1, abs=2e-4)
    assert methods.get("turboquant:bits=3,paper=true").key_format(spec(128)).inner.levels == exact
