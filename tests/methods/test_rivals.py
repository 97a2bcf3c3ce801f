"""KVarN, GSRQ, NOVA-KV, TaSQ and fold's codebook: each formula against a plain statement of it, and what is claimed of it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import kvfold
from helpers import difference, feed, layer, relative, rope, spec, tokens
from kvfold import artefact as artefacts
from kvfold.calibration import gsrq, nova, vqllm
from kvfold.errors import MethodError
from kvfold.formats import AffineGroups, Balanced, GroupCodes, Hadamard, Projected, ResidualCodes, UniformTokens
from kvfold.formats.balanced import deviation, factors, mean
from kvfold.formats.gaussian import gaussian_codes
from kvfold.formats.grouped import GroupBook, choose
from kvfold.formats.residual import Codebook
from kvfold.kernels.generic import readers, unpack
from kvfold.kernels.searched import encode as encode_search
from kvfold.methods import Pair, get


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(form, x: torch.Tensor) -> torch.Tensor:
    """Squared error of every token."""
    return (form.decode(form.encode(x)) - x).square().sum(-1)


def uneven(tokens: int = 128, d: int = 64) -> torch.Tensor:
    """A tile whose tokens and channels differ in size."""
    return randn(1, 2, tokens, d) * randn(1, 2, tokens, 1, seed=1).exp() * randn(1, 2, 1, d, seed=2).exp()


def balanced(axis: str, d: int = 64, rounds: int = 8, bits: int = 2) -> Balanced:
    inner = AffineGroups(d, 128, "plain", bits, axis, "asym", 128 if axis == "token" else d)
    return Balanced(d, 128, "plain", inner, rounds)


# ---- KVarN -----------------------------------------------------------------------------------------------------------


def test_factors_make_tokens_and_channels_of_a_tile_alike():
    x = uneven()
    by_token, by_channel = factors(x, -2, 16), factors(x, -1, 16)
    even = x / by_token.unsqueeze(-1) / by_channel.unsqueeze(-2)
    for dim in (-1, -2):
        before, after = (t.std(dim) for t in (x, even))
        assert (before.amax(-1) / before.amin(-1)).min() > 10
        assert (after.amax(-1) / after.amin(-1)).max() < 1.05


@pytest.mark.parametrize("size", [96, 128, 80, 1])
def test_sums_in_order_are_sums_and_know_no_neighbours(size):
    x = randn(3, 5, 2 * size, size) + 1
    for dim in (-1, -2):
        torch.testing.assert_close(mean(x, dim, in_order=True), x.mean(dim, keepdim=True))
        if x.shape[dim] > 1:
            torch.testing.assert_close(deviation(x, dim, in_order=True), x.std(dim, keepdim=True))
            assert torch.equal(deviation(x, dim, in_order=True)[1, 2], deviation(x[1, 2], dim, in_order=True))
    torch.testing.assert_close(mean(x, -2, -1, in_order=True), x.mean((-2, -1), keepdim=True))


@pytest.mark.parametrize("scale", [2.0**-6, 2.0**6])
def test_a_tile_is_coded_alike_at_every_size(scale):
    x = uneven()
    for axis in ("token", "channel"):
        form = balanced(axis)
        decoded = form.decode(form.encode(x * scale)) / scale
        assert relative(decoded, form.decode(form.encode(x))) < 0.03


def test_no_factor_makes_the_tile_less_even_than_it_was():
    """The most even tile of all rounds is kept: a tile that is even already keeps its channels' factors."""
    x = randn(1, 1, 128, 64)
    x = x / x.std(-1, keepdim=True)
    kept = factors(x, -2, 0)
    torch.testing.assert_close(kept, torch.ones_like(kept))


def test_large_tokens_do_not_spoil_the_others_keys():
    x = randn(1, 2, 128, 64)
    x[:, :, 5] *= 30
    plain, even = (error(balanced("token", rounds=rounds), x) for rounds in (0, 8))
    others = torch.arange(128) != 5
    assert even[..., others].mean() < 0.05 * plain[..., others].mean()


def test_large_channels_do_not_spoil_the_others_values():
    x = randn(1, 2, 128, 64)
    x[..., 5] *= 30
    forms = [balanced("channel", rounds=rounds) for rounds in (0, 8)]
    plain, even = ((f.decode(f.encode(x)) - x).square().mean((0, 1, 2)) for f in forms)
    others = torch.arange(64) != 5
    assert even[others].mean() < 0.2 * plain[others].mean()


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_constant_and_empty_tiles_decode_exactly(axis):
    form = balanced(axis)
    for value in (0.0, 0.5, -3.0):
        x = torch.full((1, 1, 128, 64), value)
        assert torch.equal(form.decode(form.encode(x)), x)
    assert torch.isfinite(form.decode(form.encode(torch.full((1, 1, 128, 64), 60000.0) * randn(64).sign()))).all()


def test_a_rotation_after_rope_takes_errors_to_where_queries_look():
    """Why KVarN fails where key biases are large: a bias that RoPE turns costs KIVI's groups in its own two channels alone."""
    bias, queries = torch.zeros(64), 0.2 * randn(1, 2, 16, 64, seed=1)
    bias[3], queries[..., 20] = 60.0, 20.0
    still = randn(1, 2, 128, 64) + bias
    turned = rope().rotate(still, torch.arange(128)[None])
    rotation, form = Hadamard(64, 64, 0), balanced("token", rounds=0)

    def scores(x, basis):
        kept = form.decode(form.encode(basis.apply(x) if basis else x))
        return (((basis.restore(kept) if basis else kept) - x) @ queries.mT).norm()

    assert scores(turned, rotation) > 3 * scores(turned, None)
    assert scores(still, rotation) < 1.3 * scores(still, None)


def test_kvarns_bits_are_those_of_its_source():
    """2 bits, a scale, a zero-point and a second scale per group of 128: "about 2.3 bits"."""
    assert get("kvarn").effective_bits(128) == pytest.approx(2 + 3 * 16 / 128)
    assert get("kvarn:group=64").effective_bits(128) == pytest.approx(2 + (16 / 128 + 32 / 64 + 32 / 128 + 16 / 64) / 2)


def test_a_tile_that_no_page_holds_is_refused():
    with pytest.raises(MethodError, match="kvarn: group=96 is not allowed; allowed: 32, 64, 128"):
        get("kvarn:group=96")


# ---- GSRQ ------------------------------------------------------------------------------------------------------------


def test_gain_shape_centres_are_means_of_their_vectors_at_the_end():
    """At its fixed point the gain is the mean projection on the direction of the mean: what k-means has too."""
    x = randn(4000, 6)
    centres = gsrq.gain_shape_kmeans(x, torch.ones(4000), 32, torch.Generator().manual_seed(0), rounds=200)
    at = vqllm.assign(x, centres)
    means = torch.stack([x[at == i].mean(0) for i in range(32)])
    assert relative(centres, means) < 0.02


def test_gain_shape_begins_with_centres_as_long_as_their_vectors():
    x = randn(4000, 32)
    weight, draw = torch.ones(4000), torch.Generator()
    start = gsrq.gain_shape_kmeans(x, weight, 64, draw.manual_seed(0), rounds=0)
    shrunk = vqllm.kmeans(x, 64, draw.manual_seed(0))
    assert start.norm(dim=-1).mean() == pytest.approx(float(x.norm(dim=-1).mean()), rel=0.01)
    assert shrunk.norm(dim=-1).mean() < 0.6 * start.norm(dim=-1).mean()  # the shrinkage that the source speaks of


def test_weights_grow_as_a_logarithm():
    found = gsrq.smoothed(torch.tensor([[0.0, 1.0, 2.0, 1e6]]))
    assert found[0, 0] == 0 and found[0, 3] < 20 * found[0, 2]
    x = torch.cat([randn(1000, 4), randn(1000, 4, seed=1) + 5])
    weight = torch.cat([torch.ones(1000), torch.full((1000,), 1e-4)])
    centres = gsrq.gain_shape_kmeans(x, weight, 4, torch.Generator().manual_seed(0))
    assert torch.isfinite(centres).all()


@pytest.mark.parametrize(("operand", "fit"), [("key", "size"), ("value", "unbiased")])
def test_a_refitted_scale_repairs_what_residual_codes_shrink(operand, fit):
    """Residual codes are too short; the stored scale, which costs nothing, keeps keys' lengths and makes values unbiased."""
    x = randn(1, 2, 256, 64)
    x = x * randn(1, 2, 256, 1, seed=1).exp()
    book = vqllm.residual_kmeans(randn(20000, 32, seed=2), 2, 64, torch.Generator().manual_seed(0))
    form = ResidualCodes(64, 32, "plain", 32, 64, 2, False, Codebook(book))
    plain, mended = (f.decode(f.encode(x)) for f in (form, dataclasses.replace(form, fit=fit)))
    assert mended.shape == plain.shape and form.fields() == dataclasses.replace(form, fit=fit).fields()
    assert (plain.norm(dim=-1) / x.norm(dim=-1)).mean() < 0.85
    found = mended.norm(dim=-1) if operand == "key" else (mended * x).sum(-1) / x.norm(dim=-1)
    torch.testing.assert_close(found, x.norm(dim=-1), rtol=1e-3, atol=1e-3)


def test_gsrq_costs_what_vqllm_costs():
    for bits in (1, 2):
        assert get(f"gsrq:bits={bits}").effective_bits(64) == get(f"vqllm:bits={bits}").effective_bits(64)


# ---- VQLLM and CommVQ ------------------------------------------------------------------------------------------------


def test_what_docs_say_of_vqllms_lead_is_in_the_rows():
    """docs/methods/commvq.md: CommVQ's keys have less error than VQLLM's, its values more, and its token weights add to it."""
    rows = json.loads((Path(__file__).parents[2] / "benchmarks" / "vqllm-commvq.json").read_text(encoding="utf-8"))[
        "rows"
    ]
    found = {(r["layer"], r["side"], round(r["bits"]), r["what"]): r["mse"] for r in rows}

    def of(at, side, bits, beginning):
        (mse,) = (m for key, m in found.items() if key[:3] == (at, side, bits) and key[3].startswith(beginning))
        return mse

    for at, bits in ((10, 1), (10, 2), (21, 1)):
        theirs, untied = of(at, "keys", bits, "vqllm"), of(at, "keys", bits, "whole heads, 64")
        tied = next(m for k, m in found.items() if k[:3] == (at, "keys", bits) and k[3].endswith("passes=0"))
        assert all(0.65 < mine / other < 0.91 for mine, other in zip(tied, theirs, strict=True))
        assert all(0.8 < mine / other < 1.1 for mine, other in zip(tied, untied, strict=True))
    for bits in (1, 2):
        theirs = of(10, "values", bits, "vqllm values, scale rms")
        even = next(m for k, m in found.items() if k[:3] == (10, "values", bits) and k[3].endswith("form, plain loss"))
        weighted = of(10, "values", bits, "commvq values, closed form, as")
        assert all(m > 1.1 * t for m, t in zip(even, theirs, strict=True))
        assert all(m > 1.08 * t for m, t in zip(weighted, even, strict=True))


# ---- NOVA-KV and TaSQ ------------------------------------------------------------------------------------------------


def metric(heads: int = 2, d: int = 64, seed: int = 3) -> torch.Tensor:
    """A moment whose directions weigh very differently."""
    turn = torch.linalg.qr(randn(heads, d, d, seed=seed)).Q
    return turn @ torch.diag_embed(torch.linspace(-3, 3, d).exp().expand(heads, -1)) @ turn.transpose(-1, -2)


def test_novas_map_makes_the_queries_distance_the_plain_one():
    """NOVA-KV's generalized Parseval relation: |(k - k') R|^2 is proportional to (k - k') M (k - k')'."""
    keys, m = randn(2, 2000, 64) @ metric(seed=4), metric()
    maps = nova.query_maps(keys, m, 4)
    e = randn(2, 100, 64, seed=5)
    plain, weighted = (e @ maps.apply).square().sum(-1), ((e @ m) * e).sum(-1)
    ratio = plain / weighted
    assert float((ratio / ratio.mean(1, keepdim=True) - 1).abs().max()) < 0.02
    torch.testing.assert_close(maps.apply @ maps.restore, torch.eye(64).expand(2, -1, -1), atol=1e-3, rtol=0)
    torch.testing.assert_close(maps.mean, keys.mean(1))


def test_novas_groups_are_dealt_out_so_that_they_weigh_alike():
    keys = randn(2, 2000, 64) @ metric(seed=4)
    maps = nova.query_maps(keys, metric(), 4)
    r = (keys - maps.mean.unsqueeze(1)) @ maps.apply
    variance = r.var(1)
    apart = r / variance.sqrt().unsqueeze(1)
    correlation = apart.transpose(-1, -2) @ apart / 2000
    assert float((correlation - torch.eye(64)).abs().amax()) < 0.02  # decorrelated
    order = variance.unflatten(-1, (16, 4))
    assert (order[..., :-1] >= order[..., 1:]).all()  # a group has one coordinate of every quarter of the spectrum
    volume, sorted_volume = (
        v.unflatten(-1, (16, 4)).log().sum(-1) for v in (variance, variance.sort(descending=True).values)
    )
    assert volume.std() < 0.3 * sorted_volume.std()


def test_a_query_under_the_map_meets_codes_as_it_meets_keys():
    keys, m = randn(2, 512, 64) * 3 + randn(2, 1, 64, seed=9), metric()
    maps = nova.query_maps(keys, m, 4)
    book = nova.learn_book(GroupCodes(64, 32, "plain", 4), (keys - maps.mean.unsqueeze(1)) @ maps.apply, None, draw())
    inner = GroupCodes(64, 32, "plain", 4, fit="size", book=book)
    form = Projected(64, 32, "plain", inner, maps)
    fields = form.encode(keys.unsqueeze(0))
    q = randn(1, 2, 5, 64, seed=6)
    projected, bias = maps.queries(q)
    got = projected @ inner.decode(fields).transpose(-1, -2) + bias.unsqueeze(-1)
    assert relative(got, q @ form.decode(fields).transpose(-1, -2)) < 1e-4


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_group_codes_are_the_nearest_of_their_own_codebook(strided, weighted):
    book = GroupBook(randn(2, 8, 16, 8), randn(2, 8, 8, 8, seed=1) if weighted else None)
    form = GroupCodes(64, 32, "plain", 8, 16, strided, "rms", book)
    x = randn(1, 2, 64, 64, seed=2)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    off = form.split(x).unsqueeze(-2) - book.codes.unsqueeze(1).unsqueeze(0)
    if weighted:
        off = off @ book.metric.unsqueeze(1)
    best = off.square().sum(-1).argmin(-1)
    assert torch.equal(choose(form.split(x), book), best)
    fields = form.encode(x * 7)
    assert torch.equal(fields["codes"].flatten(2, 3).long(), best)
    vectors = form.split(form.decode(fields))
    expected = book.codes[torch.arange(2).view(-1, 1, 1), torch.arange(8), best]
    torch.testing.assert_close(vectors / 7, expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(form.join(form.split(x)), x)


def test_a_groups_channels_are_whole_pairs_of_rope():
    form = get("tasq").formats(spec())[0]
    index = form.split(torch.arange(64))
    assert all({(int(c) + 32) % 64 for c in group} == set(group.tolist()) for group in index)


@pytest.mark.slow
def test_a_metric_makes_codes_serve_queries():
    """Codebooks of the queries' distance have less error of scores, and more of keys, than those of the plain one."""
    keys, m = randn(2, 4096, 64), metric()
    errors = {}
    for name, given in (("plain", None), ("queries", m)):
        form = dataclasses.replace(
            GroupCodes(64, 32, "plain", 8), book=nova.learn_book(GroupCodes(64, 32, "plain", 8), keys, given, draw())
        )
        e = form.decode(form.encode(keys.unsqueeze(0)))[0] - keys
        errors[name] = float(((e @ m) * e).sum()), float(e.square().sum())
    assert errors["queries"][0] < 0.97 * errors["plain"][0] and errors["queries"][1] > errors["plain"][1]


def test_codes_less_a_mean_are_those_of_vectors_without_it():
    """As many bits; codes, scales and errors do not depend on what a head's vectors share; the same kernels serve them."""
    form = GroupCodes(64, 32, "plain", 8, fit="size", centred=True)
    x = randn(2, 2048, 64) + 4 * randn(2, 1, 64, seed=9)
    book = nova.learn_book(form, x, None, draw())
    torch.testing.assert_close(book.mean.float(), x.mean(1), rtol=1e-3, atol=1e-3)
    form, plain = (dataclasses.replace(form, book=book, centred=centred) for centred in (True, False))
    assert form.bits == plain.bits
    shifted = (x - book.mean.float().unsqueeze(1)).unsqueeze(0)
    got, want = form.encode(x.unsqueeze(0)), plain.encode(shifted)
    assert all(torch.equal(got[name], want[name]) for name in want)
    torch.testing.assert_close(form.decode(got) - plain.decode(want), (x - shifted[0]).unsqueeze(0))
    for served in (readers.why_not, encode_search.unsupported, unpack.why_not):
        assert served(plain) is None and served(form) is None


def test_an_artefact_with_a_mean_serves_no_method_without_one(learned):
    for name, other in (("tasq", "tasq:mean=false"), ("tasq:mean=false", "tasq")):
        artefact = get(learned[name]).artefact
        asked = dataclasses.replace(get(other), artefact=artefact)
        with pytest.raises(MethodError, match=f"it is for mean={name == 'tasq'}, and mean={other == 'tasq'} is asked"):
            asked.key_format(spec())


def test_an_artefact_of_keys_alone_says_how_to_name_it(learned):
    artefact = get(learned["tasq:values=fold"]).artefact
    asked = dataclasses.replace(get("tasq"), artefact=artefact)
    with pytest.raises(
        MethodError, match=r"it holds keys alone, learned as tasq:values=fold, .* give values= as there"
    ):
        asked.key_format(spec())
    pair = get(f"k=tasq:values=fold,artefact={artefact}+v=fold:bits=1,codebook=true")
    assert pair.key_format(spec()) == get(learned["tasq:values=fold"]).key_format(spec())


def test_bits_of_byte_codes_are_those_of_their_sources():
    assert get("nova").effective_bits(128) == pytest.approx(
        (2 + 16 / 128 + 2 + 32 / 128) / 2
    )  # 2.19: 2.22 with windows
    assert get("nova:values=codes").effective_bits(128) == pytest.approx(2 + 16 / 128)
    assert get("tasq").effective_bits(128) == pytest.approx(1 + 16 / 128)
    with pytest.raises(MethodError, match="k_bits=3: a byte stands for 8 / bits channels; allowed: 1, 2, 4, 8"):
        get("nova:k_bits=3")


@pytest.mark.parametrize(("bits", "options"), [(1, "bits=1,codebook=true"), (2, "bits=2,codebook=true"), (4, "bits=4")])
def test_values_of_fold_are_those_of_a_recipe(bits, options):
    one, other, shape = get(f"tasq:bits={bits},values=fold"), get(f"fold:{options}"), spec()
    keys, values = one.formats(shape)
    assert keys == get(f"tasq:bits={bits}").formats(shape)[0] and values == other.value_format(shape)
    assert one.learned_shape() == {"k_bits": bits, "mean": True}
    assert get("tasq:k_bits=2,v_bits=1,values=fold").effective_bits(128) == pytest.approx(
        (2 + 16 / 128 + 1 + 32 / 128) / 2
    )


def test_keys_lie_anywhere_among_the_positions():
    """A mean over windows that begin at position 0 would be the mean of a sequence's beginning."""
    shape = spec()
    placed = nova.placed(torch.ones(2, 64 * 32, 64), 32, 16_384, shape, draw())
    assert placed.shape == (2, 64 * 32, 64)
    assert placed.mean(1)[:, :8].abs().max() < 0.3 < placed.std(1).max()  # fast pairs average out
    norms = placed.unflatten(-1, (2, 32)).norm(dim=-2)
    torch.testing.assert_close(norms, torch.full_like(norms, 2**0.5), rtol=1e-4, atol=1e-4)


# ---- as a cache ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> dict[str, str]:
    """Specs with artefacts of random tables for the helpers' layers."""
    folder: Path = tmp_path_factory.mktemp("rivals")
    eye = torch.eye(64).expand(2, -1, -1)
    turn = torch.linalg.qr(randn(2, 64, 64, seed=8)).Q * torch.linspace(0.5, 2, 64)
    maps = {"key.mean": randn(2, 64), "key.map": turn, "key.inverse": torch.linalg.inv(turn)}
    eights = randn(2, 8, 256, 8), eye[:, :8, :8].unsqueeze(1).expand(-1, 8, -1, -1)
    fours = randn(2, 16, 256, 4)
    stages = randn(8, 256, 32) / 2
    made = {
        "nova": ({"key.codes": fours, **maps}, {"k_bits": 2}),
        "nova:values=codes": ({"key.codes": fours, "value.codes": fours, **maps}, {"k_bits": 2, "v_bits": 2}),
        "tasq:mean=false": (
            {"key.codes": eights[0], "key.metric": eights[1], "value.codes": eights[0], "value.metric": eights[1]},
            {"k_bits": 1, "v_bits": 1},
        ),
        "tasq": (
            {
                **{"key.codes": eights[0], "key.mean": 3 * randn(2, 64).half()},
                **{"value.codes": eights[0], "value.mean": 3 * randn(2, 64, seed=1).half()},
                "value.metric": eights[1],
            },
            {"k_bits": 1, "v_bits": 1, "mean": True},
        ),
        "tasq:values=fold": (
            {"key.codes": eights[0], "key.mean": 3 * randn(2, 64).half()},
            {"k_bits": 1, "mean": True},
        ),
        "gsrq": ({"key.codes": stages, "value.codes": stages}, {"k_bits": 2, "v_bits": 2, "vector": 32, "codes": 256}),
    }
    found = {}
    for name, (parts, shape) in made.items():
        path = folder / f"{name.partition(':')[0]}{len(parts)}.safetensors"
        tensors = {
            f"layers.{i}.{n}": t.clone(memory_format=torch.contiguous_format)
            for i in range(2)
            for n, t in parts.items()
        }
        whole = artefacts.Artefact(
            model="tiny",
            config_hash="",
            method=name,
            shape={"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "rotary_dim": 64, **shape},
            calibration={},
            errors={},
            versions={},
            created="2026-01-01T00:00:00+00:00",
            tensors=tensors,
            weights_hash="",
        )
        artefacts.save(whole, path)
        found[name] = f"{name}{',' if ':' in name else ':'}artefact={path}"
    return found


@pytest.mark.parametrize("name", ["nova", "nova:values=codes", "tasq", "tasq:values=fold", "gsrq"])
def test_content_does_not_depend_on_how_calls_were_cut(name, learned):
    new = tokens(1, 400)
    whole = feed(layer(learned[name]), new)
    assert whole.packed[0] == 256
    for cuts in ([300, 100], [150, 1, 1, 98, 150], [1] * 16 + [384]):
        assert difference(whole, feed(layer(learned[name]), new, cuts)) is None


def test_keys_with_folds_values_are_one_method_under_both_names(learned):
    """A recipe has one name, so what is stored under both must be the same; and rows and sizes are."""
    one = get(learned["tasq:values=fold"])
    pair = Pair(one, "fold:bits=1,codebook=true")
    assert str(pair) == str(one) == str(get(f"k={one}+v=fold:bits=1,codebook=true")) and not isinstance(pair, type(one))
    held, other = (feed(layer(method), tokens(1, 400)) for method in (one, pair))
    assert difference(held, other) is None
    assert sum(t.nbytes for t in one.tables(spec(), "cpu").values()) == sum(
        t.nbytes for t in pair.tables(spec(), "cpu").values()
    )


@pytest.mark.parametrize("name", ["nova", "tasq", "gsrq", "kvarn"])
def test_a_cropped_cache_goes_on_as_one_that_never_was_longer(name, learned):
    spec_of = learned.get(name, name)
    new, more = tokens(1, 420), tokens(1, 200, seed=1)
    of = feed(layer(spec_of), new)
    of.crop(-30)
    of = feed(of, more, start=390)
    short = tuple(t[:, :, :390] for t in new)
    assert difference(of, feed(feed(layer(spec_of), short), more, start=390)) is None


@pytest.mark.parametrize("name", ["nova", "nova:values=codes", "tasq", "tasq:mean=false", "tasq:values=fold", "gsrq"])
def test_attention_is_that_of_the_decoded_cache(name, learned):
    new, ask = tokens(2, 400), tokens(2, 3, seed=1)
    of = feed(layer(learned[name], max_length=512), new)
    keys, values = of.decoded(0)
    out = of.reader.call(ask[2], None, 0.125)
    got = kvfold.kernels.REGISTRY["reference"].attend(out)[0]
    k, v = (t.repeat_interleave(2, 0) for t in (keys, values))
    want = (ask[2][0].float() @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v
    assert relative(got, want) < 1e-3


# ---- fold's codebook -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "limit"), [(1, 0.345), (2, 0.0985)])
def test_the_fixed_codebook_has_less_error_than_uniform_levels_at_equal_bits(bits, limit):
    x = randn(1, 2, 2048, 128)
    table = ResidualCodes(128, 32, "plain", 8 // bits, 256, 1, False, gaussian_codes(8 // bits), "least")
    levels = UniformTokens(128, 32, "plain", bits)
    assert table.bits == levels.bits
    size = x.square().sum()
    assert error(table, x).sum() / size < limit < 0.97 * error(levels, x).sum() / size


def test_a_codebook_that_serves_no_side_is_refused():
    with pytest.raises(
        MethodError, match="fold: codebook=true has no effect: there are tables for 1 and 2 bits; allowed: fa"
    ):
        get("fold:bits=3,codebook=true")
    keys, values = (f(spec()) for f in (get("fold:codebook=true").key_format, get("fold:codebook=true").value_format))
    assert isinstance(keys.inner, UniformTokens) and isinstance(values.inner, ResidualCodes)


def test_folds_codebook_costs_no_bits():
    for bits in (1, 2):
        assert get(f"fold:bits={bits},codebook=true").effective_bits(128) == get(f"fold:bits={bits}").effective_bits(
            128
        )
