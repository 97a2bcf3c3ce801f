"""Encoding kernels write the bytes that the formats' own ``encode`` writes.

Every check runs in Triton's interpreter on the CPU; with ``pytest -m gpu`` the same checks run as real launches. The
reference always runs on the CPU (on a GPU PyTorch divides by a scalar by multiplying with its reciprocal).
"""

import zlib

import pytest
import torch

pytest.importorskip("triton")


from encode_case import allocate, assert_same_bytes, check, plain_zero, poisoned, random, raw
from helpers import ENCODING, feed, interpreted_module, layer, packed_fields, spec, tokens
from kvfold.formats import AffineGroups
from kvfold.formats.affine import FP16_MAX
from kvfold.formats.paged import norms, plain
from kvfold.kernels.affine import encode as compiled
from kvfold.methods import Observation, get
from kvfold.methods.base import finite

MODES = ("asym", "sym", "hybrid")
BITS = (1, 2, 3, 4, 8)


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module("kvfold.kernels.affine.encode", *ENCODING)


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda" if request.param == "gpu" else "cpu")


@pytest.fixture
def kernels(device, interpreted):
    return compiled if device.type == "cuda" else interpreted


# ---- encode_blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bytes_are_the_formats(kernels, device, head_dim, operand, axis, mode, bits):
    if head_dim != 64 and bits != 3 and device.type == "cpu":
        pytest.skip("the interpreter covers every width at head_dim=64; the GPU covers all")
    form = AffineGroups(head_dim, 32, operand, bits, axis, mode, 32)
    check(kernels, device, form, random(*((2, 1, 64) if device.type == "cuda" else (1, 1, 32)), head_dim))


@pytest.mark.parametrize(("group", "block"), [(64, 64), (128, 128), (32, 64), (64, 128)])
@pytest.mark.parametrize(("operand", "axis"), [("key", "token"), ("value", "channel")])
def test_larger_groups_and_blocks(kernels, device, operand, axis, group, block):
    shape = (1, 2, 256, 128) if device.type == "cuda" else (1, 1, 2 * block, max(64, group))
    check(kernels, device, AffineGroups(shape[-1], block, operand, 3, axis, "asym", group), random(*shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["heads last", "wide rows", "every second channel", "one sequence twice"])
def test_any_dtype_and_strides(kernels, device, dtype, layout):
    count = 96 if device.type == "cuda" else 32
    whole = random(2, 2, count, 64, seed=1).to(dtype).to(device)
    if layout == "heads last":
        x = whole.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "wide rows":
        x = torch.full((2, 3, count + 5, 67), float("nan"), dtype=dtype, device=device)[:, 1:, 4:-1, 3:]
        x.copy_(whole)
    elif layout == "every second channel":
        x = torch.full((2, 2, count, 128), float("nan"), dtype=dtype, device=device)[..., 1::2]
        x.copy_(whole)
    else:
        x = whole[:1].expand(2, -1, -1, -1)
    check(kernels, device, AffineGroups(64, 32, "key", 2, "token", "asym", 32), x)
    check(kernels, device, AffineGroups(64, 32, "key", 2, "channel", "hybrid", 32), x)


def adversarial(name):
    x = random(1, 1, 32, 64, seed=2)
    tiny = torch.finfo(torch.float32).tiny
    return {
        "zeros": lambda: torch.zeros_like(x),
        "negative zeros": lambda: torch.where(x > 0, -0.0, 0.0),
        "constant": lambda: torch.full_like(x, 0.3),
        "constant, exact": lambda: torch.full_like(x, -1.5),
        "constant channels": lambda: x[:, :, :1].expand_as(x).clone(),
        "constant tokens": lambda: x[..., :1].expand_as(x).clone(),
        "constant size": lambda: torch.where(x > 0, 0.7, -0.7),
        "one outlier": lambda: torch.where(torch.arange(64) == 5, 3e4, x),
        "far offset": lambda: x * 0.01 + 4000,
        "beyond fp16": lambda: x * 1e6,
        "around fp16's end": lambda: x * FP16_MAX,
        "beyond everything": lambda: x * 1e30,
        "infinite": lambda: torch.where(x > 2, float("inf"), torch.where(x < -2, -float("inf"), x)),
        "fp16's subnormals": lambda: x * 2.0**-16,
        "below fp16": lambda: x * 1e-12,
        "float32's subnormals": lambda: x * tiny * 0.01,
        "negative subnormals": lambda: -(x.abs() * tiny * 0.01),
        "halves": lambda: (torch.arange(64).remainder(7) - 3) * 0.5 * torch.ones_like(x),
        "small integers": lambda: x.round(),
    }[name]()


@pytest.mark.parametrize(
    "name",
    [
        "zeros",
        "negative zeros",
        "constant",
        "constant, exact",
        "constant channels",
        "constant tokens",
        "constant size",
        "one outlier",
        "far offset",
        "beyond fp16",
        "around fp16's end",
        "beyond everything",
        "infinite",
        "fp16's subnormals",
        "below fp16",
        "float32's subnormals",
        "negative subnormals",
        "halves",
        "small integers",
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_adversarial_values(kernels, device, mode, name):
    """The interpreter has half of the pairs of axis and width for each kind of values, in turn."""
    x, turn = adversarial(name), zlib.crc32(f"{mode} {name}".encode()) % 2 == 1
    for axis in ("token", "channel"):
        for bits in (2, 8):
            if device.type == "cuda" or ((axis == "token") == (bits == 8)) == turn:
                check(kernels, device, AffineGroups(64, 32, "key", bits, axis, mode, 32), x)


def test_symmetric_groups_in_a_hybrid_format(kernels, device):
    check(
        kernels, device, AffineGroups(64, 32, "value", 2, "token", "hybrid", 32), random(1, 2, 64, 64) + 3, mode="sym"
    )


def test_sequences_of_a_batch_by_index(kernels, device):
    form = AffineGroups(64, 32, "key", 2, "token", "asym", 32)
    x, mean = random(2, 2, 64, 64), random(4, 2, 64, seed=5)
    out = allocate(form, 4, 2, 2, device)
    rows = torch.tensor([3, 1], device=device)
    how = kernels.KeyTransform(mean=mean.to(device))
    kernels.encode_blocks(x.to(device), out, form, 0, how, rows=rows)
    want = form.encode(x - mean[[3, 1]].unsqueeze(-2))
    assert_same_bytes({n: t[rows] for n, t in out.items()}, want, form, x)
    for t in out.values():
        assert torch.equal(raw(t[[0, 2]]), raw(poisoned({"": t[[0, 2]].clone()})[""]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("center", "normalize"), [("page", True), ("page", False), ("false", True)])
def test_innerq_transform(kernels, device, mode, center, normalize):
    """Statistics of a whole sequence, which kernels subtract and divide by."""
    method, shape = (
        get(f"innerq:paper=true,mode={mode},center={center},normalize={str(normalize).lower()}"),
        spec(128),
    )
    count = 96 if device.type == "cuda" else 32
    keys = tokens(2, count, shape=shape)[0].half()
    whole = method.key_format(shape)
    page = whole.statistics(finite(keys).unsqueeze(2))
    state = {"mean": page["mean"][:, :, 0].float()} if center == "page" else {}
    state |= {"norm": norms(page["norm"][:, :, 0])} if normalize else {}
    form = plain(whole)
    assert form is whole.inner and page.keys() == state.keys() == whole.page_fields().keys()
    out = allocate(form, 2, 2, count // 32, device)
    kernels.encode_blocks(keys.to(device), out, form, 0, transform(kernels, method, shape, state, device))
    want = method.encode_keys(finite(keys), {}, shape, torch.arange(count)[None, None], True, page)
    moved = finite(keys)
    moved = moved - state["mean"].unsqueeze(-2) if "mean" in state else moved
    moved = moved / state["norm"].unsqueeze(-2) if "norm" in state else moved
    assert_same_bytes(out, want, form, moved)


@pytest.mark.parametrize(
    "name", ["squat", "squat:channels=16", "squat:lam=0.1,bits=4", "squat:group=64", "squat:paper=true", "squat_pre"]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_squat_transform(kernels, device, name, head_dim):
    """Products round differently, so a code may differ by one now and then, and with it what follows in its row."""
    method, shape = get(name), spec(head_dim)
    count = 128 if device.type == "cuda" else 64
    keys = tokens(2, count, shape=shape)[0]
    positions = torch.arange(7, 7 + count)[None, None]
    state = observed(method, shape, keys, first=7)
    form = method.key_format(shape)
    out = allocate(form, 2, 2, count // form.block, device)
    how = transform(kernels, method, shape, state, device, torch.tensor([7, 7]))
    kernels.encode_blocks(keys.to(device), out, form, 0, how)
    want = method.encode_keys(keys, state, shape, positions, True)
    assert_nearly_same(out, want, form)


@pytest.mark.parametrize(("group", "ring"), [(32, True), (64, False)])
def test_blocks_with_updates_of_their_own(kernels, device, group, ring):
    """One launch leaves the bytes that a launch for each update leaves: of picked sequences in a ring, and of a call."""
    method, shape = get(f"squat:group={group}"), spec(64, heads=2, kv_heads=1)
    form, numbers = method.key_format(shape), [0, 0, 2]
    batch = 2 if ring else 1
    keys = tokens(batch, 3 * group, shape=shape)[0].to(device)
    updates = torch.stack([torch.stack([update_of(method, shape, i, b) for i in range(3)]) for b in range(batch)])
    updates = updates.to(device)
    x, rows, sequences = keys, None, batch
    if ring:
        rows, sequences = torch.tensor([2, 0], device=device), 3
        x = torch.full((3, 1, 3 * group + 5, 64), float("nan"), device=device)
        x[rows, :, torch.arange(group, 4 * group, device=device)[:, None] % x.shape[2]] = keys.permute(2, 0, 1, 3)
    got, want = (allocate(form, sequences, 1, 5, device) for _ in "gw")
    how = kernels.KeyTransform(update=updates, numbers=torch.tensor(numbers, device=device))
    kernels.encode_blocks(x, got, form, 1, how, rows=rows, ring_blocks=3 if ring else None)
    for block, number in enumerate(numbers):
        own = updates[:, number]
        how = kernels.KeyTransform(update=own if rows is None else own[[1, 0, 0]])  # by the sequences of what is stored
        part = keys[:, :, block * group : (block + 1) * group]
        kernels.encode_blocks(part, want, form, 1 + block, how, rows=rows)
    for name, t in want.items():
        assert torch.equal(raw(got[name]), raw(t))


def update_of(method, shape, state, sequence):
    """An update matrix of its own for every state and sequence, [num_kv_heads, ...]."""
    queries = tokens(1, 64, seed=10 * state + sequence, shape=shape)[2]
    return method.observe(Observation(queries, torch.arange(64)[None]), shape)["update"][0]


@pytest.mark.parametrize(
    ("update", "numbers", "message"),
    [
        (None, torch.zeros(2, dtype=torch.int64), "there must be some"),
        (torch.zeros(1, 1, 32, 32), torch.zeros(2, dtype=torch.int64), "there must be some"),
        (torch.zeros(2, 3, 1, 32, 32), torch.zeros(2, dtype=torch.int64), "of each sequence"),
        (torch.zeros(1, 3, 1, 32, 32), torch.zeros(3, dtype=torch.int64), "3 of them for 2 blocks"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(update, numbers, message):
    method, shape = get("squat"), spec(64, heads=1, kv_heads=1)
    form = method.key_format(shape)
    fields = form.allocate(1, 1, 2, "cpu")
    how = compiled.KeyTransform(update=update, numbers=numbers)
    with pytest.raises(ValueError, match=message):
        compiled.encode_blocks(torch.zeros(1, 1, 64, 64), fields, form, 0, how)


def assert_nearly_same(got, want, form):
    got = {n: t.cpu() for n, t in got.items()}
    for t in got.values():
        assert not t.is_floating_point() or torch.isfinite(t).all()
    a, b = form.decode(got), form.decode(want)
    steps = (a - b).abs() / (b.amax() - b.amin())
    assert (steps > 1e-3).float().mean() < 2e-3, f"{(steps > 1e-3).float().mean():.2%} of the values differ"
    assert (raw(got["codes"]) != raw(want["codes"])).float().mean() < 1e-2


def observed(method, shape, keys, first=0):
    count = keys.shape[-2]
    queries = tokens(keys.shape[0], count, seed=9, shape=shape)[2]
    return method.observe(Observation(queries, torch.arange(first, first + count)[None]), shape)


def transform(kernels, method, shape, state, device, first=None):
    """What :class:`KeyTransform` holds for a method's state."""
    pre = method.pre_rope
    return kernels.KeyTransform(
        inv_freq=shape.rope.inv_freq.to(device) if pre else None,
        first_position=first.to(device) if pre else None,
        rope_factor=1 / shape.rope.scaling,
        **{name: state[name].to(device) for name in ("mean", "norm", "update") if name in state},
    )


# ---- append_and_close ------------------------------------------------------------------------------------------------


class Batch:
    """Sequences of different length: each in a layer of its own, all together in what the kernel reads and writes."""

    def __init__(self, kernels, device, method, lengths, dtype=torch.float16, head_dim=64, grow=160, sizes=torch.int32):
        self.kernels, self.device, self.method = kernels, device, get(method)
        self.shape = spec(head_dim, heads=2, kv_heads=1, dtype=dtype)
        self.new = [tokens(1, n + grow, seed=i, shape=self.shape, dtype=dtype) for i, n in enumerate(lengths)]
        for _, values, _ in self.new:
            values += 4 * torch.randn(self.shape.head_dim, generator=torch.Generator().manual_seed(7))
        self.layers = [layer(method, self.shape) for _ in lengths]
        for one, new, n in zip(self.layers, self.new, lengths, strict=True):
            feed(one, tuple(t[:, :, :n] for t in new))
        self.at = list(lengths)
        first = self.layers[0]
        block, sink = first.block, self.method.sink
        self.forms = (plain(first.key_format), first.value_format)
        most = (max(lengths) + grow) // block + 1
        self.fields = [allocate(f, len(lengths), 1, most, device) for f in self.forms]
        slots = self.method.recent + block - 1 + 16 + 3  # no multiple of anything
        self.ring, self.sink = (
            tuple(torch.full((len(lengths), 1, n, head_dim), float("nan"), dtype=dtype, device=device) for _ in "kv")
            for n in (slots, sink)
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
        state = {n: torch.cat([one.following.state[n] for one in self.layers]) for n in first.following.state}
        shared = {n: torch.cat([one.slabs.shared[0][n] for one in self.layers])[:, :, 0] for n in first.slabs.shared[0]}
        state |= {n: t.float() if n == "mean" else norms(t) for n, t in shared.items()}
        self.first = torch.tensor([sink] * len(lengths))
        self.transform = transform(kernels, self.method, self.shape, state, device, self.first)
        lens = kernels.Lengths.of(self.at, [one.packed[0] for one in self.layers], sink, device, True)
        self.lengths = kernels.Lengths(lens.total.to(sizes), lens.packed.to(sizes), lens.sink, lens.recent, lens.ticket)
        self.boundary = None
        if "hybrid_prefill" in method:
            self.boundary = torch.tensor([max(n - sink, 0) // block * block for n in lengths], device=device)

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
            self.transform,
            self.boundary,
            **options,
        )

    def step(self, counts, width, launch=True):
        """Append ``counts`` tokens to each sequence, passed as ``width`` columns of which the rest hold NaN."""
        columns = [torch.full((len(counts), 1, width, self.shape.head_dim), float("nan")) for _ in "kv"]
        for row, count in enumerate(counts):
            part = slice(self.at[row], self.at[row] + count)
            for side in (0, 1):
                columns[side][row, :, :count] = self.new[row][side][0, :, part]
            if count:
                feed(self.layers[row], tuple(t[:, :, part] for t in self.new[row]), start=self.at[row])
            self.at[row] += count
        dtype = self.shape.dtype
        key, value = (t.to(dtype).transpose(2, 3).contiguous().transpose(2, 3).to(self.device) for t in columns)
        if launch:
            ragged = None if set(counts) == {width} else torch.tensor(counts, dtype=torch.int32, device=self.device)
            self.launch(key, value, counts=ragged)
        return key, value

    def check_lengths(self, packed):
        sink = self.method.sink
        want = self.kernels.Lengths.of(self.at, packed, sink, "cpu")
        for name in ("total", "packed", "sink", "recent"):
            assert getattr(self.lengths, name).tolist() == getattr(want, name).tolist(), name
        assert not self.lengths.ticket.any()

    def check_windows(self, packed):
        sink, slots = self.method.sink, self.ring[0].shape[2]
        for row, new in enumerate(self.new):
            for side in (0, 1):
                head = min(self.at[row], sink)
                assert torch.equal(self.sink[side][row, :, :head].cpu(), new[side][0, :, :head])
                held = torch.arange(packed[row], max(self.at[row] - sink, 0))
                got = self.ring[side][row].cpu()[:, held % slots]
                assert torch.equal(got, new[side][0, :, sink + held]), f"sequence {row}: recent tokens"

    def check_packed(self):
        exact = "squat" not in self.method.name
        for row, one in enumerate(self.layers):
            blocks = one.packed[0] // one.block
            for side, want in enumerate(packed_fields(one, 0)):
                got = {n: t[row, :, :blocks].cpu() for n, t in self.fields[side].items()}
                if blocks and (exact or side == 1):
                    for name in want:
                        same = raw(plain_zero(got)[name]) == raw(plain_zero(want)[name])
                        assert same.all(), f"sequence {row}, {'keys values'.split()[side]}: {name}"
                elif blocks:
                    assert_nearly_same(
                        {n: t[None] for n, t in got.items()}, {n: t[None] for n, t in want.items()}, self.forms[0]
                    )
                for name, t in self.fields[side].items():
                    rest = t[row, :, blocks:]
                    assert torch.equal(raw(rest), raw(poisoned({"": rest.clone()})[""])), f"{name}: written too far"


LAYERS = {
    "kivi": ("kivi:sink=0,recent=32", [40, 70, 95]),
    "kivi-3bit-sink": ("kivi:recent=20,sink=5,k_bits=3,v_bits=4", [3, 60, 77]),
    "kivi-no-window": ("kivi:sink=0,recent=0", [1, 31, 64]),
    "kivi-g64": ("kivi:group=64,sink=0,recent=10", [20, 74, 100]),
    "innerq": ("innerq:paper=true,center=page,sink=4,recent=24", [61, 64, 90]),
    "innerq-sym": ("innerq:paper=true,center=page,mode=sym,sink=32,recent=40,bits=1", [104, 110, 130]),
    "innerq-asym": ("innerq:paper=true,mode=asym,sink=32,recent=40,bits=8", [104, 110, 130]),
    "innerq-hybrid-prefill": ("innerq:paper=true,mode=hybrid_prefill,sink=4,recent=24", [64, 70, 115]),
    "squat": ("squat:paper=true", [64, 70, 90]),
    "squat-pre": ("squat_pre:paper=true,sink=3", [67, 70, 90]),
}


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS.keys())
def test_steps_give_the_layers_content(kernels, device, case):
    """Ragged sequences, 1 to 16 tokens a step, some sequences idle: the content is that of the layers."""
    batch = Batch(kernels, device, *case)
    generator = torch.Generator().manual_seed(0)
    widths = (1, 16, 5, 13) if device.type == "cpu" else (1, 13)  # a GPU compiles each; the interpreter has seen all
    for i in range(12):
        width = widths[i % len(widths)]
        counts = [width] * 3
        if i % 3 == 2:
            counts = torch.randint(0, width + 1, (3,), generator=generator).tolist()
        before = [one.packed[0] for one in batch.layers]
        batch.step(counts, width)
        # what attention of this step reads: nothing of the step is packed yet, all of it lies in the windows
        batch.check_lengths(before)
        batch.check_windows(before)
    batch.launch(None, None)
    after = [one.packed[0] for one in batch.layers]
    assert after > before or sum(after) > 96
    batch.check_lengths(after)
    batch.check_windows(after)
    batch.check_packed()


def test_append_attend_close_in_two_launches(kernels, device):
    batch = Batch(kernels, device, "kivi:recent=32,sink=2", [40, 70, 95], torch.bfloat16, sizes=torch.int64)
    for _ in range(25):
        before = [one.packed[0] for one in batch.layers]
        key, value = batch.step([1, 1, 1], 1, launch=False)
        batch.launch(key, value, close=False)
        batch.check_lengths(before)
        batch.launch(None, None)
        batch.check_lengths([one.packed[0] for one in batch.layers])
    batch.check_windows([one.packed[0] for one in batch.layers])
    batch.check_packed()


def test_lengths_without_a_ticket_are_only_read(kernels, device):
    batch = Batch(kernels, device, "kivi:sink=0,recent=32", [40, 70, 95])
    batch.lengths = kernels.Lengths.of(batch.at, [0, 32, 32], 0, device)
    batch.step([3, 3, 3], 3)
    batch.check_windows([0, 32, 32])
    for name in ("total", "packed", "sink", "recent"):
        assert getattr(batch.lengths, name).equal(
            getattr(kernels.Lengths.of([40, 70, 95], [0, 32, 32], 0, device), name)
        )


def test_nothing_is_written_past_the_storage(kernels, device):
    batch = Batch(kernels, device, "kivi:sink=0,recent=32", [70, 95, 64])
    for side in (0, 1):
        batch.fields[side] = {n: t[:, :, :1].clone() for n, t in batch.fields[side].items()}
    guard = [{n: t.clone() for n, t in f.items()} for f in batch.fields]
    for _ in range(3):
        batch.step([16, 16, 16], 16)
    for f, g in zip(batch.fields, guard, strict=True):
        for n in f:
            assert torch.equal(raw(f[n]), raw(g[n]))
    assert batch.lengths.packed.tolist() == [32, 32, 32]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "method", ["kivi:sink=0,recent=32", "innerq:paper=true,center=page,sink=4,recent=24", "squat:paper=true"]
)
def test_steps_in_a_cuda_graph(method):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    batch = Batch(compiled, device, method, [64, 70, 90])
    key, value = batch.step([1, 1, 1], 1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.launch(key, value)
    for _ in range(70):
        for static, new in zip((key, value), batch.step([1, 1, 1], 1, launch=False), strict=True):
            static.copy_(new)
        graph.replay()
    batch.launch(None, None)
    packed = [one.packed[0] for one in batch.layers]
    batch.check_lengths(packed)
    batch.check_windows(packed)
    batch.check_packed()


@pytest.mark.gpu
def test_a_prompt_is_encoded_without_a_copy():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    form = AffineGroups(128, 32, "key", 2, "token", "asym", 32)
    x = torch.randn(1, 8, 32768, 128, device="cuda", dtype=torch.float16)
    out = form.allocate(1, 8, 1024, "cuda")
    compiled.encode_blocks(x, out, form, 0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compiled.encode_blocks(x, out, form, 0)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs a CUDA device with 24 GiB free")
    form = AffineGroups(128, 32, "key", 2, "token", "asym", 32)
    x = torch.empty(2, 8, 1_300_000 // 32 * 32, 128, device="cuda", dtype=torch.float16)  # 2.7e9 elements
    x[-1, -1, -64:] = random(64, 128).half().cuda()
    x[0, 0, :64] = random(64, 128, seed=1).half().cuda()
    out = form.allocate(2, 8, x.shape[2] // 32, "cuda")
    compiled.encode_blocks(x, out, form, 0)
    for b, h, part, blocks in ((-1, -1, slice(-64, None), slice(-2, None)), (0, 0, slice(0, 64), slice(0, 2))):
        want = form.encode(x[b, h, part].float().cpu()[None, None])
        for name, t in out.items():
            assert torch.equal(raw(t[b, h, blocks].cpu()), raw(want[name][0, 0]))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "options", "reason"),
    [
        (AffineGroups(96, 32, "key", 2, "token", "asym", 32), {}, "head_dim=96"),
        (AffineGroups(128, 32, "key", 2, "token", "asym", 16), {}, "group=16"),
        (AffineGroups(128, 64, "value", 2, "token", "hybrid", 64), {}, "group=64 in mode hybrid"),
        (AffineGroups(128, 32, "plain", 2, "token", "asym", 32), {}, "operand=plain"),
        (AffineGroups(128, 32, "key", 2, "token", "asym", 32), {"update": torch.zeros(1, 1, 120, 120)}, "channels=8"),
        (AffineGroups(128, 32, "key", 2, "channel", "asym", 32), {"update": torch.zeros(1, 1, 64, 64)}, "axis=channel"),
        (get("qjl").key_format(spec(128)), {}, "storage"),
    ],
)
def test_what_is_not_supported_is_named(form, options, reason):
    width = form.head_dim - options["update"].shape[-1] if options else None
    assert reason in compiled.unsupported(form, width)
    with pytest.raises(ValueError, match="encode"):
        compiled.encode_blocks(
            torch.zeros(1, 1, 64, form.head_dim), {}, form, 0, compiled.KeyTransform(update=options.get("update"))
        )


def test_without_a_gpu_the_reason_is_the_device():
    form = AffineGroups(128, 32, "key", 2, "token", "asym", 32)
    assert "cpu" in compiled.why_not(form, torch.device("cpu"))


def test_shapes_that_do_not_fit_are_refused(interpreted):
    form = AffineGroups(64, 32, "key", 2, "token", "asym", 32)
    fields = form.allocate(1, 1, 2, "cpu")
    for x, offset, message in (
        (torch.zeros(1, 1, 33, 64), 0, "whole blocks"),
        (torch.zeros(1, 1, 64, 64), 1, "block_offset=1"),
        (torch.zeros(2, 1, 32, 64), 0, "fields"),
    ):
        with pytest.raises(ValueError, match=message):
            interpreted.encode_blocks(x, fields, form, offset)
    window = torch.zeros(1, 1, 63, 64)
    lengths = interpreted.Lengths.of([0], [0], 0, "cpu")
    with pytest.raises(ValueError, match="63 slots"):
        interpreted.append_and_close(
            window[:, :, :1],
            window[:, :, :1],
            lengths,
            (window[:, :, :0],) * 2,
            (window,) * 2,
            32,
            fields,
            form,
            fields,
            form,
        )
