"""Storage formats: what is read back is as near as the format promises."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfold
from helpers import dividing, rope, spec
from kvfold.formats import AffineGroups, Dense, PagedFormat, SignSketch
from kvfold.formats.affine import floor_fp16, quantize_asym, quantize_sym, to_fp16
from kvfold.formats.basis import filled
from kvfold.formats.packing import PLANES, group_order, pack, pack_signs, unpack, unpack_signs
from kvfold.methods import Observation, get
from targets import current


def on_device(test):
    """Of tests that run on a GPU as well: formats encode there what no kernel does."""
    return pytest.mark.targets(pytest.mark.float32("formats take float32, whatever the model's dtype")(test))


BITS = sorted(PLANES)
HEAD_DIMS = (64, 80, 96, 128, 256)
OPERANDS = ("key", "value")
HALF_ULP = 2.0**-11  # of fp16, relative
HALF_TINY = 2.0**-25  # of fp16's subnormal numbers, absolute


@pytest.mark.parametrize(
    ("method", "said"),
    [("fold:bits=2,codebook=true", "256 codes for 4 channels ("), ("kivi", "2-bit asym, groups of 32")],
)
def test_a_format_is_said_in_one_phrase(method, said):
    assert get(method).value_format(spec()).describe().startswith(said)


# ---- packing ---------------------------------------------------------------------------------------------------------


def stream_index(head_dim: int, operand: str) -> torch.Tensor:
    """Place of each code of a unit in the stream, int64 [32, head_dim]; the layout's description, written down."""
    token, channel = torch.meshgrid(torch.arange(32), torch.arange(head_dim), indexing="ij")
    row, col = (token % 16, channel % 16) if operand == "key" else (channel % 16, token % 16)
    row_half, g = row // 8, row % 8
    col_half, t, pair = col // 8, col % 8 // 2, col % 2
    inside = (((g * 4 + t) * 2 + col_half) * 2 + row_half) * 2 + pair
    return ((channel // 16) * 2 + token // 16) * 256 + inside


@on_device
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_packing_round_trip_and_size(bits, head_dim, operand):
    codes = torch.randint(0, 1 << bits, (2, 3, 96, head_dim), generator=torch.Generator().manual_seed(bits))
    codes = codes.to(current().device)
    words = pack(codes.to(torch.uint8), bits, operand)
    assert words.dtype == torch.int16 and words.nbytes * 8 == bits * codes.numel()
    assert torch.equal(unpack(words, bits, operand, head_dim), codes.to(torch.uint8))


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_packing_lies_where_the_layout_says(bits, head_dim, operand):
    """Field f of word w holds the code at f W + w of the stream, plane after plane."""
    codes = torch.randint(0, 1 << bits, (32, head_dim), generator=torch.Generator().manual_seed(bits))
    words = pack(codes, bits, operand)[0].long() & 0xFFFF
    where = stream_index(head_dim, operand)
    assert where.flatten().sort().values.equal(torch.arange(32 * head_dim))
    start, shift, found = 0, 0, torch.zeros_like(codes)
    for width in PLANES[bits]:
        count = 32 * head_dim * width // 16
        plane = words[start : start + count]
        found += ((plane[where % count] >> (width * (where // count))) & ((1 << width) - 1)) << shift
        start, shift = start + count, shift + width
    assert torch.equal(found, codes)


def test_two_bits_of_128_channels_have_one_channel_tile_per_field():
    for tile in range(8):
        codes = torch.zeros(32, 128, dtype=torch.int32)
        codes[:16, 16 * tile : 16 * tile + 16] = 3
        words = pack(codes, 2, "key")[0].long() & 0xFFFF
        assert (words[:256] == 3 << (2 * tile)).all() and (words[256:] == 0).all()


@on_device
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_signs_round_trip(group):
    negative = torch.rand(5, 3, group, generator=torch.Generator().manual_seed(group)).to(current().device) < 0.5
    words = pack_signs(negative)
    assert words.shape == (5, 3, group // 16) and words.dtype == torch.int16
    assert torch.equal(unpack_signs(words), negative)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_order_of_groups_is_a_permutation(head_dim, operand, axis):
    count = head_dim if axis == "token" else 32 * head_dim // 16
    assert group_order(operand, axis, count).sort().values.equal(torch.arange(count))


# ---- rounding --------------------------------------------------------------------------------------------------------


@given(st.floats(-(2.0**20), 2.0**20, width=32))
def test_the_zero_point_is_the_largest_fp16_value_that_is_not_above(value):
    x = torch.tensor([value])
    floor = floor_fp16(x)
    assert floor.isfinite().all()
    if value < -65504:
        assert floor.item() == -65504
        return
    assert floor.float() <= x
    above = torch.nextafter(floor, torch.tensor([float("inf")], dtype=torch.float16))
    assert above.float() > x or floor.item() == 65504


# ---- affine groups: the bound ----------------------------------------------------------------------------------------


def step_bound(extent: torch.Tensor, bits: int) -> torch.Tensor:
    """How far a value of a group may move whose scale is fp16(extent / levels): half a step, or, where the scale was
    rounded down, what that takes off the top of the range."""
    levels = (1 << bits) - 1
    step = extent / levels
    half = step / 2 * (1 + HALF_ULP) + HALF_TINY / 2
    return torch.maximum(half, levels * (step * HALF_ULP + HALF_TINY))


def bounds(groups: torch.Tensor, mode: str, bits: int) -> torch.Tensor:
    """Bound on the error of each element of groups [..., n], double [..., n]."""
    x = groups.double()
    low, high, size = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), x.abs().amax(-1, keepdim=True)
    arithmetic = 4 * torch.finfo(torch.float32).eps * size
    below = (low.abs() * 2 * HALF_ULP).clamp_min(2 * HALF_TINY)  # one fp16 step under low
    asym = torch.where(low == high, below * HALF_ULP + HALF_TINY, step_bound(high - low + below, bits)) + arithmetic
    flat = x.abs().amin(-1, keepdim=True) == size
    sym = torch.where(flat, size * HALF_ULP + HALF_TINY, step_bound(size, bits)) + arithmetic
    n = x.shape[-1]
    if mode == "asym":
        return asym.expand_as(x)
    if mode == "sym":
        return sym.expand_as(x)
    return (torch.minimum(torch.where(low == high, sym, asym), sym) * math.sqrt(n)).expand_as(
        x
    )  # the smaller squared error, all in one element


KINDS = ("normal", "offset", "constant", "zero", "huge", "tiny", "denormal", "one", "spike")


def sample(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    level = torch.randn((*shape[:-2], 1, 1), generator=generator)
    smallest = torch.finfo(dtype).smallest_normal
    x = {
        "normal": lambda: noise * 3,
        "offset": lambda: 100 * level + noise,
        "constant": lambda: (50 * level).expand(shape),
        "zero": lambda: torch.zeros(shape),
        "huge": lambda: 6e4 * noise.sign(),
        "tiny": lambda: 1e-6 * noise,
        "denormal": lambda: smallest * noise / 4,
        "one": lambda: noise.sign(),
        "spike": lambda: torch.where(noise > 2, 6e4, 1e-3 * noise),
    }[kind]()
    return x.to(current().device, dtype).float()


SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.sampled_from([16, 48, *HEAD_DIMS]))


@on_device
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    shape=SHAPES,
    kind=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    bits=st.sampled_from(BITS),
    axis=st.sampled_from(["token", "channel"]),
    mode=st.sampled_from(["asym", "sym", "hybrid"]),
    operand=st.sampled_from(OPERANDS),
    data=st.data(),
)
def test_affine_groups_read_back_within_the_bound(shape, kind, dtype, bits, axis, mode, operand, data):
    batch, heads, blocks, head_dim = shape
    group = data.draw(st.sampled_from([g for g in (16, 32, 64) if axis == "token" or head_dim % g == 0]), "group")
    block = max(32, group)
    form = AffineGroups(head_dim, block, operand, bits, axis, mode, group)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20), "seed"))
    x = torch.cat([sample(k, (batch, heads, block * blocks, head_dim), dtype, generator) for k in kind], -2)
    decoded = form.decode(form.encode(x))
    assert decoded.dtype == torch.float32 and decoded.shape == x.shape
    assert decoded.isfinite().all()
    groups = form._split(x)
    error = (form._split(decoded).double() - groups.double()).abs()
    worst = (error / bounds(groups, mode, bits).clamp_min(1e-300)).max()
    assert worst <= 1, f"{worst:.3f} times the bound"


@on_device
@pytest.mark.parametrize("mode", ["asym", "sym", "hybrid"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_values_between_fp16_ones_read_back_within_the_bound(kind, bits, mode):
    form = AffineGroups(64, 32, "key", bits, "channel", mode)
    x = sample(kind, (2, 4, 64, 64), torch.float32, torch.Generator().manual_seed(2))
    groups = form._split(x)
    error = (form._split(form.decode(form.encode(x))).double() - groups.double()).abs()
    assert (error <= bounds(groups, mode, bits)).all()


@pytest.mark.parametrize("mode", ["asym", "sym", "hybrid"])
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("bits", BITS)
def test_the_bound_is_nearly_reached(bits, axis, mode):
    """So that a bound above is not merely wide: some element is more than 0.9 of half a step away."""
    x = torch.randn(4, 4, 256, 64, generator=torch.Generator().manual_seed(0))
    form = AffineGroups(64, 32, "key", bits, axis, "sym" if mode == "sym" else "asym")
    groups = form._split(x)
    error = (form._split(form.decode(form.encode(x))) - groups).abs()
    assert (error / bounds(groups, "sym" if mode == "sym" else "asym", bits)).max() > 0.9


@on_device
@pytest.mark.parametrize("mode", ["asym", "sym", "hybrid"])
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 6e4, -6e4, 65504.0, 6e-8, -6e-8, 1 / 3])
def test_constant_fp16_groups_are_exact(value, bits, axis, mode):
    x = torch.full((1, 2, 64, 64), value, device=current().device).half().float()
    form = AffineGroups(64, 32, "value", bits, axis, mode)
    assert torch.equal(form.decode(form.encode(x)), x)


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_nearest_to_what_is_read_back(bits):
    """No other code of the same group is nearer than the one chosen."""
    x = 5 + torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    codes, scale, zero = quantize_asym(x, bits)
    every = zero.float().unsqueeze(-1) + scale.float().unsqueeze(-1) * torch.arange(1 << bits)
    best = (every - x.unsqueeze(-1)).abs().amin(-1)
    assert torch.allclose((zero.float() + scale.float() * codes - x).abs(), best, atol=1e-6)
    codes, scale = quantize_sym(x, bits)
    every = scale.float().unsqueeze(-1) * torch.arange(1 << bits)
    assert torch.allclose(
        (scale.float() * codes - x.abs()).abs(), (every - x.abs().unsqueeze(-1)).abs().amin(-1), atol=1e-6
    )


@on_device
@pytest.mark.parametrize("value", [1e5, 3e38, -1e5, -3e38])
@pytest.mark.parametrize("mode", ["asym", "sym", "hybrid"])
def test_values_beyond_fp16_saturate(mode, value):
    x = torch.randn(1, 1, 32, 64, generator=torch.Generator().manual_seed(0)).to(current().device)
    x[0, 0, 3, 5] = value
    form = AffineGroups(64, 32, "key", 2, "token", mode)
    assert form.decode(form.encode(x)).isfinite().all()
    assert to_fp16(torch.tensor(value)).isfinite()


def squared_errors(x: torch.Tensor, mode: str, bits: int, axis: str, group: int) -> torch.Tensor:
    form = AffineGroups(x.shape[-1], x.shape[-2], "key", bits, axis, mode, group)
    return form._split(form.decode(form.encode(x)) - x).double().square().sum(-1)


@on_device
@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("base", "spread"), [(0.0, 1.0), (3.0, 1.0), (300.13, 0.1), (1000.26, 0.4), (-2000.9, 1.0)])
def test_hybrid_is_never_worse_than_the_better_of_sym_and_asym(base, spread, bits, axis, group):
    x = base + spread * torch.rand(2, 2, 64, 64, generator=torch.Generator().manual_seed(0)).to(current().device)
    asym, sym, hybrid = (squared_errors(x, mode, bits, axis, group) for mode in ("asym", "sym", "hybrid"))
    best = torch.minimum(asym, sym)
    rounding = group * (torch.finfo(torch.float32).eps * x.abs().max().double()).square()
    assert (hybrid <= best * (1 + 1e-6) + rounding).all()


@on_device
@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("value", [1 / 3, -1000 / 3, 1e-3])
def test_hybrid_is_never_worse_on_constant_groups(value, group):
    x = torch.full((1, 1, 64, 64), value, device=current().device)
    asym, sym, hybrid = (squared_errors(x, mode, 2, "channel", group) for mode in ("asym", "sym", "hybrid"))
    assert (hybrid <= torch.minimum(asym, sym) + group * (2**-24 * value) ** 2).all()


def test_hybrid_uses_both_modes():
    """On centred and shifted groups together it is better than either of them: the choice is per group."""
    x = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    x[..., 32:] += 10
    asym, sym, hybrid = (squared_errors(x, mode, 2, "channel", 32).sum() for mode in ("asym", "sym", "hybrid"))
    assert hybrid < 0.95 * min(asym, sym)


@pytest.mark.parametrize("group", [8, 24, 48, 128])
def test_groups_that_do_not_fit_are_refused_by_name(group):
    with pytest.raises(
        ValueError, match=rf"group={group}: head_dim=64 is not divisible by it; allowed: \[16, 32, 64\]"
    ):
        AffineGroups(64, 32, "key", 2, "channel", "asym", group)


def test_other_shapes_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="bits=5"):
        AffineGroups(64, 32, "key", 5, "channel")
    with pytest.raises(ValueError, match="head_dim=72"):
        AffineGroups(72, 32, "key", 2, "token")
    with pytest.raises(ValueError, match="block=48"):
        AffineGroups(64, 48, "key", 2, "token")
    with pytest.raises(ValueError, match="sketch="):
        SignSketch(64, 32, "key", (24,), (1.0,))


# ---- the other formats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dense_is_the_vectors_themselves(dtype):
    x = torch.randn(2, 2, 64, 80).to(dtype).float()
    form = Dense(80, 32, "key", dtype)
    assert torch.equal(form.decode(form.encode(x)), x) and form.bits == 8 * dtype.itemsize


@on_device
@pytest.mark.parametrize("scale", [1e-30, 1.0, 6e4])
@pytest.mark.parametrize("sketches", [(128,), (64, 32)])
def test_a_sketch_reads_back_signs_times_norms(sketches, scale):
    gains = tuple(0.5 + i for i in range(len(sketches)))
    form = SignSketch(64, 32, "key", sketches, gains)
    generator = torch.Generator().manual_seed(0)
    projections = (torch.randn(2, 2, 64, sum(sketches), generator=generator) * scale).to(current().device)
    norms = (torch.rand(2, 2, 64, len(sketches), generator=generator) * 8 * scale).to(current().device)
    decoded = form.decode(form.encode(torch.cat([projections, norms], -1)))
    assert decoded.isfinite().all()
    expected = torch.where(projections >= 0, 1.0, -1.0)
    factors, counts = torch.tensor(gains).to(norms), torch.tensor(sketches, device=norms.device)
    spread = torch.repeat_interleave(norms * factors, counts, -1)
    off = (decoded - expected * spread).abs()
    assert (off <= spread * HALF_ULP * 1.01 + 8 * max(gains) * HALF_TINY).all()


# ---- declared against real -------------------------------------------------------------------------------------------


def encoded(name: str, head_dim: int, dtype: torch.dtype = torch.float32):
    """A method's formats and what they make of five blocks of random keys and values."""
    method = get(dividing(name, head_dim))
    shape = spec(head_dim, dtype=dtype, rope=rope(head_dim))
    count = 5 * method.block
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 2, count, head_dim, generator=generator).to(dtype).float()
    positions = torch.arange(count).unsqueeze(0)
    queries = torch.randn(1, shape.num_heads, count, head_dim, generator=generator)
    state = {n: t.expand(2, *t.shape[1:]) for n, t in method.observe(Observation(queries, positions), shape).items()}
    return (
        (method.key_format(shape), method.encode_keys(keys, state, shape, positions.unsqueeze(1), True)),
        (method.value_format(shape), method.encode_values(values, state, shape, True)),
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", kvfold.DEFAULT)
def test_declared_fields_and_bytes_are_the_real_ones(name, head_dim):
    for form, fields in encoded(name, head_dim):
        declared = {field: (5, *of) for field, of in form.fields().items()}
        per_page, pages = {}, 0
        if isinstance(form, PagedFormat):
            pages = -(-5 * form.block // form.page) if form.page else 1
            assert form.pages(5) == pages
            per_page = form.page_fields()
            assert not per_page.keys() & declared.keys()
            declared |= {field: (pages, *of) for field, of in per_page.items()}
        assert fields.keys() == declared.keys()
        for field, (count, shape, dtype) in declared.items():
            assert (fields[field].dtype, tuple(fields[field].shape)) == (dtype, (2, 2, count, *shape)), field
        own = sum(t.nbytes for n, t in fields.items() if n not in per_page)
        assert own == 2 * 2 * 5 * form.block_bytes
        bits = 8 * form.block_bytes / (form.block * head_dim)
        if per_page:
            assert sum(fields[n].nbytes for n in per_page) == 2 * 2 * pages * form.page_bytes
            bits += 8 * form.page_bytes / (128 * head_dim) if form.page else 0
        assert form.bits == pytest.approx(bits)
        storage = form.allocate(2, 2, 5, "cpu")
        kept = {n: t for n, t in fields.items() if n not in per_page or form.page}  # a sequence's have another owner
        assert {n: (t.dtype, t.shape) for n, t in storage.items()} == {n: (t.dtype, t.shape) for n, t in kept.items()}
        assert {n: t.shape[2] for n, t in form.take(fields, 2).items()} == {
            n: 2 if n not in per_page else form.pages(2) for n in fields
        }
        decoded = form.decode(fields)
        assert decoded.shape == (2, 2, 5 * form.block, form.width) and decoded.dtype == torch.float32
        assert decoded.isfinite().all()


@pytest.mark.parametrize(
    ("name", "head_dim", "bits"),
    [
        *((f"kivi:bits={b},group={g}", 128, b + 32 / g) for b in (1, 2, 3, 4, 8) for g in (32, 64, 128)),
        ("kivi", 80 * 2, 3.0),
        ("squat", 128, 3.0),
        ("squat_pre", 128, 3.0),
        # a page of 128 tokens: 2 bytes of mean and 1 of norm per channel
        ("innerq", 128, 3.5 + 24 / 128 / 2),
        ("innerq:center=false", 128, 3.5 + 8 / 128 / 2),
        ("innerq:center=false,normalize=false", 128, 3.5),
        ("innerq:paper=true", 128, 3.5),
        ("innerq:mode=sym", 128, 3.5 + 24 / 128 / 2),
        ("innerq:mode=asym", 128, 3.0 + 24 / 128 / 2),
        ("innerq:mode=hybrid_prefill", 64, 3.5 + 24 / 128 / 2),
        ("fold", 128, (3 + 16 / 128 + 24 / 128 + 2 + 16 / 128 + 16 / 128) / 2),
        ("fold:bits=4", 64, (4 + 16 / 64 + 24 / 128 + 4 + 16 / 64 + 16 / 128) / 2),
        ("fold:center=false,normalize=false", 128, 2.5 + 16 / 128),
        ("qjl:paper=true", 128, 82 * 8 / 256),
        ("qjl:paper=true", 64, (2 + 16 / 64 + 3) / 2),
        ("qjl", 128, 82 * 8 / 256 + 24 / 128 / 2),
        ("qjl_outliers", 128, ((17 * 4.25 + 15 * 5.25) / 32 + 3) / 2),
        ("qjl:outliers=8,normalize=false", 128, (4.25 + 3 + (16 * 128 + 8 * 8) / (128 * 128)) / 2),
        ("kivi:k_bits=4,v_bits=2", 128, (5 + 3) / 2),
    ],
)
def test_effective_bits(name, head_dim, bits):
    assert get(name).effective_bits(head_dim) == pytest.approx(bits)


@pytest.mark.parametrize("rows", [0, 1, 32, 33, 4096, 4097])
def test_rows_of_a_product_do_not_depend_on_how_many_there_are(rows):
    """As it is made on a GPU: of equally many rows at a time."""
    draw = torch.Generator().manual_seed(0)
    x, matrix = (torch.randn(n, 32, generator=draw) for n in (4200, 32))
    whole = filled(x, matrix)
    assert torch.equal(filled(x[:rows], matrix), whole[:rows])
    assert torch.equal(filled(x[:rows].view(1, rows, 1, 32), matrix), whole[:rows].view(1, rows, 1, 32))
    assert (whole - x @ matrix).abs().max() < 1e-5
