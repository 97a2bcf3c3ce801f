"""Attention over pages by products of bytes, run by warps in NumPy, against attention over the decoded pages."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvfold.kernels import _last, _pages_rows_gluon, pages
from kvfold.kernels.decode import Plan
from kvfold.methods import LayerSpec, get
from warps import Machine, Pointer, on_cpu, register, scalar

NAMES = ("D", "K_BITS", "K_MEAN", "K_NORM", "K_MIX", "V_BITS", "V_MEAN", "V_MIX", "NB")


def error(method, rows=4, blocks=6, warps=1, query=1.0, value=1.0, spread=0.7, scale=128**-0.5, **how):
    """Relative RMS error of the output. Storage is poisoned beyond its ``blocks`` blocks. ``how``: deep, late."""
    spec = LayerSpec(0, 1, 1, 1, 128)
    method = get(method)
    formats = method.key_format(spec), method.value_format(spec)
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    keys = random(1, 1, 32 * blocks, 128) * torch.exp(spread * random(1, 1, 1, 128)) + random(1, 1, 1, 128)
    values = value * (random(1, 1, 32 * blocks, 128) + random(1, 1, 1, 128))
    q = (query * random(rows, 128)).half()
    machine, decoded, arrays = Machine(warps, late=how.get("late", False)), [], []
    for form, x, norm in zip(formats, (keys, values), (True, False), strict=True):
        fields = form.allocate(1, 1, blocks + 2, "cpu")
        for y in fields.values():
            y.fill_(float("nan") if y.is_floating_point() else -1)
        for name, y in form.encode(x).items():
            fields[name][:, :, : y.shape[2]] = y
        decoded.append(form.decode(fields)[0, 0, : 32 * blocks].double())
        given = pages._arrays(form, fields, pages._signs(form, torch.zeros(1)), norm)
        arrays.append([machine.put(y) for y in given])
    weights = (q.double() @ decoded[0].T * scale).softmax(-1)
    want = weights @ decoded[1]

    fixed = pages.constants(*formats, Plan(warps, pages.BLOCKS, 1, 1, 1, 0, bytewise=True), False, True)
    (k, v), zero = arrays, scalar(0)
    stored = tuple(tuple(scalar(a, np.int64) for a in side) for side in (k[:4], (*v[:3], v[2])))
    at, parts = (
        machine.put(q),
        [machine.put(torch.full(shape, math.nan)) for shape in ((2, rows, 128), (2, rows), (2, rows))],
    )
    kernel, slot = on_cpu(_pages_rows_gluon, machine), scalar(1, np.int64)

    def program(warp):
        lane, warp = register(np.arange(32, dtype=np.int32)), scalar(warp)
        signs = kernel.turn_signs(Pointer(v[3], np.float32), lane // 4, lane % 4) if fixed["V_MIX"] > 1 else lane * 0
        sums = kernel.attend_rows(
            zero, lane, warp, zero, scalar(-(-blocks // 4)), scalar(blocks), stored, (zero, zero, zero), None, None,
            Pointer(at, np.float16, "fp16"), scalar(0, np.int64), zero, rows, scale * math.log2(math.e), None,
            Pointer(k[4], np.float32), Pointer(v[3], np.float32), *(fixed[n] for n in NAMES), how.get("deep", False),
        )  # fmt: skip
        outputs = (Pointer(p, np.float32) for p in parts)
        kernel.finish_rows(zero, lane, warp, *(sums[i] for i in (0, 1, 2)), signs, *outputs, slot, zero, rows, 128,
                           fixed["V_BITS"], fixed["V_MIX"])  # fmt: skip

    machine.run(program)
    out, total = (
        torch.from_numpy(machine.get(parts[i], shape)[1]) for i, shape in ((0, (2, rows, 128)), (2, (2, rows)))
    )
    got = out.double() / total.double()[:, None]
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    "method", ["fold", "fold:bits=2", "fold:bits=4", "fold:k_bits=2,v_bits=3", "fold:rotation=1", "fold:rotation=128"]
)
def test_it_is_attention_over_the_decoded_pages(method):
    assert error(method) < 3e-4


@pytest.mark.parametrize("rows, blocks, warps", [(1, 1, 2), (3, 4, 1), (4, 13, 4)])
def test_fewer_rows_blocks_and_pages_than_warps(rows, blocks, warps):
    assert error("fold:center=false", rows, blocks, warps) < 3e-4


@pytest.mark.parametrize("rows, blocks, warps", [(1, 1, 2), (4, 21, 1), (4, 37, 4)])
@pytest.mark.parametrize("late", [False, True])
def test_two_stages_of_a_warp_are_neither_read_too_early_nor_filled_too_soon(rows, blocks, warps, late):
    assert error("fold:center=false", rows, blocks, warps, deep=True, late=late) < 3e-4


@pytest.mark.parametrize("rows, parts, warps", [(4, 33, 4), (3, 2, 2), (1, 18, 1)])
def test_a_warp_merges_the_parts_of_a_row(rows, parts, warps):
    """Of the second of two heads; the third part sees no token, nor does a row that no part sees."""
    torch.manual_seed(0)
    sums, tops, totals = (
        torch.randn(2, parts, rows, 128),
        9 * torch.randn(2, parts, rows),
        torch.rand(2, parts, rows) + 1,
    )
    nothing = torch.zeros(parts, rows, dtype=bool)
    nothing[2:3] = True
    nothing[:, 1:2] = True
    tops[1][nothing], totals[1][nothing], sums[1][nothing] = -1e30, 0, 0
    machine = Machine(warps)
    given = [Pointer(machine.put(x), np.float32) for x in (sums, tops, totals)]
    out = machine.put(torch.full((2, rows, 128), math.nan))
    merge = on_cpu(_last, machine).merge_rows
    lane = register(np.arange(32, dtype=np.int32))
    machine.run(lambda w: merge(lane, scalar(w), *given, Pointer(out, np.float32), scalar(1), parts, rows, 128))
    weight = torch.exp2(tops[1] - tops[1].amax(0))
    want = (weight[..., None] * sums[1]).sum(0) / (weight * totals[1]).sum(0).clamp_min(1e-30)[:, None]
    got = torch.from_numpy(machine.get(out, (2, rows, 128)))
    assert got[0].isnan().all()
    torch.testing.assert_close(got[1], want, rtol=1e-5, atol=1e-5)


def test_copies_that_arrive_late_are_waited_for():
    assert error("fold", 4, 13, 2, late=True) < 3e-4


@pytest.mark.parametrize("given", [{"query": 100.0}, {"query": 1e-4}, {"value": 1e-3}, {"value": 1e3}, {"scale": 0.5}])
def test_numbers_of_every_size(given):
    assert error("fold", **given) < 8e-4
