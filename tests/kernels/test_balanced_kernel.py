"""Attention over balanced tiles by the Gluon kernel, run by warps in NumPy, against attention over the decoded tiles."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from aot import plain as aot_plain
from blocks_case import Case
from kvfold import methods
from kvfold.formats import Hadamard
from kvfold.kernels import REGISTRY
from kvfold.kernels.balanced import _decode as _balanced_gluon
from kvfold.kernels.balanced import decode as balanced
from kvfold.kernels.device import HOPPER, STATIC_SHARED
from kvfold.methods import LayerSpec
from warps import Machine, Pointer, on_cpu, register, scalar


def formats(method="kvarn", dim=128):
    made, spec = methods.get(method), LayerSpec(0, 1, 1, 1, dim, fragments=False)
    return made.key_format(spec), made.value_format(spec)


def error(method="kvarn", dim=128, rows=4, blocks=3, warps=1, value=1.0, spread=0.7):
    """Relative RMS error of the output. Storage is poisoned beyond its ``blocks`` tiles."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    tokens = 128 * blocks
    keys = random(1, 1, tokens, dim) * torch.exp(0.7 * random(1, 1, 1, dim)) + random(1, 1, 1, dim)
    values = value * (random(1, 1, tokens, dim) * torch.exp(spread * random(1, 1, tokens, 1)) + random(1, 1, 1, dim))
    q = random(rows, dim).half()
    machine, decoded, arrays = Machine(warps), [], []
    forms = formats(method, dim)
    for form, x in zip(forms, (keys, values), strict=True):
        fields = form.allocate(1, 1, blocks + 2, "cpu")
        for y in fields.values():
            y.fill_(float("nan") if y.is_floating_point() else -1)
        for name, y in form.encode(x).items():
            fields[name][:, :, : y.shape[2]] = y
        decoded.append(form.decode({name: y[:, :, :blocks] for name, y in fields.items()})[0, 0].double())
        arrays.append([machine.put(fields[name]) for name in ("codes", "meta", "factor")])
    scale = dim**-0.5
    want = (q.double() @ decoded[0].T * scale).softmax(-1) @ decoded[1]
    kernel, zero, far, at = on_cpu(_balanced_gluon, machine), scalar(0), 1 << 16, machine.put(q)
    block = balanced.constants(forms[0])["BLOCK"]
    basis = forms[0].basis if block > 1 else Hadamard(dim, 1, 0)
    signs = Pointer(machine.put(basis.signs("cpu")), np.float32)
    parts = [machine.put(torch.full(shape, math.nan)) for shape in ((2, rows, dim), (2, rows), (2, rows))]

    def program(warp):
        lane, warp = register(np.arange(32, dtype=np.int32)), scalar(warp)
        up = kernel.balanced_rows(
            Pointer(at, np.float16, "fp16"), signs, lane * 8 + far, lane, scalar(0, np.int64), zero, rows,
            scale * math.log2(math.e), dim, block,
        )  # fmt: skip
        machine.program_sync(lane)
        top, out, side = kernel.attend_balanced(
            zero, lane, warp, zero, scalar(blocks), *([scalar(a, np.int64) for a in side] for side in arrays), zero,
            lane * 8 + far, up, signs, dim, block,
        )  # fmt: skip
        kernel._finish(
            zero, lane, warp, top, out, side, *(Pointer(p, np.float32) for p in parts), scalar(1, np.int64), zero, rows, 2,
            dim, 1, 0,
        )  # fmt: skip

    machine.run(program)
    out, total = (
        torch.from_numpy(machine.get(parts[i], shape)[1]) for i, shape in ((0, (2, rows, dim)), (2, (2, rows)))
    )
    got = out.double() / total.double()[:, None]
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dim", [128, 96, 80, 64])
@pytest.mark.parametrize("method", ["kvarn", "kvarn:rotation=1", "kvarn:rotation=8", "kvarn:rounds=0"])
def test_it_is_attention_over_the_decoded_tiles(method, dim):
    assert error(method, dim) < 1.5e-3


@pytest.mark.parametrize("rows, blocks, warps", [(1, 1, 1), (8, 5, 4), (5, 2, 4), (3, 7, 2)])
def test_every_number_of_rows_blocks_and_warps(rows, blocks, warps):
    assert error(rows=rows, blocks=blocks, warps=warps) < 1.5e-3


@pytest.mark.parametrize("value, spread", [(1e-4, 0.7), (100.0, 2.0)])
def test_small_and_uneven_values_keep_their_digits(value, spread):
    assert error(value=value, spread=spread) < 1.5e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, limit", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("per_head, tokens", [(1, 1), (4, 1), (8, 1), (4, 4)])
@pytest.mark.parametrize("method, dim, packed, slabs", [
    ("kvarn", 128, (4096, 3968), (32,)),
    ("kvarn", 128, (128, 1280), (4, 8)),
    ("kvarn", 64, (640, 0), (8,)),
    ("kvarn:rotation=1", 96, (1024, 896), (4, 4)),
    ("kvarn:rotation=16", 80, (1024, 896), (12,)),
])  # fmt: skip
def test_calls_on_a_gpu(method, dim, packed, slabs, per_head, tokens, dtype, limit):
    """Ragged sequences, several slabs, storage that holds no token full of NaN."""
    options = {"head_dim": dim, "packed": packed, "slabs": slabs, "in_place": True, "ring": 160}
    case = Case(method, **options, tokens=tokens, per_head=per_head, device="cuda", dtype=dtype)
    assert case.error(balanced.BalancedTiles()) < limit


@pytest.mark.parametrize("method, reason", [
    ("kvarn", None),
    ("kvarn:bits=3", "keys: 3 bits, operand=plain; allowed: 2, plain"),
    ("kvarn:group=64", "keys: tiles of 64 tokens, by_token=True; allowed: 128, True"),
    ("kivi", "keys: affine storage; allowed: balanced"),
    ("fold", "keys: uniform storage; allowed: balanced"),
])  # fmt: skip
def test_what_it_does_not_serve_it_names(method, reason):
    assert balanced.unsupported(*formats(method)) == reason


@pytest.mark.parametrize("rows, reason", [(16, None), (24, "24 query rows; allowed: up to 16")])
def test_models_of_many_query_heads_are_left_to_another_kernel_by_name(rows, reason):
    kernel = REGISTRY["balanced"]
    assert kernel.why_not_queries(*formats(), torch.device("cuda"), rows, 0) == reason


def test_sides_of_two_rotations_are_refused():
    keys, values = formats()
    assert (
        balanced.unsupported(keys, replace(values, basis=Hadamard(128, 32, 0)))
        == "values: another rotation than that of keys"
    )


@pytest.mark.parametrize("jobs, blocks", [(1, 1), (8, 1023), (128, 255), (4096, 16)])
def test_launch_shapes_fit(jobs, blocks):
    plan = balanced.make_plan(128, jobs, blocks, HOPPER)
    assert 1 <= plan.splits <= max(1, blocks) and balanced.program_bytes(128) <= STATIC_SHARED
    early = balanced.make_plan(128, jobs, blocks, HOPPER, True)
    assert jobs > 132 or 1 <= early.splits * jobs <= 132  # one program for each multiprocessor


@pytest.mark.parametrize("dim, capability", [(128, 90), (128, 80), (64, 90), (80, 90)])
def test_it_compiles_without_spills(dim, capability):
    report = aot_plain.compile_balanced(formats(dim=dim)[0], capability=capability)
    assert report.spilled == 0 and report.registers <= balanced.REGISTERS
