"""A model's small operations in one kernel each: in Triton's interpreter, compiled, and with ``pytest -m gpu`` launched."""

import pytest
import torch

pytest.importorskip("triton")

from aot.small import compile_gate, compile_norm, compile_rotate
from helpers import interpreted_module
from kvfold.engines.transformers.ops import small as compiled

FP16, BF16 = torch.float16, torch.bfloat16
WHERE = [
    ("cpu", FP16),  # the interpreter cuts numbers off where bfloat16 is rounded
    *(pytest.param(("cuda", dtype), marks=pytest.mark.gpu, id=f"gpu-{dtype}") for dtype in (FP16, BF16)),
]


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module("kvfold.engines.transformers.ops.small")


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
