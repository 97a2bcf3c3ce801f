"""The kernel that finds pairs of codes of keys among few (CommVQ): its lanes run by PyTorch, compiled ahead, and on a GPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import lanes
from aot.tables import compile_pair_tables, compile_pairs, compile_units, compile_values
from helpers import ENCODING, interpreted_module, relative
from kvfold.formats import codebook
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, times_i
from kvfold.kernels.common.encode_source import Source, angles
from kvfold.kernels.commvq import encode as encode_pairs
from kvfold.kernels.searched import encode as encode_search
from kvfold.rope import Rope

INTERPRETED = (
    *ENCODING,
    "kvfold.kernels.searched._encode",
    "kvfold.kernels.commvq._encode",
    "kvfold.kernels.commvq.encode",
)
HEADS, DIM = 2, 128
CHOOSE = {name: getattr(codebook, name) for name in ("nearest", "first_pair", "next_pair")}


class Emulated:
    """A kernel whose launches PyTorch runs."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            lanes.run(self.kernel, grid, arguments, constants, num_warps, 227 << 10)

        return launch


@pytest.fixture
def pairs():
    return interpreted_module("kvfold.kernels.commvq.encode", *INTERPRETED)


SPREAD = 0.02
"""Of keys around a mean of length 1 for each channel."""


def form(stages, passes=1, mean=False):
    """Random tables; with ``mean`` for keys that differ little from what they share, as in Qwen models' first layers."""
    draw = torch.Generator().manual_seed(stages)
    centres = torch.randn(HEADS, stages, 64, DIM, generator=draw) / max(stages, 11) ** 0.5
    metric = torch.eye(DIM) * torch.linspace(0.7, 1.4, HEADS)[:, None, None]
    if mean:
        centres *= SPREAD
        centres[:, 0] += 0.5**0.5
        centres /= metric[:, None, :1, :1]
    return AdditiveCodes(DIM, 32, "key", stages, 64, passes, KeyCodebook.rounded(centres, metric, DIM))


def compared(module, fmt, tokens, device, rows=None, batch=1, mean=False):
    """Fraction of codes that differ from the format's own, and how much larger the squared error is."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(batch, HEADS, tokens, DIM, generator=draw)
    x[0, 1, 5] = 0.0
    rope = Rope(10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM), 1.25)
    positions = torch.arange(37, 37 + tokens)[None].expand(batch, -1)
    turned = [t.to(device) for t in angles(rope, positions)]
    if mean:  # all imaginary parts: z + i z of equal z
        shared = torch.full((DIM,), 0.5**0.5)
        x = rope.rotate(x * SPREAD + shared + times_i(shared, DIM), positions[:, None])
    plain = rope.unrotate(x, positions[:, None])
    fields = fmt.allocate(batch, HEADS, tokens // 32 + 1, device)
    picked = None if rows is None else torch.tensor(rows, device=device)
    module.encode_pairs(fmt, Source(x.to(device), fields, 1, picked, tuple(turned), 1 / rope.scaling))
    order = range(batch) if rows is None else rows
    got = {name: t[list(order), :, 1:].cpu() for name, t in fields.items()}
    want = fmt.encode(plain)

    def missed(stored):
        return float((fmt.decode(stored) - plain).square().sum())

    return float((fmt.codes(got) != fmt.codes(want)).float().mean()), missed(got) / missed(want)


@pytest.mark.parametrize(
    "stages, passes, tokens, batch, rows, change, mean",
    [
        (3, 1, 32, 1, None, {}, True),
        (2, 0, 32, 2, [1, 0], {}, False),
        (5, 2, 32, 1, None, {}, False),
        (1, 1, 32, 1, None, {}, False),
        (2, 1, 96, 1, None, {"WIDE": True, "num_warps": 4}, True),
        (6, 1, 64, 1, None, {"WIDE": True, "num_warps": 4}, False),
        (3, 0, 64, 1, None, {"WIDE": True, "num_warps": 4}, False),
    ],
)
def test_lanes_find_pairs_as_near_as_the_format(stages, passes, tokens, batch, rows, change, mean, monkeypatch, pairs):
    monkeypatch.setattr(pairs, "pairs_search_kernel", Emulated(pairs.pairs_search_kernel))
    for name, value in ({"num_warps": 2, "WIDE": False} | change).items():
        monkeypatch.setitem(pairs.QUADS, name, value)
    differ, worse = compared(pairs, form(stages, passes, mean), tokens, torch.device("cpu"), rows, batch, mean)
    assert differ < 0.06
    assert worse < 1.003


def test_codes_of_all_pairs_are_the_nearest_where_keys_share_most_of_themselves(monkeypatch, pairs):
    monkeypatch.setattr(pairs, "is_quick", lambda _: False)
    differ, worse = compared(pairs, form(2, 1, True), 32, torch.device("cpu"), mean=True)
    assert differ < 0.03
    assert worse < 1.0005


def by_pytorch(fmt, source):
    for name, stored in fmt.encode(source.x).items():
        source.fields[name].copy_(stored)


def in_fp16(find, *given):
    return find(*(t.half().float() if t.is_floating_point() else t for t in given))


@pytest.mark.parametrize("rounded", [False, True])
def test_a_self_test_sees_what_is_lost_where_keys_share_most_of_themselves(rounded, monkeypatch):
    """Scores in fp16 of keys whose mean was not taken off: of random numbers they choose as well."""

    def search(fmt, source):
        if rounded:
            for name, find in CHOOSE.items():
                monkeypatch.setattr(codebook, name, partial(in_fp16, find))
        by_pytorch(fmt, source)
        for name, find in CHOOSE.items():
            monkeypatch.setattr(codebook, name, find)

    monkeypatch.setitem(encode_search._LAUNCH, AdditiveCodes, search)
    encode_search.self_test.cache_clear()
    said = encode_search.self_test(form(2, 1, True), torch.device("cpu"))
    encode_search.self_test.cache_clear()
    assert (said is not None and said.startswith("keys near their own codebook")) if rounded else said is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "stages, tokens, mean", [(11, 4096, True), (21, 4096, False), (21, 32, False), (11, 288, False)]
)
def test_pairs_on_a_gpu_are_as_near(stages, tokens, mean):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    fmt = form(stages, mean=mean)
    differ, worse = compared(encode_pairs, fmt, tokens, torch.device("cuda"), mean=mean)
    assert differ < 0.12  # one code that is nearly as good changes those after it
    assert worse < 1 + max(1e-3, 0.1 / tokens**0.5)


def tiles(rows):
    """Rows fp16 [heads, stages, 64, 128] as products of warpgroups read them: [heads, stages, 2 parts of channels, 64 rows, 64
    channels]."""
    lines = rows.unflatten(2, (4, 8, 2)).transpose(2, 3).flatten(2, 4)
    words = lines.unflatten(-1, (4, 4, 4, 2)).transpose(-3, -2).reshape(*lines.shape[:-1], 2, 8, 8)
    place = torch.arange(8)
    index = (place ^ place.repeat(8).unsqueeze(1))[:, None, :, None]
    return words.gather(-2, index.expand(*words.shape[:2], 64, 2, 8, 8)).transpose(2, 3).flatten(-2)


def turning(draw):
    """A metric that commutes with multiplication by i."""
    a, b = (torch.randn(HEADS, DIM // 2, DIM // 2, generator=draw) for _ in range(2))
    return torch.eye(DIM) + 0.1 * torch.cat((torch.cat((a, b), -1), torch.cat((-b, a), -1)), 1)


@pytest.mark.parametrize("wide", [True, False])
def test_tables_of_a_stage_lie_as_lanes_take_them(wide, pairs):
    """Less the first stage's means; one side's are those of the other."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(HEADS, 2, 64, DIM, generator=draw) + 3
    metric = turning(draw)
    book = KeyCodebook(centres, metric, DIM)
    search, shift = encode_pairs.shifted(book.search())
    got = pairs.pair_tables(book, wide)
    assert relative(got.shift, shift) < 1e-5
    assert torch.equal(got.near_shift, got.shift.half())
    assert relative(got.high.float() * got.scale[:, None, None], metric) < 1e-3
    assert relative((got.high.double() + got.low.double()) * got.scale[:, None, None], metric) < 1e-6
    plain = search.halves[:, :, :64]
    rows, chunks = got.stages[..., :8192].view(HEADS, 2, 64, 4, 32), plain.view(HEADS, 2, 64, 4, 32)
    assert relative(rows[:, :, ::2], chunks[:, :, ::2]) < 1e-3
    assert relative(rows[:, :, 1::2], chunks[:, :, 1::2][:, :, :, [1, 0, 3, 2]]) < 1e-3
    between = got.stages[..., 8192:12288].view(HEADS, 2, 64, 64)
    assert relative(between, search.cross * -0.5) < 1e-3
    assert relative(-between.mT, search.cross * -0.5) < 1e-3
    less = search.squares[..., :64] * -0.5
    assert relative(got.stages[..., 12288:12352], less) < 1e-3
    assert relative(search.squares[..., 64:] * -0.5, less) < 1e-5
    common = got.stages[..., -4096:].view(HEADS, 2, 64, 64)
    assert relative(common, plain @ plain.mT + less.unsqueeze(-2)) < 1e-3
    if wide:
        assert relative(got.stages[..., 12800:20992].view(HEADS, 2, 2, 64, 64), tiles(plain)) < 1e-3


def test_keys_that_rope_turns_in_part_are_not_searched_by_one_sides_tables():
    fmt = form(2)
    book = KeyCodebook(fmt.codebook.centres, fmt.codebook.metric, 96)
    assert encode_pairs.is_quick(fmt) and not encode_pairs.is_quick(replace(fmt, codebook=book))


def test_sums_beyond_fp16_are_bounded(pairs):
    book = KeyCodebook(torch.full((1, 2, 64, DIM), 1e6), torch.eye(DIM).unsqueeze(0), DIM)
    made = pairs.pair_tables(book, False)
    assert (
        torch.isfinite(made.stages[..., :12352]).all()
        and torch.isfinite(made.stages[..., -4096:]).all()
        and torch.isfinite(made.near_shift).all()
    )


def test_tables_compile_without_spills():
    assert compile_pair_tables(21).spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 21])
def test_tables_on_a_gpu_are_those_of_the_codebook(stages):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    book = form(stages, mean=True).codebook
    search, shift = encode_pairs.shifted(book.search())
    got = encode_pairs.pair_tables(book.on(torch.device("cuda")), True)
    assert relative(got.shift.cpu(), shift) < 1e-5
    stored, plain = got.stages.cpu(), search.halves[:, :, :64]
    assert relative(stored[..., 12800:20992].view(HEADS, stages, 2, 64, 64), tiles(plain)) < 1e-3
    assert relative(stored[..., 8192:12288].view(search.cross.shape), search.cross * -0.5) < 2e-3
    common = plain @ plain.mT - 0.5 * search.squares[:, :, None, :64]
    assert relative(stored[..., -4096:].view(search.cross.shape), common) < 2e-3
    metric = (got.high.double() + got.low.double()) * got.scale[:, None, None]
    assert relative(metric.cpu(), book.metric) < 1e-6


@pytest.mark.parametrize("stages, wide", [(11, False), (21, False), (21, True)])
def test_search_compiles_within_its_registers(stages, wide, monkeypatch):
    monkeypatch.setitem(encode_pairs.QUADS, "WIDE", wide)
    report = compile_pairs(form(stages))
    assert report.instructions["HGMMA" if wide else "HMMA"] >= 32
    assert report.registers <= encode_pairs.QUADS["maxnreg"]
    # without products of warpgroups what spills is read between loops: GPUs that have them are the ones this is made for
    assert report.spilled <= 128 if wide else report.spills_in_loop <= 16
    assert report.shared <= 227 << 10


def test_keys_under_the_metric_compile_without_spills():
    assert compile_units().spilled == 0


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e14])
def test_keys_of_any_size_are_put_under_the_metric(size, pairs):
    """Sums of two fp16 numbers, of keys and of metrics; one head's metric is a thousand times as large."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, HEADS, 40, DIM, generator=draw) * torch.exp(2 * torch.randn(DIM, generator=draw)) * size
    metric = torch.randn(HEADS, DIM, DIM, generator=draw) * torch.tensor([1.0, 1e3])[:, None, None]
    shift = torch.randn(HEADS, DIM, generator=draw)
    tables = pairs.pair_tables(KeyCodebook(torch.randn(HEADS, 1, 64, DIM, generator=draw), metric, DIM), False)
    units, sizes = pairs.under_metric(Source(x, {"rms": x}, 0), replace(tables, shift=shift))
    seen = x.double() @ metric.double()
    want = seen.square().mean(-1).sqrt()
    assert relative(sizes, want) < 1e-5
    assert relative(units + shift.unsqueeze(1), seen / want.unsqueeze(-1)) < 1e-3


@pytest.mark.parametrize("codes", [128, 256])
def test_values_compile_without_spills_in_loops(codes):
    """64 codes a warp move some registers between loops, and were faster than 32 on a GPU."""
    report = compile_values(codes)
    assert report.spills_in_loop == 0 and report.spilled <= 128
