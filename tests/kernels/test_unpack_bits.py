"""Bits and a matrix of every KV head, unpacked: the kernel run on a CPU, compiled ahead, and the formats it is meant for."""

import pytest
import torch

pytest.importorskip("triton")

import lanes
from blocks_case import commvq
from kvfold.formats.codebook import BinaryCodes
from kvfold.kernels import _unpack_bits_gluon, unpack_bits
from kvfold.kernels.aot_turned import compile_unpack_bits, compile_unpack_steps

FIRST, TOKENS = 128, 96


class Emulated:
    """The kernel, whose launches PyTorch runs."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            run = _unpack_bits_gluon.unpack_bits_kernel
            lanes.run(run, grid, arguments, constants, num_warps, 80 << 10)

        return launch


@pytest.mark.parametrize("wide", range(3), ids=["warps", "warpgroups", "beside"])
@pytest.mark.parametrize(("codes", "dtype"), [(128, torch.float16), (128, torch.bfloat16), (256, torch.float16)])
def test_numbers_are_those_of_the_format(codes, dtype, wide, monkeypatch):
    monkeypatch.setattr(unpack_bits, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(unpack_bits, "WIDE", wide > 0)
    monkeypatch.setattr(unpack_bits, "BESIDE", wide > 1)
    if not wide:
        monkeypatch.setattr(unpack_bits, "WARPS", 2)
    monkeypatch.setattr(unpack_bits, "_kernel", Emulated)
    assert error(codes, dtype, "cpu", 7 * 32) < (5e-4 if dtype == torch.float16 else 3e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("wide", range(3), ids=["warps", "warpgroups", "beside"])
@pytest.mark.parametrize("codes", [128, 256])
def test_numbers_on_a_gpu(codes, wide, dtype, monkeypatch):
    monkeypatch.setattr(unpack_bits, "WIDE", wide > 0)
    monkeypatch.setattr(unpack_bits, "BESIDE", wide > 1)
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
    matrix = (rows[:, :-1] / size.view(-1, 1, 1)).half()
    tables = unpack_bits.operands(matrix.to(device), rows[:, -1].to(device))
    whole = torch.full((1, 2, tokens + 32, 128), float("nan"), dtype=dtype, device=device)
    stored = {name: x.to(device) for name, x in fields.items()}
    unpack_bits.unpack_bits(form, stored, FIRST, whole[:, :, :tokens], tables, size.to(device))
    assert whole[:, :, tokens:].isnan().all()
    return (whole[:, :, :tokens].float().cpu() - want).norm() / want.norm()


@pytest.mark.parametrize("codes", [128, 256])
def test_compiles_with_few_spills(codes, monkeypatch):
    monkeypatch.setattr(unpack_bits, "WIDE", False)
    report = compile_unpack_bits(codes)
    assert report.spills_in_loop <= (0 if codes == 128 else 12) and report.instructions["HMMA"] == 2 * codes


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
@pytest.mark.parametrize("codes", [128, 256])
def test_products_of_warpgroups_compile(codes, bf16, beside, monkeypatch):
    """Three programs on a multiprocessor, or one beside one of keys; and no product waits for the one before it."""
    monkeypatch.setattr(unpack_bits, "BESIDE", beside)
    report = compile_unpack_bits(codes, bf16)
    assert report.spilled == 0 and report.instructions["HGMMA"] == (codes // 8 if not beside else 16)
    assert report.instructions["WARPGROUP"] <= 8 and 3 * report.shared <= 224 << 10
    keys = compile_unpack_steps(commvq(21 if codes == 256 else 11, rounded=True)(128, "cpu")[0], bf16)
    if beside:
        assert keys.shared + report.shared + 1024 <= 228 << 10
        assert 256 * round_up(keys.registers) + 128 * round_up(report.registers) <= 65536


def round_up(registers):
    """As many as are given to a thread."""
    return -(-registers // 8) * 8


def test_which_formats_it_serves():
    gpu = torch.device("cuda")
    assert unpack_bits.serves(BinaryCodes(128, 32, "plain", 128), gpu)
    assert not unpack_bits.serves(BinaryCodes(128, 32, "plain", 128), torch.device("cpu"))
    assert not unpack_bits.serves(BinaryCodes(128, 32, "plain", 64), gpu)
    assert not unpack_bits.serves(BinaryCodes(128, 32, "plain", 128, 2), gpu)
