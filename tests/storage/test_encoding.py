"""What encodes a layer: the kernels, run by Triton's interpreter, leave the bytes that torch operations leave."""

import sys

import pytest
import torch

pytest.importorskip("triton")


from helpers import (
    ENCODING,
    assert_same_content,
    feed,
    interpreted_module,
    layer,
    left_padding,
    llama,
    packed_fields,
    spec,
    tokens,
)
from kvfold import explain
from kvfold.formats.paged import plain
from kvfold.kernels import affine, dense, fold
from kvfold.kernels.lengths import Lengths
from kvfold.methods import get
from kvfold.plan import Encoder, choose_encoder
from kvfold.storage.lengths import StaticLengths

pytestmark = pytest.mark.slow  # Triton's interpreter takes seconds for what a kernel does in microseconds


@pytest.fixture
def interpreted(monkeypatch):
    """Encoding kernels that run on the CPU, in place of the compiled ones."""
    module = interpreted_module("kvfold.kernels.affine.encode", *ENCODING)
    monkeypatch.setitem(sys.modules, "kvfold.kernels.affine.encode", module)
    monkeypatch.setattr(affine, "encode", module, raising=False)
    return module


@pytest.fixture
def pages_interpreted(monkeypatch):
    """The same for formats with statistics per page."""
    uses = *ENCODING, "kvfold.kernels.affine.encode", "kvfold.kernels.fold._encode"
    module = interpreted_module("kvfold.kernels.fold.encode", *uses)
    monkeypatch.setitem(sys.modules, "kvfold.kernels.fold.encode", module)
    monkeypatch.setattr(fold, "encode", module, raising=False)
    return module


@pytest.fixture
def dense_interpreted(monkeypatch):
    """The same for vectors that are stored as they are."""
    uses = *ENCODING, "kvfold.kernels.affine.encode", "kvfold.kernels.dense._encode"
    module = interpreted_module("kvfold.kernels.dense.encode", *uses)
    monkeypatch.setitem(sys.modules, "kvfold.kernels.dense.encode", module)
    monkeypatch.setattr(dense, "encode", module, raising=False)
    return module


def pair(method, monkeypatch, shape=None, **options):
    """A layer encoded by kernels and one encoded by torch."""
    by_torch = layer(method, shape, **options)
    by_kernel = layer(method, shape, **options)
    initialize = by_kernel.lazy_initialization

    def with_kernel(*args):
        initialize(*args)
        by_kernel.writer.encoder = Encoder("triton", "asked for")

    monkeypatch.setattr(by_kernel, "lazy_initialization", with_kernel)
    launches = []
    encoder = by_kernel.writer.by_kernel
    name = "launch" if hasattr(encoder, "launch") else "encode"
    launch = getattr(encoder, name)
    monkeypatch.setattr(encoder, name, lambda *a, **k: (launches.append(a), launch(*a, **k)))
    monkeypatch.setattr(by_kernel.writer, "by_torch", None)  # it must not be called
    return by_kernel, by_torch, launches


SMALL = spec(heads=2, kv_heads=1)


@pytest.mark.parametrize(
    ("method", "cuts"),
    [
        ("kivi:recent=20,sink=3", [100, 1, 40]),
        ("kivi:sink=0,recent=40", [61, 30, 50]),  # a block that begins in the ring and ends in the call
        ("kivi:group=64,sink=0,recent=10", [90, 90]),
        ("innerq:paper=true,center=page,sink=4,recent=24", [30, 70, 41]),
        ("innerq:paper=true,center=page,sink=4,recent=24", [70, 50]),
        ("innerq:paper=true,mode=sym,sink=4,recent=24", [120]),
        ("innerq:paper=true,mode=hybrid_prefill,sink=4,recent=24", [95, 70]),
    ],
)
def test_kernels_leave_torchs_bytes(interpreted, monkeypatch, method, cuts):
    by_kernel, by_torch, launches = pair(method, monkeypatch, SMALL)
    new = tokens(1, sum(cuts), shape=SMALL)
    new = (new[0], new[1] + 3 * new[1][..., :1], new[2])
    for one in (by_kernel, by_torch):
        feed(one, new, cuts)
    assert launches and by_kernel.packed[0] > 0
    assert_same_content(by_kernel, by_torch)


@pytest.mark.parametrize(
    ("method", "cuts"), [("none", [100, 1, 40]), ("none:sink=3,recent=40", [61, 30, 50]), ("none:group=96", [90, 110])]
)
def test_dense_kernels_leave_torchs_bytes(dense_interpreted, monkeypatch, method, cuts):
    by_kernel, by_torch, launches = pair(method, monkeypatch, SMALL)
    new = tokens(1, sum(cuts), shape=SMALL)
    for one in (by_kernel, by_torch):
        feed(one, new, cuts)
    assert launches and by_kernel.packed[0] > 0
    assert_same_content(by_kernel, by_torch)


def test_dense_kernels_serve_ragged_batches(dense_interpreted, monkeypatch):
    lengths = (60, 90, 59, 90)  # two rows in one group that do not follow each other
    by_kernel, by_torch, _ = pair("none:sink=2,recent=16", monkeypatch, SMALL)
    offset, valid = left_padding(lengths, 90)
    new, more = (tokens(4, n, seed=n, shape=SMALL) for n in (90, 33))
    for one in (by_kernel, by_torch):
        feed(one, new, valid=valid, offset=offset)
        feed(one, more, [1, 32], start=90, offset=offset)
    for row in range(4):
        assert_same_content(by_kernel, by_torch, row, row)


def test_a_step_of_a_graph_keeps_dense_storage(dense_interpreted):
    """What :meth:`FoldedLayer.static_step` does, launched one by one: the same content as without."""
    stepped, plain_layer = (layer("none:sink=2,recent=8", SMALL, max_length=160) for _ in range(2))
    new = tokens(2, 120, shape=SMALL)
    for one in (stepped, plain_layer):
        feed(one, tuple(t[:, :, :70] for t in new))
    method, at = stepped.method, stepped.lens
    before, after = (Lengths.of(at, stepped.packed, method.sink, "cpu") for _ in range(2))
    lengths = StaticLengths(before, after)
    stepped.writer.encoder = Encoder("triton", "asked for")
    stepped.enter_static(lengths)
    for t in range(70, 120):
        key, value, query = (x[:, :, t : t + 1] for x in new)
        lengths.begin(1, method.sink, method.recent, stepped.block)
        got = stepped.static_step(key, value, query, 0.125, lengths)
        plain_layer.append(key, value, query, None, pack=False)
        want = plain_layer.kernel.attend(plain_layer.reader.call(query, None, 0.125))
        plain_layer.pack_due()
        assert (got - want).norm() <= 1e-5 * want.norm()
        lengths.end()
        lengths.steps += 1
    stepped.leave_static(50)
    assert stepped.packed == plain_layer.packed == [96, 96]
    for row in range(2):
        assert_same_content(stepped, plain_layer, row, row)


def test_storage_that_grows(interpreted, monkeypatch):
    by_kernel, by_torch, _ = pair("kivi:sink=0,recent=0", monkeypatch, SMALL)
    new = tokens(1, 128, shape=SMALL)
    for one in (by_kernel, by_torch):
        feed(one, new, [32, 64, 32])
    assert len(by_kernel.slabs) == 3
    assert_same_content(by_kernel, by_torch)


def test_a_call_that_fills_two_slabs(interpreted, monkeypatch):
    by_kernel, by_torch, launches = pair("kivi:sink=0,recent=0", monkeypatch, SMALL, max_length=64)
    new = tokens(1, 128, shape=SMALL)
    for one in (by_kernel, by_torch):
        feed(one, new, [32, 96])
    assert len(by_kernel.slabs) == 2 and len(launches) == 3
    assert_same_content(by_kernel, by_torch)


def test_ragged_batches(interpreted, monkeypatch):
    lengths = (60, 90, 59, 90)  # two rows in one group that do not follow each other
    method = "innerq:paper=true,mode=asym,sink=2,recent=16"
    by_kernel, by_torch, _ = pair(method, monkeypatch, SMALL)
    offset, valid = left_padding(lengths, 90)
    new = tokens(4, 90, shape=SMALL)
    more = tokens(4, 33, seed=1, shape=SMALL)
    for one in (by_kernel, by_torch):
        feed(one, new, valid=valid, offset=offset)
        feed(one, more, [1, 32], start=90, offset=offset)
    for row in range(4):
        assert_same_content(by_kernel, by_torch, row, row)


def test_written_first_and_packed_later(interpreted, monkeypatch):
    by_kernel, by_torch, launches = pair("kivi:sink=0,recent=20", monkeypatch, SMALL)
    new = tokens(1, 96, shape=SMALL)
    for one in (by_kernel, by_torch):
        feed(one, tuple(t[:, :, :60] for t in new))
        for at in range(60, 96, 12):
            part = tuple(t[:, :, at : at + 12] for t in new)
            one.append(*part, None, pack=False)
            one.pack_due()
    assert len(launches) == 2 and by_kernel.packed == [64]
    assert_same_content(by_kernel, by_torch)


def test_squats_codes_are_torchs_but_for_rounding(interpreted, monkeypatch):
    by_kernel, by_torch, _ = pair("squat:sink=0,recent=0", monkeypatch, SMALL)
    new = tokens(1, 128, shape=SMALL)
    for one in (by_kernel, by_torch):
        feed(one, new)
    for got, want in zip(packed_fields(by_kernel, 0), packed_fields(by_torch, 0), strict=True):
        for name in want:
            a, b = (t.contiguous().view(torch.uint8) for t in (got[name], want[name]))
            assert (a != b).float().mean() < 1e-2


def test_nothing_is_concatenated_or_widened(interpreted, monkeypatch):
    """The kernels are given views of the call and the ring."""
    by_kernel, _, launches = pair("kivi:sink=0,recent=8", monkeypatch, SMALL)
    keys, values, queries = (t.half() for t in tokens(1, 120, shape=SMALL))
    by_kernel.lazy_initialization(keys, values)
    for at in (0, 60):
        by_kernel.append(*(t[:, :, at : at + 60] for t in (keys, values, queries)), None)
    owners = {t.untyped_storage().data_ptr() for t in (keys, values, *by_kernel.ring)}
    for launch in launches:
        assert {t.untyped_storage().data_ptr() for t in launch[2]} & owners
    assert {t.untyped_storage().data_ptr() for t in launches[-1][2]} <= owners


# ---- statistics per page ---------------------------------------------------------------------------------------------


def assert_near(a, b, row=0):
    """Packed bytes as Torch leaves them but for rounding, and what they decode to."""
    assert (a.lens[row], a.packed[row]) == (b.lens[row], b.packed[row]) and a.packed[row]
    for got, want in zip(packed_fields(a, row), packed_fields(b, row), strict=True):
        for name in want:
            assert (got[name] != want[name]).float().mean() < (2e-3 if name == "codes" else 2e-2), name
    for got, want in zip(a.decoded(row), b.decoded(row), strict=True):
        assert (got - want).norm() < 2e-3 * want.norm()


@pytest.mark.parametrize(
    ("method", "cuts"),
    [
        ("fold", [300]),
        ("fold:sink=3", [200, 1, 130, 60]),  # pages and blocks that begin in the ring and end in the call
        ("fold:recent=20,sink=0,rotation=1", [70, 90, 31]),
        ("innerq:recent=24,sink=4,mode=hybrid_prefill", [95, 40]),
        ("k=fold+v=kivi", [250, 40]),
        ("fold:k_bits=2,v_bits=3,codebook=true", [200, 1, 60]),
    ],
)
def test_kernels_encode_pages_as_torch_does(pages_interpreted, monkeypatch, method, cuts):
    by_kernel, by_torch, launches = pair(method, monkeypatch, SMALL)
    new = tokens(1, sum(cuts), shape=SMALL)
    for one in (by_kernel, by_torch):
        feed(one, new, cuts)
    assert launches
    assert_near(by_kernel, by_torch)


def test_pages_of_ragged_batches_in_storage_that_grows(pages_interpreted, monkeypatch):
    lengths = (160, 190, 159, 190)
    by_kernel, by_torch, _ = pair("fold:recent=32,sink=2", monkeypatch, SMALL)
    offset, valid = left_padding(lengths, 190)
    new, more = tokens(4, 190, shape=SMALL), tokens(4, 130, seed=1, shape=SMALL)
    for one in (by_kernel, by_torch):
        feed(one, new, valid=valid, offset=offset)
        feed(one, more, [1, 129], start=190, offset=offset)
    assert len(by_kernel.slabs) > 1
    for row in range(4):
        assert_near(by_kernel, by_torch, row)


def test_a_page_goes_on_after_a_cut(pages_interpreted, monkeypatch):
    """What is left of a page keeps the page's statistics, and later blocks take them."""
    by_kernel, by_torch, _ = pair("fold:sink=0", monkeypatch, SMALL)
    new = tokens(1, 400, shape=SMALL)
    for one in (by_kernel, by_torch):
        feed(one, tuple(t[:, :, :300] for t in new))
        one.crop(-120)
        feed(one, tuple(t[:, :, 180:] for t in new), start=180)
    assert_near(by_kernel, by_torch)


@pytest.mark.parametrize("method", ["fold", "fold:k_bits=1,v_bits=2,codebook=true"])
def test_a_layers_steps_close_pages(pages_interpreted, monkeypatch, method):
    """What a decode graph replays, step by step: the content is that of a layer that decides on the host."""
    by_kernel, by_torch, _ = pair(method, monkeypatch, SMALL, max_length=512)
    new = tokens(1, 300, seed=1, shape=SMALL)  # of seed 0 two codes are equally near to 15 bits, which kernels compare
    for one in (by_kernel, by_torch):
        feed(one, tuple(t[:, :, :250] for t in new))
    lengths = pages_interpreted.Lengths.of(by_kernel.lens, by_kernel.packed, 32, "cpu", True)
    for at in range(250, 300):
        key, value, _ = (t[:, :, at : at + 1] for t in new)
        by_kernel.writer.by_kernel.close(key, value, lengths, None)
    by_kernel.writer.by_kernel.close(None, None, lengths, None)
    feed(by_torch, tuple(t[:, :, 250:300] for t in new), [10] * 5, start=250)
    by_kernel.sequences.lens[0], by_kernel.sequences.packed[0] = 300, int(lengths.packed[0])
    assert_near(by_kernel, by_torch)


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("gear:outliers=0.02", "low rank storage"),
        ("qjl:outliers=4,normalize=false", "split sketch storage"),
        ("squat_pre", "squat_pre"),
        ("innerq:paper=true,group=16", "group=16"),
        ("innerq:group=16", "group=16"),
        ("turboquant:residual=true", "sketched residual storage"),
        ("turboquant:bits=8", "8-bit levels"),
        ("k=squat+v=fold", "update of following channels"),
        ("k=innerq:paper=true+v=fold", "whole sequence"),
        ("squat:channels=8", "channels=8"),
    ],
)
def test_what_torch_encodes_on_a_gpu_is_named(method, reason):
    found = choose_encoder(get(method), spec(128), torch.device("cuda"))
    assert found.name == "torch" and reason in found.reason


@pytest.mark.parametrize(
    "method",
    [
        *("fold", "fold:bits=1", "innerq", "innerq:mode=hybrid_prefill", "k=fold+v=kivi", "turboquant:bits=3", "qjl"),
        *("fold:bits=2,codebook=true", "fold:k_bits=3,v_bits=1,codebook=true"),
    ],
)
def test_what_kernels_encode_on_a_gpu(method, monkeypatch):
    """Asked without a GPU, so the kernels cannot test themselves."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_encoder(get(method), spec(128), torch.device("cuda")) == Encoder("triton", "first choice")


def test_kernels_encode_gears_prompts_and_leave_single_blocks_to_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = choose_encoder(get("gear"), spec(128), torch.device("cuda"))
    assert found == Encoder("triton", "first choice", closes=False)


def test_pages_kernels_that_store_something_else_are_not_used(pages_interpreted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pages_interpreted, "self_test", lambda *_: "keys differ")
    assert choose_encoder(get("fold"), spec(64), torch.device("cuda")) == Encoder("torch", "keys differ")


@pytest.mark.parametrize("method", ["kivi", "squat", "innerq:paper=true", "innerq:paper=true,mode=asym,bits=3"])
def test_kernels_test_themselves(method, interpreted):
    shape, form = spec(64), get(method)
    formats = (plain(form.key_format(shape)), form.value_format(shape))
    width = form.slice_width(64)
    assert interpreted.self_test(*formats, width, torch.device("cpu")) is None


@pytest.mark.parametrize("broken", ["encode_blocks", "append_and_close"])
def test_kernels_that_store_something_else_are_not_used(broken, interpreted, monkeypatch):
    """One code in sixty-four is wrong, as a miscompiled channel would have it."""
    shape, form = spec(64), get("kivi")
    formats = (form.key_format(shape), form.value_format(shape))
    sound = getattr(interpreted, broken)

    def unsound(*args, **options):
        sound(*args, **options)
        fields = args[1] if broken == "encode_blocks" else args[6]
        fields["codes"][..., ::64] ^= -1

    monkeypatch.setattr(interpreted, broken, unsound)
    interpreted.self_test.cache_clear()
    wrong = interpreted.self_test(*formats, None, torch.device("cpu"))
    assert wrong is not None and wrong.startswith("keys") and "differ from the format's" in wrong
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(interpreted, "why_not", lambda *_: None)
    monkeypatch.setattr(interpreted, "self_test", lambda *_: wrong)
    assert choose_encoder(form, shape, torch.device("cuda")) == Encoder("torch", wrong)


def test_explain_says_what_encodes():
    report = explain(llama(), "kivi")
    assert {row.encoder for row in report.layers} == {"torch: encoding kernels run on cuda"}
    assert "encoded by torch: encoding kernels run on cuda" in report.notes


@pytest.mark.gpu
@pytest.mark.parametrize(
    "method",
    [
        "none",
        "kivi",
        "kivi:bits=1",
        "squat",
        "innerq:paper=true",
        "innerq:paper=true,mode=hybrid_prefill",
        "fold",
        "innerq",
        "fold:bits=2,codebook=true",
    ],
)
def test_a_gpu_encodes_by_kernel(method):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert choose_encoder(get(method), spec(64), torch.device("cuda")).name == "triton"
