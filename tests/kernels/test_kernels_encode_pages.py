"""The kernels that encode formats with statistics per page, against the formats' own encoding in float32 on the CPU.

As in test_kernels_encode.py: Triton's interpreter by default, real launches with ``pytest -m gpu``.
"""

import pytest
import torch

pytest.importorskip("triton")

from helpers import ENCODING, feed, interpreted_module, layer, packed_fields, spec, tokens
from kvfold.formats import AffineGroups, Hadamard, Paged, ResidualCodes, Rotation, SignSketch, UniformTokens
from kvfold.formats.gaussian import gaussian_codes
from kvfold.formats.residual import Codebook
from kvfold.kernels.fold import encode as compiled
from kvfold.methods import get
from kvfold.methods.base import finite


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module(
        "kvfold.kernels.fold.encode", *ENCODING, "kvfold.kernels.affine.encode", "kvfold.kernels.fold._encode"
    )


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda" if request.param == "gpu" else "cpu")


@pytest.fixture
def kernels(device, interpreted):
    return compiled if device.type == "cuda" else interpreted


def poisoned(fields):
    for t in fields.values():
        t.fill_(float("nan") if t.is_floating_point() else 77)
    return fields


def raw(x):
    return x.cpu().contiguous().view(torch.uint8)


def random(*shape, seed=0, dtype=torch.float16):
    """Channels of different size and offset."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    return (randn(*shape) * torch.exp(randn(shape[-1])) + 4 * randn(shape[-1])).to(dtype)


def assert_close(got, want, form, share=1e-3):
    """Fields as the format's own but for rounding; then decoded vectors, too, are near."""
    got = {name: t.cpu() for name, t in got.items()}
    assert got.keys() == want.keys()
    for name in ("mean", "scale"):  # fp16 of one sign lie next to each other as integers do
        if name in want and form_of(form).kind == "uniform":
            off = (got[name].view(torch.int16).int() - want[name].view(torch.int16).int()).abs()
            assert off.max() <= 1, f"{name}: {int(off.max())} steps of fp16"
    if "norm" in want:
        assert (got["norm"].int() - want["norm"].int()).abs().max() <= 1
    for name in ("rms", "scale"):
        if name in want and (
            form_of(form).kind in ("lookup", "sign sketch") or getattr(form_of(form), "fit", "") == "rms"
        ):
            off = (got[name].view(torch.int16).int() - want[name].view(torch.int16).int()).abs()
            assert off.max() <= 1, f"{name}: {int(off.max())} steps of fp16"
    for name in ("codes", "meta", "aux", "signs"):
        if name in want:
            assert (got[name] != want[name]).float().mean() < share, name
    ours, theirs = form.decode(got), form.decode(want)
    assert torch.isfinite(ours).all() or not torch.isfinite(theirs).all()
    if form_of(form).kind == "residual codes":  # where two codes are nearly as near, vectors are not
        same = (got["codes"] == want["codes"]).flatten(-2).all(-1)
        off = (got["rms"].view(torch.int16).int() - want["rms"].view(torch.int16).int()).abs()
        assert same.float().mean() > 1 - 64 * share and off[same].max() <= 1
        ours, theirs = (t.unflatten(-2, (-1, form.block))[same] for t in (ours, theirs))
    error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt().clamp_min(1e-30)
    assert error < 2e-3, f"relative RMS {error:.1e}"


def form_of(form):
    return form.inner if isinstance(form, Paged) else form


def check(kernels, device, form, x, start=0):
    """Encode ``x``, in two calls if there is a ``start``; compare, and see that nothing else is written."""
    batch, heads, count, _ = x.shape
    blocks = count // form.block
    fields = poisoned(form.allocate(batch, heads, blocks + 4, device))
    x = x.to(device)
    if start:
        kernels.encode_pages(x, fields, form, 0, start)
    kernels.encode_pages(x[:, :, start:], fields, form, start, count, old=start)
    assert_close(form.take(fields, blocks), form.encode(finite(x.cpu())), form)
    guard = poisoned({name: t.clone() for name, t in fields.items()})
    pages = form.pages(blocks) if isinstance(form, Paged) else 0
    for name, t in fields.items():
        used = pages if name in ("mean", "norm") else blocks
        assert torch.equal(raw(t[:, :, used:]), raw(guard[name][:, :, used:])), f"{name}: written out of bounds"


def uniform(dim, operand="key", bits=2, fit=None, mean=True, norm="rms", rotation=32, block=32):
    fit = fit or ("size" if operand == "key" else "unbiased")
    inner = UniformTokens(dim, block, operand, bits, fit)
    return Paged(dim, block, operand, inner, mean, norm, Hadamard(dim, rotation) if rotation else None)


def vectors(dim, operand="key", vector=4, fit=None, mean=True, norm="rms", rotation=32, book=None):
    fit = fit or ("size" if operand == "key" else "unbiased")
    book = book or gaussian_codes(vector)
    inner = ResidualCodes(dim, 32, operand, vector, book.codes.shape[1], 1, False, book, fit)
    return Paged(dim, 32, operand, inner, mean, norm, Hadamard(dim, rotation) if rotation else None)


def of_method(method, dim, side, order):
    """A method's keys' or values' format; ``order`` "plain" or the side's own."""
    shape = spec(dim, fragments=order != "plain")
    return getattr(get(method), f"{side}_format")(shape)


# ---- a call's blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("operand", ["key", "value"])
def test_codes_are_the_formats(kernels, device, operand, bits):
    check(kernels, device, uniform(64, operand, bits), random(1, 1, 256, 64, seed=bits), start=96)


@pytest.mark.parametrize(("dim", "rotation"), [(80, 16), (96, 32), (128, 64), (256, 128), (128, 1), (128, 0)])
def test_head_sizes_and_rotations(kernels, device, dim, rotation):
    for operand, bits in (("key", 3), ("value", 1)):
        check(kernels, device, uniform(dim, operand, bits, rotation=rotation), random(1, 1, 128, dim))


@pytest.mark.parametrize("vector", [4, 8])
@pytest.mark.parametrize("operand", ["key", "value"])
def test_codes_of_vectors_are_the_formats(kernels, device, operand, vector):
    norm = "rms" if operand == "key" else ""
    check(kernels, device, vectors(64, operand, vector, norm=norm), random(1, 2, 256, 64, seed=vector), start=96)


@pytest.mark.parametrize(
    ("dim", "vector", "rotation", "fit"),
    [(80, 4, 16, "rms"), (96, 8, 32, "least"), (128, 4, 64, "unbiased"), (256, 8, 128, "size"), (128, 8, 0, "size")],
)
def test_shapes_and_fits_of_codes(kernels, device, dim, vector, rotation, fit):
    check(kernels, device, vectors(dim, "value", vector, fit, rotation=rotation), random(1, 1, 128, dim))


def test_codes_are_of_the_formats_own_table(kernels, device):
    """Formats of one shape are equal, whatever their tables are."""
    draw = torch.Generator().manual_seed(5)
    for count in (16, 64, 64):
        book = Codebook(torch.randn(1, count, 8, generator=draw).half())
        check(kernels, device, vectors(64, "value", 8, book=book), random(1, 1, 128, 64))


@pytest.mark.parametrize("order", ["own", "plain"])
@pytest.mark.parametrize(
    ("method", "dim", "side"),
    [
        *((f"turboquant:bits={bits}", 64, side) for bits, side in ((1, "key"), (2, "value"), (3, "key"), (4, "value"))),
        ("turboquant:center=false,normalize=false,bits=3", 64, "key"),
        ("turboquant:bits=3", 80, "key"),
        ("turboquant", 128, "value"),
        ("qjl", 64, "key"),
        ("qjl:center=false,normalize=false", 64, "key"),
        ("qjl:bits=3", 80, "key"),
    ],
)
def test_levels_and_signs_through_a_basis(kernels, device, method, dim, side, order):
    check(kernels, device, of_method(method, dim, side, order), random(1, 1, 256, dim), 64)


@pytest.mark.parametrize(
    ("mean", "norm", "fit"),
    [(True, "max", "least"), (False, "rms", "size"), (True, "", "unbiased"), (False, "", "least")],
)
def test_statistics_and_fits(kernels, device, mean, norm, fit):
    form = uniform(64, fit=fit, mean=mean, norm=norm)
    check(kernels, device, form, random(1, 2, 256, 64))


def test_uniform_levels_without_a_page(kernels, device):
    check(kernels, device, UniformTokens(64, 64, "value", 2, "least"), random(1, 2, 128, 64))


@pytest.mark.parametrize("seen", [32, 41, 100])
def test_statistics_of_a_pages_first_tokens(kernels, device, seen):
    inner = UniformTokens(64, 32, "key", 3)
    form = Paged(64, 32, "key", inner, True, "rms", seen=seen)
    check(kernels, device, form, random(1, 1, 256, 64))


@pytest.mark.parametrize("mode", ["asym", "sym", "hybrid"])
def test_affine_groups(kernels, device, mode):
    inner = AffineGroups(64, 32, "key", 2, "channel", mode, 32)
    check(kernels, device, Paged(64, 32, "key", inner, True, "max"), random(1, 1, 256, 64), start=96)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("heads last", torch.float16),
        ("wide rows", torch.bfloat16),
        ("every second channel", torch.float32),
        ("one sequence twice", torch.bfloat16),
    ],
)
def test_any_dtype_and_strides(kernels, device, dtype, layout):
    whole = random(2, 1, 128, 64, seed=1).to(dtype).to(device)
    if layout == "heads last":
        x = whole.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "wide rows":
        x = torch.full((2, 2, 133, 67), float("nan"), dtype=dtype, device=device)[:, 1:, 4:132, 3:]
        x.copy_(whole)
    elif layout == "every second channel":
        x = torch.full((2, 1, 128, 128), float("nan"), dtype=dtype, device=device)[..., 1::2]
        x.copy_(whole)
    else:
        x = whole[:1].expand(2, -1, -1, -1)
    form = uniform(64, bits=2)
    want = form.encode(finite(x.cpu()))
    plain, strided = (poisoned(form.allocate(2, 1, 4, device)) for _ in "ps")
    kernels.encode_pages(x.contiguous(), plain, form, 0, 128)
    kernels.encode_pages(x, strided, form, 0, 128)
    assert_close(strided, want, form)
    for name in plain:
        assert torch.equal(raw(plain[name]), raw(strided[name])), f"{name}: depends on strides"


def test_tokens_of_ring_and_call(kernels, device):
    """A page that began in the ring, blocks and statistics across its end, sequences picked by an index."""
    form = uniform(64)
    x = random(2, 1, 300, 64)
    fields = poisoned(form.allocate(3, 1, 16, device))
    rows = torch.tensor([2, 0], device=device)
    ring = torch.full((3, 1, 90, 64), float("nan"), dtype=x.dtype, device=device)
    kernels.encode_pages(x[:, :, :128].to(device), fields, form, 0, 64, rows=rows)
    for t in range(64, 150):
        ring[rows, :, t % 90] = x[:, :, t].to(device)
    kernels.encode_pages(x[:, :, 150:].to(device), fields, form, 64, 192, ring=ring, old=150, rows=rows)
    assert_close(form.take({n: t[rows] for n, t in fields.items()}, 6), form_take(form, x, 256, 6), form)
    for name, t in fields.items():
        assert torch.equal(raw(t[1]), raw(poisoned({"": t[1].clone()})[""])), name


def form_take(form, x, tokens, blocks):
    return form.take(form.encode(finite(x[:, :, :tokens])), blocks)


def test_a_second_slab(kernels, device):
    form, x = uniform(64), random(1, 1, 256, 64)
    fields = poisoned(form.allocate(1, 1, 4, device))
    kernels.encode_pages(x.to(device), fields, form, 128, 256, first_block=4)
    assert_close(fields, form.encode(finite(x[:, :, 128:])), form)


def extreme(name):
    x = random(1, 1, 128, 64, seed=3, dtype=torch.float32)
    return {
        "zeros": torch.zeros_like(x),
        "constant": torch.full_like(x, 0.3),
        "constant channels": x[:, :, :1].expand_as(x).clone(),
        "one giant channel": torch.where(torch.arange(64) == 5, 3e4 * x.sign(), x),
        "one giant token": torch.where(torch.arange(128)[:, None] == 7, 6e4 * x.sign(), x),
        "near fp16's end": x.sign() * 65504,
        "beyond fp16": x * 1e6,
        "infinite": torch.where(x > 6, float("inf"), x),
        "fp16's subnormals": x * 2.0**-18,
        "below fp16": x * 1e-14,
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("zeros", "constant", "constant channels", "one giant channel", "one giant token", "near fp16's end"),
        *("beyond fp16", "infinite", "fp16's subnormals", "below fp16"),
    ],
)
def test_extreme_values(kernels, device, name):
    x = extreme(name)
    for form in (uniform(64, "key", 3), uniform(64, "value", 2, norm=""), vectors(64, "value", norm="")):
        fields = poisoned(form.allocate(1, 1, 4, device))
        kernels.encode_pages(x.to(device), fields, form, 0, 128)
        fields = {n: t.cpu() for n, t in fields.items()}
        want = form.encode(finite(x))
        for field in ("mean", "norm", "scale", "rms"):
            if field in want:
                a, b = (t.float() for t in (fields[field], want[field]))
                assert torch.isfinite(a).all()
                limit = 1 if field == "norm" else 2e-3 * b.abs() + 1e-7
                assert ((a - b).abs() <= limit).all(), field
        ours, theirs = form.decode(fields), form.decode(want)
        if form_of(form).kind == "residual codes":  # of vectors beyond fp16 other codes are as good
            assert (ours - finite(x)).norm() <= 1.01 * (theirs - finite(x)).norm() + 1e-6
        else:
            assert (ours - theirs).norm() <= 1e-2 * theirs.norm()


# ---- a decode step ---------------------------------------------------------------------------------------------------


class Batch:
    """Sequences of different length, each in a layer of its own (Torch encodes it), and all together in what the kernel
    reads and writes."""

    def __init__(self, kernels, device, method, lengths, grow, head_dim=64):
        self.kernels, self.device, self.method = kernels, device, get(method)
        self.shape = spec(head_dim, heads=2, kv_heads=1, dtype=torch.float16)
        self.new = [tokens(1, n + grow, seed=i, shape=self.shape, dtype=torch.float16) for i, n in enumerate(lengths)]
        self.layers = [layer(method, self.shape) for _ in lengths]
        for one, new, n in zip(self.layers, self.new, lengths, strict=True):
            feed(one, tuple(t[:, :, :n] for t in new))
        self.at, first, sink = list(lengths), self.layers[0], self.method.sink
        self.forms = (first.key_format, first.value_format)
        blocks = -(-(max(lengths) + grow) // 128) * 128 // first.block
        self.fields = [poisoned(f.allocate(len(lengths), 1, blocks, device)) for f in self.forms]
        slots = self.method.recent + first.block - 1 + 16 + 3
        self.sink, self.ring = (
            tuple(
                torch.full((len(lengths), 1, n, head_dim), float("nan"), dtype=torch.float16, device=device)
                for _ in "kv"
            )
            for n in (sink, slots)
        )
        for row, (one, new) in enumerate(zip(self.layers, self.new, strict=True)):
            for side, stored in enumerate(packed_fields(one, 0)):
                for name, t in stored.items():
                    self.fields[side][name][row, :, : t.shape[1]] = t.to(device)
            for side in (0, 1):
                head = min(self.at[row], sink)
                self.sink[side][row, :, :head] = new[side][0, :, :head].to(device)
                for t in range(one.packed[0], max(self.at[row] - sink, 0)):
                    self.ring[side][row, :, t % slots] = new[side][0, :, sink + t].to(device)
        self.lengths = kernels.Lengths.of(self.at, [one.packed[0] for one in self.layers], sink, device, True)

    def launch(self, key, value, **options):
        self.kernels.append_and_close(
            key,
            value,
            self.lengths,
            self.sink,
            self.ring,
            self.method.recent,
            self.fields[0],
            self.forms[0],
            self.fields[1],
            self.forms[1],
            **options,
        )

    def step(self, width, launch=True):
        parts = [tuple(t[:, :, n : n + width] for t in new) for n, new in zip(self.at, self.new, strict=True)]
        for one, part, n in zip(self.layers, parts, self.at, strict=True):
            feed(one, part, start=n)
        self.at = [n + width for n in self.at]
        key, value = (torch.cat([part[side] for part in parts]).to(self.device) for side in (0, 1))
        if launch:
            self.launch(key, value)
        return key, value

    def check(self):
        packed = [one.packed[0] for one in self.layers]
        want = self.kernels.Lengths.of(self.at, packed, self.method.sink, "cpu")
        for name in ("total", "packed", "sink", "recent"):
            assert getattr(self.lengths, name).tolist() == getattr(want, name).tolist(), name
        slots = self.ring[0].shape[2]
        for row, (one, new) in enumerate(zip(self.layers, self.new, strict=True)):
            held = torch.arange(packed[row], self.at[row] - self.method.sink)
            for side, form in enumerate(self.forms):
                got = self.ring[side][row].cpu()[:, held % slots]
                assert torch.equal(got, new[side][0, :, self.method.sink + held])
                blocks = packed[row] // one.block
                some = form.take({n: t[row : row + 1] for n, t in self.fields[side].items()}, blocks)
                assert_close(some, packed_of(one, side), form, share=2e-3)


def packed_of(one, side):
    return {name: t.unsqueeze(0) for name, t in packed_fields(one, 0)[side].items()}


CASES = {
    "fold": ("fold", [230, 250, 300], 12),
    "fold-small-window": ("fold:recent=24,sink=4,bits=4", [70, 140], 12),
    "innerq": ("innerq", [250], 5),
    "turboquant": ("turboquant:bits=3", [250], 5),
    "qjl": ("qjl", [250], 5),
    "fold-and-kivi": ("k=fold+v=kivi", [250], 5),
    "codebook": ("fold:k_bits=1,v_bits=2,codebook=true", [250], 5),
    "levels-and-codebook": ("fold:k_bits=3,v_bits=2,codebook=true", [250], 5),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_steps_give_the_layers_content(kernels, device, case):
    method, lengths, steps = case
    batch = Batch(kernels, device, method, lengths, grow=160)
    before = [one.packed[0] // 128 for one in batch.layers]
    for _ in range(steps):
        batch.step(13)
    batch.launch(None, None)
    assert all(one.packed[0] // 128 > page for one, page in zip(batch.layers, before, strict=True))
    batch.check()


@pytest.mark.parametrize("name", ["fold", "turboquant", "qjl", "fold:k_bits=1,v_bits=2,codebook=true"])
def test_a_step_leaves_the_bytes_of_a_prompt(kernels, device, name):
    """Whole pages closed one block after the other, and encoded together."""
    method, x = get(name), [random(1, 1, 384, 64, seed=s).to(device) for s in (1, 2)]
    forms = [form(spec(64)) for form in (method.key_format, method.value_format)]
    prompt, closed = ([poisoned(f.allocate(1, 1, 12, device)) for f in forms] for _ in "pc")
    for form, t, fields in zip(forms, x, prompt, strict=True):
        kernels.encode_pages(t, fields, form, 0, 256)
    slots, ring = 96 + 31 + 16, []
    for t in x:
        ring.append(torch.full((1, 1, slots, 64), float("nan"), dtype=t.dtype, device=device))
        ring[-1][:, :, :112] = t[:, :, :112]
    nothing = tuple(t[:, :, :0].contiguous() for t in x)
    lengths = kernels.Lengths.of([112], [0], 0, device, True)
    for at in range(112, 384, 16):
        kernels.append_and_close(
            *(t[:, :, at : at + 16] for t in x), lengths, nothing, tuple(ring), 96, closed[0], forms[0], closed[1], forms[1]
        )  # fmt: skip
    kernels.append_and_close(None, None, lengths, nothing, tuple(ring), 96, closed[0], forms[0], closed[1], forms[1])
    assert lengths.packed.tolist() == [288]
    for one, other in zip(prompt, closed, strict=True):
        for name in one:
            part = slice(0, 2 if name in ("mean", "norm") else 8)
            assert torch.equal(raw(one[name][:, :, part]), raw(other[name][:, :, part])), name


@pytest.mark.parametrize("name", ["fold", "k=fold+v=kivi"])
def test_a_program_closes_several_heads(kernels, device, name):
    method, found = get(name), []
    forms = [form(spec(64, heads=2, kv_heads=2)) for form in (method.key_format, method.value_format)]
    ring = tuple(random(2, 2, 140, 64, seed=s).to(device) for s in (1, 2))
    nothing = tuple(t[:, :, :0].contiguous() for t in ring)
    for each in (1, 2):
        fields = [poisoned(f.allocate(2, 2, 4, device)) for f in forms]
        lengths = kernels.Lengths.of([130, 120], [0, 0], 0, device, True)
        stored = fields[0], forms[0], fields[1], forms[1]
        kernels.append_and_close(None, None, lengths, nothing, ring, 96, *stored, each=each)
        assert lengths.packed.tolist() == [32, 0] and not lengths.ticket.any()
        found.append(fields)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert all(torch.equal(raw(a[n]), raw(b[n])) for n in a)
    with pytest.raises(ValueError, match="each=3: a program closes 1 of 2 heads"):
        kernels.append_and_close(None, None, lengths, nothing, ring, 96, *stored, each=3)


def test_many_sequences_share_programs():
    cpu = torch.device("cpu")  # as with one multiprocessor
    assert [compiled.heads_together(batch, 8, cpu) for batch in (1, 2, 100)] == [4, 8, 8]
    assert [compiled.heads_together(1, heads, cpu) for heads in (1, 4, 7, 96)] == [1, 1, 1, 48]


def test_nothing_is_written_past_the_storage(kernels, device):
    batch = Batch(kernels, device, "fold", [230, 250], grow=64)
    for side in (0, 1):
        batch.fields[side] = {
            n: t[:, :, : 1 if n in ("mean", "norm") else 4].clone() for n, t in batch.fields[side].items()
        }
    for _ in range(4):
        batch.step(16)
    batch.launch(None, None)
    assert batch.lengths.packed.tolist() == [128, 128]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fold", "innerq", "turboquant", "qjl", "fold:bits=2,codebook=true"])
def test_steps_in_a_cuda_graph(method):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    batch = Batch(compiled, torch.device("cuda"), method, [230, 250, 300], grow=220)
    key, value = batch.step(1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.launch(key, value)
    for _ in range(200):
        for static, new in zip((key, value), batch.step(1, launch=False), strict=True):
            static.copy_(new)
        graph.replay()
    batch.launch(None, None)
    batch.check()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (AffineGroups(64, 32, "plain", 2, "token"), "operand=plain"),
        (UniformTokens(512, 32, "key", 2), "head_dim=512"),
        (Paged(64, 32, "key", UniformTokens(64, 32, "key", 2), True, "", Rotation(64)), "basis rotation"),
        (Paged(64, 32, "key", AffineGroups(64, 32, "key", 2, "token"), True, "", Hadamard(64)), "before affine"),
        (Paged(96, 32, "key", AffineGroups(96, 32, "key", 2, "token"), True), "head_dim=96"),
        (Paged(64, 32, "key", UniformTokens(64, 32, "key", 2), basis=Hadamard(64), page=0), "whole sequence"),
        (get("qjl:outliers=4,normalize=false").key_format(spec(128)), "split sketch storage"),
        (get("turboquant:bits=8").key_format(spec(128)), "8-bit levels"),
        (Paged(64, 32, "key", SignSketch(64, 32, "key", (64,), (0.1,)), True), "without a basis"),
        (vectors(64, book=Codebook(torch.zeros(1, 256, 4))), "codes of=float32"),
        (Paged(64, 32, "key", ResidualCodes(64, 32, "key", 16, 256, 1)), "vector=16"),
        (Paged(64, 32, "key", ResidualCodes(64, 32, "key", 4, 100, 1)), "codes=100"),
        (Paged(64, 32, "key", ResidualCodes(64, 32, "key", 4, 256, 2)), "stages=2"),
    ],
)
def test_what_is_not_supported_is_named(form, reason):
    assert reason in compiled.unsupported(form)
    with pytest.raises(ValueError, match="encode"):
        compiled.encode_pages(torch.zeros(1, 1, 128, form.head_dim), {}, form, 0, 128)


def test_without_a_gpu_the_reason_is_the_device():
    assert "cpu" in compiled.why_not(uniform(64), torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0, "stop": 33}, "blocks of 32"),
        ({"start": 0, "stop": 256}, "storage has"),
        ({"start": 0, "stop": 128, "old": 32}, "no ring"),
        ({"start": 0, "stop": 128, "tokens": 64}, "are read"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(interpreted, options, message):
    form = uniform(64)
    x = torch.zeros(1, 1, options.pop("tokens", 128), 64)
    with pytest.raises(ValueError, match=message):
        interpreted.encode_pages(
            x, form.allocate(1, 1, 4, "cpu"), form, options.pop("start"), options.pop("stop"), **options
        )


@pytest.mark.parametrize("name", ["fold", "fold:bits=2,codebook=true"])
def test_kernels_test_themselves(interpreted, monkeypatch, name):
    shape, form = spec(64), get(name)
    formats = (form.key_format(shape), form.value_format(shape))
    assert interpreted.self_test(*formats, torch.device("cpu")) is None
    sound = interpreted.encode_pages

    def unsound(*args, **options):
        sound(*args, **options)
        args[1]["codes"][..., ::64] ^= -1

    monkeypatch.setattr(interpreted, "encode_pages", unsound)
    interpreted.self_test.cache_clear()
    assert "keys encoded on this device differ" in interpreted.self_test(*formats, torch.device("cpu"))


# ---- compiled ahead of time ------------------------------------------------------------------------------------------

CODEBOOKS = "fold:bits=1,codebook=true", "fold:bits=2,codebook=true", "fold:k_bits=3,v_bits=2,codebook=true"


@pytest.mark.parametrize(
    ("method", "what"),
    [
        *(("fold", what) for what in ("statistics", "keys", "step")),
        *((method, what) for method in ("turboquant:bits=3", "qjl", *CODEBOOKS) for what in ("keys", "step")),
        ("innerq", "step"),
    ],
)
def test_kernels_compile_without_spills(method, what):
    import aot

    shape, chosen = spec(128), get(method)
    keys, values = chosen.key_format(shape), chosen.value_format(shape)
    if what == "step":
        report = aot.compile_pages_step(keys, values, boundary=method == "innerq")
    else:
        report = aot.compile_encode_pages(keys, statistics=what == "statistics")
    assert report.spilled <= {"turboquant:bits=3": 64, CODEBOOKS[0]: 16}.get(method, 0) * (what == "step")
