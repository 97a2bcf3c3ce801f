"""Codes that a Hadamard rotation turns, unpacked: the kernel run on a CPU, compiled ahead, and the formats it is meant for."""

import pytest
import torch

pytest.importorskip("triton")

import lanes
from kvfold.kernels import _unpack_hadamard_gluon, unpack_hadamard
from kvfold.kernels.aot_turned import compile_unpack_hadamard
from kvfold.methods import LayerSpec, get

FIRST, TOKENS = 128, 160  # a page, and a quarter of the next one


class Emulated:
    """The kernel, whose launches PyTorch runs."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            run = _unpack_hadamard_gluon.unpack_hadamard_kernel
            lanes.run(run, (*grid, 1), arguments, constants, num_warps, 4 << 10)

        return launch


def form_of(side, method="fold"):
    method, layer = get(method), LayerSpec(0, 1, 1, 1, 128, torch.float16)
    return method.key_format(layer) if side == "keys" else method.value_format(layer)


CASES = [
    *((f"fold:bits={bits}", side, torch.float16) for bits in (1, 2, 3, 4) for side in ("keys", "values")),
    *(("fold", side, torch.bfloat16) for side in ("keys", "values")),
    ("fold:rotation=32", "keys", torch.float16),
    ("fold:rotation=128", "values", torch.float16),
    ("fold:rotation=128,bits=4", "keys", torch.float16),
]


@pytest.mark.parametrize(("method", "side", "dtype"), CASES)
def test_numbers_are_those_of_the_format(method, side, dtype, monkeypatch):
    monkeypatch.setattr(unpack_hadamard, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(unpack_hadamard, "RESIDENT", 1)
    monkeypatch.setattr(unpack_hadamard, "_kernel", Emulated)
    assert error(method, side, dtype, "cpu") < (5e-4 if dtype == torch.float16 else 3e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("method", "side", "dtype"), CASES)
def test_numbers_on_a_gpu(method, side, dtype):
    assert error(method, side, dtype, "cuda", 32 * 53) < (5e-4 if dtype == torch.float16 else 3e-3)


def error(method, side, dtype, device, tokens=TOKENS, scale=None):
    """Relative RMS error of the tokens from the second page on, or, with all scales ``scale``, the largest number."""
    form, draw = form_of(side, method), torch.Generator().manual_seed(0)
    pages = -(-(FIRST + tokens) // 128)
    shape = torch.exp(0.7 * torch.randn(1, 2, 1, 128, generator=draw))
    x = torch.randn(1, 2, 128 * pages, 128, generator=draw) * shape + torch.randn(1, 2, 1, 128, generator=draw)
    fields = form.allocate(1, 2, 4 * pages + 3, device)
    for y in fields.values():
        y.fill_(float("nan") if y.is_floating_point() else -1)
    for name, y in form.encode(x).items():
        fields[name][:, :, : y.shape[2]] = y
    if scale is not None:
        fields["scale"].fill_(scale)
    want = form.decode(fields)[:, :, FIRST : FIRST + tokens].float()
    whole = torch.full((1, 2, tokens + 32, 128), float("nan"), dtype=dtype, device=device)
    unpack_hadamard.unpack_hadamard(form, fields, FIRST, whole[:, :, :tokens])
    assert whole[:, :, tokens:].isnan().all()
    found = whole[:, :, :tokens].float()
    return (found - want).norm() / want.norm() if scale is None else found.abs().max()


def test_large_numbers_do_not_become_infinities(monkeypatch):
    monkeypatch.setattr(unpack_hadamard, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(unpack_hadamard, "_kernel", Emulated)
    assert error("fold", "values", torch.float16, "cpu", 32, 60000.0) == 65504


@pytest.mark.parametrize("side", ["keys", "values"])
def test_compiles_without_spills(side):
    report = compile_unpack_hadamard(form_of(side))
    assert report.spilled == 0 and report.instructions["HMMA"] == 64


def test_which_formats_it_serves():
    gpu = torch.device("cuda")
    for side in ("keys", "values"):
        assert unpack_hadamard.serves(form_of(side), gpu)
        assert not unpack_hadamard.serves(form_of(side), torch.device("cpu"))
        for other in ("kivi", "turboquant:bits=2", "fold:bits=8", "fold:rotation=1", "fold:rotation=16"):
            assert not unpack_hadamard.serves(form_of(side, other), gpu)
