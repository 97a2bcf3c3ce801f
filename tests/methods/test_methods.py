"""Methods: what the papers define and prove, and what the options promise."""

import dataclasses
from itertools import pairwise

import pytest
import torch

import kvfold
from helpers import feed, layer, packed_fields, relative, rope, same_bytes, spec, tokens
from kvfold.errors import MethodError
from kvfold.formats import AffineGroups, Dense, Paged, PagedFormat
from kvfold.formats.affine import quantize_asym
from kvfold.formats.paged import norms, plain
from kvfold.methods import Observation, get
from kvfold.methods.base import boundary, store
from kvfold.methods.squat import penalty_matrix, steer, update_matrix


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observe(method, shape, queries):
    return get(method).observe(Observation(queries, torch.arange(queries.shape[-2])[None]), shape)


# ---- exactness of the maps -------------------------------------------------------------------------------------------


def unquantized(form):
    """A format that prepares vectors as ``form`` does and stores them in float32."""
    if isinstance(form, Paged):
        return dataclasses.replace(form, inner=Dense(form.head_dim, form.block, form.operand, torch.float32))
    return Dense(form.head_dim, form.block, form.operand, torch.float32)


MAPPED = [n for n in kvfold.DEFAULT if n.startswith(("fold", "none", "kivi", "squat", "innerq"))]
MAPPED += [n for n in kvfold.DEFAULT if n.startswith("turboquant") and "residual" not in n]


@pytest.mark.parametrize("name", [*MAPPED, "fold:rotation=1", "innerq:center=page,normalize=false", "squat:lam=0"])
def test_keys_and_values_are_exact_when_nothing_is_quantized(name):
    """Means are added back, norms multiplied, rotations undone: what is read differs from what was stored by rounding."""
    shape, method = spec(), get(name)
    keys, values, queries = tokens(2, 256)
    positions = torch.arange(100, 356).expand(2, 1, -1)
    state = {n: t.expand(2, *t.shape[1:]) for n, t in observe(name, shape, queries[:1]).items()}
    plain_method = dataclasses.replace(method, lam=0.0) if hasattr(method, "lam") else method  # steering is quantizing
    prepared = plain_method.transform_keys(keys, state, shape, positions)
    form = unquantized(method.key_format(shape))
    restored = plain_method.restore_keys(form.decode(store(form, prepared, None)), shape, positions)
    assert relative(restored, keys) < 2e-6
    form = unquantized(method.value_format(shape))
    assert relative(method.unproject_values(form.decode(store(form, values, None)), shape), values) < 2e-6


@pytest.mark.parametrize("name", ["innerq:paper=true", "innerq:paper=true,center=page", "innerq", "fold"])
def test_what_goes_into_the_query_is_what_decoding_does(name):
    """Where statistics belong to a sequence, a projected query and a bias give the scores of the decoded keys."""
    new = tokens(2, 300)
    of = feed(layer(name), new)
    queries = new[2].unflatten(1, (2, -1)).flatten(2, 3)
    (span,) = of.slabs.spans()
    call = of.reader.call(new[2], None, 0.125)
    projected, bias = call.projected
    assert torch.equal(call.rows, queries.float()) and (projected is call.rows) == (call.project is None)
    assert (call.project is None) == (plain(of.key_format) is of.key_format)
    fields = of.key_format.take(span.keys, of.packed[0] // of.block)
    own = {n: t for n, t in fields.items() if n not in of.slabs.shared[0]}
    stored = plain(of.key_format).decode(own)
    scores = projected @ stored.transpose(-1, -2) + (0 if bias is None else bias.unsqueeze(-1))
    assert relative(scores, queries @ of.key_format.decode(fields).transpose(-1, -2)) < 1e-6
    if name == "innerq:paper=true,center=page":
        assert bias is not None and bias.abs().max() > 1
        assert (
            isinstance(of.key_format, PagedFormat) and of.slabs.shared[0].keys() == of.key_format.page_fields().keys()
        )


@pytest.mark.targets
def test_innerqs_norm_is_the_papers_and_per_head_and_channel():
    """The paper's: of the whole first call behind the sink, in steps of 0.7 %; the largest is 1, which scales divide out."""
    new = tokens(2, 400, seed=3)
    of = feed(layer("innerq:paper=true"), new, [200, 200])
    expected = new[0][:, :, 32:200].float().abs().amax(-2).sqrt()
    found = norms(of.slabs.shared[0]["norm"][:, :, 0])
    expected = expected / expected.amax(-1, keepdim=True)
    assert ((found / expected).log2().abs() <= 0.5 / 48 + 1e-4).all()
    page = feed(layer("innerq"), new)
    for at in range(2):
        seen = new[0][:, :, 32 + 128 * at : 160 + 128 * at].float()  # a page's tokens, from behind the sink
        stored = {n: torch.cat([slab.keys[n] for slab in page.slabs], 2)[:, :, at] for n in ("mean", "norm")}
        assert torch.allclose(stored["mean"].float(), seen.mean(-2), atol=1e-2, rtol=1e-3)
        size = (seen - stored["mean"].float().unsqueeze(-2)).abs().amax(-2).sqrt()
        size = (size / size.amax(-1, keepdim=True)).clamp_min(2 ** (-255 / 48))
        assert ((norms(stored["norm"]) / size).log2().abs() <= 0.5 / 48 + 1e-3).all()


@pytest.mark.targets
def test_a_channel_of_zeros_is_not_divided_by_zero():
    keys, values, queries = tokens(1, 300)
    keys[..., 7] = 0
    for name in ("innerq:center=false", "innerq", "innerq:paper=true"):
        decoded = feed(layer(name), (keys, values, queries)).decoded(0)[0]
        assert decoded.isfinite().all() and (decoded[..., 7] == 0).all()
    assert feed(layer("fold"), (keys, values, queries)).decoded(0)[0].isfinite().all()


@pytest.mark.targets
@pytest.mark.parametrize("mode", ["asym", "hybrid"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_a_silent_channel_costs_the_same_at_every_scale_of_the_keys(scale, mode):
    """A channel that says nothing in the first tokens must not be divided by something larger than its neighbours are."""
    keys, values, queries = tokens(1, 300)
    keys[..., 7] = 0
    of = feed(layer(f"innerq:mode={mode}"), (keys * scale, values, queries))
    error = (of.decoded(0)[0] / scale - keys[0]).square().sum((0, 1)).sqrt()
    assert error[7] < 3 * error.median()


@pytest.mark.targets
@pytest.mark.parametrize("method", ["fold", "innerq", "qjl", "turboquant"])
def test_centring_shrinks_the_error_of_keys_with_large_constant_channels(method):
    keys, values, queries = tokens(1, 400)
    keys = keys + 20 * torch.randn(1, 2, 1, 64, generator=generator(5)).to(keys)

    def error(name):
        decoded = feed(layer(name), (keys, values, queries)).decoded(0)[0]
        scores = queries[0].float().unflatten(0, (2, -1)).flatten(1, 2) @ (decoded - keys[0]).transpose(-1, -2)
        return (scores - scores.mean(-1, keepdim=True)).norm()  # what softmax notices

    assert error(method) < 0.5 * error(f"{method}:center=false")


# ---- KIVI and InnerQ against plain definitions -----------------------------------------------------------------------


def plain_asym(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Section 3 of KIVI, in doubles; groups on the last axis."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return low + step * ((groups - low) / step).round()


def plain_sym(groups: torch.Tensor, bits: int) -> torch.Tensor:
    step = groups.abs().amax(-1, keepdim=True) / (2**bits - 1)
    return step * (groups / step).round()


def by_tokens(x: torch.Tensor, how, bits: int, group: int = 32) -> torch.Tensor:
    x = x.double().unflatten(-2, (-1, group)).transpose(-1, -2)
    return how(x, bits).transpose(-1, -2).flatten(-3, -2)


def by_channels(x: torch.Tensor, how, bits: int, group: int = 32) -> torch.Tensor:
    return how(x.double().unflatten(-1, (-1, group)), bits).flatten(-2)


@pytest.mark.targets
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [
        ("kivi:sink=0,recent=0", (by_tokens, plain_asym), (by_channels, plain_asym)),
        (
            "innerq:mode=asym,sink=0,recent=0,center=false,normalize=false",
            (by_channels, plain_asym),
            (by_tokens, plain_asym),
        ),
        (
            "innerq:mode=sym,sink=0,recent=0,center=false,normalize=false",
            (by_channels, plain_sym),
            (by_tokens, plain_sym),
        ),
    ],
    ids=["kivi", "innerq-asym", "innerq-sym"],
)
def test_what_is_read_back_is_the_papers_definition(name, keys, values, bits):
    new = tokens(1, 128, seed=bits)
    of = feed(layer(f"{name},bits={bits}"), new)
    assert of.packed == [128]
    for decoded, x, (grouping, how) in zip(of.decoded(0), new, (keys, values), strict=False):
        expected = grouping(x[0], how, bits)
        # fp16 scales and zero-points move a value by a thousandth of its step and, where it lay between two codes, by one
        moved = (decoded - expected).abs() > 0.01 * x[0].abs().amax()
        assert moved.float().mean() < 0.005
        assert relative(torch.where(moved, 0, decoded), torch.where(moved, 0, expected)) < 2e-3


@pytest.mark.targets
def test_hybrid_prefill_is_hybrid_for_the_prompt_and_sym_afterwards():
    keys, values, queries = (t + 4 for t in tokens(1, 320, seed=1))
    options = "sink=0,recent=0,center=false,normalize=false"
    of = feed(layer(f"innerq:mode=hybrid_prefill,{options}"), (keys, values, queries), [160, 100, 60])
    hybrid = feed(layer(f"innerq:mode=hybrid,{options}"), (keys, values, queries))
    shape = spec()
    sym = get(f"innerq:mode=sym,{options}")
    forms = (sym.key_format(shape), sym.value_format(shape))
    both = zip(packed_fields(of, 0), packed_fields(hybrid, 0), forms, (keys, values), strict=True)
    for fields, as_hybrid, form, x in both:
        as_sym = form.encode(x.float().cpu())
        for name in fields:
            assert same_bytes(fields[name][:, :5], as_hybrid[name][:, :5])
            assert same_bytes(fields[name][:, 5:].cpu(), as_sym[name][0, :, 5:])
            assert not same_bytes(as_hybrid[name][:, 5:].cpu(), as_sym[name][0, :, 5:])


def test_center_is_refused_where_it_would_not_be_exact():
    with pytest.raises(
        MethodError, match=r"squat_pre: center=page is not allowed: a mean of keys before RoPE.*: false$"
    ):
        get("squat_pre:center=page")
    with pytest.raises(MethodError, match=r"kivi: center=page is not allowed; allowed: false$"):
        get("kivi:center=page")


# ---- SQuat -----------------------------------------------------------------------------------------------------------


@pytest.mark.targets
@pytest.mark.parametrize(
    "options", ["", ",bits=1", ",bits=3", ",bits=4,v_bits=2", ",channels=1", ",group=64", ",sink=5"]
)
def test_squat_without_penalty_is_kivi_bit_for_bit(options):
    new = tokens(2, 400, seed=1)
    kivi = ",".join(o for o in options.split(",") if o and "channels" not in o)
    a, b = feed(layer("squat:lam=0" + options), new), feed(layer("kivi" + (f":{kivi}" if kivi else "")), new)
    assert a.packed == b.packed and a.packed[0] >= 256
    for row in range(2):
        for left, right in zip(packed_fields(a, row), packed_fields(b, row), strict=True):
            assert left.keys() == right.keys() and all(same_bytes(left[n], right[n]) for n in left)


def test_squat_pre_without_penalty_is_kivi_on_unrotated_keys():
    keys, values, queries = tokens(1, 400)
    before = rope().unrotate(keys, torch.arange(400).view(1, 1, -1))
    a, b = (
        feed(layer("squat_pre:lam=0"), (keys, values, queries)),
        feed(layer("kivi"), (before, values, queries)),
    )
    for left, right in zip(packed_fields(a, 0), packed_fields(b, 0), strict=True):
        assert all(same_bytes(left[n], right[n]) for n in left)


@pytest.mark.targets
def test_squat_with_a_penalty_is_not_kivi():
    new = tokens(1, 400, seed=1)
    a, b = feed(layer("squat"), new), feed(layer("kivi"), new)
    assert not same_bytes(packed_fields(a, 0)[0]["codes"], packed_fields(b, 0)[0]["codes"])
    assert same_bytes(packed_fields(a, 0)[1]["codes"], packed_fields(b, 0)[1]["codes"])


def paper_penalty(queries: torch.Tensor, rank: int, lam: float) -> torch.Tensor:
    """``I + lam Q'Q`` by the singular value decomposition (Algorithm 1, lines 6 - 9)."""
    _, sizes, right = torch.linalg.svd(queries.double(), full_matrices=False)
    top = sizes[..., :rank, None] * right[..., :rank, :]
    return torch.eye(queries.shape[-1]).double() + lam * top.transpose(-1, -2) @ top


def queries_of(d: int = 64, count: int = 300, seed: int = 0) -> torch.Tensor:
    """Queries with a few strong directions, as models have."""
    strong = torch.randn(3, d, generator=generator(seed + 100)) * torch.tensor([[4.0], [2.0], [1.0]])
    return torch.randn(count, 3, generator=generator(seed)) @ strong + 0.3 * torch.randn(
        count, d, generator=generator(seed + 1)
    )


@pytest.mark.parametrize("lam", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("rank", [1, 5, 40])
def test_the_penalty_is_the_svds(rank, lam):
    queries = queries_of()
    assert relative(penalty_matrix(queries, rank, lam), paper_penalty(queries, rank, lam)) < 1e-6


@pytest.mark.parametrize("lam", [1e-4, 1e-3, 1.0])
@pytest.mark.parametrize("width", [1, 4, 16, 32])
def test_the_update_is_the_direct_inverse(width, lam):
    """Lemma 2 in the form ``-P_rr^-1 P_rs``, one inverse per slice."""
    penalty = paper_penalty(queries_of(), 5, lam)
    update, d = update_matrix(penalty, width), 64
    for start in range(0, d - width, width):
        rest, own = slice(start + width, d), slice(start, start + width)
        direct = -torch.linalg.inv(penalty[rest, rest]) @ penalty[rest, own]
        assert relative(update[start:, own], direct.float()) < 1e-5
        assert (update[:start, own] == 0).all()


@pytest.mark.parametrize("lam", [1e-4, 1e-3, 1.0])
@pytest.mark.parametrize("width", [1, 4, 16, 32])
def test_the_update_is_the_papers_recursion(width, lam):
    """Lemma 3 (Prop. 2 at width 1): A_T^-1 = P, A_t^-1 = M - N' O^-1 N; the update of slice t is B_t H_t with H_t the
    last columns of A_t^-1 and B_t the bottom left block of P^-1."""
    penalty, d = paper_penalty(queries_of(), 5, lam), 64
    update, inverse = update_matrix(penalty, width), torch.linalg.inv(penalty)
    current = penalty
    for stop in range(d - width, 0, -width):
        m, n, o = current[:stop, :stop], current[stop:, :stop], current[stop:, stop:]
        current = m - n.T @ torch.linalg.inv(o) @ n
        if stop in (width, d // 2, d - width):
            assert relative(current, torch.linalg.inv(inverse[:stop, :stop])) < 1e-6
        last = current[:, stop - width :]
        assert relative(update[stop - width :, stop - width : stop], inverse[stop:, :stop] @ last) < 1e-5


def proposition_1(keys: torch.Tensor, penalty: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Proposition 1 as it stands, channel by channel with A_t inverted anew: [tokens, d] -> what is read back."""
    inverse, d = torch.linalg.inv(penalty), keys.shape[-1]
    current = keys.clone()
    for t in range(1, d + 1):
        x = current[:, t - 1].unflatten(0, (-1, group))
        codes, scale, zero = quantize_asym(x, bits)
        quantized = (zero.float() + scale.float() * codes).flatten()
        error = quantized - current[:, t - 1]
        current[:, t - 1] = quantized
        if t < d:
            h = torch.linalg.inv(inverse[:t, :t])[:, -1]
            current[:, t:] += error.unsqueeze(-1) * (inverse[t:, :t] @ h).float()
    return current


@pytest.mark.targets
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("lam", [1e-3, 1e-1])
def test_squat_one_channel_at_a_time_is_proposition_1(lam, bits):
    shape = spec(64, heads=1, kv_heads=1)
    keys, values, _ = tokens(1, 128, shape=shape)
    queries = queries_of(count=128).view(1, 1, 128, 64).to(keys)
    of = feed(layer(f"squat:paper=true,channels=1,recent=0,bits={bits},lam={lam}", shape), (keys, values, queries))
    expected = proposition_1(keys[0, 0].float().cpu(), paper_penalty(queries[0, 0].cpu(), 5, lam), bits, 32)
    decoded = of.decoded(0)[0][0].cpu()
    # rounding may move a value that lies between two codes, and with it those after it: no more than a few do
    moved = (decoded - expected).abs() > 1e-3
    assert moved.float().mean() < 0.01, f"{moved.float().mean():.3f} of the values differ"
    kivi = feed(layer(f"kivi:sink=0,recent=0,bits={bits}", shape), (keys, values, queries)).decoded(0)[0][0].cpu()
    assert ((kivi - expected).abs() > 1e-3).float().mean() > 0.5  # and it is not what would be read back without


@pytest.mark.parametrize("channels", [1, 8, 32])
def test_the_residual_on_the_query_subspace_shrinks_as_lambda_grows(channels):
    queries = queries_of()
    _, sizes, right = torch.linalg.svd(queries, full_matrices=False)
    top = sizes[:5, None] * right[:5]
    keys = tokens(1, 320, shape=spec(64, 1, 1))[0]
    form = AffineGroups(64, 32, "key", 2, "token")
    projected, distance = [], []
    for lam in (0.0, 1e-6, 1e-5, 1e-4, 1e-3):
        update = update_matrix(penalty_matrix(queries, 5, lam), channels).expand(1, 1, -1, -1)
        residual = form.decode(form.encode(steer(keys, update, channels, 2, 32))) - keys
        projected.append(float((residual @ top.T).norm()))
        distance.append(float(residual.norm()))
    assert all(b < a for a, b in pairwise(projected)), projected
    assert projected[-1] < (0.75 if channels == 32 else 0.5) * projected[0]
    assert distance[-1] > distance[0]  # the price


@pytest.mark.parametrize("width", [1, 8, 32])
def test_an_update_solves_the_papers_problem(width):
    """Lemma 2's solution minimizes ``|r|^2 + lam |Q r|^2`` over the channels that are left, so its second term can only
    fall as lam grows, and it falls to nothing where channels are left to take the error."""
    queries = queries_of()
    _, sizes, right = torch.linalg.svd(queries.double(), full_matrices=False)
    top = sizes[:5, None] * right[:5]
    error = torch.randn(50, width, generator=generator(4)).double()
    norms = []
    for lam in (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1.0):
        update = update_matrix(paper_penalty(queries, 5, lam), width)[:, :width].double()
        residual = torch.cat([error, error @ update.T], -1)
        objective = residual.square().sum(-1) + lam * (residual @ top.T).square().sum(-1)
        for seed in range(3):
            nudge = 0.01 * torch.randn(64 - width, generator=generator(seed)).double()
            other = residual + torch.cat([torch.zeros(width).double(), nudge])
            assert (other.square().sum(-1) + lam * (other @ top.T).square().sum(-1) > objective - 1e-6).all()
        projected = (residual @ top.T).norm(dim=-1)
        norms.append(projected)
    assert all((b <= a * (1 + 1e-4) + 1e-3).all() for a, b in pairwise(norms))
    assert (norms[-1] < 0.05 * norms[0]).all()


def test_the_papers_subspace_is_of_a_kv_heads_own_queries_of_the_whole_prompt():
    """All query heads of a KV head, sink included; neither other heads nor later tokens enter."""
    queries = tokens(1, 500)[2]
    of = feed(layer("squat:paper=true,sink=4"), tokens(1, 500), [300, 200])
    for head in range(2):
        own = queries[0, 2 * head : 2 * head + 2, :300].flatten(0, 1)
        expected = update_matrix(paper_penalty(own, 5, 1e-3), 32)
        assert relative(of.following.state["update"][0, head], expected) < 1e-4


@pytest.mark.parametrize("count", [160, 255, 256, 511, 700, 1100, 2100])
def test_the_subspace_is_of_the_newest_queries_before_a_boundary(count):
    """Powers of two, then every 1,024 tokens; divided by the number of queries and their mean square."""
    queries = tokens(1, count)[2]
    of = feed(layer("squat:rank=5,lam=0.5"), tokens(1, count))
    at = boundary(count)
    assert at == max(n for n in (128, 256, 512, 1024, 2048) if n <= count)
    for head in range(2):
        own = queries[0, 2 * head : 2 * head + 2, at - 64 : at].flatten(0, 1)
        expected = update_matrix(paper_penalty(own, 5, 0.5 / (128 * float(own.double().square().mean()))), 32)
        assert relative(of.following.state["update"][0, head], expected) < 1e-4


def test_boundaries_are_powers_of_two_then_multiples():
    assert [boundary(n) for n in (1, 128, 255, 256, 1023, 1024, 2047, 2048, 3071, 3072, 100_000)] == [
        1, 128, 128, 256, 512, 1024, 1024, 2048, 2048, 3072, 99_328,
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "start"), [("squat_pre:paper=true", 0), ("squat_pre:rank=5,lam=0.001", 192)])
def test_squat_pre_takes_queries_before_rope(name, start):
    keys, values, queries = tokens(1, 300)
    before = rope().unrotate(queries, torch.arange(300).view(1, 1, -1))
    of, stop = feed(layer(name), (keys, values, queries)), 256 if start else 300
    for head in range(2):
        own = before[0, 2 * head : 2 * head + 2, start:stop].flatten(0, 1)
        size = float(own.double().square().mean()) * len(own) if start else 1.0
        expected = update_matrix(paper_penalty(own, 5, 1e-3 / size), 32)
        assert relative(of.following.state["update"][0, head], expected) < 1e-4


def test_normalized_lambda_depends_neither_on_the_number_of_queries_nor_on_their_size():
    queries = queries_of()
    longer = queries.repeat(4, 1)
    one, four, large = (penalty_matrix(q, 5, 0.1, normalize=True) for q in (queries, longer, 30 * queries))
    assert relative(four, one) < 1e-6 and relative(large, one) < 1e-6
    assert relative(penalty_matrix(longer, 5, 0.1), penalty_matrix(queries, 5, 0.4)) < 1e-6
    size = 300 * float(queries.double().square().mean())
    assert relative(one, penalty_matrix(queries, 5, 0.1 / size)) < 1e-6


def test_rank_0_weighs_all_directions():
    queries = queries_of()
    for normalize in (False, True):
        every = penalty_matrix(queries, 64, 0.1, normalize)
        assert relative(penalty_matrix(queries, 0, 0.1, normalize), every) < 1e-6
    assert float(penalty_matrix(queries, 0, 0.5, True).diagonal().sum()) == pytest.approx(64 * 1.5)
