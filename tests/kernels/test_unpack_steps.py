"""CommVQ's keys unpacked: the kernel run on a CPU and on a GPU, compiled ahead, and the formats it is meant for."""

import pytest
import torch

pytest.importorskip("triton")

import lanes
from blocks_case import Case, commvq, unproject
from kvfold.kernels import _unpack_steps_gluon, unpack_steps
from kvfold.kernels.aot_turned import compile_unpack_steps
from kvfold.rope import Rope

FIRST, ROOM = 128, 32


class Emulated:
    """The kernel, whose launches PyTorch runs."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg=None, **constants):
            lanes.run(_unpack_steps_gluon.unpack_steps_kernel, grid, arguments, constants, num_warps, 227 << 10)

        return launch


def error(stages, dtype, device, blocks=7):
    """Relative RMS error of the tokens from the second page on; what is not read is NaN, what is not written stays NaN."""
    case = Case(
        commvq(stages, codes=128, rounded=True), head_dim=128, rotary=128, scaling=1.1, packed=(8 * 32,), slabs=(8,),
        unproject=unproject,
    )  # fmt: skip
    call = case.call
    span, form, rope, place = call.spans[0], call.key_format, call.rope, call.first_position + 100_000
    tokens = blocks * 32 - FIRST
    want = form.decode(span.keys)[:, :, FIRST : FIRST + tokens].float()
    exact = Rope(rope.inv_freq.double(), rope.scaling)
    want = exact.rotate(want, (place[:, None] + span.start + FIRST + torch.arange(tokens))[:, None]).float()
    whole = torch.full((*want.shape[:2], tokens + ROOM, 128), float("nan"), dtype=dtype, device=device)
    fields = {name: x.to(device) for name, x in span.keys.items()}
    rope = Rope(rope.inv_freq.to(device), rope.scaling)
    unpack_steps.unpack_steps(form, fields, span.start, FIRST, whole[:, :, :tokens], rope, place.to(device))
    whole = whole.cpu().float()
    assert whole[:, :, tokens:].isnan().all()
    return (whole[:, :, :tokens] - want).norm() / want.norm()


@pytest.mark.parametrize(
    ("stages", "dtype"),
    [
        (1, torch.float16),
        (2, torch.float16),
        (5, torch.bfloat16),
        (8, torch.float16),
        (11, torch.float16),
        (21, torch.float16),
    ],
)
def test_numbers_are_those_of_the_format(stages, dtype, monkeypatch):
    monkeypatch.setattr(unpack_steps, "WARPS", 2)
    monkeypatch.setattr(unpack_steps, "program_memory", lambda device: 227 << 10)
    monkeypatch.setattr(unpack_steps, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(unpack_steps, "_kernel", Emulated)
    assert error(stages, dtype, "cpu") < (1e-3 if dtype == torch.float16 else 3e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("stages", [1, 5, 11, 21])
def test_numbers_on_a_gpu(stages, dtype):
    assert error(stages, dtype, "cuda") < (1e-3 if dtype == torch.float16 else 3e-3)


@pytest.mark.parametrize("warps", [8, 16])
@pytest.mark.parametrize(("stages", "bf16"), [(11, False), (21, False), (21, True)])
def test_compiles_with_few_spills(stages, bf16, warps, monkeypatch):
    """Products are one for each two stages and 16 channels of 8 tokens."""
    monkeypatch.setattr(unpack_steps, "WARPS", warps)
    form = commvq(stages, codes=128, rounded=True)(128, "cpu")[0]
    report = compile_unpack_steps(form, bf16)
    assert report.spills_in_loop <= 12 and report.instructions["IMMA"] == 8 * ((stages + 1) // 2)
    assert report.shared <= 227 << 10


def test_which_formats_it_serves(monkeypatch):
    monkeypatch.setattr(unpack_steps, "program_memory", lambda device: 227 << 10)
    gpu, rope = torch.device("cuda"), Rope(torch.ones(64))
    keys, values = commvq(21, codes=256, rounded=True)(128, "cpu")
    assert unpack_steps.serves(keys, rope, gpu) and not unpack_steps.serves(values, None, gpu)
    assert not unpack_steps.serves(keys, None, gpu) and not unpack_steps.serves(keys, rope, torch.device("cpu"))
    assert not unpack_steps.serves(keys, Rope(torch.ones(32)), gpu)
    assert not unpack_steps.serves(commvq(21, codes=256)(128, "cpu")[0], rope, gpu)  # not in whole steps
    monkeypatch.setattr(unpack_steps, "program_memory", lambda device: 163 << 10)
    assert not unpack_steps.serves(keys, rope, gpu)
