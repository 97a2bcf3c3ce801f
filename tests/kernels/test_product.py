"""One row times a weight: in Triton's interpreter, compiled, and with ``pytest -m gpu`` launched, alone and in a row."""

import pytest
import torch

pytest.importorskip("triton")

from aot.small import compile_row, compile_three_rows
from helpers import interpreted_module
from kvfold.engines.transformers.ops import product as compiled
from kvfold.engines.transformers.ops import small

FP16, BF16 = torch.float16, torch.bfloat16
WHERE = [
    ("cpu", FP16),  # the interpreter cuts numbers off where bfloat16 is rounded
    *(pytest.param(("cuda", dtype), marks=pytest.mark.gpu, id=f"gpu-{dtype}") for dtype in (FP16, BF16)),
]
CHANNELS = [64, 1544, 4096]  # less than a part, not whole parts, and as many as wait
LIMIT = {FP16: 1e-3, BF16: 5e-3}


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module("kvfold.engines.transformers.ops.product", "kvfold.engines.transformers.ops._row")


@pytest.fixture(params=WHERE)
def where(request, interpreted):
    """Kernels, and the dtype of what they are given."""
    device, dtype = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    with torch.device(device):
        yield compiled if device == "cuda" else interpreted, dtype


def operands(channels, counts, dtype):
    x = torch.randn(1, 1, channels).to(dtype)
    return x, *(torch.randn(count, channels).div(channels**0.5).to(dtype) for count in counts)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_its_definition(channels, bias, where):
    kernels, dtype = where
    x, weight = operands(channels, [13], dtype)
    more = torch.randn(13).to(dtype) if bias else None
    got = kernels.row_product(x, weight, more)
    want = torch.nn.functional.linear(x.float(), weight.float(), None if more is None else more.float())
    assert got.shape == (1, 1, 13) and got.dtype == dtype
    assert (got.float() - want).norm() < LIMIT[dtype] * want.norm()


@pytest.mark.parametrize("channels", CHANNELS)
def test_a_gated_product_is_that_of_its_definition(channels, where):
    kernels, dtype = where
    x, gate, up = operands(channels, [13, 13], dtype)
    want = small.gated_by_definition(x.float() @ gate.float().T, x.float() @ up.float().T)
    got = kernels.gated_row_product(x, gate, up)
    assert (got.float() - want).norm() < 2 * LIMIT[dtype] * want.norm()


@pytest.mark.parametrize("channels", [64, 4096])
@pytest.mark.parametrize("bias", [False, True])
def test_three_products_in_one_launch_are_those_of_their_definitions(channels, bias, where):
    kernels, dtype = where
    x, *weights = operands(channels, [13, 4, 7], dtype)
    more = [torch.randn(len(w)).to(dtype) if bias else None for w in weights]
    results = kernels.three_row_products(x, weights, more)
    for got, weight, b in zip(results, weights, more, strict=True):
        want = torch.nn.functional.linear(x.float(), weight.float(), None if b is None else b.float())
        assert got.shape == want.shape and got.dtype == dtype and got.is_contiguous()
        assert (got.float() - want).norm() < LIMIT[dtype] * want.norm()


@pytest.mark.parametrize("plan", [(1, 256, 3, 1), (4, 512, 2, 4), (2, 2048, 1, 4)], ids=str)
def test_any_plan_gives_the_product(plan, where):
    kernels, dtype = where
    x, weight = operands(4096, [10], dtype)
    got, want = kernels.row_product(x, weight, plan=kernels.Plan(*plan)), x.float() @ weight.float().T
    assert (got.float() - want).norm() < LIMIT[dtype] * want.norm()


@pytest.mark.parametrize(
    ("channels", "gated"), [(4096, False), (14336, False), (4096, True), (896, True), (8960, False)]
)
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_spills(channels, gated, capability):
    """And on sm_90 the weights of the first parts are asked for before the kernel waits."""
    report = compile_row(channels, gated, capability=capability)
    assert report.spilled == 0 and report.registers <= 168
    assert (report.instructions["ACQBULK"] == 1) == (capability == 90)


@pytest.mark.parametrize("channels", [4096, 1536])
def test_three_products_read_their_weights_as_wide_as_one(channels):
    one, three = compile_row(channels), compile_three_rows(channels)
    assert three.spilled == 0 and three.instructions["ACQBULK"] == 1
    assert three.instructions["LDG"] <= one.instructions["LDG"] + 2  # of the bias


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_kernels_that_begin_early_wait_for_what_they_read(dtype):
    """Norms, products and gates in a graph, one after the other and over one another's memory, as they are alone."""
    torch.manual_seed(0)
    size, wide = 2048, 5632
    with torch.device("cuda"):
        weights = [
            [w.div(size**0.5).to(dtype) for w in (torch.randn(wide, size), torch.randn(wide, size))] for _ in range(8)
        ]
        downs = [torch.randn(size, wide).div(wide**0.5).to(dtype) for _ in range(8)]
        scale, x = torch.ones(size).to(dtype), torch.randn(1, 1, size).to(dtype)

    def run(sync):
        sums, out = x, torch.zeros_like(x)
        for (gate, up), down in zip(weights, downs, strict=True):
            total = torch.empty_like(x)
            steps = [
                lambda a=sums, b=out, t=total: small.added_norm(a, b, t, scale, 1e-5, "normed"),
                lambda h, g=gate, u=up: compiled.gated_row_product(h, g, u),
                lambda h, d=down: compiled.row_product(h, d),
            ]
            h = steps[0]()
            for step in steps[1:]:
                if sync:
                    torch.cuda.synchronize()
                h = step(h)
            if sync:
                torch.cuda.synchronize()
            sums, out = total, h
        return sums + out

    want = run(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(got, want)
