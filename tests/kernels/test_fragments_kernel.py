"""What the decode kernel over pages of any codes takes, its constants, its launches; numbers: test_gpu_fragments.py."""

import math

import pytest
import torch

pytest.importorskip("triton")

import aot
from kvfold.formats.basis import projection
from kvfold.formats.lookup import ChannelScales
from kvfold.kernels import REGISTRY
from kvfold.kernels.affine.decode import Plan
from kvfold.kernels.common._codes import _place
from kvfold.kernels.device import HOPPER, STATIC_SHARED
from kvfold.kernels.fragments import decode as fragments
from kvfold.kernels.fragments import layout as fragment_tables
from kvfold.kernels.fragments._codes import level_tile
from kvfold.methods import LayerSpec, get
from kvfold.methods.kvquant import Learned
from kvfold.methods.turboquant import lloyd_max
from kvfold.rope import Rope


def formats(method, dim=128, **spec):
    method, spec = get(method), LayerSpec(0, 1, 8, 2, dim, torch.float16, **spec)
    return method.key_format(spec), method.value_format(spec)


TAKEN = [
    ("innerq", 64), ("innerq", 128), ("innerq", 256), ("innerq:mode=asym", 128), ("innerq:normalize=false,bits=4", 128),
    ("qjl", 64), ("qjl", 128), ("qjl:k_bits=1", 128), ("turboquant", 64), ("turboquant", 128), ("turboquant:bits=3", 128),
    ("turboquant:bits=1", 64), ("turboquant:center=false,normalize=false", 128), ("k=qjl+v=turboquant", 128), ("gear", 64),
    ("gear", 128), ("gear:rank=4", 128), ("zipcache", 128),
]  # fmt: skip


@pytest.mark.parametrize("method, dim", TAKEN)
def test_what_it_takes(method, dim):
    assert fragments.unsupported(*formats(method, dim)) is None


@pytest.mark.parametrize("method, dim, reason", [
    ("innerq", 96, "keys: head_dim=96; allowed: 64, 128, 256"),
    ("kivi", 128, "keys: affine storage; allowed: paged"),
    ("fold", 128, "keys: uniform storage without a rotation or a sketch"),
    ("qjl:paper=true", 128, "keys: pages of all tokens in blocks of 32; allowed: 128, 32"),
    ("turboquant:bits=4", 128, "keys: levels of 4 bits; allowed: 1, 2, and 3 at head_dim 128 and 256"),
    ("turboquant:bits=3", 64, "keys: levels of 3 bits; allowed: 1, 2, and 3 at head_dim 128 and 256"),
    ("qjl:k_bits=3", 128, "keys: sketches of 384; allowed: one for keys, of 64, 128, 256 or 512"),
    ("gear:rank=3", 128, "keys: rank 3; allowed: 2, 4, 6, 8"),
    ("zipcache", 64, "keys: head_dim=64 in blocks of 128; allowed: 128, 128"),
])  # fmt: skip
def test_what_it_refuses_is_named(method, dim, reason):
    assert fragments.unsupported(*formats(method, dim)) == reason


def kvquant(bits=3, heads=2, dim=128, fused=True):
    made, spec = get(f"kvquant:bits={bits}"), LayerSpec(0, 1, heads, heads, dim, fragments=fused)
    levels = tuple(x / 3 for x in lloyd_max(bits))
    scales = ChannelScales(torch.randn(heads, dim), 3 * torch.randn(heads, dim).abs() + 1)
    return tuple(made.format(spec, side, Learned(levels, levels, scales)) for side in ("key", "value"))


def test_it_reads_kvquant_before_rope_only():
    assert fragments.unsupported(*kvquant(), pre_rope=True) is None
    assert fragments.unsupported(*kvquant()) == "keys: constants per channel after RoPE; allowed: before it"


@pytest.mark.parametrize("forms, reason", [
    (kvquant(bits=4), "keys: 4 bits, 41 elements; allowed: 2 and 3 bits, up to 64"),
    (kvquant(dim=64), "keys: head_dim=64 in blocks of 32; allowed: 128, 32"),
    (kvquant(fused=False), "keys: operand=plain; allowed: key"),
])  # fmt: skip
def test_what_it_refuses_of_kvquant_is_named(forms, reason):
    assert fragments.unsupported(*forms, pre_rope=True) == reason


def test_layers_of_kvquant_on_a_gpu_are_its(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert REGISTRY["fragments"].why_not(*kvquant(), torch.device("cuda"), True) is None
    assert REGISTRY["fragments"].why_not(*formats("qjl"), torch.device("cuda"), True) == "keys are stored before RoPE"


@pytest.mark.parametrize("rows, columns", [(1, 1), (4, 1), (6, 2), (8, 2), (12, 3)])
def test_both_parts_of_kvquants_queries_share_the_columns_of_a_product(rows, columns):
    plan = fragments.make_plan(*kvquant(), 8, rows, 1024, 160, HOPPER)
    assert (plan.columns, plan.tiles) == (columns, 1)


def test_rotations_of_part_of_the_channels_are_refused():
    with pytest.raises(ValueError, match="rope of 64 channels: allowed: 128"):
        fragment_tables.rope_turns(Rope(torch.ones(32)), torch.device("cpu"))


def test_channels_constants_lie_as_lanes_take_them():
    keys, _ = kvquant()
    got = fragment_tables.channel_constants(keys, torch.device("cpu"))
    for head, channel in ((0, 0), (1, 77), (1, 127)):
        of = got[head, channel // 16, channel % 8 // 2, channel % 16 // 8, :, channel % 2]
        own = keys.inner.channels
        assert of.tolist() == torch.stack((own.spread[head, channel], own.center[head, channel])).half().tolist()


def test_rotations_of_a_page_lie_as_operands():
    rope = Rope(10000.0 ** (-torch.arange(0, 128, 2).float() / 128), 1.5)
    turns, table = fragment_tables.rope_turns(rope, torch.device("cpu"))
    assert (turns.double().sum(0) * 2 * math.pi - rope.inv_freq.double()).abs().max() < 1e-12
    for token, pair in ((0, 0), (21, 37), (127, 63)):
        lane = token % 8 * 4 + pair % 8 // 2
        register = token % 16 // 8 + 2 * (pair % 16 // 8)
        angle = token * float(rope.inv_freq[pair])
        for which, want in enumerate((math.cos(angle), math.sin(angle))):
            of = table[token // 16, pair // 16, which].reshape(32, 4, 2)[lane, register, pair % 2]
            assert float(of) == pytest.approx(1.5 * want, abs=1e-3)


def test_codes_in_plain_order_are_refused():
    assert fragments.unsupported(*formats("qjl", fragments=False)) == "keys: operand=plain; allowed: key"


@pytest.mark.parametrize("bits", [2, 3])
def test_bytes_of_levels_are_looked_up_by_code(bits):
    levels = lloyd_max(bits, 128)
    upper, more, lower, rest = (int(x, 16) for x in fragments._level_table(levels).split())
    for code, level in enumerate(levels):
        pair = (upper, lower) if code < 4 else (more, rest)
        high, low = ((x >> 8 * (code % 4)) & 255 for x in pair)
        number = torch.tensor([low, high], dtype=torch.uint8).view(torch.float16)
        assert float(number) == float(torch.tensor(level).half())


@pytest.mark.parametrize("dim", [128, 256])
def test_every_tile_of_levels_comes_once_and_from_its_nibble(dim):
    tiles = [
        (level_tile(dim, w, half, i), w, 2 * half + i) for w in range(dim // 32) for half in (0, 1) for i in (0, 1)
    ]
    assert sorted(tile for tile, _, _ in tiles) == list(range(dim // 8))
    for tile, word, nibble in tiles:
        place, right, bit = _place(dim, 3, tile)
        assert (place, (right + bit) // 4) == (word, nibble)


@pytest.mark.parametrize("name", ["qjl", "turboquant"])
def test_a_matrix_lies_as_operands(name):
    keys, _ = formats(name)
    of = fragments.side(keys)
    table = fragments._table(keys, torch.device("cpu"), False)
    want = projection(of.width, 128, 0, "cpu") / math.sqrt(128)  # a rotation is that of as many rows as channels
    for row, channel in ((0, 0), (9, 1), (37, 77), (of.width - 1, 126)):
        lane = row % 8 * 4 + channel % 8 // 2
        register = row % 16 // 8 + 2 * (channel % 16 // 8)
        k = row // 16 % 8 if name == "qjl" else 0
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
    ("gear", 8, None), ("gear", 128, 168), ("zipcache", 8, None), ("zipcache", 128, None), ("qjl", 8, None),
    ("qjl", 128, 168),
])  # fmt: skip
def test_registers_where_programs_are_few(method, batch_heads, registers):
    assert fragments.make_plan(*formats(method), batch_heads, 4, 4096, 160, HOPPER).registers == registers


def test_a_matrix_is_brought_where_few_programs_have_many_pages():
    long, short = (fragments.make_plan(*formats("qjl"), 8, 4, capacity, 160, HOPPER) for capacity in (4096, 1024))
    assert long.ahead and not short.ahead and short.registers == 168
    counts = [aot.compile_fragments(*formats("qjl"), plan=plan).instructions["CCTL"] for plan in (long, short)]
    assert counts == [2 * 128 * 256 // (32 * 128), 0]


@pytest.mark.parametrize("method, loop", [("qjl", 2150), ("turboquant:bits=3", 3200)])
def test_it_compiles_without_spills_in_its_loop(method, loop):
    report = aot.compile_fragments(*formats(method))
    assert report.registers <= 168
    assert report.spills_in_loop <= 12
    assert report.loop <= loop
    assert report.shared <= STATIC_SHARED + 1024


def test_products_of_bytes_of_two_precisions_compile_without_spills():
    forms = formats("zipcache")
    plan = fragments.make_plan(*forms, 8, 4, 4096, 160, HOPPER)
    report = aot.compile_fragments(*forms, plan=plan)
    assert (report.spills_in_loop, report.instructions["IMMA"]) == (0, 32 + 20 + 32 + 24)
    assert report.loop <= 2000


def test_it_compiles_before_hopper():
    plan = Plan(2, 4, 1, 1, 4, 2, False, 168)
    assert aot.compile_fragments(*formats("gear"), capability=80, plan=plan).shared <= STATIC_SHARED + 1024
