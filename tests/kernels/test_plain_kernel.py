"""Attention over plain order by the Gluon kernel, run by warps in NumPy, against attention over the decoded groups."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from aot import plain as aot_plain
from kvfold.formats import AffineGroups
from kvfold.kernels.affine import _row_major as _plain_gluon
from kvfold.kernels.affine import row_major as plain
from kvfold.kernels.device import HOPPER, STATIC_SHARED
from kvfold.rope import Rope
from warps import Machine, Pointer, on_cpu, register, scalar


def error(dim=128, groups=(32, 32), rows=4, units=10, warps=1, stage=2, rotary=False, value=1.0, position=900):
    """Relative RMS error of the output. Storage is poisoned beyond its ``units`` units."""
    forms = [
        AffineGroups(dim, 32, "plain", 2, axis, "asym", g) for axis, g in zip(("token", "channel"), groups, strict=True)
    ]
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    tokens = 32 * units
    keys = random(1, 1, tokens, dim) * torch.exp(0.7 * random(1, 1, 1, dim)) + random(1, 1, 1, dim)
    values = value * (random(1, 1, tokens, dim) + random(1, 1, 1, dim))
    q = random(rows, dim).half()
    machine, decoded, arrays = Machine(warps), [], []
    for form, x in zip(forms, (keys, values), strict=True):
        fields = form.allocate(1, 1, units + 2, "cpu")
        for y in fields.values():
            y.fill_(float("nan") if y.is_floating_point() else -1)
        for name, y in form.encode(x).items():
            fields[name][:, :, : y.shape[2]] = y
        decoded.append(form.decode(fields)[0, 0, :tokens].double())
        arrays += [machine.put(fields[name]) for name in ("codes", "meta")]
    freq = table = scalar(0, np.int64)
    if rotary:
        rope = Rope(10000.0 ** (-torch.arange(0, dim, 2).float() / dim), 1.25)
        decoded[0] = rope.rotate(decoded[0][None].float(), torch.arange(tokens)[None] + position)[0].double()
        turns, places = plain.turning(rope, torch.device("cpu"))
        freq, table = Pointer(machine.put(turns), np.float32), scalar(machine.put(places), np.int64)
    scale = dim**-0.5
    want = (q.double() @ decoded[0].T * scale).softmax(-1) @ decoded[1]
    kernel, zero, far, at = on_cpu(_plain_gluon, machine), scalar(0), 1 << 16, machine.put(q)
    parts = [machine.put(torch.full(shape, math.nan)) for shape in ((2, rows, dim), (2, rows), (2, rows))]

    def program(warp):
        lane, warp = register(np.arange(32, dtype=np.int32)), scalar(warp)
        up = kernel.plain_rows(
            Pointer(at, np.float16, "fp16"), lane * 8 + far, lane // 4, lane % 4, scalar(0, np.int64), zero, rows,
            scale * math.log2(math.e), dim, 8 if rotary else -1,
        )  # fmt: skip
        machine.program_sync(lane)
        top, out, side = kernel.attend_plain(
            zero, lane, warp, zero, scalar(-(-units // 4)), scalar(units), [scalar(a, np.int64) for a in arrays], zero,
            lane * 8 + far, up, scalar(position), freq, table + lane * 16, dim, *groups, stage, rotary,
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


@pytest.mark.parametrize(
    "dim, groups", [(128, (32, 32)), (96, (32, 32)), (80, (16, 16)), (112, (32, 16)), (96, (16, 32)), (64, (32, 64))]
)
def test_it_is_attention_over_the_decoded_groups(dim, groups):
    assert error(dim, groups) < 1.5e-3


@pytest.mark.parametrize("rows, units, warps, stage", [(1, 1, 1, 2), (8, 12, 4, 1), (5, 17, 2, 4)])
def test_every_number_of_rows_units_and_warps(rows, units, warps, stage):
    assert error(96, rows=rows, units=units, warps=warps, stage=stage) < 1.5e-3


def test_small_values_keep_their_digits():
    assert error(value=1e-4) < 1.5e-3


@pytest.mark.parametrize(
    "dim, groups, stage", [(128, (32, 32), 2), (128, (16, 32), 1), (64, (32, 32), 2), (96, (32, 32), 2)]
)
def test_keys_before_rope(dim, groups, stage):
    assert error(dim, groups, units=18, warps=4, stage=stage, rotary=True) < 2e-3


# ---- which calls it serves, and how ---------------------------------------------------------------------------------


def formats(dim=96, bits=2, mode="asym", groups=(32, 32), order="plain", axes=("token", "channel")):
    return [AffineGroups(dim, 32, order, bits, axis, mode, g) for axis, g in zip(axes, groups, strict=True)]


@pytest.mark.parametrize("forms, rotary, reason", [
    (formats(bits=4), 0, "keys: 4 bits, mode=asym; allowed: 2, asym"),
    (formats(mode="sym"), 0, "keys: 2 bits, mode=sym; allowed: 2, asym"),
    (formats(64, order="key"), 0, "keys: affine storage; allowed: affine, in plain order"),
    (formats(axes=("channel", "token")), 0, "keys: groups along channels in blocks of 32; allowed: along tokens, 32"),
    (formats(256), 0, "keys: head_dim=256; allowed: multiples of 16 up to 128"),
    (formats(groups=(32, 96)), 64, "keys: RoPE of 64 of 96 channels; allowed: all, a multiple of 32"),
    (formats(80, groups=(16, 16)), 80, "keys: RoPE of 80 of 80 channels; allowed: all, a multiple of 32"),
])  # fmt: skip
def test_what_it_refuses_is_named(forms, rotary, reason):
    assert plain.unsupported(*forms, rotary) == reason


@pytest.mark.parametrize("dim, groups, rotary", [(96, (32, 32), False), (80, (16, 16), False), (128, (16, 16), True)])
@pytest.mark.parametrize("jobs, units", [(8, 4096), (128, 1024), (1024, 1), (1, 64)])
def test_launches_fit(dim, groups, rotary, jobs, units):
    forms = formats(dim, groups=groups)
    made = plain.make_plan(*forms, jobs, units, rotary, HOPPER)
    assert plain.program_bytes(*forms, made.units, rotary, made.warps) <= STATIC_SHARED
    assert 1 <= made.splits <= 256


@pytest.mark.parametrize(
    "dim, groups, rotary, most", [(96, (32, 32), False, 760), (80, (16, 16), False, 790), (128, (32, 32), True, 1570)]
)
def test_it_compiles_without_spills(dim, groups, rotary, most):
    report = aot_plain.compile_plain(*formats(dim, groups=groups), rotary)
    assert report.spills_in_loop == 0 and report.registers <= (168 if rotary else 128)
    assert report.loop <= most  # of 64 tokens
