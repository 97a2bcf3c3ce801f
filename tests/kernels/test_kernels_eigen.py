"""Products of queries and eigenvectors by kernels, in Triton's interpreter or on a GPU, against float64 and ``eigh``."""

import pytest
import torch

pytest.importorskip("triton")

from helpers import interpreted_module, relative
from kvfold.methods.eigenpairs import top_eigenpairs
from kvfold.methods.squat import penalty_factor, penalty_of, update_matrix, update_of_factor

MODULES = "kvfold.kernels.common._encode_groups", "kvfold.kernels.affine._eigen"


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module("kvfold.kernels.affine.eigen", *MODULES)


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """The module and the device it runs on."""
    if request.param == "interpreter":
        return request.getfixturevalue("interpreted"), torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from kvfold.kernels.affine import eigen

    return eigen, torch.device("cuda")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def symmetric(values, seed=0):
    """A matrix of these eigenvalues, float64 [1, d, d]."""
    basis = torch.linalg.qr(randn(1, len(values), len(values), seed=seed).double())[0]
    return (basis * values.double()) @ basis.mT


def queries(heads, tokens, d, dtype):
    """As a model has them: heads of a token lie together, a few directions are large."""
    x = randn(2, tokens, heads, d) * torch.exp(randn(heads, d, seed=1)) + randn(heads, d, seed=2)
    return x.to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "tokens", "d"), [(4, 100, 64), (2, 65, 80), (2, 1, 128), (3, 4200, 32)])
def test_products_are_those_of_float64(heads, tokens, d, dtype, place):
    module, device = place
    x = queries(heads, tokens, d, dtype)
    kv_heads = 1 if heads == 3 else 2
    own = x.double().unflatten(1, (kv_heads, -1)).flatten(2, 3)
    want = own.mT @ own
    got = module.gram(x.to(device), kv_heads).cpu()
    assert got.dtype == torch.float64 and got.shape == want.shape
    assert ((got - want).abs().amax((-1, -2)) <= 1e-6 * want.abs().amax((-1, -2))).all()


def test_a_query_that_is_no_number_spoils_its_own_head(place):
    module, device = place
    x = queries(2, 40, 32, torch.bfloat16).contiguous()
    x[0, 1, 3, 5] = float("nan")
    x[1, 0, 0, 0] = float("inf")
    got = module.gram(x.to(device), 2).cpu()
    assert got[0, 0].isfinite().all() and got[0, 1].isnan().any() and not got[1].isnan().any()


@pytest.mark.parametrize("d", [8, 16, 20, 32, 80, 128])
def test_eigenvectors(d, place):
    module, device = place
    if d > 20 and device.type == "cpu":
        pytest.skip("a minute in the interpreter")
    steep, flat = symmetric(torch.logspace(0, -12, d)), symmetric(1 + 0.01 * torch.arange(d), seed=1)
    few = symmetric(torch.cat((torch.ones(3), torch.zeros(d - 3))), seed=2)
    matrices = torch.cat((steep, flat, few, torch.zeros(1, d, d), torch.eye(d)[None])).double()
    values, vectors = (t.cpu() for t in module.eigh(matrices.to(device)))
    expected = torch.linalg.eigvalsh(matrices)
    assert ((values - expected).abs() <= 1e-13 * expected[:, -1:]).all()
    assert ((vectors.mT @ vectors - torch.eye(d)).abs() < 1e-12).all()
    assert (matrices @ vectors - vectors * values.unsqueeze(-2)).abs().max() < 1e-12


def test_only_what_is_needed_is_turned(place):
    module, device = place
    matrices = torch.cat((symmetric(torch.arange(16) + 1.0), torch.full((1, 16, 16), float("nan")).double()))
    values, _ = module.eigh(matrices.to(device), torch.tensor([True, False], device=device))
    assert (values[0].cpu() - torch.arange(16) - 1).abs().max() < 1e-12
    module.eigh(matrices.to(device))  # ends


def test_a_solver_that_turns_too_little_is_not_used(monkeypatch):
    from kvfold.kernels.affine import eigen as module

    def turned(matrices, needed=None):
        values, vectors = torch.linalg.eigh(matrices)
        first, last = vectors[1, :, 0].clone(), vectors[1, :, -1].clone()
        vectors[1, :, 0], vectors[1, :, -1] = first + 1e-4 * last, last - 1e-4 * first
        return values, vectors

    untested = module.is_right.__wrapped__
    monkeypatch.setattr(module, "eigh", lambda matrices, needed=None: torch.linalg.eigh(matrices))
    assert untested(torch.device("cpu"))
    monkeypatch.setattr(module, "eigh", turned)
    with pytest.warns(RuntimeWarning, match="waits for the host"):
        assert not untested(torch.device("cpu"))


@pytest.mark.gpu
def test_the_solver_passes_its_test():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from kvfold.kernels.affine import eigen as module

    assert module.is_right(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 5, 20, 40])
def test_states_are_those_of_the_hosts_solver(rank):
    """Steep spectra pass the iteration's check; a flat one goes to the solver whole."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from kvfold.kernels.affine import eigen as module

    device = torch.device("cuda")
    steep = symmetric(torch.cat((torch.tensor([1e5]), torch.logspace(4, 2, 63))))
    grams = torch.cat((steep, symmetric(1 + 1e-3 * torch.arange(64), seed=1), torch.zeros(1, 64, 64).double()))
    pairs = top_eigenpairs(grams.to(device), rank, True, module.eigh)
    values, vectors = (t.cpu() for t in pairs)
    wanted, directions = (t[..., -rank:] for t in torch.linalg.eigh(grams))
    assert ((values - wanted).abs() <= 1e-10 * wanted[:, -1:]).all()
    assert relative((vectors @ vectors.mT)[:2], (directions @ directions.mT)[:2]) < 1e-7
    want = update_matrix(penalty_of(grams, rank, 1e-3, False, False), 32)
    mine = update_of_factor(penalty_factor(grams.to(device), rank, 1e-3, True, module.eigh), 32).cpu()
    assert relative(mine, want) < 1e-6
