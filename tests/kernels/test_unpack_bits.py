"""Bits and a matrix of every KV head, unpacked: the kernel run on a CPU, compiled ahead, and the formats it is meant for."""

import pytest
import torch

pytest.importorskip("triton")

import lanes
from kvfold.formats.codebook import BinaryCodes
from kvfold.kernels import _unpack_bits_gluon, unpack_bits
from kvfold.kernels.aot_turned import compile_unpack_bits

FIRST, TOKENS = 128, 96


class Emulated:
    """The kernel, whose launches PyTorch runs."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            run = _unpack_bits_gluon.unpack_bits_kernel
            lanes.run(run, grid, arguments, constants, num_warps, 80 << 10)

        return launch


@pytest.mark.parametrize(("codes", "dtype"), [(128, torch.float16), (128, torch.bfloat16), (256, torch.float16)])
def test_numbers_are_those_of_the_format(codes, dtype, monkeypatch):
    monkeypatch.setattr(unpack_bits, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(unpack_bits, "WARPS", 2)
    monkeypatch.setattr(unpack_bits, "_kernel", Emulated)
    assert error(codes, dtype, "cpu") < (5e-4 if dtype == torch.float16 else 3e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("codes", [128, 256])
def test_numbers_on_a_gpu(codes, dtype):
    assert error(codes, dtype, "cuda", 32 * 53) < (5e-4 if dtype == torch.float16 else 3e-3)


def error(codes, dtype, device, tokens=TOKENS):
    """Relative RMS error of the tokens from the second page on; what is not read is ones, what is not written stays NaN."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(2, codes + 1, 128, generator=draw) * torch.tensor([0.01, 3.0]).view(-1, 1, 1)
    form = BinaryCodes(128, 32, "plain", codes)
    blocks = (FIRST + tokens) // 32
    fields = form.allocate(1, 2, blocks + 2, "cpu")
    fields["bits"].fill_(-1)
    bits = torch.randn(1, 2, FIRST + tokens, codes, generator=draw)
    fields["bits"][:, :, :blocks] = form.encode(bits)["bits"]
    want = (form.decode(fields) @ rows)[:, :, FIRST : FIRST + tokens]
    size = rows[:, :-1].abs().flatten(1).amax(1)
    tables = unpack_bits.operands((rows[:, :-1] / size.view(-1, 1, 1)).half(), rows[:, -1])
    whole = torch.full((1, 2, tokens + 32, 128), float("nan"), dtype=dtype, device=device)
    stored = {name: x.to(device) for name, x in fields.items()}
    unpack_bits.unpack_bits(form, stored, FIRST, whole[:, :, :tokens], tables.to(device), size.to(device))
    assert whole[:, :, tokens:].isnan().all()
    return (whole[:, :, :tokens].float().cpu() - want).norm() / want.norm()


@pytest.mark.parametrize("codes", [128, 256])
def test_compiles_with_few_spills(codes):
    report = compile_unpack_bits(codes)
    assert report.spills_in_loop <= (0 if codes == 128 else 12) and report.instructions["HMMA"] == 2 * codes


def test_which_formats_it_serves():
    gpu = torch.device("cuda")
    assert unpack_bits.serves(BinaryCodes(128, 32, "plain", 128), gpu)
    assert not unpack_bits.serves(BinaryCodes(128, 32, "plain", 128), torch.device("cpu"))
    assert not unpack_bits.serves(BinaryCodes(128, 32, "plain", 64), gpu)
    assert not unpack_bits.serves(BinaryCodes(128, 32, "plain", 128, 2), gpu)
