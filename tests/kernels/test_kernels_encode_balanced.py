"""The kernels of tiles (KVarN, values of NOVA-KV) and of keys under a learned map, against the formats' own encoding.

As in test_kernels_encode_search.py: Triton's interpreter by default, real launches with ``pytest -m gpu``.
"""

import sys

import pytest
import torch

pytest.importorskip("triton")

from helpers import assert_same_content, interpreted_module, relative, spec, tokens
from kvfold.bench.storage import with_tables
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.formats import GroupCodes, Projected
from kvfold.formats.grouped import GroupBook
from kvfold.formats.projected import HeadMaps
from kvfold.kernels import searched
from kvfold.kernels.common.encode_source import Source
from kvfold.methods import get
from kvfold.plan import Encoder, choose_encoder
from test_kernels_encode_search import DIM, HEADS, INTERPRETED, vectors

CASES = {
    "kvarn-keys": ("kvarn", 0, 256),
    "kvarn-values": ("kvarn:v_bits=3", 1, 128),
    "kvarn-small-keys": ("kvarn:group=32,rounds=3,bits=4,rotation=16", 0, 96),
    "kvarn-small-values": ("kvarn:group=32,bits=8,rotation=1,rounds=2", 1, 96),
    "kvarn-even": ("kvarn:group=64,rounds=0,bits=1", 1, 64),
    "nova-values": ("nova", 1, 96),
    "tasq-values": ("tasq:values=affine,bits=2", 1, 64),
}


@pytest.fixture(scope="module")
def interpreted():
    interpreted_module("kvfold.kernels.fragments.encode_mixed", *INTERPRETED)
    return sys.modules["kvfold_kernels_searched_encode_interpreted"]


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return torch.device("cuda")
    module = request.getfixturevalue("interpreted")
    monkeypatch.setitem(sys.modules, "kvfold.kernels.searched.encode", module)
    monkeypatch.setattr(searched, "encode", module, raising=False)
    return torch.device("cpu")


def shape(dim=DIM, **options):
    return spec(head_dim=dim, heads=2 * HEADS, kv_heads=HEADS, fragments=False, **options)


def both(method, side, x, device):
    """What the kernel and what the format stores, and the format."""
    from kvfold.kernels.searched import encode as encode_search

    made = with_tables(get(method), HEADS, DIM, device)
    form = (made.key_format, made.value_format)[side](shape())
    fields = form.allocate(1, HEADS, x.shape[2] // form.block + 2, device)
    for t in fields.values():
        t.fill_(float("nan") if t.is_floating_point() else -1)
    encode_search.encode(form, Source(x, fields, 1))
    for t in fields.values():  # nothing beside the blocks is written
        for edge in (t[:, :, :1], t[:, :, -1:]):
            assert (edge.isnan() if t.is_floating_point() else edge == (255 if t.dtype == torch.uint8 else -1)).all()
    return {name: t[:, :, 1:-1].contiguous() for name, t in fields.items()}, form.encode(x.float()), form


def bytes_that_differ(got, want):
    return sum(
        int((a.view(torch.uint8) != want[n].contiguous().view(torch.uint8)).sum()) for n, a in got.items()
    ) / sum(want[n].nbytes for n in got)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bytes_are_those_of_the_format_but_for_ties(case, device):
    method, side, count = case
    x = vectors(device, count)
    got, want, form = both(method, side, x, device)
    assert bytes_that_differ(got, want) < 5e-3
    missed, expected = (float((form.decode(f) - x.float()).square().sum()) for f in (got, want))
    assert missed < 1.001 * expected


def test_keys_under_a_map_have_the_codes_of_the_format(device):
    from kvfold.kernels.searched import encode as encode_search

    draw = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=draw).to(device)

    codes = GroupCodes(DIM, 32, "plain", 8, 16, False, "size", GroupBook(randn(HEADS, DIM // 8, 16, 8).half()))
    maps = HeadMaps(3 * randn(HEADS, DIM), randn(HEADS, DIM, DIM), randn(HEADS, DIM, DIM))
    form, x = Projected(DIM, 32, "plain", codes, maps), vectors(device, 64)
    fields = form.allocate(1, HEADS, 2, device)
    encode_search.encode(form, Source(x, fields, 0))
    want = form.encode(x.float())
    assert (fields["codes"] != want["codes"]).float().mean() < 2e-3
    assert relative(fields["rms"], want["rms"]) < 1e-3


@pytest.mark.parametrize("side", [0, 1])
def test_tiles_without_variance_are_those_of_the_format(side, device):
    """Constant tokens, constant channels, a tile of zeros, a token that is far larger than others."""
    x = vectors(device, 128).float()
    x[:, 0, :32] = x[:, 0, :1]
    x[:, 0, 32:64] = 0.0
    x[:, 0, 64:96] = x[:, 0, 64:96, :1]
    x[:, 0, 100] *= 1000.0
    got, want, form = both("kvarn:group=32,rotation=1", side, x, device)
    # rounds that are equally even differ in the factors' common size, which scales of values take back
    assert bytes_that_differ(got, want) < (5e-3, 5e-2)[side]
    missed, expected = (float((form.decode(f) - x.float()).square().sum()) for f in (got, want))
    assert missed < 1.001 * expected
    # of what is constant a deviation is 0 but for rounding: such tiles have no factors, and decode exactly
    assert torch.equal(form.decode(got)[:, 0, :64], form.decode(want)[:, 0, :64])


def test_content_does_not_depend_on_how_calls_were_cut(device):
    made, small = get("kvarn:group=32,rounds=2,sink=3,recent=64"), shape(dtype=torch.float32)
    new = tuple(x.to(device) for x in tokens(2, 150, shape=small))
    valid = torch.arange(150, device=device) >= torch.tensor([0, 30], device=device)[:, None]
    layers = []
    for cuts in ([150], [80, 1, 30, 1, 38]):
        one = FoldedLayer(made, small, max_length=256)
        one.lazy_initialization(*new[:2])
        one.writer.encoder = Encoder("triton", "asked for", False)
        one.writer.by_torch = None  # it must not be called
        at = 0
        for n in cuts:
            one.append(*(x[:, :, at : at + n] for x in new), valid[:, at : at + n])
            at += n
        layers.append(one)
    assert layers[0].packed[1] > 0
    for row in range(2):
        assert_same_content(*layers, row, row)


@pytest.mark.parametrize("method", ["kvarn", "kvarn:rotation=1", "nova", "nova:values=codes", "tasq:values=affine"])
def test_plan_names_what_encodes(method):
    if torch.cuda.is_available():
        pytest.skip("the choice runs a kernel where there is a GPU")
    made = with_tables(get(method), HEADS, DIM, torch.device("cpu"))
    chosen = choose_encoder(made, shape(), torch.device("cuda"))
    assert chosen == Encoder("triton", "first choice", False) and not chosen.in_graphs


@pytest.mark.parametrize(
    ("method", "dim", "why"),
    [
        ("kvarn", 256, "keys: tiles of 128 tokens, 256 channels; allowed: up to 16384 elements"),
        ("kvarn", 96, "keys: head_dim=96; allowed: 64, 128, 256"),
        ("nova", 256, "keys: head_dim=256; allowed: 64, 128"),
    ],
)
def test_what_kernels_do_not_encode_is_named(method, dim, why):
    made = with_tables(get(method), HEADS, dim, torch.device("cpu"))
    assert choose_encoder(made, shape(dim), torch.device("cuda")) == Encoder("torch", why, True)


@pytest.mark.parametrize("side", [0, 1])
def test_tiles_compile_without_spills(side):
    from aot.tables import compile_tile

    made = get("kvarn")
    report = compile_tile((made.key_format, made.value_format)[side](shape(128)))
    assert report.spilled == 0


def test_maps_compile_without_spills():
    from aot.tables import compile_map

    assert compile_map(128).spilled == 0
