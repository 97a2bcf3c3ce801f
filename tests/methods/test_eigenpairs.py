"""Largest eigenpairs by subspace iteration against ``torch.linalg.eigh``."""

import pytest
import torch

from helpers import relative
from kvfold.methods.eigenpairs import BLOCK, SPARE, TOLERANCE, subspace_iteration, top_eigenpairs
from kvfold.methods.squat import penalty_factor, penalty_matrix, update_matrix, update_of_factor

SIZES = (64, 128, 256)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def queries_of(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Queries [1, 1, d, d] whose Gram matrix has the eigenvalues ``values`` [d]."""
    basis = torch.linalg.qr(normal(1, 1, len(values), len(values), seed=seed))[0]
    return values.sqrt().unsqueeze(-1) * basis.mT


def spectrum(d: int, first: float = 1e5, second: float = 1e4, last: float = 300) -> torch.Tensor:
    """Like that of a model's queries: a large mean, then a steady fall; all distinct."""
    tail = torch.logspace(0, 1, d - 1, base=last / second, dtype=torch.float64) * second
    return torch.cat([torch.tensor([first], dtype=torch.float64), tail])


def gram_of(queries: torch.Tensor) -> torch.Tensor:
    return queries.mT @ queries


@pytest.fixture
def whole(monkeypatch):
    """Numbers of matrices given to ``eigh`` whole, not as a block's Rayleigh-Ritz step."""
    counts, eigh = [], torch.linalg.eigh

    def counted(matrices):
        if matrices.shape[-1] != BLOCK:
            counts.append(matrices.shape[:-2].numel())
        return eigh(matrices)

    monkeypatch.setattr(torch.linalg, "eigh", counted)
    return counts


def check_pairs(gram: torch.Tensor, rank: int) -> None:
    values, vectors = top_eigenpairs(gram, rank, iterate=True)
    expected = torch.linalg.eigvalsh(gram)
    largest = expected[..., -1:]
    assert values.shape == (*gram.shape[:-2], rank) and vectors.shape == (*gram.shape[:-1], rank)
    assert ((values - expected[..., -rank:]).abs() <= TOLERANCE * largest).all()
    residual = (gram @ vectors - vectors * values.unsqueeze(-2)).norm(dim=-2)
    assert (residual <= 1.01 * TOLERANCE * largest).all()
    eye = torch.eye(rank, dtype=gram.dtype)
    assert ((vectors.mT @ vectors - eye).abs() < 1e-12).all()


def check_penalty(queries: torch.Tensor, rank: int, lam: float = 1e-3) -> None:
    penalty, expected = (penalty_matrix(queries, rank, lam, iterate=iterate) for iterate in (True, False))
    assert relative(penalty, expected) < 1e-9
    width = queries.shape[-1] // 2
    ours, theirs = (torch.linalg.solve(p[..., width:, width:], p[..., width:, :width]) for p in (penalty, expected))
    assert relative(ours, theirs) < 1e-8
    assert relative(update_matrix(penalty, width), update_matrix(expected, width)) < 1e-6  # stored in float32


@pytest.mark.parametrize("width", (16, 32))
@pytest.mark.parametrize(("rank", "lam"), ((1, 1e-3), (5, 1e-3), (20, 1.0), (40, 1e5)))
def test_updates_of_a_factor_are_those_of_the_whole_matrix(rank, lam, width):
    queries = queries_of(spectrum(64))
    gram = gram_of(queries)
    got = update_of_factor(penalty_factor(gram, rank, lam), width)
    assert relative(got, update_matrix(penalty_matrix(queries, rank, lam), width)) < 1e-6
    assert not update_of_factor(torch.full((1, 2, 64, 5), torch.nan, dtype=torch.float64), width).any()


@pytest.mark.parametrize("rank", (1, 5, 10, 20))
@pytest.mark.parametrize("d", SIZES)
def test_a_models_spectrum(d, rank, whole):
    queries = queries_of(spectrum(d, last=100 * 64 / d))
    check_pairs(gram_of(queries), rank)
    assert not whole
    check_penalty(queries, rank)


@pytest.mark.parametrize("d", SIZES)
def test_a_flat_spectrum_goes_to_eigh_and_takes_no_other_along(d, whole):
    flat = gram_of(normal(1, 1, 20_000, d))
    steep = gram_of(queries_of(spectrum(d, last=1)))
    gram = torch.cat([steep, flat], 1)
    values, vectors = top_eigenpairs(gram, 5, iterate=True)
    assert whole == [1]
    expected = torch.linalg.eigh(flat)
    assert torch.equal(values[:, 1:], expected[0][..., -5:]) and torch.equal(vectors[:, 1:], expected[1][..., -5:])
    alone, directions = top_eigenpairs(steep, 5, iterate=True)
    assert relative(values[:, :1], alone) < 1e-12
    assert relative((vectors @ vectors.mT)[:, :1], directions @ directions.mT) < 1e-8


@pytest.mark.parametrize("tokens", (1, 3, 40))
@pytest.mark.parametrize("d", SIZES)
def test_fewer_tokens_than_channels(d, tokens):
    queries = normal(1, 2, tokens, d) * torch.logspace(1, -1, d, dtype=torch.float64)
    check_pairs(gram_of(queries), 5)
    check_penalty(queries, 5)


@pytest.mark.parametrize("d", SIZES)
def test_zero_beside_another(d):
    queries = torch.cat([torch.zeros(1, 1, d, d, dtype=torch.float64), queries_of(spectrum(d))], 1)
    check_pairs(gram_of(queries), 5)
    penalty = penalty_matrix(queries, 5, 1e-3, iterate=True)
    assert torch.equal(penalty[0, 0], torch.eye(d, dtype=torch.float64))
    check_penalty(queries[:, 1:], 5)


@pytest.mark.parametrize("size", (1e18, 1e-18, 1e-30))
def test_any_scale(size, whole):
    queries = size * queries_of(spectrum(128, first=1, second=0.1, last=0.001))
    check_pairs(gram_of(queries), 5)
    assert not whole
    if size > 1:
        assert penalty_matrix(queries.float(), 5, 1e-3, iterate=True).isfinite().all()


@pytest.mark.parametrize("second", (1e-2, 1e-4, 1e-6, 1e-9, 1e-12))
def test_one_value_far_above_the_others(second):
    queries = queries_of(spectrum(128, first=1e6, second=1e6 * second, last=1e5 * second))
    check_pairs(gram_of(queries), 5)
    check_penalty(queries, 5)


@pytest.mark.parametrize("gap", (0.0, 1e-14, 1e-9, 1e-4))
def test_near_ties(gap):
    """Below the boundary of rank they change nothing; across it the space is any, and still an eigenspace."""
    values = spectrum(128, last=30)
    within, across = values.clone(), values.clone()
    within[3] = values[4] * (1 + gap)
    across[5] = values[4] * (1 - gap)
    check_penalty(queries_of(within), 5)
    check_pairs(gram_of(queries_of(within)), 5)
    check_pairs(gram_of(queries_of(across)), 5)


def test_equal_values_and_diagonal_matrices():
    eye = torch.eye(128, dtype=torch.float64).expand(1, 2, -1, -1)
    check_pairs(eye, 5)
    check_pairs(torch.diag_embed(spectrum(128)).expand(1, 2, -1, -1), 5)
    check_pairs(torch.ones(1, 2, 128, 128, dtype=torch.float64), 5)


def test_a_call_repeats_its_bytes_and_a_sequence_does_not_see_its_batch():
    steep, slow = ([queries_of(spectrum(128, last=n), seed=i) for i in range(2)] for n in (2, 30))
    queries = torch.cat([*steep, *slow])  # some of them need more rounds than others
    penalty, again = (penalty_matrix(queries, 5, 1e-3, iterate=True) for _ in range(2))
    assert torch.equal(penalty, again)
    for i in range(4):
        assert torch.equal(penalty[i : i + 1], penalty_matrix(queries[i : i + 1], 5, 1e-3, iterate=True))


@pytest.mark.parametrize(("d", "rank"), ((128, BLOCK - SPARE + 1), (128, 60), (32, 5), (8, 5), (4, 5)))
def test_sizes_that_eigh_serves(d, rank):
    gram = gram_of(normal(1, 2, 300, d))
    for mine, whole in zip(top_eigenpairs(gram, rank, iterate=True), torch.linalg.eigh(gram), strict=True):
        assert torch.equal(mine, whole[..., -rank:])


def test_the_check_tells_which_matrices_failed():
    flat, steep = gram_of(normal(1, 20_000, 64)), gram_of(queries_of(spectrum(64, last=1))[0])
    assert subspace_iteration(torch.cat([flat, steep]), 5)[2].tolist() == [True, False]
    assert subspace_iteration(steep, 5)[2] is None
    assert subspace_iteration(flat.fill_(float("nan")), 5)[2].tolist() == [True]


def test_a_solver_that_does_not_wait_gives_the_same_pairs():
    """It is told which matrices it is needed for; of others it may give anything."""
    asked = []

    def eigh(matrices, needed):
        asked.append(None if needed is None else needed.tolist())
        values, vectors = torch.linalg.eigh(matrices)
        if needed is not None:
            values = values.masked_fill(~needed[:, None], torch.nan)
            vectors = vectors.masked_fill(~needed[:, None, None], torch.nan)
        return values, vectors

    flat, steep = gram_of(normal(1, 20_000, 64)), gram_of(queries_of(spectrum(64, last=1))[0])
    gram = torch.cat([flat, steep])
    values, vectors = top_eigenpairs(gram, 5, True, eigh)
    wanted, directions = top_eigenpairs(gram, 5, True)
    assert relative(values, wanted) < 1e-12
    assert relative(vectors @ vectors.mT, directions @ directions.mT) < 1e-8
    assert asked[0] == [True, True] and asked[-1] == [True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_iterates_and_agrees_with_the_cpu(whole):
    queries = torch.cat([queries_of(spectrum(128), seed=i) for i in range(8)], 1)
    on_gpu = penalty_matrix(queries.cuda(), 5, 1e-3).cpu()
    assert not whole
    assert relative(on_gpu, penalty_matrix(queries, 5, 1e-3)) < 1e-8
