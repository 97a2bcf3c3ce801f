"""Kernels that take tokens into dense storage leave the bytes of the format: in Triton's interpreter and (``-m gpu``) as real
launches."""

import pytest
import torch

pytest.importorskip("triton")

import aot
from helpers import ENCODING, interpreted_module
from kvfold.formats import AffineGroups, Dense
from kvfold.kernels.dense import encode as compiled
from kvfold.kernels.lengths import Lengths
from kvfold.methods.base import finite

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module(
        "kvfold.kernels.dense.encode", *ENCODING, "kvfold.kernels.affine.encode", "kvfold.kernels.dense._encode"
    )


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda" if request.param == "gpu" else "cpu")


@pytest.fixture
def kernels(device, interpreted):
    return compiled if device.type == "cuda" else interpreted


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def storage(form, batch, heads, blocks, device):
    return {n: t.fill_(float("nan")) for n, t in form.allocate(batch, heads, blocks, device).items()}


def raw(x):
    return x.cpu().contiguous().view(torch.uint8)


def check(kernels, device, x, form, blocks=4, offset=1, transposed=False):
    """Encode ``x`` on the CPU and by the kernel; blocks beside it stay as they are."""
    want = form.encode(finite(x))["x"]
    given = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    fields = storage(form, x.shape[0], x.shape[1], blocks, device)
    kernels.encode_blocks(given.to(device), fields, form, offset)
    got = fields["x"].cpu()
    count = want.shape[2]
    assert torch.equal(raw(got[:, :, offset : offset + count]), raw(want))
    assert got[:, :, :offset].isnan().all() and got[:, :, offset + count :].isnan().all()


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_prompt(kernels, device, dtype, transposed):
    check(kernels, device, random(2, 2, 64, 64).to(dtype), Dense(64, 32, "key", dtype), transposed=transposed)


@pytest.mark.parametrize("dim, block", [(80, 32), (16, 96), (256, 32)])
def test_shapes(kernels, device, dim, block):
    check(kernels, device, random(1, 3, block, dim).half(), Dense(dim, block, "value", FP16))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_what_lies_beyond_the_range(kernels, device, dtype):
    x = random(1, 1, 32, 16).to(dtype)
    x[..., :4, 0] = torch.tensor([float("inf"), float("-inf"), 65504.0, -0.0]).to(dtype)
    if dtype != FP16:
        x[..., 4, 1:3] = torch.tensor([3e38, -1e19]).to(dtype)
    check(kernels, device, x, Dense(16, 32, "key", dtype))


@pytest.mark.parametrize("picked", [None, [2, 0]])
def test_from_a_ring(kernels, device, picked):
    """Tokens 64 to 128 of every sequence, in a ring of 70 slots, to storage that begins with block 1."""
    form, tokens = Dense(64, 32, "key", FP16), random(3, 2, 128, 64).half()
    ring = torch.full((3, 2, 70, 64), float("nan"), dtype=FP16)
    ring[:, :, torch.arange(64, 128) % 70] = tokens[:, :, 64:]
    fields = storage(form, 3, 2, 4, device)
    rows = None if picked is None else torch.tensor(picked, device=device)
    kernels.encode_blocks(ring.to(device), fields, form, 1, rows, 1, 2)
    got = fields["x"].cpu()
    for row in range(3):
        if picked is None or row in picked:
            assert torch.equal(got[row, :, 1:3].flatten(1, 2), tokens[row, :, 64:])
        else:
            assert got[row].isnan().all()


@pytest.mark.parametrize("width, recent, sink, block", [(1, 0, 0, 32), (2, 20, 4, 32), (3, 40, 8, 96), (16, 32, 0, 32)])
def test_steps(kernels, device, width, recent, sink, block):
    """Sequences of different length; what a step closes is what left the recent window."""
    lengths, heads, dim, slots = [9, 130], 1, 16, recent + block - 1 + width
    forms = [Dense(dim, block, side, FP16) for side in ("key", "value")]
    grow = -(-40 // width) * width
    new = [random(2, heads, 400, dim, seed=s).half() for s in (0, 1)]
    blocks = -(-400 // block)
    fields = [storage(f, 2, heads, blocks, device) for f in forms]
    sinks, ring = (
        tuple(torch.full((2, heads, n, dim), float("nan"), dtype=FP16, device=device) for _ in "kv")
        for n in (sink, slots)
    )
    packed = [max(n - sink - recent, 0) // block * block for n in lengths]
    for side in (0, 1):
        for row, n in enumerate(lengths):
            x, head = new[side][row].to(device), min(n, sink)
            sinks[side][row, :, :head] = x[:, :head]
            at = torch.arange(packed[row], max(n - sink, 0), device=device)
            ring[side][row][:, at % slots] = x[:, sink + at]
            fields[side]["x"][row].view(heads, -1, dim)[:, : packed[row]] = x[:, sink : sink + packed[row]]
    on_device = Lengths.of(lengths, packed, sink, device, True)
    stored = fields[0], forms[0], fields[1], forms[1]
    for step in range(0, grow, width):
        key, value = (
            torch.stack([x[row, :, n + step : n + step + width] for row, n in enumerate(lengths)]).to(device)
            for x in new
        )
        kernels.append_and_close(key, value, on_device, sinks, ring, recent, *stored)
    kernels.append_and_close(None, None, on_device, sinks, ring, recent, *stored)
    total = [n + grow for n in lengths]
    packed = [max(n - sink - recent, 0) // block * block for n in total]
    want = Lengths.of(total, packed, sink, "cpu")
    for name in ("total", "packed", "sink", "recent"):
        assert getattr(on_device, name).tolist() == getattr(want, name).tolist(), name
    for side in (0, 1):
        for row, n in enumerate(total):
            x, done = new[side][row], packed[row]
            got = fields[side]["x"][row].cpu().view(heads, -1, dim)
            assert torch.equal(got[:, :done], x[:, sink : sink + done]) and got[:, done:].isnan().all()
            at = torch.arange(done, n - sink)
            assert torch.equal(ring[side][row].cpu()[:, at % slots], x[:, sink + at])
            assert torch.equal(sinks[side][row].cpu(), x[:, :sink])


def test_lengths_that_others_advance_stay(kernels, device):
    form = Dense(16, 32, "key", FP16)
    fields, x = storage(form, 1, 1, 1, device), random(1, 1, 1, 16).half().to(device)
    ring = tuple(torch.zeros(1, 1, 32, 16, dtype=FP16, device=device) for _ in "kv")
    nothing = tuple(t[:, :, :0].contiguous() for t in ring)
    lengths = Lengths.of([40], [32], 0, device)
    kernels.append_and_close(x, x, lengths, nothing, ring, 0, fields, form, fields, form)
    assert lengths.total.tolist() == [40] and torch.equal(ring[0][:, :, 8], x[:, :, 0])
    assert fields["x"].isnan().all()  # nothing is due


@pytest.mark.parametrize(
    "form, reason",
    [
        (Dense(64, 16, "key", FP16), "block=16: must be a multiple of 32"),
        (Dense(64, 32, "key", torch.float64), "dtype=float64"),
        (AffineGroups(64, 32, "key", 2, "token", "asym", 32), "affine storage"),
    ],
)
def test_what_is_refused_is_named(form, reason):
    assert reason in compiled.unsupported(form)
    with pytest.raises(ValueError, match=reason):
        compiled.encode_blocks(torch.zeros(1, 1, 32, 64), form.allocate(1, 1, 1, "cpu"), form, 0)


@pytest.mark.parametrize(
    "dim, tokens, bf16", [(128, None, True), (80, None, False), (128, 1, True), (80, 16, False), (256, 0, True)]
)
def test_compiles_without_spills(dim, tokens, bf16):
    report = aot.compile_dense_encoding(dim, tokens, bf16, advance=tokens == 16)
    assert report.spilled == 0
