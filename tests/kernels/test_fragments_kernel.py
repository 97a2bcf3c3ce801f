"""What the decode kernel over pages of affine groups and of signs takes, its constants, its launches.

Numbers: test_gpu_fragments.py.
"""

import math

import pytest
import torch

pytest.importorskip("triton")

import aot
from kvfold.formats.basis import projection
from kvfold.kernels.affine.decode import Plan
from kvfold.kernels.device import HOPPER, STATIC_SHARED
from kvfold.kernels.fragments import decode as fragments
from kvfold.methods import LayerSpec, get


def formats(method, dim=128, **spec):
    method, spec = get(method), LayerSpec(0, 1, 8, 2, dim, torch.float16, **spec)
    return method.key_format(spec), method.value_format(spec)


TAKEN = [
    ("innerq", 64), ("innerq", 128), ("innerq", 256), ("innerq:mode=asym", 128), ("innerq:normalize=false,bits=4", 128),
    ("qjl", 64), ("qjl", 128), ("qjl:k_bits=1", 128), ("qjl:normalize=false", 128), ("k=qjl+v=kivi", 128),
]  # fmt: skip


@pytest.mark.parametrize("method, dim", TAKEN)
def test_what_it_takes(method, dim):
    assert fragments.unsupported(*formats(method, dim)) is None


@pytest.mark.parametrize("method, dim, reason", [
    ("innerq", 96, "keys: head_dim=96; allowed: 64, 128, 256"),
    ("kivi", 128, "keys: affine storage; allowed: paged"),
    ("fold", 128, "keys: uniform storage; allowed: affine, sign sketch"),
    ("qjl:paper=true", 128, "keys: pages of all tokens in blocks of 32; allowed: 128, 32"),
    ("turboquant", 128, "keys: lookup storage; allowed: affine, sign sketch"),
    ("k=qjl+v=turboquant", 128, "values: lookup storage; allowed: affine, sign sketch"),
    ("qjl:k_bits=3", 128, "keys: sketches of 384; allowed: one for keys, of 64, 128, 256 or 512"),
    ("gear", 128, "keys: low rank storage; allowed: paged"),
    ("zipcache", 128, "keys: mixed precision storage; allowed: paged"),
])  # fmt: skip
def test_what_it_refuses_is_named(method, dim, reason):
    assert fragments.unsupported(*formats(method, dim)) == reason


def test_codes_in_plain_order_are_refused():
    assert fragments.unsupported(*formats("qjl", fragments=False)) == "keys: operand=plain; allowed: key"


def test_a_matrix_lies_as_operands():
    keys, _ = formats("qjl")
    of = fragments.side(keys)
    table = fragments._table(keys, torch.device("cpu"))
    want = projection(of.width, 128, 0, "cpu") / math.sqrt(128)
    for row, channel in ((0, 0), (9, 1), (37, 77), (of.width - 1, 126)):
        lane = row % 8 * 4 + channel % 8 // 2
        register = row % 16 // 8 + 2 * (channel % 16 // 8)
        k = row // 16 % 8
        got = table[row // 16, channel // 16].reshape(32, 4, 2)[lane, register, channel % 2]
        assert float(got) * 2**k == pytest.approx(float(want[row, channel]), rel=1e-3)


@pytest.mark.parametrize("batch_heads", [1, 8, 1024])
@pytest.mark.parametrize("rows", [1, 4, 8, 64])
@pytest.mark.parametrize("capacity", [1, 64, 4096])
@pytest.mark.parametrize("method, dim", TAKEN)
def test_launches_fit_and_cover(method, dim, capacity, rows, batch_heads):
    forms = formats(method, dim)
    plan = fragments.make_plan(*forms, batch_heads, rows, capacity, 160, HOPPER)
    assert fragments.program_bytes(*forms, plan.tiles, plan.warps, plan.blocks) <= STATIC_SHARED
    # rows of four pages at once are the first operand of the sketch's product, which has 16
    assert (16 if plan.tiles == 4 else plan.columns * 8) // plan.tiles >= rows
    assert plan.tiles == 1 or rows <= 4
    assert 1 <= plan.splits <= 256 and plan.dense_splits >= 1


@pytest.mark.parametrize("method, batch_heads, registers", [
    ("innerq", 8, 168), ("innerq", 128, 168), ("qjl", 8, None), ("qjl", 128, 168),
])  # fmt: skip
def test_registers_where_programs_are_few(method, batch_heads, registers):
    assert fragments.make_plan(*formats(method), batch_heads, 4, 4096, 160, HOPPER).registers == registers


def test_a_matrix_is_brought_where_few_programs_have_many_pages():
    long, short = (fragments.make_plan(*formats("qjl"), 8, 4, capacity, 160, HOPPER) for capacity in (4096, 1024))
    assert long.ahead and not short.ahead and short.registers == 168
    counts = [aot.compile_fragments(*formats("qjl"), plan=plan).instructions["CCTL"] for plan in (long, short)]
    assert counts == [2 * 128 * 256 // (32 * 128), 0]


def test_it_compiles_without_spills_in_its_loop():
    report = aot.compile_fragments(*formats("qjl"))
    assert report.registers <= 168
    assert report.spills_in_loop <= 12
    assert report.loop <= 2150
    assert report.shared <= STATIC_SHARED + 1024


def test_it_compiles_before_hopper():
    plan = Plan(2, 4, 1, 1, 4, 2, False, 168)
    assert aot.compile_fragments(*formats("innerq"), capability=80, plan=plan).shared <= STATIC_SHARED + 1024
