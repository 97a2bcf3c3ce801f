"""Codes of two precisions, unpacked: the kernel run on a CPU, compiled ahead, and the formats it is meant for."""

import pytest
import torch

pytest.importorskip("triton")

import lanes
from aot.turned import compile_unpack_mixed
from helpers import multiprocessors
from kvfold.kernels.long import _mixed as _unpack_mixed_gluon
from kvfold.kernels.long import mixed as unpack_mixed
from kvfold.methods import LayerSpec, get

FIRST, TOKENS = 128, 160  # a block, and a quarter of the next one


class Emulated:
    """The kernel, whose launches PyTorch runs."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            run = _unpack_mixed_gluon.unpack_mixed_kernel
            lanes.run(run, (*grid, 1), arguments, constants, num_warps, 4 << 10)

        return launch


def form_of(side, method="zipcache"):
    method, layer = get(method), LayerSpec(0, 1, 1, 1, 128, torch.float16)
    return method.key_format(layer) if side == "keys" else method.value_format(layer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_numbers_are_those_of_the_format(side, dtype, monkeypatch):
    monkeypatch.setattr(unpack_mixed, "device_info", multiprocessors(1))
    monkeypatch.setattr(unpack_mixed, "RESIDENT", 1)
    monkeypatch.setattr(unpack_mixed, "_kernel", Emulated)
    assert error(side, dtype, "cpu") < (5e-4 if dtype == torch.float16 else 3e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_numbers_on_a_gpu(side, dtype):
    assert error(side, dtype, "cuda", 32 * 53) < (5e-4 if dtype == torch.float16 else 3e-3)


def error(side, dtype, device, tokens=TOKENS):
    """Relative RMS error of the tokens from the second block on; unused storage is full of NaN."""
    form, draw = form_of(side), torch.Generator().manual_seed(0)
    blocks = -(-(FIRST + tokens) // 128)
    shape = torch.exp(0.7 * torch.randn(1, 2, 1, 128, generator=draw))
    x = torch.randn(1, 2, 128 * blocks, 128, generator=draw) * shape + torch.randn(1, 2, 1, 128, generator=draw)
    fields = form.allocate(1, 2, blocks + 2, device)
    for y in fields.values():
        y.fill_(float("nan") if y.is_floating_point() else -1)
    score = torch.rand(1, 2, 128 * blocks, generator=draw)
    for name, y in form.encode(x, score=score).items():
        fields[name][:, :, : y.shape[2]] = y
    want = form.decode(fields)[:, :, FIRST : FIRST + tokens].float()
    whole = torch.full((1, 2, tokens + 32, 128), float("nan"), dtype=dtype, device=device)
    unpack_mixed.unpack_mixed(form, fields, FIRST, whole[:, :, :tokens])
    assert whole[:, :, tokens:].isnan().all()
    return (whole[:, :, :tokens].float() - want).norm() / want.norm()


@pytest.mark.parametrize("side", ["keys", "values"])
def test_compiles_without_spills(side):
    report = compile_unpack_mixed(form_of(side))
    assert report.spilled == 0 and report.instructions["HMMA"] == 64


def test_which_formats_it_serves():
    gpu = torch.device("cuda")
    for side in ("keys", "values"):
        assert unpack_mixed.serves(form_of(side), gpu) and not unpack_mixed.serves(form_of(side), torch.device("cpu"))
        for other in ("kivi", "zipcache:salient_bits=3", "zipcache:ratio=0", "zipcache:group=32"):
            assert not unpack_mixed.serves(form_of(side, other), gpu)
