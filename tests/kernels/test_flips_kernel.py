"""The kernels that find bits of values in fp16 and flip them (CommVQ): a warp's lanes run by PyTorch, the rest in the
interpreter; compiled ahead, and on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

import lanes
from aot.tables import compile_flips, compile_gains, compile_value_bits
from books_case import value_tables
from helpers import ENCODING, interpreted_module, relative
from kvfold.formats.binary import BinaryCodes
from kvfold.kernels.common.encode_source import Source
from kvfold.kernels.commvq import encode as encode_pairs
from kvfold.methods.commvq import ValueCodebook

INTERPRETED = (
    *ENCODING,
    "kvfold.kernels.searched._encode",
    "kvfold.kernels.commvq._encode",
    "kvfold.kernels.commvq.encode",
)
HEADS = 2
OFFSET = 30.0
"""Beside which values are small."""


class Emulated:
    """A kernel whose launches PyTorch runs."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            lanes.run(self.kernel, grid, arguments, constants, num_warps, 1 << 16)

        return launch


@pytest.fixture(params=["together", "apart"])
def module(request, monkeypatch):
    """Bits chosen and flipped by one kernel, or by two."""
    copy = interpreted_module("kvfold.kernels.commvq.encode", *INTERPRETED)
    for name in ("flip_kernel", "value_bits_kernel"):
        monkeypatch.setattr(copy, name, Emulated(getattr(copy, name)))
    if request.param == "apart":
        monkeypatch.setitem(copy.TOGETHER, "codes", ())
    monkeypatch.setattr(copy, "flips_by_lanes", lambda codes: True)
    return copy


def case(codes, dim, tokens, batch=1, offset=OFFSET):
    """A codebook of values, and values that it was not learned from; the second head's are 200 times as large."""
    draw = torch.Generator().manual_seed(0)
    parts = value_tables(draw, HEADS, codes, dim, False)
    sizes = torch.tensor([0.1, 20.0]).view(HEADS, 1, 1)
    parts["metric"] = parts["metric"].float() / sizes
    parts["codebook"] = parts["codebook"].float() * sizes
    parts["offset"] = (parts["offset"].float() + offset) * sizes[:, 0]
    origin = torch.full((HEADS, 1, dim), offset) @ (parts["metric"] * sizes) @ parts["axes"].float().mT
    parts["shift"] = parts["shift"].float() - origin.squeeze(1)
    x = (torch.randn(batch, HEADS, tokens, dim, generator=draw) + offset) * sizes
    return ValueCodebook(parts), x


def bits_of(fmt, fields, blocks):
    return fmt.decode({"bits": fields["bits"][:, :, blocks].cpu()})[..., : fmt.codes]


def missed(book, bits, x):
    """Squared error under the metric, [heads]."""
    rest = (book.decode(bits) - x) @ book.tensors["metric"].float()
    return rest.square().sum((-1, -2))


@pytest.mark.parametrize("codes, dim, dtype", [(128, 128, torch.bfloat16), (64, 32, torch.float32)])
def test_gains_are_those_of_flips(codes, dim, dtype, module):
    """Several sequences, tokens that fill no program, values that lie around an offset which is large beside them."""
    book, x = case(codes, dim, 35, batch=2)
    x = x.to(dtype)
    flat = x.float().transpose(0, 1).flatten(1, 2)
    got = module.first_gains(x, book.gains()).flatten(1, 2)
    bits = (got.view(torch.int32) & 1).float()
    want, slope, gram = book.start(flat, True)
    same = (bits == want).all(-1)
    assert same.float().mean() > 0.9
    gain = (1 - 2 * want) * slope - 0.5 * gram.diagonal(dim1=-1, dim2=-2).unsqueeze(1)
    for head in range(HEADS):
        found = got[head] / book.gains().size[head]
        assert relative(found[same[head]], gain[head][same[head]]) < 2e-3


def test_products_of_codes_are_those_of_what_bits_miss():
    """So ``x @ along - bits @ gram`` is ``(x - bits @ codebook) @ along``, under metrics that are not the identity."""
    book, _ = case(128, 64, 32)
    tables, metric = book.gains(), book.tensors["metric"].float()
    square = metric @ metric.mT
    off = square - torch.diag_embed(square.diagonal(dim1=-1, dim2=-2))
    assert (off.norm(dim=(-1, -2)) > 0.1 * square.norm(dim=(-1, -2))).all()
    for head in range(HEADS):
        codes = book.steps.codebook[head] * tables.scale[head]
        assert relative(codes @ tables.along[head].float(), tables.gram[head].float()) < 1e-3


@pytest.mark.parametrize(
    "codes, dim, flips",
    [(128, 128, 32), (256, 128, 32), (256, 256, 32), (128, 64, 32), (64, 64, 32), (64, 64, 3), (64, 64, 0)],
)
def test_lanes_flip_bits_as_well_as_the_method(codes, dim, flips, module):
    book, x = case(codes, dim, 32)
    fmt = BinaryCodes(dim, 32, "value", codes, 1)
    fields = fmt.allocate(1, HEADS, 2, torch.device("cpu"))
    module.encode_bits(fmt, Source(x, fields, 1, tables=(book, flips)))
    got, want = bits_of(fmt, fields, slice(1, None))[0], book.bits(x[0], flips)
    assert (got != want).float().mean() < 0.02
    assert (missed(book, got, x[0]) < 1.004 * missed(book, want, x[0])).all()
    if flips == 32:
        assert (missed(book, got, x[0]) < 0.95 * missed(book, book.bits(x[0], 0), x[0])).all()


@pytest.mark.parametrize("operand", ["value", "plain"])
@pytest.mark.parametrize("codes", [64, 128, 256])
def test_bits_are_packed_as_the_format_has_them(codes, operand, module):
    """Two sequences, which are others of the storage, whose first block stays what it was."""
    book, x = case(codes, 64, 64, batch=2)
    fmt = BinaryCodes(64, 32, operand, codes, 1)
    fields = {name: torch.full_like(t, -1) for name, t in fmt.allocate(3, HEADS, 3, torch.device("cpu")).items()}
    rows = torch.tensor([2, 0])
    module.encode_bits(fmt, Source(x, fields, 1, rows, tables=(book, 0)))
    want = book.bits(x.transpose(0, 1).flatten(1, 2), 0).unflatten(1, (2, -1)).transpose(0, 1)
    assert (bits_of(fmt, fields, slice(1, None))[rows] != want).float().mean() < 0.002
    assert (fields["bits"][1] == -1).all() and (fields["bits"][:, :, 0] == -1).all()


@pytest.mark.parametrize("dtype, skipped", [(torch.bfloat16, 0), (torch.float16, 3)])
def test_values_of_a_model_are_read_where_they_lie(dtype, skipped, module):
    """Heads of a token side by side, also where that is not at multiples of 16 bytes; tokens that fill no program."""
    book, x = case(64, 32, 96, offset=0.0)
    wide = torch.zeros(1, 96, HEADS * 32 + skipped, dtype=dtype)
    wide[..., skipped:] = x.transpose(1, 2).flatten(2)
    x = wide[..., skipped:].unflatten(-1, (HEADS, 32)).transpose(1, 2)
    fmt = BinaryCodes(32, 32, "value", 64, 1)
    fields = fmt.allocate(1, HEADS, 3, torch.device("cpu"))
    module.encode_bits(fmt, Source(x, fields, 0, tables=(book, 32)))
    got, want = bits_of(fmt, fields, slice(None))[0], book.bits(x[0].float(), 32)
    assert (got != want).float().mean() < 0.02
    assert (missed(book, got, x[0].float()) < 1.004 * missed(book, want, x[0].float())).all()


def test_values_far_from_all_codes_are_flipped_to_what_is_nearest(module):
    """Up to a thousand times as large as those that codes were learned from, infinite ones and zeros."""
    book, x = case(64, 64, 32, offset=0.0)
    x[0, :, 3] *= 1000
    x[0, :, 5] = 0
    x[0, 0, 7, 2] = torch.inf
    fmt = BinaryCodes(64, 32, "value", 64, 1)
    fields = fmt.allocate(1, HEADS, 1, torch.device("cpu"))
    module.encode_bits(fmt, Source(x, fields, 0, tables=(book, 32)))
    got, clean = bits_of(fmt, fields, slice(None))[0], x[0].clamp(-1e18, 1e18)
    want = book.bits(clean, 32)
    kept = torch.tensor([i for i in range(32) if i != 7])
    for token in (3, 5):
        pick = torch.tensor([token])
        a, b = (missed(book, bits[:, pick], clean[:, pick]) for bits in (got, want))
        assert (a < 1.02 * b + 1e-6).all(), token
    assert (missed(book, got[:, kept], clean[:, kept]) < 1.01 * missed(book, want[:, kept], clean[:, kept])).all()


def test_the_self_test_sees_flips_that_are_wrong(module, monkeypatch):
    fmt = BinaryCodes(32, 32, "value", 64, 1)
    assert module.bits_test(fmt, torch.device("cpu")) is None
    together, right = module.choose_and_flip, module.flip_and_pack
    monkeypatch.setattr(module, "choose_and_flip", lambda f, tables, flips, to: together(f, tables, flips // 4, to))
    monkeypatch.setattr(module, "flip_and_pack", lambda f, gains, tables, flips, *to: right(f, gains, tables, 8, *to))
    said = module.bits_test(fmt, torch.device("cpu"))
    assert said is not None and said.startswith("flips of bits on this device leave")


@pytest.mark.parametrize("codes", [64, 128, 256])
def test_flips_compile_without_spills(codes):
    report = compile_flips(codes)
    assert report.spilled == 0 and report.shared == 0
    assert report.registers <= encode_pairs.FLIP[codes]
    assert report.instructions["VIMNMX3"]  # three numbers by one instruction


@pytest.mark.parametrize("codes, spilled", [(64, 0), (128, 32), (256, 96)])
def test_bits_chosen_and_flipped_compile_within_their_registers(codes, spilled):
    report = compile_value_bits(codes, 64 if codes == 64 else 128)
    assert report.registers <= encode_pairs.CHOSEN[codes]
    assert report.spilled <= spilled and report.spills_in_loop == 0


@pytest.mark.parametrize("codes", [128, 256])
def test_gains_compile_without_spills_in_loops(codes):
    report = compile_gains(codes)
    assert report.spills_in_loop == 0 and report.spilled <= 64


@pytest.mark.gpu
@pytest.mark.parametrize("codes, tokens, flips", [(128, 4096, 32), (256, 4096, 32), (64, 96, 32), (256, 96, 0)])
@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
def test_bits_on_a_gpu_are_as_good(codes, tokens, flips, together, monkeypatch):
    if not together:
        monkeypatch.setitem(encode_pairs.TOGETHER, "codes", ())
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    book, x = case(codes, 64 if codes == 64 else 128, tokens)
    fmt = BinaryCodes(x.shape[-1], 32, "value", codes, 1)
    device = torch.device("cuda")
    fields = fmt.allocate(1, HEADS, tokens // 32, device)
    encode_pairs.encode_bits(fmt, Source(x.to(device), fields, 0, tables=(book.on(device), flips)))
    got, want = bits_of(fmt, fields, slice(None))[0], book.bits(x[0], flips)
    assert (got != want).float().mean() < 0.02
    assert (missed(book, got, x[0]) < 1.003 * missed(book, want, x[0])).all()
