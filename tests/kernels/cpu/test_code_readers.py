"""Readers of codebooks on a CPU, unit by unit, against their formats' own decoding."""

import gc
import os
import platform
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from cpu_case import decoded, missed
from kvfold.formats import GroupCodes, ResidualCodes
from kvfold.formats.binary import BinaryCodes
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, KeySteps, largest, sharing
from kvfold.formats.grouped import GroupBook
from kvfold.formats.residual import Codebook
from kvfold.kernels.cpu._numbers import has_halves
from kvfold.kernels.cpu.readers import reader_of, why_not
from kvfold.kernels.cpu.readers.base import made
from kvfold.methods import LayerSpec, get

LIMIT = 1e-6
VECTORS = [
    (64, 32),
    (64, 4),
    (64, 2),
    (64, 1),
    (80, 16),
    (80, 5),
    (96, 24),
    (96, 12),
    (96, 3),
    (128, 32),
    (128, 8),
    (80, 80),
]
"""Channels, and those of a group."""

several = settings(max_examples=60, deadline=None, derandomize=True)
vectors = st.sampled_from(VECTORS)
blocks = st.sampled_from([32, 64, 128])
heads_of = st.integers(1, 4)
dtypes = st.sampled_from([torch.float16, torch.float32, torch.bfloat16])


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def anything(form, heads, batch=2, count=2, seed=0):
    """Any bytes as codes, scales of any size: ``count`` blocks, of storage that holds -1 and NaN beyond them."""
    generator, fields = torch.Generator().manual_seed(seed), {}
    for name, (shape, dtype) in form.fields().items():
        room = (batch, heads, count + 2, *shape)
        if dtype.is_floating_point:
            whole = torch.full(room, float("nan"), dtype=dtype)
            drawn = torch.randn(batch, heads, count, *shape, generator=generator)
            drawn[..., ::5] = 0.0
            drawn[..., 1::7] *= 1e-6
        else:
            whole = torch.full(room, 255 if dtype == torch.uint8 else -1, dtype=dtype)
            size = torch.iinfo(dtype)
            drawn = torch.randint(size.min, size.max + 1, (batch, heads, count, *shape), generator=generator)
        whole[:, :, :count] = drawn.to(dtype)
        fields[name] = whole[:, :, :count]
    return fields


def residual(dim=64, vector=32, codes=256, stages=4, strided=False, block=32, dtype=torch.float16, seed=1):
    book = draw(stages, codes, vector, seed=seed) * 0.8 ** torch.arange(stages).view(-1, 1, 1)
    return ResidualCodes(dim, block, "plain", vector, codes, stages, strided, Codebook(book.to(dtype)))


def grouped(dim=64, vector=4, codes=256, heads=2, strided=False, centred=False, block=32, dtype=torch.float16, seed=1):
    mean = draw(heads, dim, seed=seed + 1).half()
    book = GroupBook(draw(heads, dim // vector, codes, vector, seed=seed).to(dtype), None, mean)
    return GroupCodes(dim, block, "plain", vector, codes, strided, "rms", book, centred)


def additive(dim=64, stages=3, levels=64, heads=2, rotary=None, rounded=False, block=32, dtype=torch.float16, seed=1):
    z = (draw(heads, stages, levels, dim, seed=seed) * 0.9 ** torch.arange(stages).view(-1, 1, 1)).to(dtype)
    make = KeyCodebook.rounded if rounded else KeyCodebook
    return AdditiveCodes(
        dim, block, "key", stages, levels, 0, make(z, torch.eye(dim).expand(heads, -1, -1), rotary or dim)
    )


# ---- residual codes --------------------------------------------------------------------------------------------------


@several
@given(vectors, st.sampled_from([2, 16, 200, 256]), st.integers(1, 9), st.booleans(), blocks, heads_of, dtypes)
def test_residual_codes(of, codes, stages, strided, block, heads, dtype):
    form = residual(*of, codes, stages, strided, block, dtype)
    assert missed(form, anything(form, heads)) < LIMIT


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_residual_codes_of_32_channels(dim, stages, strided):
    form = residual(dim, 32, 256, stages, strided, 64)
    assert missed(form, anything(form, 2)) < LIMIT


@pytest.mark.parametrize("strided", [False, True])
def test_residual_codes_of_vectors(strided):
    form = residual(64, 8, 64, 2, strided)
    assert missed(form, form.encode(draw(2, 3, 96, 64, seed=5))) < LIMIT


def test_codes_in_whole_steps_are_read_as_stored():
    book = Codebook.rounded(draw(4, 256, 32))
    form = ResidualCodes(64, 32, "plain", 32, 256, 4, False, book)
    assert missed(form, anything(form, 2)) < LIMIT


# ---- a code per group ------------------------------------------------------------------------------------------------


@several
@given(vectors, st.sampled_from([2, 16, 200, 256]), heads_of, st.booleans(), st.booleans(), blocks, dtypes)
def test_group_codes(of, codes, heads, strided, centred, block, dtype):
    form = grouped(*of, codes, heads, strided, centred, block, dtype)
    assert missed(form, anything(form, heads)) < LIMIT


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("vector", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_group_codes_of_methods(dim, vector, strided):
    form = grouped(dim, vector, strided=strided, centred=strided, block=128)
    assert missed(form, anything(form, 2)) < LIMIT


@pytest.mark.parametrize("strided", [False, True])
def test_group_codes_of_vectors(strided):
    form = grouped(64, 8, 64, 3, strided, True)
    assert missed(form, form.encode(1 + draw(2, 3, 96, 64, seed=5))) < LIMIT


# ---- sums of complex codes -------------------------------------------------------------------------------------------


@several
@given(
    st.sampled_from(
        [(64, 64), (64, 16), (80, 80), (80, 20), (96, 48), (128, 128), (128, 32), (40, 40), (6, 6), (64, 0)]
    ),
    st.sampled_from([1, 2, 5, 11, 21]),
    st.sampled_from([2, 4, 8, 16, 32, 64, 128, 256]),
    heads_of,
    blocks,
    dtypes,
)
def test_additive_codes(of, stages, levels, heads, block, dtype):
    dim, rotary = of
    form = additive(dim, stages, levels, heads, None, False, block, dtype)
    form.codebook.rotary = rotary
    assert missed(form, anything(form, heads)) < LIMIT


@several
@given(
    st.sampled_from([40, 64, 80, 96, 128, 256]),
    st.sampled_from([1, 2, 5, 11, 21]),
    st.sampled_from([2, 16, 64, 256]),
    heads_of,
    blocks,
)
def test_additive_codes_in_steps(dim, stages, levels, heads, block):
    form = additive(dim, stages, levels, heads, None, True, block, torch.float32)
    assert form.codebook.steps is not None
    assert missed(form, anything(form, heads)) < LIMIT


@pytest.mark.parametrize("stages", [1, 21])
def test_steps_are_read_where_centres_are_rounded_to_fp16(stages):
    """Not the centres: those miss the steps by fp16's rounding."""
    form = additive(128, stages, 64, 2, None, True)
    fields, book = anything(form, 2), form.codebook
    exact = replace(form, codebook=KeyCodebook(book.steps.centres, book.metric, book.rotary))
    expected = exact.decode(fields)
    assert float((decoded(form, fields) - expected).norm() / expected.norm()) < LIMIT
    assert missed(form, fields) < 5e-4


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 11, 300])
def test_sums_of_the_largest_numbers(stages):
    """Sums of a group's stages are bytes."""
    groups = sharing(stages)
    top = torch.tensor([largest(together) for together in groups for _ in range(together)], dtype=torch.uint8)
    steps = KeySteps(
        top.view(1, -1, 1, 1).repeat(1, 1, 2, 64),
        torch.full((1, 32), 0.5),
        torch.linspace(0.25, 1.5, len(groups) - 1).view(1, -1, 1).expand(1, -1, 32).half(),
        torch.full((1, 64), 200.0),
    )
    steps.numbers[:, :, 1, 32:] = 0
    book = KeyCodebook(steps.centres, torch.eye(64).expand(1, -1, -1), 64, steps)
    form = AdditiveCodes(64, 32, "key", stages, 2, 0, book)
    fields = anything(form, 1, count=1)
    assert missed(form, fields) < LIMIT
    for word in (0, -1):
        fields["codes"].fill_(word)
        assert missed(form, fields) < LIMIT


def test_additive_codes_of_vectors():
    form = additive(64, 5, 16, 3)
    assert missed(form, form.encode(draw(2, 3, 96, 64, seed=5))) < LIMIT


# ---- bits ------------------------------------------------------------------------------------------------------------


@several
@given(st.sampled_from([16, 48, 64, 80, 128, 256]), heads_of, st.booleans(), blocks)
def test_binary_codes(codes, heads, joint, block):
    form = BinaryCodes(64, block, "plain", codes, heads if joint else 1)
    fields = anything(form, heads)
    assert torch.equal(decoded(form, fields), form.decode(fields))


@pytest.mark.parametrize("joint", [1, 3])
def test_binary_codes_of_vectors(joint):
    form, x = BinaryCodes(64, 32, "plain", 96, joint), draw(2, 3, 64, 96)
    got = decoded(form, form.encode(x))
    bits = (x > 0).float()
    if joint > 1:
        bits = bits.transpose(1, 2).flatten(-2).unsqueeze(1).expand(-1, 3, -1, -1)
    assert torch.equal(got[..., :-1], bits) and bool((got[..., -1] == 1).all())


# ---- all -------------------------------------------------------------------------------------------------------------

FORMS = [
    residual(codes=100),
    residual(stages=1, vector=4, codes=100),
    residual(strided=True, codes=100),
    grouped(codes=100),
    grouped(codes=100, strided=True, centred=True),
    additive(),
    additive(rounded=True, dtype=torch.float32),
    additive(levels=2, rotary=32),
    BinaryCodes(64, 32, "plain", 64),
    BinaryCodes(64, 32, "plain", 64, 2),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
@pytest.mark.parametrize("word", [0, 255])
def test_storage_of_one_byte(form, word):
    """Whatever storage holds, no number outside of a table is read."""
    fields = anything(form, 2)
    for x in fields.values():
        if not x.is_floating_point():
            x.fill_(255 if x.dtype == torch.uint8 else -1) if word else x.fill_(0)
    assert missed(form, fields) < LIMIT


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_one_block_of_one_sequence(form):
    assert missed(form, anything(form, 2, batch=1, count=1)) < LIMIT


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_storage_whose_heads_are_last(form):
    fields = {
        name: x.movedim(1, -1).contiguous().movedim(-1, 1) if x.ndim > 3 else x for name, x in anything(form, 2).items()
    }
    assert missed(form, fields) < LIMIT


@pytest.mark.parametrize("make", [residual, grouped, additive])
def test_formats_that_are_equal_have_their_own_tables(make):
    one, other = make(seed=1), make(seed=2)
    assert one == other
    fields = anything(one, 2)
    assert missed(one, fields) < LIMIT and missed(other, fields) < LIMIT
    assert not torch.equal(decoded(one, fields), decoded(other, fields))


@pytest.mark.parametrize("make", [residual, grouped, additive])
def test_tables_in_fp16_are_not_copied(make):
    if not has_halves():
        pytest.skip("fp16 is not converted by the processor")
    form = make()
    book = form.codebook if make is additive else form.book
    table = book.centres if make is additive else book.codes
    assert table.data_ptr() in reader_of(form).row(anything(form, 2), [])


def test_tables_go_with_their_codebook():
    form = grouped(dtype=torch.float32, centred=True)
    reader_of(form).row(anything(form, 2), [])
    held = weakref.ref(made(form.book, "mean", lambda: None))
    assert held() is not None
    del form
    gc.collect()
    assert held() is None


def test_what_cannot_be_read():
    assert "multiples of 32" in why_not(residual(block=48)) and "multiples of 32" in why_not(grouped(block=16))
    assert why_not(BinaryCodes(64, 32, "value", 64)) == "packed for tensor cores"
    # bytes of these lie in one order everywhere
    for form in (residual(), grouped(), additive()):
        assert why_not(replace(form, operand="key")) is None


@pytest.mark.parametrize("spec", ["fold:bits=2,codebook=true", "fold:bits=1,codebook=true"])
def test_codebooks_of_methods(spec):
    method, layer = get(spec), LayerSpec(0, 1, 2, 4, 128, fragments=False)
    for form in (method.key_format(layer).inner, method.value_format(layer).inner):
        assert missed(form, anything(form, 2)) < LIMIT


PLAIN = """
import test_code_readers as t
for form in t.FORMS:
    assert t.missed(form, t.anything(form, 2)) < t.LIMIT, form
assert not t.has_halves()
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="others convert it")
def test_processors_without_fp16(tmp_path):
    """Tables are float32 there."""
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", PLAIN], check=True, env=os.environ | generic)
