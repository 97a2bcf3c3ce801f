"""A model's small operations in one kernel each: in Triton's interpreter, compiled, and with ``pytest -m gpu`` launched."""

import pytest
import torch

pytest.importorskip("triton")

from helpers import interpreted_module
from kvfold.formats.projected import HeadMaps
from kvfold.kernels import small as compiled
from kvfold.kernels.aot_small import compile_gate, compile_map, compile_norm, compile_rotate, compile_statistics

FP16, BF16 = torch.float16, torch.bfloat16
WHERE = [
    ("cpu", FP16),  # the interpreter cuts numbers off where bfloat16 is rounded
    *(pytest.param(("cuda", dtype), marks=pytest.mark.gpu, id=f"gpu-{dtype}") for dtype in (FP16, BF16)),
]


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module("kvfold.kernels.small")


@pytest.fixture(params=WHERE)
def where(request, interpreted):
    """Kernels, and the dtype of what they are given."""
    device, dtype = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with torch.device(device):
        yield compiled if device == "cuda" else interpreted, dtype


@pytest.mark.parametrize("shape", [(2, 1, 1536), (3, 1, 4, 80), (1, 1, 1)])
@pytest.mark.parametrize("rounding", compiled.ROUNDINGS)
def test_a_norm_is_that_of_its_definition(rounding, shape, where):
    """But for the order of the sum: where that moves a number over a rounding, by one step of the dtype."""
    kernels, dtype = where
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(s) for s in (shape, shape[-1]))
    x, weight = x.to(dtype), weight.to(dtype)
    got = kernels.rms_norm(x, weight, 1e-6, rounding)
    want = kernels.norm_by_definition(x, weight, 1e-6, rounding)
    assert got.dtype == dtype and got.shape == x.shape
    step = 2 * torch.finfo(dtype).eps * want.abs().float()
    assert ((got.float() - want.float()).abs() <= step).all()
    assert (got != want).float().mean() < 0.02


@pytest.mark.parametrize("rounding", compiled.ROUNDINGS)
def test_a_norm_of_a_sum_is_that_of_the_sum(rounding, where):
    """And the sum is written, rounded as Torch rounds it."""
    kernels, dtype = where
    torch.manual_seed(0)
    x, more = (3 * torch.randn(2, 1, 1536).to(dtype) for _ in range(2))
    weight, total = torch.randn(1536).to(dtype), torch.full_like(x, float("nan"))
    got = kernels.added_norm(x, more, total, weight, 1e-6, rounding)
    assert torch.equal(total, x + more)
    assert torch.equal(got, kernels.rms_norm(x + more, weight, 1e-6, rounding))


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("alike", [True, False])
def test_a_rotation_is_that_of_its_definition_to_the_last_bit(dim, alike, where):
    """Of views, as models make them: of one product of queries, keys and values."""
    kernels, dtype = where
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 8, dim).to(dtype).transpose(1, 2)
    q, k = whole[:, :5], whole[:, 5:7]
    cos, sin = (torch.randn(1 if alike else 3, 1, dim).to(dtype) for _ in range(2))
    for got, want in zip(kernels.rotate(q, k, cos, sin), kernels.rotate_by_definition(q, k, cos, sin), strict=True):
        assert got.shape == want.shape and torch.equal(got, want)


def test_a_gate_is_that_of_its_definition(where):
    """But for the last bit of an exponential; also where it is none or all of its number."""
    kernels, dtype = where
    torch.manual_seed(0)
    gate, up = (3 * torch.randn(2, 1, 700).to(dtype) for _ in range(2))
    gate[0, 0, :3] = torch.tensor([-80.0, 0.0, 80.0])
    got, want = kernels.gated(gate, up), kernels.gated_by_definition(gate, up)
    assert ((got.float() - want.float()).abs() <= 2 * torch.finfo(dtype).eps * want.abs().float() + 1e-7).all()
    assert (got != want).float().mean() < 0.02


@pytest.mark.parametrize(("capability", "rounding"), [(80, "normed"), (90, "whole"), (100, "above one")])
def test_kernels_compile_without_spills(capability, rounding):
    """Of models of many channels; a row is read once, sixteen bytes a load."""
    report = compile_norm(8192, rounding, capability=capability)
    assert report.spilled == 0 and report.registers <= 168 and report.instructions["LDG"] <= 12
    assert compile_rotate(128, capability=capability).spilled == compile_gate(capability=capability).spilled == 0


@pytest.mark.parametrize("norm, mean", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dim", [128, 80])
def test_queries_meet_statistics_of_a_sequence_as_defined(dim, norm, mean, where):
    """Of views, in every dtype that layers have."""
    kernels, dtype = where
    torch.manual_seed(0)
    q = torch.randn(2, 3, 6, 2 * dim).to(dtype)[..., :dim].transpose(1, 2)
    codes = torch.randint(0, 256, (2, 6, 1, dim), dtype=torch.uint8) if norm else None
    means = torch.randn(2, 6, 1, dim).half() if mean else None
    for queries in (q, q.float()):
        got, bias = kernels.with_statistics(queries, codes, means)
        want, added = kernels.with_statistics_by_definition(queries, codes, means)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want.float(), rtol=2e-6, atol=0)
        assert torch.equal(kernels.with_statistics(queries, codes, means, dtype)[0], got.to(dtype))
        assert (bias is None) == (added is None)
        if bias is not None:
            torch.testing.assert_close(bias, added.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_kernel_of_statistics_compiles_without_spills(dim):
    report = compile_statistics(dim)
    assert report.spilled == 0 and report.registers <= 64


@pytest.mark.parametrize("rows", [1, 4, 40, 130])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_queries_go_through_a_heads_map_as_defined(dim, rows, where):
    """Of views, in every dtype that layers have; within float32's rounding."""
    kernels, dtype = where
    torch.manual_seed(0)
    maps = HeadMaps(torch.randn(3, dim), torch.eye(dim).expand(3, -1, -1), torch.randn(3, dim, dim).transpose(1, 2))
    q = torch.randn(2, rows, 3, 2 * dim).to(dtype)[..., :dim].transpose(1, 2)
    for queries in (q, q.float()):
        got, bias = kernels.through_maps(maps, queries)
        want = queries.double() @ maps.restore.double().transpose(1, 2)
        added = (queries.double() * maps.mean.double()[:, None]).sum(-1)
        assert got.dtype == bias.dtype == torch.float32
        assert float((got - want).norm() / want.norm()) < 1e-6
        assert float((bias - added).norm() / added.norm()) < 1e-6
        rounded, again = kernels.through_maps(maps, queries, dtype)
        assert rounded.dtype == dtype and float((again - bias).norm() / bias.norm()) < 1e-6
        torch.testing.assert_close(rounded, got.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("rows", [4, 2048])
@pytest.mark.parametrize("dim, capability", [(64, 80), (128, 80), (128, 90)])
def test_the_kernel_of_maps_compiles_without_spills(dim, capability, rows):
    assert compile_map(dim, rows, capability=capability).spilled == 0
