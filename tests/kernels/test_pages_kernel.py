"""What the decode kernel over pages takes, and how it is launched; its numbers are compared on a GPU (test_gpu_pages.py)."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import aot
from kvfold.formats.residual import Codebook
from kvfold.kernels import Span, Windows
from kvfold.kernels.affine.decode import Plan
from kvfold.kernels.common.partials import Partials
from kvfold.kernels.device import HOPPER, LEAST_SHARED, STATIC_SHARED
from kvfold.kernels.fold import decode as pages
from kvfold.kernels.paged import gluon
from kvfold.methods import LayerSpec, get
from paged_case import Server
from pieces_case import Emulated, error_of_pieces


def formats(method, dim=128, **spec):
    method, spec = get(method), LayerSpec(0, 1, 8, 2, dim, torch.float16, **spec)
    return method.key_format(spec), method.value_format(spec)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "method",
    [
        *("fold", "fold:bits=1", "fold:bits=4", "fold:center=false", "fold:normalize=false,rotation=1"),
        *("fold:codebook=true", "fold:bits=2,codebook=true", "fold:k_bits=2,v_bits=1,codebook=true"),
    ],
)
def test_it_takes_what_fold_stores(method, dim):
    assert pages.unsupported(*formats(method, dim)) is None


@pytest.mark.parametrize("method, dim, reason", [
    ("fold", 96, "keys: head_dim=96; allowed: 64, 128, 256"),
    ("fold:bits=8", 256, "8 and 8 bits at head_dim=256: a page is larger than shared memory"),
    ("kivi", 128, "keys: affine storage; allowed: paged"),
    ("innerq", 128, "keys: affine storage in pages; allowed: uniform, codes into fold's table"),
    ("turboquant", 128, "keys: lookup storage in pages; allowed: uniform, codes into fold's table"),
    ("fold:codebook=true", 96, "keys: head_dim=96; allowed: 64, 128, 256"),
    ("fold:bits=1,codebook=true", 64,
     "keys: 256 codes for 8 channels (1.25 bits); allowed: one stage of 256 codes for 4 neighbours"),
    ("fold:codebook=true,rotation=8", 64, "values: codes of channels that no Hadamard rotation of 16 or more mixes"),
])  # fmt: skip
def test_what_it_refuses_is_named(method, dim, reason):
    assert pages.unsupported(*formats(method, dim)) == reason


def test_codes_in_plain_order_are_refused():
    assert pages.unsupported(*formats("fold", fragments=False)) == "keys: operand=plain; allowed: key"


@pytest.mark.parametrize("batch_heads", [1, 8, 128, 1024])
@pytest.mark.parametrize("rows", [1, 4, 8, 64])
@pytest.mark.parametrize("capacity", [1, 4, 64, 1024, 4096])
@pytest.mark.parametrize("method, dim", [
    ("fold", 128), ("fold", 64), ("fold", 256), ("fold:bits=8", 128), ("fold:codebook=true", 64), ("fold:codebook=true", 256),
    ("fold:k_bits=8,v_bits=2,codebook=true", 256),
])  # fmt: skip
def test_launches_fit_and_cover(method, dim, capacity, rows, batch_heads):
    plan = pages.make_plan(*formats(method, dim), batch_heads, rows, capacity, 160, HOPPER)
    most = LEAST_SHARED if "codebook" in method else STATIC_SHARED
    assert pages.program_bytes(*formats(method, dim), plan) <= most
    assert plan.columns * plan.tiles * 8 >= rows
    assert 1 <= plan.splits <= 256 and plan.dense_splits >= 1


@pytest.mark.parametrize("batch_heads, capacity, whether", [(8, 256, True), (8, 4096, True), (128, 1024, False)])
def test_few_programs_bring_their_first_pages_and_begin_with_windows(batch_heads, capacity, whether):
    plan = pages.make_plan(*formats("fold"), batch_heads, 4, capacity, 160, HOPPER)
    assert plan.windows_first is whether


@pytest.mark.parametrize("batch_heads, capacity, rows, whole", [
    (1120 * 32, 16, 1, True), (2048, 64, 4, True), (2048, 65, 4, False), (1024, 16, 4, False), (2048, 64, 8, False),
])  # fmt: skip
def test_a_warp_takes_a_short_sequence_whole_where_there_are_many(batch_heads, capacity, rows, whole):
    plan = pages.make_plan(*formats("fold:bits=2"), batch_heads, rows, capacity, 32, HOPPER)
    assert (plan.warps == 1) is whole
    if whole:
        assert plan.splits == plan.dense_splits == 1
        report = aot.compile_pages(*formats("fold:bits=2"), rows=rows, plan=plan)
        assert report.registers <= 128 and report.spills_in_loop == 0  # sixteen programs of a multiprocessor
        assert 16 * (report.shared + 1024) <= 227 * 1024


@pytest.mark.parametrize(
    "method, rows, loads", [("fold", 4, 2), ("fold:codebook=true", 4, 2), ("fold:codebook=true", 8, 4), ("fold", 8, 16)]
)
def test_queries_are_asked_for_before_pages(method, rows, loads):
    """Right after the wait, with the sequence's length; and nothing is brought to L2 ahead."""
    code = aot.compile_pages(*formats(method), rows=rows).code
    after = code[code.index("ACQBULK") :]
    assert after[: after.index("BRA")].count("LDG") == 1 + loads and "LDGSTS" not in after[: after.index("BRA")]
    assert "LDGSTS" in after and "UBLKPF" not in code


@pytest.mark.parametrize("dim, registers", [(64, 168), (128, 168), (256, 255)])
def test_it_compiles_without_spills_in_its_loop(dim, registers):
    report = aot.compile_pages(*formats("fold", dim), rows=8)
    assert report.registers <= registers
    assert report.spills_in_loop <= 8
    assert report.shared <= STATIC_SHARED + 1024
    # codes: one for 16 x 16 of them; means, sums and rotations; the windows' program
    assert report.instructions["HMMA"] <= dim + dim // 2 + dim // 16 * 4 + 20


@pytest.mark.parametrize("method, most, sums", [
    ("fold", 1165, 8), ("fold:bits=2", 1070, 8), ("fold:codebook=true", 1530, 4), ("fold:bits=2,codebook=true", 1480, 0),
    ("fold:k_bits=2,v_bits=1,codebook=true", 1360, 0),
])  # fmt: skip
def test_products_of_bytes_take_fewer_instructions(method, most, sums):
    """Codes: one for 16 x 32 of them; sums of queries and of weights, which codes that are looked up do without."""
    report = aot.compile_pages(*formats(method), rows=4)
    assert report.registers <= 168 and report.spills_in_loop == 0
    assert report.shared <= (LEAST_SHARED if "codebook" in method else STATIC_SHARED) + 1024
    assert report.loop <= most
    assert report.instructions["IMMA"] == 64 + sums


@pytest.mark.parametrize("method, most, registers, spills, words", [
    ("fold", 1660, 168, 16, 95), ("fold:bits=2", 1640, 168, 16, 95), ("fold:bits=4", 1600, 168, 4, 95),
    ("fold:codebook=true", 2010, 255, 0, 240), ("fold:bits=2,codebook=true", 2010, 255, 0, 375),
    ("fold:k_bits=2,v_bits=1,codebook=true", 1800, 255, 0, 310),
])  # fmt: skip
def test_two_sets_of_rows_share_operands_of_codes(method, most, registers, spills, words):
    """Twice the products of one set, and no more reads of codes and rows of tables. Of uniform codes, of which three
    programs fit, what two sets have more than 168 registers waits in local memory."""
    forms = formats(method)
    plan = pages.make_plan(*forms, 128, 8, 1024, 160, HOPPER, sets=2)
    assert plan.bytewise == 2 and plan.columns == 1 and plan.registers == registers
    report = aot.compile_pages(*forms, rows=8, plan=plan)
    assert report.registers <= registers and report.spills_in_loop <= spills and report.loop <= most
    assert report.shared <= pages.most_bytes(*forms) + 1024
    one = aot.compile_pages(*forms, rows=4)
    assert report.instructions["IMMA"] == 2 * one.instructions["IMMA"]
    assert report.instructions["LDS"] <= min(words, one.instructions["LDS"] + 32)


@pytest.mark.parametrize("method, dim, rows, sets", [
    ("fold", 128, 4, 1), ("fold", 128, 5, 0), ("fold", 64, 4, 0), ("fold", 256, 1, 0),
    ("fold:bits=4", 128, 2, 1), ("fold:bits=1", 128, 4, 0), ("fold:rotation=1", 128, 4, 1),
    ("fold:codebook=true", 128, 4, 1), ("fold:bits=2,codebook=true", 128, 5, 2), ("fold:codebook=true", 128, 8, 2),
    ("fold:codebook=true", 128, 9, 0), ("fold:k_bits=2,v_bits=1,codebook=true", 128, 1, 1),
    ("fold:k_bits=2,v_bits=1,codebook=true", 128, 7, 2), ("fold:codebook=true", 64, 4, 0),
    ("fold:codebook=true", 256, 1, 0),
])  # fmt: skip
def test_where_products_of_bytes_serve(method, dim, rows, sets):
    assert pages.make_plan(*formats(method, dim), 8, rows, 1024, 160, HOPPER).bytewise == sets


@pytest.mark.parametrize("sets, rows", [(1, 5), (1, 16), (True, 8)])
def test_a_plan_of_too_few_sets_is_refused(sets, rows):
    forms, none, count = formats("fold"), torch.zeros(1, 2, 32, 128), torch.zeros(1, dtype=torch.int32)
    spans = [Span(0, *(form.allocate(1, 2, 4, "cpu") for form in forms))]
    windows = Windows((none, none), (none, none), count, count, count)
    plan = Plan(4, pages.BLOCKS, 1, 1, 1, 1, bytewise=sets)
    with pytest.raises(ValueError, match=f"{rows} query rows of a KV head"):
        pages.decode_attention(torch.zeros(1, 2 * rows, 1, 128), *forms, spans, windows, 1.0, plan=plan)


def test_it_compiles_before_hopper():
    report = aot.compile_pages(*formats("fold"), capability=80, plan=Plan(4, pages.BLOCKS, 1, 1, 4, 2, False, 168))
    assert report.shared <= STATIC_SHARED + 1024


@pytest.mark.parametrize("method, fragments", [
    ("fold:bits=2,codebook=true", True), ("fold:bits=2,codebook=true", False), ("fold:codebook=true", True),
    ("fold:k_bits=2,v_bits=1,codebook=true", False), ("fold:k_bits=2,v_bits=3,codebook=true", True),
])  # fmt: skip
@pytest.mark.parametrize("per_head, tokens, sets", [(2, 2, 1), (4, 2, 2), (5, 1, 2), (5, 2, 0)])
def test_lanes_read_pages_of_tables(method, fragments, per_head, tokens, sets, monkeypatch):
    """Codes of either side or both, of keys in either order (which is no order: they lie token by token). Up to eight query
    rows of a KV head are products of bytes, in sets of four; ten of halves."""
    assert pages.bytewise(*formats(method, fragments=fragments), per_head * tokens) == sets
    assert error_of_lanes(method, per_head, tokens, monkeypatch, fragments) < 1e-3


@pytest.mark.parametrize("method", ["fold", "fold:bits=2", "fold:bits=4"])
@pytest.mark.parametrize("per_head, tokens, sets", [(2, 2, 1), (3, 2, 2), (7, 1, 2), (4, 2, 0)])
def test_lanes_read_pages_of_uniform_codes(method, per_head, tokens, sets, monkeypatch):
    monkeypatch.setattr(pages, "bytewise", lambda *_: sets)
    assert error_of_lanes(method, per_head, tokens, monkeypatch) < 1e-3


def error_of_lanes(method, per_head, tokens, monkeypatch, fragments=True):
    monkeypatch.setattr(gluon, "fold_pieces_kernel", Emulated(gluon.fold_pieces_kernel))
    gluon.shape.cache_clear()  # it holds the kernel
    error = error_of_pieces(
        Server(method, (210, 300), 128, per_head=per_head, fragments=fragments), tokens, gluon.pieces
    )
    gluon.shape.cache_clear()
    return error


def test_one_table_serves_both_sides_only_where_it_is_the_same():
    keys, values = formats("fold:bits=2,codebook=true")
    assert pages.unsupported(keys, values) is None
    book = values.inner.book
    same = replace(values, inner=replace(values.inner, book=Codebook(book.codes.clone())))
    other = replace(values, inner=replace(values.inner, book=Codebook(-book.codes)))
    assert pages.unsupported(keys, same) is None
    assert pages.unsupported(keys, other) == "values: another codebook than that of keys; allowed: the same"


@pytest.mark.parametrize("factor, refused", [(-1.0, False), (1.01, True), (2.0, True)])
def test_a_table_of_no_bytes_is_refused(factor, refused):
    """Numbers that are no whole steps, or too large ones."""
    forms = formats("fold:bits=2,codebook=true")
    book = Codebook(forms[0].inner.book.codes * factor)
    keys, values = (replace(form, inner=replace(form.inner, book=book)) for form in forms)
    why = "keys: a codebook whose numbers are no bytes; allowed: whole steps of 0.03125, up to 3.96875"
    assert pages.unsupported(keys, values) == (why if refused else None)


@pytest.mark.parametrize("method, heads, tokens, sets", [
    ("fold", 7, 1, 2), ("fold:codebook=true", 7, 1, 2), ("fold:bits=2,codebook=true", 4, 2, 2),
    ("fold:bits=2,codebook=true", 6, 2, 2), ("fold:codebook=true", 4, 1, 1), ("fold:codebook=true", 7, 1, 0),
])  # fmt: skip
def test_lanes_attend_over_a_slab_and_its_windows(method, heads, tokens, sets, monkeypatch):
    """Whole launches: two splits, and the windows' program; twelve rows are those of two programs."""
    draw, packed, sinks, slots = torch.Generator().manual_seed(0), 416, 32, 64

    def random(n):
        return torch.randn(1, 2, n, 128, generator=draw)

    sides, spans = [], []
    windows = [random(n).half() for n in (sinks, sinks, slots, slots)]
    age = torch.arange(slots - 16)
    for form, sink, ring in zip(formats(method), windows[:2], windows[2:], strict=True):
        fields = form.allocate(1, 2, packed // 32 + 3, "cpu")
        for name, x in form.encode(random(packed)).items():
            fields[name][:, :, : x.shape[2]] = x
        spans.append(fields)
        decoded = form.decode(form.take(fields, packed // 32))
        sides.append(torch.cat([sink.float(), decoded.float(), ring[:, :, (packed + age) % slots].float()], 2)[0])
    keys, values = sides
    counts = [torch.tensor([n], dtype=torch.int32) for n in (sinks, packed, slots - 16)]
    given = Windows((windows[0], windows[1]), (windows[2], windows[3]), *counts)
    q = torch.randn(1, 2 * heads, tokens, 128, generator=draw).half()
    monkeypatch.setattr(pages, "pages_kernel", Emulated(pages.pages_kernel))
    monkeypatch.setattr(Partials, "merge", merged)
    plan = pages.make_plan(*formats(method), 2, heads * tokens, packed // 32 + 3, sinks + slots, HOPPER, sets=sets)
    plan = replace(plan, splits=2, dense_splits=1)
    got = pages.decode_attention(q, *formats(method), [Span(0, *spans)], given, 128**-0.5, plan=plan)
    sees = torch.ones(tokens, keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - tokens)
    rows = q[0].float().unflatten(0, (2, -1))
    scores = (rows @ keys.mT.unsqueeze(1) * 128**-0.5).masked_fill(~sees, float("-inf"))
    want = (scores.softmax(-1) @ values.unsqueeze(1)).flatten(0, 1)
    assert float((got[0].float() - want).norm() / want.norm()) < 1e-3


def merged(parts, out, *_):
    weight = torch.exp2(parts.top - parts.top.amax(1, True))
    x = (parts.out * weight.unsqueeze(-1)).sum(1) / (parts.total * weight).sum(1).unsqueeze(-1)
    return out.copy_(x.view(out.shape))
