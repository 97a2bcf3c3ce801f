"""Attention over pages of signs by products of bytes, run by warps in NumPy, against attention over the decoded pages."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import aot
from kvfold.kernels.device import HOPPER
from kvfold.kernels.fragments import _decode as _fragments_gluon
from kvfold.kernels.fragments import decode as fragments
from kvfold.methods import LayerSpec, get
from warps import Machine, Pointer, on_cpu, register, scalar

METHOD = "qjl"


def formats(method=METHOD, dim=128):
    spec = LayerSpec(0, 1, 1, 1, dim, torch.float16)
    method = get(method)
    return method.key_format(spec), method.value_format(spec)


def error(
    method=METHOD, rows=4, blocks=10, warps=1, stage=4, query=1.0, value=1.0, scale=128**-0.5, at_once=4, late=False,
    wide=False,
):  # fmt: skip
    """Relative RMS error of the output. Storage is poisoned beyond its ``blocks`` blocks. ``late``: see
    :class:`warps.Machine`. ``wide``: the matrix in shared memory, products of warpgroups."""
    forms = formats(method)
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    keys = random(1, 1, 32 * blocks, 128) * torch.exp(0.7 * random(1, 1, 1, 128)) + random(1, 1, 1, 128)
    values = value * (random(1, 1, 32 * blocks, 128) + random(1, 1, 1, 128))
    q = (query * random(rows, 128)).half()
    machine, decoded, arrays = Machine(warps, late=late), [], []
    for form, x, back in zip(forms, (keys, values), (False, True), strict=True):
        fields = form.allocate(1, 1, blocks + 2, "cpu")
        for y in fields.values():
            y.fill_(float("nan") if y.is_floating_point() else -1)
        for name, y in form.encode(x).items():
            fields[name][:, :, : y.shape[2]] = y
        decoded.append(form.decode(fields)[0, 0, : 32 * blocks].double())
        arrays.append([machine.put(y) for y in fragments._arrays(form, fields, True, wide and not back)])
    weights = (q.double() @ decoded[0].T * scale).softmax(-1)
    want = weights @ decoded[1]

    k, v = (fragments.side(form) for form in forms)
    kernel, zero, far = on_cpu(_fragments_gluon, machine), scalar(0), 3 << 15
    base = scalar(1 << 16 if wide else 0)
    places = _fragments_gluon.layout(k.constants, v.constants, 128, k.width, at_once, stage, wide)
    if wide:
        far = (1 << 16) + warps * places[4]
    lift = _fragments_gluon._lift(*v.constants[:2])
    at = machine.put(q)
    parts = [machine.put(torch.full(shape, math.nan)) for shape in ((2, rows, 128), (2, rows), (2, rows))]
    addresses = [[scalar(a, np.int64) for a in side] for side in arrays]
    stored = (
        tuple(addresses[0][i] for i in (0, 1, 3, 4)),
        tuple(addresses[1][:2]),
    )

    def program(warp):
        lane, warp = register(np.arange(32, dtype=np.int32)), scalar(warp)
        factor = scale * math.log2(math.e)
        row = kernel.column_row(zero, lane // 4, 2, True)
        query = Pointer(at, np.float16, "fp16")
        raw = kernel.ask_queries(query, lane % 4, scalar(0, np.int64), row, rows, None, 128)
        up = kernel._raw_queries(raw, lane * 8 + far, lane % 4, factor, 128, 8, 0, 1)
        machine.program_sync(lane)
        pages = scalar(-(-blocks // 4))
        to = [Pointer(p, np.float32) for p in parts]
        matrix = addresses[0][5] + lane * 16
        if wide:
            for i in range(warp, k.width // 2, warps):
                machine.copy_async(lane * 16 + 512 * i, matrix + 512 * i, 16, 1, 0, 0, False)
            machine.copy_commit(lane)
            matrix = zero
            kernel.bring_pages(
                base, lane, warp, zero, pages, pages, scalar(blocks), stored, zero, zero, 128, k.constants, k.width,
                v.constants, places, stage, 4 // stage, at_once, True,
            )  # fmt: skip
            machine.copy_wait(lane, 2)
            machine.program_sync(lane)
        best, out, side = kernel.attend_signs(
            base, lane, warp, zero, pages, pages, scalar(blocks), stored, zero, zero, matrix,
            lane * 8 + far, up[0], (), 128, k.constants, k.width, v.constants, places, stage, 4 // stage, lift,
            at_once, wide,
        )  # fmt: skip
        machine.program_sync(lane)
        sums = tuple(x for c in out for x in (c[0], c[2]))
        kernel.finish_rows(
            base, lane, warp, (best - lift,), sums, (side[0][2],), lane, *to, scalar(1, np.int64), zero, rows, 128, 0, 1,
        )  # fmt: skip

    machine.run(program)
    out, total = (
        torch.from_numpy(machine.get(parts[i], shape)[1]) for i, shape in ((0, (2, rows, 128)), (2, (2, rows)))
    )
    got = out.double() / total.double()[:, None]
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    "method",
    ["qjl", "qjl:center=false"],
)
def test_it_is_attention_over_the_decoded_pages(method):
    assert error(method) < 1e-3


@pytest.mark.parametrize("rows, blocks, warps, stage", [(1, 1, 1, 4), (3, 12, 2, 2), (4, 17, 4, 4), (4, 15, 1, 2)])
def test_every_number_of_rows_pages_and_warps(rows, blocks, warps, stage):
    assert error(rows=rows, blocks=blocks, warps=warps, stage=stage) < 1e-3


@pytest.mark.parametrize("at_once", [2, 4])
def test_every_number_of_pages_that_go_through_the_matrix_at_once(at_once):
    assert error(blocks=25, warps=1, at_once=at_once) < 1e-3


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "method, rows, blocks, warps, stage",
    [
        *((METHOD, 1, 1, 4, 4), (METHOD, 4, 16 * 7 + 3, 4, 4), (METHOD, 3, 41, 8, 4), (METHOD, 4, 70, 4, 2)),
        ("qjl:center=false", 4, 80, 4, 4),
    ],
)
def test_four_warps_that_multiply_together(method, rows, blocks, warps, stage, late):
    assert error(method, rows, blocks, warps, stage, late=late, wide=True) < 1.2e-3


def test_numbers_of_every_size():
    assert error(query=300.0, value=1e-3, scale=128**-0.5 / 300) < 1e-3


def test_it_compiles_with_few_instructions():
    report = aot.compile_fragments(*formats(), plan=fragments.make_plan(*formats(), 128, 4, 1024, 160, HOPPER))
    assert report.registers <= 168 and report.spills_in_loop <= 1
    assert report.loop <= 1900  # of a page, of which 480 serve two


def test_four_pages_at_once_compile_with_few_spills():
    plan = fragments.make_plan(*formats(), 8, 4, 4096, 160, HOPPER)
    assert plan.tiles == 4 and plan.registers is None
    assert (
        fragments.make_plan(*formats(), 64, 4, 1024, 160, HOPPER).tiles == 2
    )  # programs of 255 registers would take turns
    assert aot.compile_fragments(*formats(), plan=plan).spills_in_loop <= 12


def test_four_warps_that_multiply_together_compile_without_spills():
    plan = fragments.make_plan(*formats(), 8, 4, 4096, 160, HOPPER, True)
    assert plan.wide and plan.registers is None
    report = aot.compile_fragments(*formats(), plan=plan)
    assert report.registers <= 224 and report.spills_in_loop == 0
    assert report.loop <= 1960  # of a page, of which 720 serve four
    assert report.instructions["HGMMA"] == 8 * 4 and report.shared <= 227 * 1024


@pytest.mark.parametrize(
    "batch_heads, capacity",
    [(8, 4096), (16, 4096), (8, 2048), (4, 8192), (32, 4096), (7, 4096), (8, 1024)],
)
def test_programs_with_a_matrix_each_run_at_once(batch_heads, capacity):
    plan = fragments.make_plan(*formats(), batch_heads, 4, capacity, 160, HOPPER, True)
    assert plan.wide and plan.dense_splits == 1
    packed, windows = batch_heads * plan.splits, -(-batch_heads // plan.window_heads)
    assert 0.9 * 132 <= packed < packed + windows <= 132
    size = fragments.program_bytes(*formats(), plan.tiles, plan.warps, plan.blocks, True)
    assert size <= 227 * 1024 and size % 1024 == 0
    assert not fragments.make_plan(*formats(), batch_heads, 4, capacity, 160, HOPPER).wide


@pytest.mark.parametrize(
    "batch_heads, capacity, splits", [(128, 1024, 1), (64, 1024, 2), (256, 1024, 1), (66, 2048, 2)]
)
def test_programs_of_many_heads_attend_to_their_windows_themselves(batch_heads, capacity, splits):
    plan = fragments.make_plan(*formats(), batch_heads, 4, capacity, 160, HOPPER, True)
    assert plan.wide and (plan.splits, plan.dense_splits, plan.window_heads) == (splits, 0, 0)
    assert fragments.parts(plan) == 2 * splits


def test_programs_that_attend_to_their_windows_compile_without_spills():
    plan = fragments.make_plan(*formats(), 128, 4, 1024, 160, HOPPER, True)
    report = aot.compile_fragments(*formats(), plan=plan)
    assert plan.window_heads == 0 and report.spills_in_loop == 0
    assert report.registers <= 255 and report.loop <= 2040  # which fit the instruction cache


@pytest.mark.parametrize("batch_heads, rows, capacity", [(8, 4, 512), (8, 8, 4096), (160, 4, 1024), (20, 4, 256)])
def test_few_pages_and_multiprocessors_that_would_be_idle_have_programs_without_a_matrix(batch_heads, rows, capacity):
    one, other = (
        fragments.make_plan(*formats(), batch_heads, rows, capacity, 160, HOPPER, wide) for wide in (False, True)
    )
    assert one == other


def test_products_of_bytes_serve_a_step_of_few_rows():
    assert fragments.bytewise(*formats(), 4)
    assert not fragments.bytewise(*formats(), 5)
    assert not fragments.bytewise(*formats(dim=64), 4)
    assert not fragments.bytewise(*formats("qjl:k_bits=1"), 4)
    assert not fragments.bytewise(*formats("qjl:normalize=false"), 4)


@pytest.mark.parametrize(
    "method, rows, blocks, warps, at_once",
    [
        *(("qjl", 1, 1, 1, 4), ("qjl", 4, 37, 2, 4), ("qjl", 3, 41, 2, 2), ("qjl", 4, 21, 1, 2)),
        ("qjl:center=false", 4, 22, 1, 4),
    ],
)
def test_pages_whose_copies_come_late(method, rows, blocks, warps, at_once):
    assert error(method, rows, blocks, warps, at_once=at_once, late=True) < 1e-3
