"""What queries meet before packed keys, in one kernel each: interpreted, compiled, and with ``pytest -m gpu`` launched."""

import pytest
import torch

pytest.importorskip("triton")

from aot.queries import compile_map, compile_statistics
from helpers import interpreted_module
from kvfold.formats.projected import HeadMaps
from kvfold.kernels import queries as compiled

FP16, BF16 = torch.float16, torch.bfloat16
WHERE = [
    ("cpu", FP16),  # the interpreter cuts numbers off where bfloat16 is rounded
    *(pytest.param(("cuda", dtype), marks=pytest.mark.gpu, id=f"gpu-{dtype}") for dtype in (FP16, BF16)),
]


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module("kvfold.kernels.queries")


@pytest.fixture(params=WHERE)
def where(request, interpreted):
    """Kernels, and the dtype of what they are given."""
    device, dtype = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with torch.device(device):
        yield compiled if device == "cuda" else interpreted, dtype


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
