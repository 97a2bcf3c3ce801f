"""Bits and a matrix of every KV head, unpacked: the kernel run on a CPU, compiled ahead, and the formats it is meant for."""

import pytest
import torch

pytest.importorskip("triton")

import lanes
from aot.turned import compile_unpack_bits, compile_unpack_tables
from helpers import multiprocessors
from kvfold.formats.binary import BinaryCodes, ValueSteps
from kvfold.formats.codebook import AdditiveCodes
from kvfold.kernels.long import _bits as _unpack_bits_gluon
from kvfold.kernels.long import bits as unpack_bits
from kvfold.kernels.long import tables as unpack_tables

FIRST, TOKENS = 128, 96


class Emulated:
    """The kernel, whose launches PyTorch runs."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            run = _unpack_bits_gluon.unpack_bits_kernel
            lanes.run(run, grid, arguments, constants, num_warps, 32 << 10)

        return launch


@pytest.mark.parametrize("wide", [True, False], ids=["wide", "alone"])
@pytest.mark.parametrize(("codes", "dtype"), [(128, torch.float16), (128, torch.bfloat16), (256, torch.float16)])
def test_numbers_are_those_of_the_format(codes, dtype, wide, monkeypatch):
    monkeypatch.setattr(unpack_bits, "device_info", multiprocessors(2 if wide else 4))
    monkeypatch.setattr(unpack_bits, "WARPS", 4 if wide else 2)
    monkeypatch.setattr(unpack_bits, "WIDE", wide)
    monkeypatch.setattr(unpack_bits, "_kernel", Emulated)
    assert error(codes, dtype, "cpu") < (4e-4 if dtype == torch.float16 else 3e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("codes", [128, 256])
def test_numbers_on_a_gpu(codes, dtype):
    assert error(codes, dtype, "cuda", 32 * 53) < (4e-4 if dtype == torch.float16 else 3e-3)


def error(codes, dtype, device, tokens=TOKENS):
    """Relative RMS error of the tokens from the second page on; what is not read is ones, what is not written stays NaN."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(2, codes + 1, 128, generator=draw) * torch.tensor([0.01, 3.0]).view(-1, 1, 1)
    steps = ValueSteps.of(rows[:, :-1])
    rows[:, :-1] = steps.codebook
    form = BinaryCodes(128, 32, "plain", codes)
    blocks = (FIRST + tokens) // 32
    fields = form.allocate(1, 2, blocks + 2, "cpu")
    fields["bits"].fill_(-1)
    bits = torch.randn(1, 2, FIRST + tokens, codes, generator=draw)
    fields["bits"][:, :, :blocks] = form.encode(bits)["bits"]
    want = (form.decode(fields) @ rows)[:, :, FIRST : FIRST + tokens]
    tables = unpack_bits.operands(steps, rows[:, -1])
    whole = torch.full((1, 2, tokens + 32, 128), float("nan"), dtype=dtype, device=device)
    stored = {name: x.to(device) for name, x in fields.items()}
    unpack_bits.unpack_bits(form, stored, FIRST, whole[:, :, :tokens], tables.to(device))
    assert whole[:, :, tokens:].isnan().all()
    return (whole[:, :, :tokens].float().cpu() - want).norm() / want.norm()


@pytest.mark.parametrize("codes", [128, 256])
def test_compiles_with_few_spills(codes):
    """Two products of 64 channels for each 32 codes; both are waited for one by one."""
    report = compile_unpack_bits(codes)
    assert report.spills_in_loop <= (2 if codes == 128 else 0) and report.instructions["IGMMA"] == codes // 16
    waits = [i for i, name in enumerate(report.code) if name == "WARPGROUP"][-2:]
    assert "STG" in report.code[waits[0] : waits[1]]


def test_other_gpus_multiply_warp_by_warp():
    report = compile_unpack_bits(256, capability=80)
    assert report.spills_in_loop == 0 and report.instructions["IMMA"] == 128


def test_a_program_fits_beside_that_of_keys():
    """228 KB and 65,536 registers of a multiprocessor of sm_90, which gives registers to warps in eights of a thread's."""
    form = AdditiveCodes(128, 32, "key", 21, 64, 1)
    keys, values = compile_unpack_tables(form), compile_unpack_bits(256)
    assert keys.shared + values.shared <= 228 << 10
    of_warps = [
        32 * warps * -(-report.registers // 8) * 8
        for report, warps in ((keys, unpack_tables.WARPS), (values, unpack_bits.WARPS))
    ]
    assert sum(of_warps) <= 65536


@pytest.mark.parametrize("codes", [128, 256])
def test_the_largest_sums_are_whole(codes, monkeypatch):
    """All bits of channels whose numbers are all 127, or -127, and channels of zeros."""
    monkeypatch.setattr(unpack_bits, "device_info", multiprocessors(1))
    monkeypatch.setattr(unpack_bits, "_kernel", Emulated)
    book = torch.tensor([1.0, -1.0, 0.0, 100.0]).repeat(32).expand(1, codes, -1)
    steps = ValueSteps.of(book)
    form = BinaryCodes(128, 32, "plain", codes)
    fields = form.encode(torch.ones(1, 1, 64, codes))
    out = torch.full((1, 1, 64, 128), float("nan"), dtype=torch.float16)
    unpack_bits.unpack_bits(form, fields, 0, out, unpack_bits.operands(steps, torch.full((1, 128), 0.5)))
    assert torch.equal(out, (book.sum(1) + 0.5).half().expand(1, 1, 64, -1))


def test_which_formats_it_serves():
    gpu = torch.device("cuda")
    assert unpack_bits.serves(BinaryCodes(128, 32, "plain", 128), gpu)
    assert not unpack_bits.serves(BinaryCodes(128, 32, "plain", 128), torch.device("cpu"))
    assert not unpack_bits.serves(BinaryCodes(128, 32, "plain", 64), gpu)
    assert not unpack_bits.serves(BinaryCodes(128, 32, "plain", 128, 2), gpu)
