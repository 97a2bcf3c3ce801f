"""The kernels that search for codes, pick outliers and find salient tokens, against the methods' own encoding.

As in test_kernels_encode.py: Triton's interpreter by default, real launches with ``pytest -m gpu``.
"""

import sys

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from helpers import ENCODING, assert_same_content, interpreted_module, packed_fields, relative, spec, tokens
from kvfold.bench.storage import with_tables
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.formats import GroupCodes
from kvfold.formats.codebook import AdditiveCodes, choices
from kvfold.formats.grouped import GroupBook
from kvfold.kernels.common.encode_source import Source, angles
from kvfold.kernels.commvq.encode import order
from kvfold.methods import get
from kvfold.plan import Encoder, choose_encoder
from kvfold.rope import Rope

INTERPRETED = (
    *ENCODING,
    "kvfold.kernels.affine.encode",
    "kvfold.kernels.fold._encode",
    "kvfold.kernels.fold.encode",
    "kvfold.kernels.searched._encode",
    "kvfold.kernels.searched._tiles",
    "kvfold.kernels.searched.tiles",
    "kvfold.kernels.commvq._encode",
    "kvfold.kernels.commvq.encode",
    "kvfold.kernels.searched.encode",
    "kvfold.kernels.fragments._encode_mixed",
)
DIM, HEADS = 64, 2
TOKENS, FIRST = 256, 37
EXACT = "kvquant:bits=3", "kvquant:bits=2,outliers=0.03", "kvquant:bits=1"
NEAR = (
    *("vqllm:bits=1", "vqllm:vector=16,codes=32", "gsrq:bits=1", "gsrq:vector=16,codes=32"),
    *("tasq:mean=false", "tasq:bits=2,refit=false"),
    *("commvq:bits=1", "commvq:levels=16,passes=0,flips=3", "commvq:levels=32,passes=2"),
)


@pytest.fixture(scope="module")
def interpreted():
    mixed = interpreted_module("kvfold.kernels.fragments.encode_mixed", *INTERPRETED)
    sys.modules["kvfold_kernels_commvq_encode_interpreted"].FLIPS["T"] = 32  # the interpreter goes program by program
    others = {name: sys.modules[f"kvfold_kernels_{name}_encode_interpreted"] for name in ("searched", "fold")}
    return {"fragments.encode_mixed": mixed, **{f"{name}.encode": module for name, module in others.items()}}


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return torch.device("cuda")
    for name, module in request.getfixturevalue("interpreted").items():
        folder, _, own = name.partition(".")
        monkeypatch.setitem(sys.modules, f"kvfold.kernels.{name}", module)
        monkeypatch.setattr(sys.modules[f"kvfold.kernels.{folder}"], own, module, raising=False)
    return torch.device("cpu")


def shape_on(device, **options):
    rope = Rope(10000.0 ** (-torch.arange(0, DIM, 2, device=device).float() / DIM), 1.25)
    return spec(head_dim=DIM, heads=2 * HEADS, kv_heads=HEADS, rope=rope, **options)


def vectors(device, count=TOKENS, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1, count, HEADS, DIM, generator=draw) * torch.exp(torch.randn(DIM, generator=draw))
    x[0, 5, 1] = 0.0
    return x.bfloat16().to(device).transpose(1, 2)  # tokens' heads lie together, as in a model


def encoded(method, shape, side, x, device):
    """What a kernel and what the method itself stores of vectors, and their format."""
    from kvfold.kernels.searched import encode as encode_search

    positions = torch.arange(FIRST, FIRST + x.shape[2], device=device)[None]
    is_key = side == "key"
    form = method.key_format(shape) if is_key else method.value_format(shape)
    turned = {"angles": angles(shape.rope, positions), "factor": 1 / shape.rope.scaling} if is_key else {}
    blocks = x.shape[2] // form.block
    fields = form.allocate(1, HEADS, blocks + 1, device)
    encode_search.encode(form, Source(x, fields, 1, tables=method.value_tables(shape, device), **turned))
    if is_key:
        want = method.encode_keys(x.float(), {}, shape, positions[:, None], True)
    else:
        want = method.encode_values(x.float(), {}, shape, True)
    return {name: t[:, :, 1:] for name, t in fields.items()}, want, form


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("fragments", [True, False])
def test_levels_and_outliers_are_those_of_the_format(method, side, fragments, device):
    made = with_tables(get(method), HEADS, DIM, device)
    got, want, _ = encoded(made, shape_on(device, fragments=fragments), side, vectors(device, 96), device)
    for name in want:
        assert torch.equal(got[name], want[name]), name


def missed(method, form, fields, x, side, shape):
    stored = form.decode(fields)
    if side == "value":
        return float((method.unproject_values(stored, shape) - x).square().sum())
    positions = torch.arange(FIRST, FIRST + x.shape[2], device=x.device)[None, None]
    return float((stored - shape.rope.unrotate(x, positions)).square().sum())


@pytest.mark.parametrize("method", NEAR)
@pytest.mark.parametrize("side", ["key", "value"])
def test_nearest_codes_miss_as_little_as_those_of_the_format(method, side, device):
    made, shape, x = with_tables(get(method), HEADS, DIM, device), shape_on(device), vectors(device, 96)
    got, want, form = encoded(made, shape, side, x, device)
    for name in want:
        assert (got[name] != want[name]).float().mean() < 0.1, name
    assert missed(made, form, got, x.float(), side, shape) < 1.004 * missed(made, form, want, x.float(), side, shape)


def stages_kernel(
    out, STAGES: tl.constexpr, COUNT: tl.constexpr, MIDDLE: tl.constexpr, LOW: tl.constexpr, LATE: tl.constexpr
):
    for choice in range(COUNT):
        stage, again = _stage_at(choice, STAGES, MIDDLE, LOW, LATE)  # noqa: F821
        tl.store(out + 2 * choice, stage)
        tl.store(out + 2 * choice + 1, tl.where(again, 1, 0))


@pytest.mark.parametrize("passes", [0, 1, 2, 3])
def test_kernels_choose_stages_in_the_order_of_the_format(passes, interpreted, monkeypatch):
    found = sys.modules["kvfold_kernels_common__encode_nearest_interpreted"]
    monkeypatch.setitem(globals(), "_stage_at", found._stage_at)
    for stages in (1, 2, 3, 5, 11, 21, 32):
        form, wanted = AdditiveCodes(DIM, 32, "key", stages, 64, passes), choices(stages, passes)
        out = torch.zeros(len(wanted), 2, dtype=torch.int32)
        InterpretedFunction(stages_kernel)[(1,)](out, STAGES=stages, **order(form))
        assert out.tolist() == [[stage, int(stage in wanted[:i])] for i, stage in enumerate(wanted)]


@pytest.mark.parametrize(("bits", "dtype"), [(1, torch.bfloat16), (2, torch.float32)], ids=["1-bf16", "2-float32"])
def test_values_begin_with_the_bits_of_their_method(bits, dtype, device):
    """Several sequences, tokens that fill no program: what flips begin with."""
    from kvfold.kernels.searched import encode as encode_search

    encode_pairs = sys.modules[encode_search.encode_bits.__module__]  # interpreted, or not
    made = with_tables(get(f"commvq:bits={bits}"), HEADS, DIM, device)
    book = made.value_tables(shape_on(device), device)[0]
    x = torch.randn(2, HEADS, 35, DIM, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    got, slope = encode_pairs.first_bits(x, book.level_tables(), True)
    want, fall, _ = book.start(x.float().transpose(0, 1).flatten(1, 2), True)
    same = (got == want).all(-1)  # the slope follows the bits
    assert same.float().mean() > 0.98
    assert relative(slope[same], fall[same]) < 1e-5


@pytest.mark.parametrize("fit", ["rms", "least", "size", "unbiased"])
@pytest.mark.parametrize("vector", [4, 8])
def test_codes_of_groups_are_nearest_under_their_metric(vector, fit, device):
    from kvfold.kernels.searched import encode as encode_search

    groups = DIM // vector
    draw = torch.Generator().manual_seed(1)
    codes = torch.randn(HEADS, groups, 64, vector, generator=draw).half()
    metric = torch.randn(HEADS, groups, vector, vector, generator=draw)
    mean = torch.randn(HEADS, DIM, generator=draw).half().to(device)
    book = GroupBook(codes.to(device), metric.to(device), mean)
    form = GroupCodes(DIM, 32, "key", vector, 64, True, fit, book, centred=vector == 8)
    x = vectors(device, 96)
    fields = form.allocate(1, HEADS, 3, device)
    encode_search.encode(form, Source(x, fields, 0))
    want = form.encode(x.float())
    assert (fields["codes"] != want["codes"]).float().mean() < 2e-3
    assert ((fields["rms"] - want["rms"]).abs() > 2e-3 * want["rms"].abs()).float().mean() < 0.02


@pytest.mark.parametrize("method", ["zipcache", "zipcache:probes=9,ratio=0.3,k_bits=2,v_bits=2,salient_bits=3"])
@pytest.mark.parametrize("fragments", [True, False])
def test_salient_tokens_are_those_of_the_method(method, fragments, device):
    from kvfold.kernels.fragments import encode_mixed

    made, shape = get(method), shape_on(device, fragments=fragments)
    keys, values = vectors(device), vectors(device, seed=1)
    probes = torch.randn(1, 2, HEADS, made.probes, DIM, generator=torch.Generator().manual_seed(2)).half().to(device)
    formats = made.key_format(shape), made.value_format(shape)
    stored = [form.allocate(1, HEADS, 3, device) for form in formats]
    numbers = torch.tensor([1, 0], device=device)
    encode_mixed.encode(keys, values, *stored, *formats, 1, probes, numbers)
    state = {"probe": probes[:, numbers].transpose(1, 2)}
    wanted = (
        made.encode_keys(keys.float(), state, shape, torch.zeros(1), True),
        made.encode_values(values.float(), state, shape, True),
    )
    for fields, want in zip(stored, wanted, strict=True):
        for name in want:
            got = fields[name][:, :, 1:]
            # of a GPU's product two scores that are nearly equal may have another order
            different = (got != want[name]).float().mean()
            assert different == 0 if device.type == "cpu" else different < 0.02, name


def learned(method, dim=DIM, device="cpu"):
    """A method, or a pair of methods, with tables."""
    return get(method).mapped(lambda one: with_tables(one, HEADS, dim, torch.device(device)))


def windows(method):
    """With windows of 3 and 100 tokens."""
    return "+".join(part + (":" if ":" not in part else ",") + "sink=3,recent=100" for part in method.split("+"))


def layer_of(made, shape, new, cuts, encoder="triton"):
    """A layer that takes two sequences, of which one is padded, in calls of so many tokens."""
    valid = torch.arange(sum(cuts), device=new[0].device) >= torch.tensor([0, 30], device=new[0].device)[:, None]
    one = FoldedLayer(made, shape, max_length=512)
    one.lazy_initialization(*new[:2])
    one.writer.encoder = Encoder(encoder, "asked for", False)
    setattr(one.writer, "by_torch" if encoder == "triton" else "by_kernel", None)  # it must not be called
    at = 0
    for n in cuts:
        one.append(*(x[:, :, at : at + n] for x in new), valid[:, at : at + n])
        at += n
    return one


APART = "tasq:bits=2,values=fold", "nova:values=fold", "k=fold+v=vqllm:bits=1", "k=tasq+v=kivi"
"""Methods of which each side has kernels of its own."""


@pytest.mark.parametrize(
    "method", ["kvquant:bits=3", "vqllm:bits=1", "commvq:bits=1,levels=16,flips=2", "zipcache", APART[0], APART[2]]
)
def test_content_does_not_depend_on_how_calls_were_cut(method, device):
    made, shape = learned(windows(method), DIM, device), shape_on(device, dtype=torch.float32)
    count = 420 if method == "zipcache" else 200
    new = tuple(x.to(device) for x in tokens(2, count, shape=shape))
    layers = [layer_of(made, shape, new, cuts) for cuts in ([count], [130, 1, 30, 1, count - 162])]
    assert layers[0].packed[1] > 0
    for row in range(2):
        assert_same_content(*layers, row, row)


@pytest.mark.parametrize("method", APART)
def test_sides_apart_are_near_those_of_torch(method, device):
    made, shape = learned(windows(method), DIM, device), shape_on(device, dtype=torch.float32)
    new = tuple(x.to(device) for x in tokens(2, 300, shape=shape))
    ours, theirs = (layer_of(made, shape, new, [200, 1, 99], encoder) for encoder in ("triton", "torch"))
    assert ours.packed == theirs.packed and ours.packed[1] > 128
    for row in range(2):
        for got, want in zip(packed_fields(ours, row), packed_fields(theirs, row), strict=True):
            for name in want:
                assert (got[name] != want[name]).float().mean() < 0.01, name
        for got, want in zip(ours.decoded(row), theirs.decoded(row), strict=True):
            assert relative(got, want) < 0.05  # where two codes are nearly as near


def test_sides_apart_go_on_after_a_cut_and_in_another_order(device):
    """A page that begins before the cut keeps its statistics; codes differ where two are nearly as near."""
    made, shape = learned(windows(APART[0]), DIM, device), shape_on(device, dtype=torch.float32)
    new = tuple(x.to(device) for x in tokens(2, 420, shape=shape))
    layers = [layer_of(made, shape, [x[:, :, :300] for x in new], [300], encoder) for encoder in ("triton", "torch")]
    for one in layers:
        one.crop(-150)  # into a packed block
        one.reorder_cache(torch.tensor([1, 0], device=device))
        for low, high in ((300, 301), (301, 420)):
            one.append(*(x[:, :, low:high] for x in new), None)
    ours, theirs = layers
    assert ours.packed == theirs.packed and max(ours.packed) > 128
    for row in range(2):
        for got, want in zip(packed_fields(ours, row), packed_fields(theirs, row), strict=True):
            for name in want:
                assert (got[name] != want[name]).float().mean() < 0.01, name


@pytest.mark.parametrize("method", ["kvquant:bits=3", "vqllm", "commvq", "zipcache", *APART])
def test_plan_names_what_encodes(method):
    made = learned(method)
    if torch.cuda.is_available():
        pytest.skip("the choice runs a kernel where there is a GPU")
    chosen = choose_encoder(made, shape_on("cpu"), torch.device("cuda"))
    assert chosen == Encoder("triton", "first choice", False) and not chosen.in_graphs


@pytest.mark.parametrize(
    ("method", "dim", "why"),
    [
        ("kvquant:bits=8", 64, "keys: bits=8; allowed: 1, 2, 3, 4"),
        ("kvquant:bits=3", 96, "keys: head_dim=96; allowed: 64, 128, 256"),
        ("vqllm:vector=8,codes=16", 64, "keys: vector=8; allowed: 16, 32, 64, 128"),
        ("commvq:levels=128", 64, "keys: levels=128; allowed: 16, 32, 64"),
        ("zipcache:probes=65", 64, "probes=65; allowed: 1 to 64"),
        (
            "zipcache:group=64",
            64,
            "values with other statistics than norms of largest magnitudes per block of 128 tokens",
        ),
        (
            "k=vqllm+v=turboquant:bits=8",
            64,
            "values: 8-bit levels scaled by rms; allowed: up to 4 bits, by the rms of a token",
        ),
        ("k=squat+v=vqllm", 64, "keys: an update of following channels beside statistics per page"),
    ],
)
def test_what_kernels_do_not_encode_is_named(method, dim, why):
    made = learned(method, dim)
    shape = spec(head_dim=dim, heads=2 * HEADS, kv_heads=HEADS)
    assert choose_encoder(made, shape, torch.device("cuda")) == Encoder("torch", why, True)


@pytest.mark.parametrize("bits", [1, 2])
def test_four_programs_that_search_groups_fit_on_a_multiprocessor(bits, monkeypatch):
    """Of 128 threads, 65,536 registers in all; nothing on the stack."""
    from kvfold.kernels.searched import encode as encode_search
    from test_paged_kernels import compiled

    launched, kernel = {}, encode_search.group_kernel

    class Launched:
        def __getitem__(self, grid):
            return lambda *given, **options: launched.update(dict(zip(kernel.arg_names, given, strict=False)) | options)

    monkeypatch.setattr(encode_search, "group_kernel", Launched())
    shape, x = spec(head_dim=128, heads=4, kv_heads=HEADS), torch.zeros(1, HEADS, 96, 128, dtype=torch.bfloat16)
    form = learned(f"tasq:bits={bits},values=fold", 128).key_format(shape)
    turned = torch.zeros(1, 96, 64), torch.zeros(1, 96, 64)
    encode_search.encode(form, Source(x, form.allocate(1, HEADS, 3, "cpu"), 0, angles=turned))
    report = compiled(kernel, launched)
    assert report.registers <= 128 and report.spilled == 0
