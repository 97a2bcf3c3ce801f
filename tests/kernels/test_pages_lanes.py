"""Pages of codes into fold's table at head sizes 64 and 256: lanes run by PyTorch, against attention over decoded pages, and
what the compiler makes of them."""

import pytest
import torch

pytest.importorskip("triton")

import aot
import lanes
from kvfold.kernels.affine.decode import Plan
from kvfold.kernels.common.partials import Partials
from kvfold.kernels.device import HOPPER, LEAST_SHARED
from kvfold.kernels.fold import _codebook as _page_lookups
from kvfold.kernels.fold import decode as pages
from kvfold.kernels.paged import gluon
from kvfold.methods import LayerSpec, get
from paged_case import Server, formats_of
from pages_case import Case
from pieces_case import Emulated, error_of_pieces

THREE, TWO, ONE, MIXED = (
    "fold:codebook=true", "fold:bits=2,codebook=true", "fold:k_bits=2,v_bits=1,codebook=true",
    "fold:k_bits=2,v_bits=3,codebook=true",
)  # fmt: skip


def formats(method, dim):
    method, spec = get(method), LayerSpec(0, 1, 8, 2, dim, torch.float16)
    return method.key_format(spec), method.value_format(spec)


@pytest.fixture
def in_slabs(monkeypatch):
    """Attention over slabs without a GPU."""

    def merge(self, out, early, sinks, tokens):
        weight = torch.exp2(self.top - self.top.amax(1, keepdim=True))
        whole = (self.out * weight.unsqueeze(-1)).sum(1) / (self.total * weight).sum(1).unsqueeze(-1)
        return out.copy_(whole.view(out.shape))

    monkeypatch.setattr(pages, "pages_kernel", Emulated(pages.pages_kernel))
    monkeypatch.setattr(Partials, "merge", merge)


@pytest.fixture
def in_pieces(monkeypatch):
    monkeypatch.setattr(gluon, "fold_pieces_kernel", Emulated(gluon.fold_pieces_kernel))
    gluon.shape.cache_clear()  # it holds the kernel
    yield
    gluon.shape.cache_clear()


@pytest.mark.parametrize("method", [THREE, TWO, ONE, MIXED, "fold:k_bits=4,v_bits=1,codebook=true"])
@pytest.mark.parametrize("per_head, tokens", [(1, 1), (1, 3), (2, 2), (5, 1), (2, 4), (3, 3), (9, 2)])
def test_a_server_at_head_size_64(method, per_head, tokens, in_pieces):
    """Up to eight query rows of a KV head and more, of which two tiles share what is looked up; the first page begins with the
    sink, the last one is not full."""
    plain = method in (TWO, ONE) and per_head == 2  # their codes lie token by token in either order
    server = Server(method, (210, 300), 64, per_head=per_head, fragments=not plain)
    assert error_of_pieces(server, tokens, gluon.pieces) < 1e-3


@pytest.mark.parametrize("method", [THREE, TWO, ONE, MIXED])
@pytest.mark.parametrize("per_head, tokens", [(1, 1), (5, 2)])
def test_a_server_at_head_size_256(method, per_head, tokens, in_pieces):
    server = Server(method, (210, 300), 256, per_head=per_head, fragments=True)
    assert error_of_pieces(server, tokens, gluon.pieces) < 1e-3


@pytest.mark.parametrize("more", [",rotation=16", ",rotation=64", ",normalize=false", ",center=false"])
@pytest.mark.parametrize("method", [THREE, TWO, ONE])
def test_other_forms_at_head_size_64(method, more, in_pieces):
    assert error_of_pieces(Server(method + more, (210, 300), 64, fragments=True), 1, gluon.pieces) < 1e-3


@pytest.mark.parametrize("method, more", [
    (THREE, ",rotation=256"), (TWO, ",rotation=256"), (ONE, ",rotation=256"), (TWO, ",rotation=32"),
    (ONE, ",rotation=64,center=false"), (TWO, ",normalize=false"),
])  # fmt: skip
def test_other_forms_at_head_size_256(method, more, in_pieces):
    assert error_of_pieces(Server(method + more, (210, 300), 256, fragments=True), 1, gluon.pieces) < 1e-3


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("method", [THREE, TWO, ONE])
def test_slabs_and_windows(method, dim, in_slabs):
    """Blocks beyond a sequence's own are poisoned, and a page has fewer than four."""
    assert Case(method, (416, 0, 32), heads=6, dim=dim, device="cpu").error() < 1e-3


@pytest.mark.parametrize("how", [
    {"heads": 4, "tokens": 5}, {"heads": 24, "kv_heads": 1}, {"split": 4}, {"size": 1e-3}, {"size": 300.0}, {"mean": 30.0},
    {"query": 8.0}, {"query": 1e-3}, {"dtype": torch.bfloat16},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("method", [THREE, TWO])
def test_slabs_at_head_size_64(method, how, in_slabs):
    """More rows than a tile's eight, slabs of several, numbers of every size."""
    limit = 1e-2 if how.get("dtype") == torch.bfloat16 else 2e-3
    assert Case(method, **{"lens": (288, 96), "heads": 4, "dim": 64, "device": "cpu", **how}).error() < limit


@pytest.mark.parametrize("warps, tiles", [(1, 1), (2, 2), (4, 1)])
def test_slabs_in_launches_of_every_shape(warps, tiles, in_slabs):
    case = Case(THREE, (672,), heads=6, kv_heads=1, tokens=2, dim=64, device="cpu")
    assert case.error(Plan(warps, pages.BLOCKS, tiles, 2 // tiles, 2, 1)) < 1e-3


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [1, 2])
def test_lanes_that_read_values_codes_never_meet_in_a_bank(dim, bits):
    f = lanes.Program(lanes.Memory(1024), 1, (1,), (0,), 1024).function(_page_lookups._row_places)
    lane = torch.arange(32)
    for odd in range(2):
        for at in f(torch.zeros(32, dtype=torch.int64), lane // 4, lane % 4, dim, bits, odd):
            words = (at // 4).unique()
            assert len(words) == len((words % 32).unique()) and at.max() < dim * bits


@pytest.mark.parametrize("rows", [4, 8, 16])
@pytest.mark.parametrize("method", [THREE, TWO, ONE])
def test_programs_at_head_size_64(method, rows):
    """Where two tables leave room, three programs of four warps fit a multiprocessor; eight query rows spill nothing."""
    forms = formats(method, 64)
    plan = pages.make_plan(*forms, 128, rows, 1024, 160, HOPPER)
    report = aot.compile_pages(*forms, rows=rows)
    assert (plan.warps, plan.tiles, plan.bytewise) == (4, 1 + rows // 16, False)
    assert report.spills_in_loop == 0 and report.shared <= LEAST_SHARED + 1024
    if plan.tiles == 1:
        assert report.registers <= 160 and report.loop <= 1260
        assert min(3, 227 * 1024 // report.shared) == (2 if method == ONE else 3)
    products = 2 * 64 + 4 * 4 + 4 * 4 + 20  # codes; means and sums; rotations; the windows' program
    assert report.instructions["HMMA"] <= plan.tiles * products


@pytest.mark.parametrize("method", [THREE, TWO, ONE])
def test_programs_at_head_size_256(method):
    forms = formats(method, 256)
    report = aot.compile_pages(*forms, rows=8)
    assert pages.make_plan(*forms, 128, 8, 1024, 160, HOPPER).warps == 2
    assert report.spills_in_loop <= 12 and report.shared <= LEAST_SHARED + 1024


@pytest.mark.parametrize("method, dim", [(THREE, 64), (TWO, 64), (ONE, 64), (TWO, 256)])
def test_programs_of_a_server(method, dim):
    report = aot.compile_pieces(*formats_of(method, dim, fragments=True), rows=8)
    assert report.spills_in_loop <= 4 and report.shared <= LEAST_SHARED + 1024
