"""Readers of the CPU kernel: units of every format are what the format decodes them to."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from cpu_case import decoded, missed
from kvfold.formats import (
    AffineGroups,
    Balanced,
    Dense,
    Fields,
    Format,
    Lookup,
    LowRank,
    MixedTokens,
    Outliers,
    Paged,
    PagedFormat,
    Projected,
    SignSketch,
    SketchedResidual,
    SplitSketch,
    UniformTokens,
)
from kvfold.formats.lookup import ChannelScales
from kvfold.kernels.cpu.readers import reader_of, why_not
from kvfold.methods import LayerSpec, get

BITS, AXES, BLOCKS, DIMS, PAGES = (1, 2, 3, 4, 8), ("token", "channel"), (32, 64, 128), (64, 80, 96, 128), (128, 0)
HEADS = 4
"""Most of them."""


def levels(bits: int) -> tuple[float, ...]:
    return tuple((torch.arange(1 << bits) * (4 / (1 << bits)) - 1.7).tolist())


def channels(heads: int, dim: int, seed: int = 0) -> ChannelScales:
    draw = torch.Generator().manual_seed(seed)
    return ChannelScales(torch.randn(heads, dim, generator=draw), torch.rand(heads, dim, generator=draw) + 0.1)


def affine(
    dim: int, block: int, bits: int = 2, axis: str = "token", mode: str = "asym", group: int = 16
) -> AffineGroups:
    return AffineGroups(dim, block, "plain", bits, axis, mode, group)


def lookup(dim: int, block: int, bits: int = 2, scaling: str = "rms", heads: int = 0) -> Lookup:
    scales = channels(heads, dim, bits) if scaling == "channel" else None
    return Lookup(dim, block, "plain", bits, levels(bits), scaling, scales)


def affine_forms(dim: int, block: int, heads: int) -> Iterator[Format]:
    for bits, axis, mode in product(BITS, AXES, ("asym", "sym", "hybrid")):
        extent = block if axis == "token" else dim
        for group in {16, 32, extent}:
            if extent % group == 0:
                yield affine(dim, block, bits, axis, mode, group)


def balanced_forms(dim: int, block: int, heads: int) -> Iterator[Format]:
    for bits, axis in product(BITS, AXES):
        inner = affine(dim, block, bits, axis, "asym", block if axis == "token" else dim)
        yield Balanced(dim, block, "plain", inner, 2)


def mixed_forms(dim: int, block: int, heads: int) -> Iterator[Format]:
    for bits, extra, axis, salient in product(BITS, (1, 2, 4), AXES, (0, 1, block * 2 // 5, block)):
        yield MixedTokens(dim, block, "plain", bits, extra, salient, axis)


def outlier_forms(dim: int, block: int, heads: int) -> Iterator[Format]:
    inners = [affine(dim, block), affine(dim, block, 4, "channel", "hybrid")]
    inners += [lookup(dim, block, 3, scaling, heads) for scaling in ("rms", "range", "channel")]
    for inner, count, axis in product(inners, (1, dim * block // 50, dim * block // 4), AXES):
        yield Outliers(dim, block, "plain", inner, count, axis)


def low_rank_forms(dim: int, block: int, heads: int) -> Iterator[Format]:
    inner = affine(dim, block)
    inners = [inner, UniformTokens(dim, block, "plain", 3), Outliers(dim, block, "plain", inner, 99, "token")]
    for inner, page in product(inners, PAGES):
        for rank in (1, 2, 3, 4, 11, 24):
            yield LowRank(dim, block, "plain", inner, rank, 1, page=page)


def sketch_forms(dim: int, block: int, heads: int) -> Iterator[Format]:
    for sketches in ((dim,), (16,), (2 * dim,), (48, 16), (32, 16, 4 * dim)):
        yield SignSketch(dim, block, "plain", sketches, tuple(0.1 + 0.2 * i for i in range(len(sketches))))


def split_forms(dim: int, block: int, heads: int) -> Iterator[Format]:
    for rows, outliers, mean, page in product(((2 * dim, dim), (48, 80)), (0, 1, 7, dim), (True, False), PAGES):
        yield SplitSketch(dim, block, "plain", rows, outliers, mean, 3, page=page)


def residual_forms(dim: int, block: int, heads: int) -> Iterator[Format]:
    for inner in (lookup(dim, block, 1), lookup(dim, block, 3), affine(dim, block)):
        yield SketchedResidual(dim, block, "plain", inner, 1)


def lookup_forms(dim: int, block: int, heads: int) -> Iterator[Format]:
    for bits, scaling in product(BITS, ("rms", "range", "channel")):
        yield lookup(dim, block, bits, scaling, heads)


def uniform_forms(dim: int, block: int, heads: int) -> Iterator[Format]:
    for bits in BITS:
        yield UniformTokens(dim, block, "plain", bits)


FORMS: dict[type[Format], Callable[[int, int, int], Iterator[Format]]] = {
    AffineGroups: affine_forms,
    Balanced: balanced_forms,
    Lookup: lookup_forms,
    LowRank: low_rank_forms,
    MixedTokens: mixed_forms,
    Outliers: outlier_forms,
    SignSketch: sketch_forms,
    SketchedResidual: residual_forms,
    SplitSketch: split_forms,
    UniformTokens: uniform_forms,
}
KINDS = pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)


def limit(form: Format) -> float:
    """Relative RMS error that is allowed: that of float32, which grows with the terms of a sum."""
    return 1e-5 if isinstance(form, SplitSketch | SketchedResidual) else 1e-6


def stored(form: Format, batch: int, heads: int, tokens: int, seed: int = 0) -> Fields:
    """Fields of vectors with large channels, cut from slabs that hold NaN and -1 elsewhere."""
    draw = torch.Generator().manual_seed(seed)
    width = form.width + len(form.sketches) if isinstance(form, SignSketch) else form.head_dim
    x = torch.randn(batch, heads, tokens, width, generator=draw)
    x = x * torch.randn(heads, 1, width, generator=draw).exp() + torch.randn(heads, 1, width, generator=draw)
    if isinstance(form, MixedTokens):
        fields = form.encode(x, torch.rand(batch, heads, tokens, generator=draw))
    else:
        fields = form.encode(x)
    slabs = form.allocate(batch + 1, heads + 2, tokens // form.block + 5, "cpu")
    for name, slab in slabs.items():
        poison(slab)
        part = slab[1:, 1:-1, : fields[name].shape[2]]
        fields[name] = part.copy_(fields[name])
    return fields


def poison(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(float("nan") if x.is_floating_point() else 255 if x.dtype == torch.uint8 else -1)


def tokens_of(block: int) -> int:
    """Two pages and a block of the next."""
    return 256 + block


@KINDS
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", DIMS)
def test_units_are_those_of_the_format(kind, dim, block):
    heads = 1 + (dim // 16 + block // 32) % HEADS
    for i, form in enumerate(FORMS[kind](dim, block, heads)):
        error = missed(form, stored(form, 2, heads, tokens_of(block), i))
        assert error < limit(form), f"{form}: {error}"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_and_so_they_are_in_any_storage(data):
    kind, dim, block = (data.draw(st.sampled_from(list(x))) for x in (FORMS, (16, 48, *DIMS, 256), BLOCKS))
    if kind is Outliers and dim == 256:
        block = min(block, 64)
    batch, heads, blocks, seed = (data.draw(st.integers(a, b)) for a, b in ((1, 3), (1, HEADS), (1, 9), (0, 99)))
    form = data.draw(st.sampled_from(list(FORMS[kind](dim, block, heads))))
    fields = stored(form, batch, heads, blocks * block, seed)
    orders = [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)]
    for name, x in fields.items():
        a, b, c = data.draw(st.sampled_from(orders))  # its own inverse
        rest = range(3, x.dim())
        fields[name] = x.permute(a, b, c, *rest).contiguous().permute(a, b, c, *rest)
    assert missed(form, fields) < limit(form)


@KINDS
@pytest.mark.parametrize("whole", [True, False], ids=["-1", "random"])
def test_what_was_never_written_is_decoded_as_the_format_does(kind, whole):
    draw = torch.Generator().manual_seed(0)
    for form in FORMS[kind](64, 64, 2):
        fields = stored(form, 1, 2, tokens_of(64))
        for name, x in fields.items():
            if not x.is_floating_point() and name != "aux":  # which has float32 zero-points, of any size
                limits = torch.iinfo(x.dtype)
                x.copy_(poison(x) if whole else torch.randint(limits.min, limits.max + 1, x.shape, generator=draw))
            elif name == "outlier":  # of two with one index either may be the last
                x.fill_(3.0)
        assert missed(form, fields) < limit(form), form
        for x in fields.values():
            poison(x)
        lost = form.decode(fields).isnan()
        assert torch.equal(decoded(form, fields).isnan(), lost), form


def test_tables_are_those_of_the_form_that_is_read_though_forms_are_equal():
    for nested in (False, True):
        forms = [replace(lookup(64, 64), scaling="channel", channels=channels(2, 64, seed)) for seed in (0, 1)]
        if nested:
            forms = [Outliers(64, 64, "plain", form, 7, "token") for form in forms]
        assert forms[0] == forms[1]
        fields = stored(forms[0], 1, 2, 128)
        assert all(missed(form, fields) < 1e-6 for form in forms)
        assert not torch.allclose(decoded(forms[0], fields), decoded(forms[1], fields))


def test_rows_hold_addresses_of_storage_itself():
    """Slabs whose blocks are adjacent are read where they are."""
    for kind, forms in FORMS.items():
        form = next(forms(64, 64, 2))
        fields, keep = stored(form, 2, 2, tokens_of(64)), []
        reader_of(form).row(fields, keep)
        starts = {x.data_ptr() for x in fields.values()}
        assert {x.data_ptr() for x in keep} == starts, kind


@pytest.mark.parametrize(
    "form, why",
    [
        (AffineGroups(64, 64, "key", 2, "token"), "tensor cores"),
        (Outliers(64, 64, "key", AffineGroups(64, 64, "key", 2, "token"), 1, "token"), "tensor cores"),
        (LowRank(64, 64, "plain", affine(64, 64), 2, page=64, seen=64), "per 64 tokens"),
        (SplitSketch(64, 64, "plain", (64, 64), 2, page=256, seen=64), "per 256 tokens"),
        (Dense(64, 64, "plain", torch.float16), "dense storage"),
        (Outliers(64, 64, "plain", Dense(64, 64, "plain", torch.float16), 1, "token"), "dense storage"),
        (LowRank(64, 64, "plain", Dense(64, 64, "plain", torch.float16), 1), "dense storage"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_what_is_not_read_is_said(form, why):
    assert why in why_not(form)


@pytest.mark.parametrize(
    "method",
    [
        *("kivi", "squat", "innerq", "gear", "gear:outliers=0.02", "gear:paper=true", "kvarn", "zipcache", "fold"),
        *("qjl", "qjl:normalize=false,outliers=4", "qjl:paper=true,outliers=4", "turboquant"),
        "turboquant:bits=3,residual=true",
    ],
)
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("dim", [64, 128])
def test_methods_formats_are_read(method, side, dim):
    method, spec = get(method), LayerSpec(0, 1, 2, 4, dim, fragments=False)
    form = method.key_format(spec) if side == "keys" else method.value_format(spec)
    while isinstance(form, Paged | Projected):  # the loops' part
        form = form.inner
    tokens = 2 * form.block + (256 if isinstance(form, PagedFormat) else 0)
    assert why_not(form) is None
    assert missed(form, stored(form, 2, 2, tokens)) < limit(form)
