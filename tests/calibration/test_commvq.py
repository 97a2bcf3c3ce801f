"""CommVQ's formulas, its storage, and its learning steps on small synthetic layers."""

import dataclasses
import itertools

import pytest
import torch

from helpers import rope, spec
from kvfold.calibration.ablation import ablate
from kvfold.calibration.collect import LayerSample, distance_factor, to_complex, to_real
from kvfold.calibration.commvq_keys import fit_together, key_metric, learn_keys, learn_stage, m_step, soft_counts
from kvfold.calibration.commvq_schedule import Schedule
from kvfold.calibration.commvq_values import fit_codebook, learn_values
from kvfold.errors import KVFoldError, MethodError
from kvfold.formats.binary import BinaryCodes
from kvfold.formats.codebook import (
    AdditiveCodes,
    KeyCodebook,
    choices,
    first_pair,
    nearest,
    next_pair,
    pack_codes,
    stages_for,
    times_i,
    unpack_codes,
)
from kvfold.methods import get
from kvfold.methods.commvq import ValueCodebook

QUICK = Schedule(
    window=64, em_tokens=0, em_steps=6, hard_steps=3, joint_rounds=1, value_rounds=2, network_steps=30, network_batch=64
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codebook(heads: int = 2, stages: int = 3, levels: int = 8, dim: int = 16, metric: bool = False) -> KeyCodebook:
    f = torch.eye(dim).repeat(heads, 1, 1)
    if metric:  # any matrix that commutes with multiplication by i
        a = torch.complex(randn(heads, dim // 2, dim // 2, seed=5), randn(heads, dim // 2, dim // 2, seed=6))
        f = to_real(to_complex(torch.eye(dim), dim) @ a.transpose(-1, -2), dim) / dim**0.5
    return KeyCodebook(randn(heads, stages, levels, dim, seed=1) / stages**0.5, f, dim)


def sample(heads: int = 2, tokens: int = 512, dim: int = 32) -> LayerSample:
    """Low-rank keys and values around a mean, as real ones are."""
    shape = spec(dim, 2 * heads, heads)
    mix = randn(heads, 8, dim, seed=1)
    keys = (
        randn(heads, tokens, 8, seed=2) @ mix
        + 2 * randn(heads, 1, dim, seed=3)
        + 0.3 * randn(heads, tokens, dim, seed=4)
    )
    values = randn(heads, tokens, 8, seed=5) @ mix.flip(-1) + 0.3 * randn(heads, tokens, dim, seed=6)
    q = torch.complex(randn(heads, 64, dim // 2, seed=7), randn(heads, 64, dim // 2, seed=8))
    metric = q.transpose(-1, -2) @ q.conj() / 64 * distance_factor(shape, 128)
    w = randn(heads, dim, 48, seed=9)
    weight = 0.1 + randn(heads, tokens, seed=10).square()
    return LayerSample(shape, keys, values, weight, weight, metric, metric, w @ w.transpose(-1, -2))


def held_out(tokens: int = 512) -> torch.Tensor:
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[-128:] = True
    return mask


def stored(stages: int, passes: int = 1) -> AdditiveCodes:
    return AdditiveCodes(32, 32, "key", stages, 8, passes)


# ---- the paper's formulas --------------------------------------------------------------------------------------------


def test_eq_8_codebook_matrices_commute_with_rope():
    x, y, angle = 0.3, -1.2, torch.tensor(0.7)
    c = torch.tensor([[x, y], [-y, x]])
    r = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
    torch.testing.assert_close(r @ c, c @ r)


def test_eq_24_centre_of_a_code_is_z_a_plus_i_z_b():
    book = codebook(heads=1, stages=1, levels=4, dim=8)
    z = to_complex(book.centres[0, 0], 8)
    for a, b in itertools.product(range(4), repeat=2):
        published = []
        for x_a, x_b in zip(z[a], z[b], strict=True):  # [1 0] C[a] + [0 1] C[b] with C = [[x, y], [-y, x]]
            c_a = torch.tensor([[x_a.real, x_a.imag], [-x_a.imag, x_a.real]])
            c_b = torch.tensor([[x_b.real, x_b.imag], [-x_b.imag, x_b.real]])
            published.append(torch.tensor([1.0, 0.0]) @ c_a + torch.tensor([0.0, 1.0]) @ c_b)
        expected = to_real(torch.view_as_complex(torch.stack(published)), 8)
        torch.testing.assert_close(book.sum(torch.tensor([[[[a, b]]]]))[0, 0], expected)
        torch.testing.assert_close(expected, to_real(z[a] + 1j * z[b], 8))


def test_times_i_and_complex_pairs_with_channels_that_rope_leaves_alone():
    x = randn(5, 12)
    torch.testing.assert_close(to_real(to_complex(x, 8), 8), x)
    torch.testing.assert_close(times_i(x, 8), to_real(1j * to_complex(x, 8), 8))


@pytest.mark.parametrize("metric", [False, True], ids=["identity", "metric"])
def test_nearest_centre_equals_brute_force_over_4096(metric):
    book = codebook(heads=2, stages=1, levels=64, dim=32, metric=metric)
    x = randn(2, 300, 32, seed=3) @ book.metric
    codes = book.assign(x, 0)
    halves = book.halves()[:, 0]
    centres = (halves[:, :64, None] + halves[:, None, 64:]).flatten(1, 2) @ book.metric  # all 4096
    distance = torch.cdist(x.double(), centres.double())
    best = distance.amin(-1)
    chosen = distance.gather(-1, (codes[:, :, 0, 0] * 64 + codes[:, :, 0, 1]).unsqueeze(-1)).squeeze(-1)
    assert (codes[:, :, 0, 0] * 64 + codes[:, :, 0, 1] == distance.argmin(-1)).float().mean() > 0.99
    torch.testing.assert_close(chosen, best, rtol=1e-5, atol=1e-5)


def test_eq_19_scores_by_rotating_the_query_equal_decode_then_rope():
    """alpha = sum over stages and halves of (R' q) . c: the query meets the table, the decoded key is never made."""
    book, turn = codebook(heads=2, stages=5, levels=16, dim=32), rope(32)
    tokens, at = 40, 77
    codes = torch.randint(16, (2, tokens, 5, 2), generator=torch.Generator().manual_seed(0))
    query = turn.rotate(randn(1, 2, 1, 32, seed=2), torch.tensor([[[at]]]))
    positions = torch.arange(tokens).view(1, 1, -1)
    decoded = turn.rotate(book.sum(codes).unsqueeze(0), positions)
    slow = (query @ decoded.transpose(-1, -2))[0, :, 0]
    back = turn.unrotate(query.expand(1, 2, tokens, 32), positions)[0]  # R_t R_i': by distance only
    table = torch.einsum("htd,hrcd->htrc", back, book.halves())  # one inner product per code
    index = codes + torch.tensor([0, 16])
    fast = table.gather(-1, index).sum((-1, -2))
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


def test_soft_assignment_factorizes_over_all_centres():
    x, z, weights = randn(2, 50, 16), randn(2, 8, 16, seed=1) / 2, randn(2, 50, seed=2).square()
    turned, temperature = times_i(z, 16), torch.tensor(3.0)
    centres = z[:, :, None] + turned[:, None]
    distance = (x[:, :, None, None] - centres[:, None]).square().sum(-1)
    dense = (-distance / temperature).flatten(2).softmax(-1).unflatten(2, (8, 8)) * weights[..., None, None]
    square = z.square().sum(-1).unsqueeze(1)
    scores = (2 * x @ z.mT - square, 2 * x @ turned.mT - square, 2 * z @ turned.mT)
    of_a, of_b, joint = soft_counts(*scores, weights, temperature)
    for got, expected in ((of_a, dense.sum(-1)), (of_b, dense.sum(-2)), (joint, dense.sum(1))):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    cold = soft_counts(*scores, weights, torch.tensor(1e-4))
    for got, chosen in zip(cold, nearest(*scores), strict=False):  # all weight on the nearest centre, but for near ties
        hard = torch.nn.functional.one_hot(chosen, 8) * weights[..., None]
        assert (got - hard).abs().sum() < 0.01 * weights.sum()
    torch.testing.assert_close(cold[2].sum((-1, -2)), weights.sum(-1))


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0, 300.0], ids=lambda s: f"spread-{s:g}")
def test_soft_assignment_is_exact_at_every_temperature(scale):
    """Also where the factors underflow, in one head and not in the other; nothing turns hard."""
    x, z, weights = randn(2, 60, 16), randn(2, 8, 16, seed=1), randn(2, 60, seed=2).square()
    z = z * torch.tensor([0.3, scale])[:, None, None]
    turned = times_i(z, 16)
    square = z.square().sum(-1).unsqueeze(1)
    table = 2 * z @ turned.mT
    scores = (2 * x @ z.mT - square, 2 * x @ turned.mT - square, table)
    temperature = torch.tensor([0.5, 0.5])[:, None, None]
    logits = scores[0][..., None].double() + scores[1][..., None, :].double() - table[:, None].double()
    dense = (logits / 0.5).flatten(2).softmax(-1).unflatten(2, (8, 8)) * weights[..., None, None]
    got = soft_counts(*scores, weights, temperature)
    for one, expected in zip(got, (dense.sum(-1), dense.sum(-2), dense.sum(1)), strict=True):
        torch.testing.assert_close(one, expected.float(), rtol=1e-5, atol=1e-7)


def test_a_head_learns_the_same_beside_any_other():
    """A head whose exponents are large must not harden the assignment of the others."""
    quiet, loud = randn(1, 300, 16, seed=1), randn(1, 300, 16, seed=2)
    loud[:, ::10] *= 300
    weights = torch.ones(2, 300)
    weights[1, ::10] = 1e-4
    schedule = dataclasses.replace(QUICK, em_steps=8, hard_steps=0, cold=0.002)

    def learned(x: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return learn_stage(x, mass, 8, 16, schedule, torch.Generator().manual_seed(0))

    both = learned(torch.cat((quiet, loud)), weights)
    assert torch.isfinite(both).all()
    torch.testing.assert_close(both[:1], learned(quiet, weights[:1]))
    torch.testing.assert_close(both[1:], learned(loud, weights[1:]))


def test_hard_steps_are_the_limit_of_cold_ones():
    x, weights = randn(2, 300, 16), 0.1 + randn(2, 300, seed=1).square()

    def learned(**options: float) -> torch.Tensor:
        schedule = dataclasses.replace(QUICK, em_steps=4, **options)
        return learn_stage(x, weights, 8, 16, schedule, torch.Generator().manual_seed(0))

    hard = learned(hard_steps=4)
    torch.testing.assert_close(learned(hard_steps=0, hot=1e-6, cold=1e-6), hard, rtol=1e-3, atol=1e-3)
    assert (learned(hard_steps=0) - hard).abs().max() > 0.01
    with pytest.raises(KVFoldError, match="hard_steps=5 is not allowed; allowed: 0 to em_steps=4"):
        learned(hard_steps=5)


def test_eq_33_m_step_equals_generic_least_squares():
    tokens, levels, dim = 400, 6, 8
    x, weights = randn(1, tokens, dim), 0.1 + randn(1, tokens, seed=1).square()
    a, b = torch.randint(levels, (2, tokens), generator=torch.Generator().manual_seed(2))
    of_a = torch.nn.functional.one_hot(a, levels).float()[None] * weights[..., None]
    of_b = torch.nn.functional.one_hot(b, levels).float()[None] * weights[..., None]
    joint = of_a.mT @ torch.nn.functional.one_hot(b, levels).float()[None]
    sums = to_complex(of_a.mT @ x, dim) - 1j * to_complex(of_b.mT @ x, dim)
    z = m_step(of_a.sum(1), of_b.sum(1), joint, sums, 0.0, torch.zeros(1, levels, dim // 2, dtype=torch.complex64))[0]
    for pair in range(dim // 2):  # the paper's T, one pair at a time, unknowns [x_0, y_0, x_1, y_1, ...]
        rows, right = torch.zeros(2 * tokens, 2 * levels), torch.zeros(2 * tokens)
        t = torch.arange(tokens)
        rows[2 * t, 2 * a] += 1
        rows[2 * t, 2 * b + 1] += -1
        rows[2 * t + 1, 2 * b] += 1
        rows[2 * t + 1, 2 * a + 1] += 1
        right[2 * t], right[2 * t + 1] = x[0, :, pair], x[0, :, pair + dim // 2]
        root = weights[0].sqrt().repeat_interleave(2)
        solved = torch.linalg.lstsq((rows * root[:, None]).double(), (right * root).double()[:, None]).solution[:, 0]
        torch.testing.assert_close(
            solved.float().view(-1, 2), torch.view_as_real(z[:, pair].resolve_conj()), rtol=1e-3, atol=1e-3
        )


def test_joint_fit_never_raises_the_error():
    x, book = randn(2, 600, 16, seed=3), codebook()
    weights = 0.1 + randn(2, 600, seed=4).square()
    codes = book.assign(x, 0)

    def error(centres: torch.Tensor) -> float:
        rest = x - KeyCodebook(centres, book.metric, 16).sum(codes)
        return float((weights * rest.square().sum(-1)).sum())

    fitted = fit_together(x, weights, codes, book.centres, 16)
    assert error(fitted) < 0.9 * error(book.centres)
    nudged = [error(fitted + 0.02 * randn(*fitted.shape, seed=s)) for s in range(3)]
    assert min(nudged) > error(fitted)


def test_later_passes_leave_the_first_stages_as_they_are():
    book, x = KeyCodebook(randn(1, 10, 4, 16, seed=3), torch.eye(16)[None], 16), randn(1, 200, 16, seed=4)
    first, later = (book.assign(x, passes) for passes in (1, 2))
    same = (first == later).all(-1).float().mean((0, 1))
    assert (same[:5] == 1).all() and (same[5:] < 1).all()


@pytest.mark.parametrize("stages", [4, 11])
def test_more_passes_never_raise_the_error(stages):
    book, x = codebook(stages=stages), randn(2, 200, 16, seed=3)
    greedy, *errors = [(x - book.sum(book.assign(x, passes))).square().sum(-1) for passes in (0, 1, 2, 4)]
    assert (errors[1] <= errors[0] + 1e-4).all() and (errors[2] <= errors[1] + 1e-4).all()
    assert greedy.sum() > errors[0].sum() > errors[2].sum()


@pytest.mark.parametrize(
    ("stages", "order"),
    [
        (1, [*range(1), *range(1)]),
        (2, [0, 0, 1, 1]),
        (3, [0, 0, 1, 2, 1, 2]),
        (11, [*range(6), *range(2, 6), *range(6, 11), *range(5, 11)]),
        (21, [*range(13), *range(5, 13), *range(13, 21), *range(11, 21)]),
    ],
)
def test_stages_are_chosen_again_when_five_eighths_are_and_at_the_end(stages, order):
    assert choices(stages, 0) == tuple(range(stages))
    assert choices(stages, 1) == tuple(order)
    for passes in (2, 3):
        assert choices(stages, passes) == choices(stages, passes - 1) + tuple(range(8 * stages // 15, stages))


def test_a_pair_begins_with_the_best_code_of_one_side():
    a, b, table = randn(2, 300, 8), randn(2, 300, 8, seed=1), randn(2, 8, 8, seed=2)
    whole = a.unsqueeze(-1) + b.unsqueeze(-2) - table.unsqueeze(1)  # [heads, tokens, a, b]
    place = torch.arange(8)
    allowed = (place[:, None] == a.argmax(-1)[..., None, None]) | (place == b.argmax(-1)[..., None, None])
    one, other = first_pair(a, b, table)
    assert torch.equal(one * 8 + other, whole.where(allowed, -torch.inf).flatten(-2).argmax(-1))


def test_a_pair_that_is_chosen_again_is_never_worse():
    a, b, table = randn(2, 300, 8), randn(2, 300, 8, seed=1), randn(2, 8, 8, seed=2)
    whole = (a.unsqueeze(-1) + b.unsqueeze(-2) - table.unsqueeze(1)).flatten(-2)
    had = torch.randint(64, (2, 300), generator=torch.Generator().manual_seed(3))
    one, other = next_pair(a, b, table, had % 8)
    found, before = (whole.gather(-1, i.unsqueeze(-1)).squeeze(-1) for i in (one * 8 + other, had))
    assert (found >= before).all() and (found > before).float().mean() > 0.9
    beside = whole.unflatten(-1, (8, 8)).gather(-1, (had % 8)[..., None, None].expand(-1, -1, 8, 1)).squeeze(-1)
    assert torch.equal(one, beside.argmax(-1))


def all_pairs_in_two_turns(book: KeyCodebook, x: torch.Tensor) -> torch.Tensor:
    """Stage by stage, then all stages again, among all pairs: what each takes of vectors, float32 like x."""
    search, taken = book.search(), torch.zeros(book.stages, *x.shape)
    for r in 2 * [*range(book.stages)]:
        halves = search.halves[:, r]
        rest = x - taken.sum(0) + taken[r]
        a, b = (2 * rest @ halves.mT - search.squares[:, r].unsqueeze(1)).chunk(2, -1)
        one, other = nearest(a, b, search.cross[:, r])
        near = torch.stack([halves[h][one[h]] + halves[h][book.levels + other[h]] for h in range(book.heads)])
        taken[r] = near
    return taken.sum(0)


@pytest.mark.parametrize("stages", [11, 21])
def test_few_pairs_miss_as_little_as_two_turns_of_all(stages):
    """Stages shrink as those of learned codebooks do."""
    book = codebook(stages=stages, levels=64, dim=64)
    book.centres *= 0.9 ** torch.arange(stages)[:, None, None]
    codes = torch.randint(64, (2, 256, stages, 2), generator=torch.Generator().manual_seed(7))
    x = book.sum(codes)
    x += 0.1 * x.std() * randn(2, 256, 64, seed=8)
    got = book.sum(book.assign(x, 1), book.search().halves)
    all_of_them = all_pairs_in_two_turns(book, x)
    assert (x - got).square().sum() < 1.01 * (x - all_of_them).square().sum()


# ---- storage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 6, 10, 12, 16])
def test_codes_are_packed_without_gaps(bits):
    codes = torch.randint(1 << bits, (3, 2, 32), generator=torch.Generator().manual_seed(bits))
    words = pack_codes(codes, bits)
    assert words.shape == (3, 2, 2 * bits) and words.dtype == torch.int16
    assert torch.equal(unpack_codes(words, bits), codes)
    stream = 0
    for t, code in enumerate(codes[0, 0].tolist()):
        stream |= code << (t * bits)
    assert [w & 0xFFFF for w in words[0, 0].tolist()] == [(stream >> (16 * i)) & 0xFFFF for i in range(2 * bits)]


def test_bits_are_those_of_the_paper():
    assert [stages_for(b, 128, 64) for b in (1, 2)] == [11, 21]
    assert [stages_for(b, 64, 64) for b in (1, 2)] == [5, 11]
    one = AdditiveCodes(128, 32, "key", 11, 64)
    assert one.bits == pytest.approx((11 * 12 + 16) / 128)
    assert one.fields()["codes"][0] == (1, 11, 24)  # 32 tokens of 12 bits in 24 words of 16
    assert BinaryCodes(128, 32, "value", 256).bits == 2
    assert get("commvq:bits=1").effective_bits(128) == pytest.approx((148 / 128 + 1) / 2)


def test_key_format_keeps_codes_and_stored_tensors_are_as_declared():
    form = AdditiveCodes(16, 32, "key", 3, 8, 1, codebook())
    x = randn(2, 2, 64, 16, seed=9)
    fields = form.encode(x)
    for name, (shape, dtype) in form.fields().items():
        assert fields[name].shape == (2, 2, 2, *shape) and fields[name].dtype == dtype
    codes = form.codes(fields)
    assert codes.shape == (2, 2, 64, 3, 2)
    book = form.codebook
    expected = book.sum(codes[1].flatten(1, 1)) * fields["rms"][1].flatten(-2).unsqueeze(-1).float()
    torch.testing.assert_close(form.decode(fields)[1], expected)
    halves = [form.encode(x[:, :, part]) for part in (slice(0, 32), slice(32, 64))]
    for name in fields:
        assert torch.equal(torch.cat([h[name] for h in halves], 2), fields[name])


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e4])
def test_key_format_survives_any_size(scale):
    form = AdditiveCodes(16, 32, "key", 3, 8, 1, codebook())
    out = form.decode(form.encode(randn(1, 2, 32, 16) * scale))
    assert torch.isfinite(out).all()
    assert (out.abs().amax() == 0) == (scale == 0)


def test_scale_of_a_key_only_scales_what_is_read():
    form = AdditiveCodes(16, 32, "key", 3, 8, 1, codebook())
    x = randn(1, 2, 32, 16)
    torch.testing.assert_close(form.decode(form.encode(8 * x)), 8 * form.decode(form.encode(x)))


def test_binary_codes_roundtrip_and_last_column_counts_tokens():
    form = BinaryCodes(64, 32, "value", 128)
    bits = (randn(2, 3, 64, 128) > 0).float()
    decoded = form.decode(form.encode(bits))
    assert decoded.shape == (2, 3, 64, form.width)
    assert torch.equal(decoded[..., :-1], bits) and (decoded[..., -1] == 1).all()
    joint = dataclasses.replace(form, joint=3).decode(form.encode(bits))
    assert torch.equal(joint[:, 1, :, :-1], bits.transpose(1, 2).flatten(-2))


# ---- learning --------------------------------------------------------------------------------------------------------


def test_one_stage_finds_planted_centres():
    z = 3 * randn(1, 4, 16, seed=1)
    codes = torch.randint(4, (2, 2000), generator=torch.Generator().manual_seed(2))
    x = z[:, codes[0]] + times_i(z, 16)[:, codes[1]] + 0.05 * randn(1, 2000, 16, seed=3)
    schedule = dataclasses.replace(QUICK, em_steps=40, hot=0.3, cold=0.001)
    best = min(
        float((x - _decode(learned, x)).square().mean())
        for seed in range(3)
        for learned in [learn_stage(x, torch.ones(1, 2000), 4, 16, schedule, torch.Generator().manual_seed(seed))]
    )
    assert best < 0.1 * float(x.var())


def _decode(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    book = KeyCodebook(z.unsqueeze(1), torch.eye(16)[None], 16)
    return book.sum(book.assign(x, 0))


def test_more_stages_lower_the_held_out_error():
    errors = []
    for stages in (1, 3, 6):
        generator = torch.Generator().manual_seed(0)
        errors.append(learn_keys(sample(), held_out(), stored(stages), QUICK, generator)[1]["score_mse"])
    assert errors[0] > errors[1] > errors[2]


def test_longer_groups_with_equal_bits_lower_the_error():
    """Table 9's shape: g pairs share a code of 2 log2 N bits at one bit per element; larger g and N is better."""
    x = sample(dim=32).keys
    x = x - x.mean(1, keepdim=True)
    errors = []
    for g, levels in ((2, 4), (4, 16)):
        parts = to_complex(x, 32).unflatten(-1, (-1, g))
        error = 0.0
        for j in range(parts.shape[2]):
            part = to_real(parts[:, :, j], 2 * g)
            z = learn_stage(part, torch.ones(2, 512), levels, 2 * g, QUICK, torch.Generator().manual_seed(0))
            book = KeyCodebook(z.unsqueeze(1), torch.eye(2 * g).repeat(2, 1, 1), 2 * g)
            error += float((part - book.sum(book.assign(part, 0))).square().sum())
        errors.append(error)
    assert errors[1] < errors[0]


def test_the_ablations_rows_are_those_of_table_10():
    """R from eq. 38: 8 stages make one bit up to g = 32, and 11 come closest to it at g = N = 64."""
    with torch.no_grad():
        rows = ablate(sample(heads=1, tokens=256, dim=128), held_out(256))
    shapes = [(row["g"], row["N"], row["R"]) for row in rows if row["table"] == "10"]
    assert shapes == [(8, 2, 8), (16, 4, 8), (32, 16, 8), (64, 64, 11)]
    assert all(row["bits"] == pytest.approx(1, abs=0.04) for row in rows if row["table"] == "10")


def test_key_metric_commutes_with_i_and_measures_scores():
    layer = sample()
    f = key_metric(layer, 1.0)
    e = randn(2, 10, 32, seed=11)
    torch.testing.assert_close(times_i(e, 32) @ f, times_i(e @ f, 32), rtol=1e-3, atol=1e-4)
    m = layer.key_metric / layer.key_metric.diagonal(dim1=-1, dim2=-2).real.mean(-1)[:, None, None]
    c = to_complex(e, 32)
    expected = (c.conj().unsqueeze(-2) @ m.unsqueeze(1) @ c.unsqueeze(-1)).real.flatten(1)
    torch.testing.assert_close((e @ f).square().sum(-1), expected, rtol=1e-2, atol=1e-2)


def test_codebook_of_values_equals_least_squares():
    y, bits = randn(1, 300, 8), (randn(1, 300, 12, seed=1) > 0).float()
    weights = 0.1 + randn(1, 300, seed=2).square()
    book, offset = fit_codebook(y, bits, weights)
    rows = torch.cat((bits[0], torch.ones(300, 1)), 1) * weights[0].sqrt()[:, None]
    solved = torch.linalg.lstsq(rows.double(), (y[0] * weights[0].sqrt()[:, None]).double()).solution
    torch.testing.assert_close(torch.cat((book[0], offset)), solved.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("encoder", ["scalar", "mlp"])
@pytest.mark.parametrize("joint", [False, True], ids=["per-head", "joint"])
def test_values_are_learned_and_flips_lower_the_error(encoder, joint):
    schedule = dataclasses.replace(QUICK, encoder=encoder)
    generator = torch.Generator().manual_seed(0)
    tensors, errors = learn_values(sample(), held_out(), 32, joint, schedule, generator)
    assert errors["value_mse"] < (0.4 if encoder == "scalar" else 0.7)
    assert {"codebook", "offset", "metric"} < set(tensors)
    values = sample().values
    if joint:
        values = values.transpose(0, 1).flatten(1).unsqueeze(0)
    book = ValueCodebook(tensors)
    f = tensors["metric"].float()
    error = [((book.decode(book.bits(values, n)) - values) @ f).square().sum(-1) for n in (0, 4, 32)]
    assert (error[1] <= error[0] + 1e-3).all() and (error[2] <= error[1] + 1e-3).all()


def test_a_codebook_of_values_means_whole_steps_everywhere():
    """At most half a step from what is given; the offset makes up for what half of the codes lose."""
    tensors, _ = learn_values(sample(), held_out(), 32, False, QUICK, torch.Generator().manual_seed(0))
    book, given = ValueCodebook(tensors), tensors["codebook"].float()
    c = book.steps.codebook
    assert ((c - given).abs() <= 0.501 * book.steps.step.unsqueeze(1)).all() and book.steps.numbers.abs().max() == 127
    rows = book.rows(len(c))
    assert torch.equal(rows[:, :-1], c)
    half = torch.full((len(c), 1, 32), 0.5)
    plain = half @ given + tensors["offset"].float().unsqueeze(1)
    assert torch.allclose(book.decode(half), plain, atol=1e-4 * float(plain.abs().max()))
    assert torch.equal(book.value_map(len(c)).rows, rows) and book.value_map(len(c)).steps is book.steps
    joint = ValueCodebook(learn_values(sample(), held_out(), 32, True, QUICK, torch.Generator().manual_seed(0))[0])
    assert joint.value_map(len(c)).steps is None


def test_values_beat_asymmetric_quantization_of_equal_bits():
    """Table 11's shape, on synthetic values: at 1 and 2 bits the learned code has the lower error."""
    layer = sample()
    truth = layer.values[:, held_out()]
    plain = dataclasses.replace(QUICK, metric=0.0, weight_limit=0.0)
    for bits in (1, 2):
        low, high = truth.amin(-1, keepdim=True), truth.amax(-1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        asym = float((low + ((truth - low) / step).round() * step - truth).square().sum() / truth.square().sum())
        learned = learn_values(layer, held_out(), 32 * bits, False, plain, torch.Generator().manual_seed(0))[1]
        assert learned["value_mse"] < 0.8 * asym


def test_errors_are_those_of_the_methods_own_search():
    """Held-out errors equal what the method's format and flips leave, and what is learned does not depend on them.

    Six stages: of four, whose choices begin with a code of one side, a search again may weigh less than all pairs at once.
    """
    layer, held = sample(), held_out()
    errors = []
    for passes, flips in ((0, 0), (3, 32)):
        form, generator = stored(6, passes), torch.Generator().manual_seed(0)
        tables, of_keys = learn_keys(layer, held, form, QUICK, generator)
        codes, of_values = learn_values(layer, held, 32, False, QUICK, generator, flips=flips)
        truth = layer.keys[:, held].unsqueeze(0)
        form = dataclasses.replace(form, codebook=KeyCodebook(tables["centres"], tables["metric"], 32))
        error = form.decode(form.encode(truth)) - truth
        assert of_keys["key_mse"] == pytest.approx(float(error.square().sum() / truth.square().sum()), rel=1e-4)
        book, truth = ValueCodebook(codes), layer.values[:, held]
        error = book.decode(book.bits(truth, flips)) - truth
        assert of_values["value_mse"] == pytest.approx(float(error.square().sum() / truth.square().sum()), rel=1e-4)
        errors.append((tables, codes, of_keys, of_values))
    (keys, values, *greedy), (same_keys, same_values, *searched) = errors
    assert all(torch.equal(same_keys[n], t) for n, t in keys.items())
    assert all(torch.equal(same_values[n], t) for n, t in values.items())
    assert all(greedy[i][name] > searched[i][name] for i in (0, 1) for name in greedy[i])


def test_learning_is_deterministic():
    runs = [learn_keys(sample(), held_out(), stored(2), QUICK, torch.Generator().manual_seed(3))[0] for _ in range(2)]
    other = learn_keys(sample(), held_out(), stored(2), QUICK, torch.Generator().manual_seed(4))[0]
    assert torch.equal(runs[0]["centres"], runs[1]["centres"])
    assert not torch.equal(runs[0]["centres"], other["centres"])


def test_nearest_prefers_the_exact_maximum_in_chunks():
    a, b, table = randn(1, 300, 8), randn(1, 300, 8, seed=1), randn(1, 8, 8, seed=2)
    best = (a.unsqueeze(-1) + b.unsqueeze(-2) - table.unsqueeze(1)).flatten(-2).argmax(-1)
    got = nearest(a, b, table)
    assert torch.equal(got[0] * 8 + got[1], best)


# ---- options ---------------------------------------------------------------------------------------------------------


def test_missing_artefact_is_said_with_the_command_that_makes_it():
    with pytest.raises(MethodError, match=r"artefact is missing.*kvfold calibrate"):
        get("commvq").key_format(spec())


@pytest.mark.parametrize("option", ["levels=48", "levels=512", "passes=-1", "flips=-1", "bits=5", "center=true"])
def test_wrong_options_are_refused(option):
    with pytest.raises(MethodError, match=option.split("=")[0]):
        get(f"commvq:{option}")
