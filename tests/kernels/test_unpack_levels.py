"""Levels with elements in fp16, unpacked: the kernel run on a CPU, compiled ahead, and the formats it is meant for."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import lanes
from aot.turned import compile_unpack_levels
from blocks_case import Case, kvquant
from helpers import multiprocessors
from kvfold.kernels.long import _levels as _unpack_levels_gluon
from kvfold.kernels.long import levels as unpack_levels
from kvfold.rope import Rope
from unpacked_case import packed_apart

FIRST, TOKENS = 128, 96


class Emulated:
    """The kernel, whose launches PyTorch runs."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            run = _unpack_levels_gluon.unpack_levels_kernel
            lanes.run(run, (*grid, 1), arguments, constants, num_warps, 227 << 10)

        return launch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("side", ["keys", "values", "keys, as they are"])
@pytest.mark.parametrize("bits", [2, 3])
def test_numbers_are_those_of_the_format(bits, side, dtype, monkeypatch):
    monkeypatch.setattr(unpack_levels, "device_info", multiprocessors(1))
    monkeypatch.setattr(unpack_levels, "_kernel", Emulated)
    assert error(bits, side, dtype, "cpu") < (1e-3 if dtype == torch.float16 else 3e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("side", ["keys", "values", "keys, as they are"])
@pytest.mark.parametrize("bits", [2, 3])
def test_numbers_on_a_gpu(bits, side, dtype):
    assert error(bits, side, dtype, "cuda", blocks=40) < (1e-3 if dtype == torch.float16 else 3e-3)


def error(bits, side, dtype, device, blocks=8):
    """Relative RMS error of 96 tokens from the second page on, or of all from there."""
    how = {"head_dim": 128, "rotary": 128, "scaling": 1.1, "packed": (blocks * 32,), "slabs": (blocks,)}
    case = Case(packed_apart(kvquant(bits)), device=device, **how)
    call, tokens = case.call, TOKENS if device == "cpu" else blocks * 32 - FIRST
    span, keys = call.spans[0], side != "values"
    form, fields = (call.key_format, span.keys) if keys else (call.value_format, span.values)
    fields["outlier"][:, :, :, 3] = 0.0
    want = form.decode(fields)[:, :, FIRST : FIRST + tokens].float()
    rope, place = None, None
    if side == "keys":
        rope, place = call.rope, call.first_position + 100_000
        exact = Rope(rope.inv_freq.double(), rope.scaling)
        want = exact.rotate(
            want, (place[:, None] + span.start + FIRST + torch.arange(tokens, device=device))[:, None]
        ).float()
    whole = torch.full((*want.shape[:2], tokens + 32, 128), float("nan"), dtype=dtype, device=device)
    unpack_levels.unpack_levels(form, fields, span.start, FIRST, whole[:, :, :tokens], rope, place)
    assert whole[:, :, tokens:].isnan().all()
    return (whole[:, :, :tokens].float() - want).norm() / want.norm()


def test_compiles_with_few_spills():
    for bits in (2, 3):
        keys, values = packed_apart(kvquant(bits))(128, "cpu")
        assert compile_unpack_levels(keys, True).spills_in_loop <= 60
        assert compile_unpack_levels(values, False).spills_in_loop <= 20


def test_which_formats_it_serves():
    gpu, rope = torch.device("cuda"), Rope(torch.ones(64))
    keys, values = packed_apart(kvquant(3))(128, "cpu")
    assert unpack_levels.serves(keys, rope, gpu) and unpack_levels.serves(keys, None, gpu)
    assert unpack_levels.serves(values, None, gpu) and not unpack_levels.serves(values, rope, gpu)
    assert not unpack_levels.serves(keys, rope, torch.device("cpu"))
    assert not unpack_levels.serves(replace(keys, count=65), rope, gpu)
    assert not unpack_levels.serves(kvquant(3)(128, "cpu")[0], rope, gpu)  # in plain order
