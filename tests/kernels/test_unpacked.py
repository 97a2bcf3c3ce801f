"""Calls of many tokens that unpack what is packed: against the reference, in Triton's interpreter and on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

import kvfold.kernels.unpacked as compiled
from helpers import interpreted_module
from kvfold.kernels import AttentionCall, NewTokens, Span, Windows
from kvfold.kernels.reference import ReferenceKernel
from kvfold.methods import LayerSpec, get

LIMIT = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda" if request.param == "gpu" else "cpu")


@pytest.fixture
def kernel(device, monkeypatch):
    if device.type == "cpu":
        windows = interpreted_module("kvfold.kernels.windows")
        monkeypatch.setattr(compiled, "attend_windows", windows.attend_windows)
    monkeypatch.setattr(compiled, "PIECE", 256)  # several pieces
    return compiled


def call(
    device, method="fold", batch=2, tokens=33, packed=(448, 96), dim=64, heads=4, kv_heads=2, dtype=torch.float16, **how
):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    spec = LayerSpec(0, 1, heads, kv_heads, dim, dtype)
    forms = get(method).key_format(spec), get(method).value_format(spec)
    spans, start = [], 0
    for n in packed:
        fields = [form.encode(random(batch, kv_heads, n, dim) + random(1, kv_heads, 1, dim)) for form in forms]
        spans.append(Span(start, *fields))
        start += n
    sides = [random(batch, kv_heads, slots, dim).to(dtype) for slots in (8, 8, 64, 64)]

    def full(n):
        return torch.full((batch,), n, dtype=torch.int32, device=device)

    windows = Windows((sides[0], sides[1]), (sides[2], sides[3]), full(8), full(start), full(50))
    new = NewTokens(*(random(batch, kv_heads, tokens, dim).to(dtype) for _ in range(2)), how.pop("valid", None))
    query = random(batch, heads, tokens, dim).to(dtype)
    return AttentionCall(
        query, dim**-0.5, kv_heads, *forms, spans, full(start), windows, new, how.pop("uniform", True), **how
    )


def error(kernel, given):
    assert kernel.serves(given)
    got, want = kernel.attend_unpacked(given).float(), ReferenceKernel().attend(given).float()
    if given.new.valid is not None:
        got, want = (x.transpose(1, 2)[given.new.valid] for x in (got, want))
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", LIMIT, ids=["fp16", "bf16"])
@pytest.mark.parametrize("method", ["fold", "fold:bits=1", "kivi", "turboquant", "none"])
def test_equals_the_reference(kernel, device, method, dtype):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter knows no bfloat16")
    assert error(kernel, call(device, method, dtype=dtype)) < LIMIT[dtype]


def test_padding_and_sinks(kernel, device):
    valid = torch.ones(2, 33, dtype=torch.bool, device=device)
    valid[1, :7] = False
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    assert error(kernel, call(device, valid=valid, sinks=sinks)) < LIMIT[torch.float16]


def test_nothing_packed(kernel, device):
    assert error(kernel, call(device, packed=())) < LIMIT[torch.float16]


@pytest.mark.parametrize("how", [{"uniform": False}, {"softcap": 30.0}, {"dtype": torch.float32}], ids=str)
def test_what_it_leaves_to_the_reference(device, how):
    assert not compiled.serves(call(device, tokens=2, packed=(32,), **how))
