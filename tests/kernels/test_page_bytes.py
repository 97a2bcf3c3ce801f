"""Attention over pages by products of bytes, run by warps in NumPy, against attention over the decoded pages."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvfold.kernels.affine.decode import Plan
from kvfold.kernels.fold import _bytes as _page_bytes
from kvfold.kernels.fold import _rows as _pages_rows_gluon
from kvfold.kernels.fold import decode as pages
from kvfold.kernels.fold._codebook import ROWS, tables_bytes
from kvfold.methods import LayerSpec, get
from warps import Machine, Pointer, on_cpu, register, scalar

NAMES = "D", "K_BITS", "K_MEAN", "K_NORM", "K_MIX", "V_BITS", "V_MEAN", "V_MIX", "NB", "K_WORDS", "V_WORDS", "BYTES"


def error(method, rows=4, blocks=6, warps=1, query=1.0, value=1.0, spread=0.7, scale=128**-0.5, late=False):
    """Relative RMS error of the output. Storage is poisoned beyond its ``blocks`` blocks. ``late``: see
    :class:`warps.Machine`."""
    spec = LayerSpec(0, 1, 1, 1, 128)
    method = get(method)
    formats = method.key_format(spec), method.value_format(spec)
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    keys = random(1, 1, 32 * blocks, 128) * torch.exp(spread * random(1, 1, 1, 128)) + random(1, 1, 1, 128)
    values = value * (random(1, 1, 32 * blocks, 128) + random(1, 1, 1, 128))
    q = (query * random(rows, 128)).half()
    fours = 1 if rows <= 4 else 2
    machine, decoded, arrays = Machine(warps, late=late), [], []
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

    fixed = pages.constants(*formats, Plan(warps, pages.BLOCKS, 1, 1, 1, 0, bytewise=fours), False, True)
    (k, v), zero = arrays, scalar(0)
    words = fixed["K_WORDS"], fixed["V_WORDS"]
    base = scalar(tables_bytes(*words))
    for form, at in zip(formats, (0, tables_bytes(*words) - ROWS.value), strict=True):
        if pages._words(form):
            table = pages.rows_of(form, torch.zeros(1), True).numpy().view(np.uint8).reshape(256, -1)
            machine.shared[at : at + ROWS.value] = np.tile(table, 128 // table.shape[1]).reshape(-1)
    stored = tuple(tuple(scalar(a, np.int64) for a in side) for side in (k[:4], (*v[:3], v[2])))
    at, parts = (
        machine.put(q),
        [machine.put(torch.full(shape, math.nan)) for shape in ((2, rows, 128), (2, rows), (2, rows))],
    )
    kernel, slot = on_cpu(_pages_rows_gluon, machine), scalar(1, np.int64)

    def program(warp):
        lane, warp = register(np.arange(32, dtype=np.int32)), scalar(warp)
        signs = kernel.rotation_signs(
            Pointer(k[4], np.float32),
            Pointer(v[3], np.float32),
            lane,
            128,
            *(fixed[n] for n in ("K_MIX", "V_MEAN", "V_MIX")),
        )
        query = Pointer(at, np.float16, "fp16")
        asked = on_cpu(_page_bytes, machine).ask_rows(
            query, lane, warp, scalar(0, np.int64), zero, rows, None, 128, 4 * fours
        )
        sums = kernel.attend_rows(
            base, lane, warp, zero, scalar(-(-blocks // 4)), scalar(blocks), stored, (zero, zero, zero), None, None,
            asked, scale * math.log2(math.e), signs[0], signs[1], *(fixed[n] for n in NAMES), (),
        )  # fmt: skip
        outputs = (Pointer(p, np.float32) for p in parts)
        kernel.finish_rows(base, lane, warp, *(sums[i] for i in (0, 1, 2)), signs[2], *outputs, slot, zero, rows, 128,
                           fixed["V_BITS"], fixed["V_MIX"], fixed["V_WORDS"])  # fmt: skip

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


@pytest.mark.parametrize("given", [{"query": 100.0}, {"query": 1e-4}, {"value": 1e-3}, {"value": 1e3}, {"scale": 0.5}])
def test_numbers_of_every_size(given):
    assert error("fold", **given) < 8e-4


@pytest.mark.parametrize("rows, blocks, warps", [(1, 1, 1), (3, 6, 1), (4, 13, 4), (4, 19, 2)])
def test_pages_whose_copies_come_late(rows, blocks, warps):
    assert error("fold", rows, blocks, warps, late=True) < 3e-4


CODED = "fold:codebook=true", "fold:bits=2,codebook=true", "fold:k_bits=2,v_bits=1,codebook=true"


@pytest.mark.parametrize(
    "method", [*CODED, "fold:k_bits=2,v_bits=3,codebook=true", "fold:bits=2,codebook=true,rotation=128"]
)
def test_codes_are_looked_up_as_bytes(method):
    assert error(method) < 3e-4


@pytest.mark.parametrize("method", CODED)
@pytest.mark.parametrize("rows, blocks, warps", [(1, 1, 2), (3, 4, 1), (4, 13, 4)])
def test_looked_up_codes_of_fewer_rows_and_pages(method, rows, blocks, warps):
    assert error(f"{method},center=false", rows, blocks, warps) < 3e-4


@pytest.mark.parametrize("given", [{"query": 100.0}, {"query": 1e-4}, {"value": 1e-3}, {"value": 1e3}, {"scale": 0.5}])
def test_looked_up_numbers_of_every_size(given):
    assert error("fold:bits=2,codebook=true", **given) < 8e-4


@pytest.mark.parametrize("method", [
    "fold", "fold:bits=2", "fold:bits=4", "fold:normalize=false", "fold:center=false", "fold:rotation=1", *CODED,
    "fold:k_bits=2,v_bits=3,codebook=true", "fold:bits=2,codebook=true,rotation=128",
])  # fmt: skip
def test_eight_rows_are_two_sets_of_four(method):
    assert error(method, 8) < 3e-4


@pytest.mark.parametrize("method", ["fold:center=false", "fold:bits=4", *CODED])
@pytest.mark.parametrize("rows, blocks, warps", [(5, 1, 2), (6, 4, 1), (7, 13, 4), (8, 19, 2)])
def test_two_sets_of_fewer_rows_and_pages_than_warps(method, rows, blocks, warps):
    assert error(method, rows, blocks, warps, late=True) < 3e-4


@pytest.mark.parametrize("method", ["fold", "fold:codebook=true", "fold:bits=2,codebook=true"])
@pytest.mark.parametrize("given", [{"query": 100.0}, {"query": 1e-4}, {"value": 1e-3}, {"value": 1e3}, {"scale": 0.5}])
def test_two_sets_of_numbers_of_every_size(method, given):
    assert error(method, 7, **given) < 8e-4
