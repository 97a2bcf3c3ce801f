"""Attention over pages by products of bytes, run by one warp in NumPy, against attention over the decoded pages."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvfold.kernels import _pages_rows_gluon, pages
from kvfold.kernels.decode import Plan
from kvfold.methods import LayerSpec, get
from one_warp import COLUMN, ROW, Machine, Pointer, on_cpu, register, scalar

PLAN = Plan(1, pages.BLOCKS, 1, 1, 1, 0, bytewise=True)
NAMES = ("D", "K_BITS", "K_MEAN", "K_NORM", "K_MIX", "V_BITS", "V_MEAN", "V_MIX", "NB")


def error(method, rows=4, blocks=6, query=1.0, value=1.0, spread=0.7, scale=128**-0.5):
    """Relative RMS error of the output. Storage is poisoned beyond its ``blocks`` blocks."""
    spec = LayerSpec(0, 1, 1, 1, 128)
    method = get(method)
    formats = method.key_format(spec), method.value_format(spec)
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    keys = random(1, 1, 32 * blocks, 128) * torch.exp(spread * random(1, 1, 1, 128)) + random(1, 1, 1, 128)
    values = value * (random(1, 1, 32 * blocks, 128) + random(1, 1, 1, 128))
    q = (query * random(rows, 128)).half()
    machine, decoded, arrays = Machine(), [], []
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

    fixed = pages.constants(*formats, PLAN, False, True)
    (k, v), zero = arrays, scalar(0)
    stored = tuple(tuple(scalar(a, np.int64) for a in side) for side in (k[:4], (*v[:3], v[2])))
    _, sums, totals = on_cpu(_pages_rows_gluon, machine).attend_rows(
        scalar(0), register(np.arange(32, dtype=np.int32)), zero, zero, scalar(-(-blocks // 4)), scalar(blocks), stored,
        (zero, zero, zero), None, None, Pointer(machine.put(q), np.float16, "fp16"), scalar(0, np.int64), zero, rows,
        scale * math.log2(math.e), None, Pointer(k[4], np.float32), Pointer(v[3], np.float32), *(fixed[n] for n in NAMES),
    )  # fmt: skip
    got, total = np.zeros((8, 128)), np.zeros(8)
    for e in range(2):
        total[2 * COLUMN + e] = totals[e]
    for tile, x in enumerate(sums):
        for i in range(4):
            got[2 * COLUMN + i % 2, 16 * tile + ROW + 8 * (i // 2)] = x[i]
    got = torch.from_numpy(got[:rows] / total[:rows, None])
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    "method", ["fold", "fold:bits=2", "fold:bits=4", "fold:k_bits=2,v_bits=3", "fold:rotation=1", "fold:rotation=128"]
)
def test_it_is_attention_over_the_decoded_pages(method):
    assert error(method) < 3e-4


@pytest.mark.parametrize("rows, blocks", [(1, 1), (3, 4)])
def test_fewer_rows_and_blocks(rows, blocks):
    assert error("fold:center=false", rows, blocks) < 3e-4


@pytest.mark.parametrize("given", [{"query": 100.0}, {"query": 1e-4}, {"value": 1e-3}, {"value": 1e3}, {"scale": 0.5}])
def test_numbers_of_every_size(given):
    assert error("fold", **given) < 8e-4
