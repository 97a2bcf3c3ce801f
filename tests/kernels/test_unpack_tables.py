"""Keys of codes into tables, unpacked: the kernel run on a CPU, compiled ahead, and the formats it is meant for."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import lanes
from aot.unpacking import compile_unpack_tables
from blocks_case import Case, by_groups, commvq, residuals, unproject
from kvfold.formats.grouped import GroupBook
from kvfold.kernels.device import HOPPER
from kvfold.kernels.long import _tables as _unpack_tables_gluon
from kvfold.kernels.long import tables as unpack_tables
from kvfold.rope import Rope

FORMATS = {
    "commvq": commvq(3, codes=128, rounded=True),
    "tasq-2bit": by_groups((4, True), (4,), mean=2.0),
    "tasq-2bit-no-mean": by_groups((4, True), (4,)),
}
FIRST, TOKENS = 128, 96
LIMIT = {torch.float16: 1e-3, torch.bfloat16: 3e-3}


class Emulated:
    """The kernel, whose launches PyTorch runs."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg=None, **constants):
            lanes.run(_unpack_tables_gluon.unpack_tables_kernel, grid, arguments, constants, num_warps, 227 << 10)

        return launch


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(unpack_tables, "WARPS", 2)
    monkeypatch.setattr(unpack_tables, "device_info", lambda device: replace(HOPPER, sms=2))
    monkeypatch.setattr(unpack_tables, "_kernel", Emulated)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_format(name, dtype):
    assert error(name, dtype, "cpu") < LIMIT[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_on_a_gpu(name, dtype):
    assert error(name, dtype, "cuda", blocks=40) < LIMIT[dtype]


def error(name, dtype, device, blocks=8):
    """Relative RMS error of 96 tokens from the second page on, or of all from there."""
    case = Case(
        FORMATS[name], head_dim=128, rotary=128, scaling=1.1, packed=(blocks * 32,), slabs=(blocks,), device=device,
        unproject=None if name != "commvq" else unproject,
    )  # fmt: skip
    call, tokens = case.call, TOKENS if device == "cpu" else blocks * 32 - FIRST
    span, form, rope = call.spans[0], call.key_format, call.rope
    want, place = form.decode(span.keys)[:, :, FIRST : FIRST + tokens].float(), call.first_position + 100_000
    exact = Rope(rope.inv_freq.double(), rope.scaling)
    at = place[:, None] + span.start + FIRST + torch.arange(tokens, device=device)
    want = exact.rotate(want, at[:, None]).float()
    whole = torch.full((*want.shape[:2], tokens + 32, 128), float("nan"), dtype=dtype, device=device)
    unpack_tables.unpack_tables(form, span.keys, span.start, FIRST, whole[:, :, :tokens], rope, place)
    assert whole[:, :, tokens:].isnan().all()
    return (whole[:, :, :tokens].float() - want).norm() / want.norm()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
@pytest.mark.parametrize("codes", [128, 256])
def test_sums_of_codes_compile_without_spills(codes, bf16):
    keys, _ = commvq(11 if codes == 128 else 21, codes=codes, rounded=True)(128, "cpu")
    assert compile_unpack_tables(keys, bf16).spilled == 0


@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["tasq-2bit", "tasq-2bit-no-mean"])
def test_codes_of_groups_compile_without_spills(name, bf16):
    report = compile_unpack_tables(FORMATS[name](128, "cpu")[0], bf16)
    assert report.spilled == 0 and report.shared <= 114 << 10  # two programs on a multiprocessor


@pytest.mark.usefixtures("on_a_cpu")
def test_rows_of_four_channels_never_meet_in_a_bank(monkeypatch):
    """A half of a warp reads 8 bytes a lane at once, from as many banks."""
    read, seen = lanes.Program.load_shared, []

    def load_shared(self, address, offset, count):
        if count == 2 and int((address + offset).max()) < 1024 + 65536:
            seen.append((address + offset).view(-1, 16) // 8)
        return read(self, address, offset, count)

    monkeypatch.setattr(lanes.Program, "load_shared", load_shared)
    assert error("tasq-2bit", torch.float16, "cpu") < LIMIT[torch.float16]
    assert seen and all(len(set((half % 16).tolist())) == 16 for x in seen for half in x)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(("norm", "mean"), [(2e4, 1e-3), (1e-4, 3e4), (0.0, 1.0), (1.0, 0.0), (6e-8, 6e-8)])
def test_keys_of_groups_whose_norms_and_mean_are_far_apart(norm, mean):
    """They are rotated as numbers of fp16 whatever their size."""
    case = Case(FORMATS["tasq-2bit"], head_dim=128, rotary=128, packed=(8 * 32,), slabs=(8,))
    call = case.call
    span, form = call.spans[0], call.key_format
    book = form.book.on(torch.device("cpu"))
    codes = book.codes.clamp(-2, 2)
    form = replace(form, book=GroupBook(codes, mean=(book.mean.float() / book.mean.abs().amax() * mean).half()))
    fields = {"codes": span.keys["codes"], "rms": torch.full_like(span.keys["rms"], norm)}
    want = form.decode(fields)[:, :, :128].float()
    place = call.first_position
    exact = Rope(call.rope.inv_freq.double(), call.rope.scaling)
    want = exact.rotate(want, (place[:, None] + span.start + torch.arange(128))[:, None]).float()
    got = torch.empty(*want.shape[:2], 128, 128, dtype=torch.bfloat16)
    unpack_tables.unpack_tables(form, fields, span.start, 0, got, call.rope, place)
    assert got.isfinite().all()
    assert (got.float() - want).norm() <= 3e-3 * want.norm()


def test_which_formats_it_serves(monkeypatch):
    monkeypatch.setattr(unpack_tables, "device_info", lambda device: HOPPER)
    gpu, rope = torch.device("cuda"), Rope(torch.ones(64))
    for formats in FORMATS.values():
        keys, values = formats(128, "cpu")
        assert unpack_tables.serves(keys, rope, gpu) and not unpack_tables.serves(keys, None, gpu)
        assert not unpack_tables.serves(values, None, gpu) and not unpack_tables.serves(values, rope, gpu)
        assert not unpack_tables.serves(keys, rope, torch.device("cpu"))
    others = residuals(rounded=True), by_groups((8, True), (8,)), commvq(3, codes=128)  # not in whole steps
    assert not any(unpack_tables.serves(form(128, "cpu")[0], rope, gpu) for form in others)


def test_turns_of_a_token_add_up():
    rope = Rope(10000.0 ** (-torch.arange(0, 128, 2).float() / 128), 1.5)
    turns, _ = unpack_tables.turns(rope, torch.device("cpu"))
    assert (turns.double().sum(0) * 2 * math.pi - rope.inv_freq.double()).abs().max() < 1e-12
