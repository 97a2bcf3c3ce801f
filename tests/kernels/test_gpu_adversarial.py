"""The GPU kernels on inputs that nobody wants and somebody has: ``pytest -m gpu``."""

import math

import pytest
import torch

pytest.importorskip("triton")

import kvfold
from decode_case import BF16, FP16, KINDS, Case, relative
from helpers import llama, logits, prompt
from kvfold.engines.transformers.graph import DecodeGraph
from kvfold.kernels import Span, Windows
from specializations import MODES, formats

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ALONE = {"sink": 0, "ring": 0}  # so that nothing but packed tokens counts


# ---- contents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "normal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mode", MODES)
def test_contents(mode, head_dim, kind):
    """Scales of zero, the largest and the smallest numbers, groups that one element ruins."""
    fit = {"largest": 12.0} if kind in ("huge", "outliers", "constant") else {}
    of = formats(mode, head_dim=head_dim)
    Case(of, keys=kind, **ALONE, **fit).check()
    large = kind in ("huge", "outliers")  # sums of such values are beyond fp16
    case = Case(of, values=kind, dtype=BF16 if large else FP16, **ALONE)
    if kind in ("zero", "tiny", "denormal"):  # as near as fp16 comes to what is hardly there
        # a weight times a scale of groups of channels is an fp16: a token's share is rounded, too
        assert (case.call().float() - case.expected()).abs().max() <= 2.0 ** (-21 if mode == "kivi" else -23)
    else:
        case.check()


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_small_values_keep_their_digits(mode, bits):
    """A probability times a small scale is far below fp16's normal numbers, unless it carries a factor that follows the
    scales."""
    Case(formats(mode, bits), values="small", packed=(320, 8192), scale_gain=3.0, **ALONE).check()


@pytest.mark.parametrize("mode", MODES)
def test_keys_and_queries_at_the_ends_of_their_ranges_together(mode):
    Case(formats(mode), keys="outliers", gain=1e4, dtype=BF16, largest=12.0, **ALONE).check()
    Case(formats(mode), keys="huge", gain=1e-4, largest=12.0, bias=True, **ALONE).check()


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("gain", [30.0, 1e3, 1e4])
@pytest.mark.parametrize("mode", MODES)
def test_scores_that_one_token_wins(mode, gain, dtype):
    """Queries so long that softmax is a choice. Rounding may decide between two, so the result is one of the values, or
    between them: finite, and inside of what the values span."""
    case = Case(formats(mode), dtype=dtype, gain=gain, scale_gain=gain)
    got = case.call().float()
    assert got.isfinite().all()
    values = case.form[1].decode(case.values)
    for b, (s, n, r) in enumerate(case.lens):
        slots = (n + torch.arange(r, device="cuda")) % case.ring[1].shape[2]
        seen = torch.cat([values[b, :, :n], case.sink[1][b, :, :s].float(), case.ring[1][b, :, slots].float()], 1)
        low, high = (
            x.repeat_interleave(got.shape[1] // seen.shape[0], 0).unsqueeze(1) for x in (seen.amin(1), seen.amax(1))
        )
        assert (got[b] >= low - 0.02 * low.abs() - 0.02).all() and (got[b] <= high + 0.02 * high.abs() + 0.02).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", MODES)
def test_unused_storage_may_hold_anything(mode, poison):
    lens = {"packed": (0, 32, 1024, 352), "sink_len": (1, 32, 7, 32), "recent": (1, 40, 128, 3)}
    Case(formats(mode), poison=poison, **lens).check()


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_33_of_all_lengths(mode, dtype):
    packed = tuple(32 * (b * b % 41) for b in range(33))
    Case(formats(mode), packed=packed, heads=1, group_heads=3, dtype=dtype).check()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_packed_beside_much(mode):
    Case(formats(mode), packed=(0, 16384, 0, 32), sink_len=(1, 32, 0, 32), recent=(1, 128, 1, 64)).check()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_16_tokens_of_8_heads_per_kv_head(mode, kv_heads, head_dim):
    of = formats(mode, head_dim=head_dim)
    Case(of, tokens=16, heads=kv_heads, group_heads=8, separate=True, bias=True, dtype=BF16).check()


@pytest.mark.parametrize("pieces", [2, 5])
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("mode", MODES)
def test_storage_in_pieces(mode, tokens, pieces):
    Case(formats(mode), packed=(2048, 32, 0, 1120), pieces=pieces, tokens=tokens, bias=True).check()


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("value_bits", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_keys_and_values_of_unlike_bits(mode, bits, value_bits):
    Case(formats(mode, bits, value_bits=value_bits)).check()


@pytest.mark.parametrize("mode", ["kivi", "hybrid"])
def test_storage_beyond_4_gib(mode):
    """Offsets of the last sequence do not fit into 32 bits, counted in elements or in bytes; nor do those of its encoding."""
    from kvfold.kernels.affine.decode import decode_attention
    from kvfold.kernels.affine.encode import encode_blocks

    of, batch, heads, packed = formats(mode, 8), 9, 8, 1024
    blocks = 16800
    stored = [f.allocate(batch, heads, blocks, torch.device("cuda")) for f in of]
    assert stored[0]["codes"][:-1].numel() > 1 << 31
    g = torch.Generator("cuda").manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, device="cuda", generator=g).to(FP16)

    rows = torch.tensor([0, batch - 1], device="cuda")
    for form, fields in zip(of, stored, strict=True):
        encode_blocks(rand(2, heads, packed, 128), fields, form, 0, rows=rows)
    small = [{n: x[rows, :, : packed // 32].clone() for n, x in fields.items()} for fields in stored]
    sink, ring = ((rand(batch, heads, n, 128), rand(batch, heads, n, 128)) for n in (8, 64))
    q, lens = rand(batch, 4 * heads, 1, 128), torch.zeros(batch, dtype=torch.int32, device="cuda")
    lens[rows] = packed
    eight, one = torch.full_like(lens, 8), torch.full_like(lens, 1)
    out = decode_attention(q, *of, [Span(0, *stored)], Windows(sink, ring, eight, lens, one), 0.1)
    some = Windows(*([x[rows] for x in side] for side in (sink, ring)), eight[rows], lens[rows], one[rows])
    want = decode_attention(q[rows], *of, [Span(0, *small)], some, 0.1)
    assert relative(out[rows], want) < 1e-3 and out.isfinite().all()


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bf16_target():
    import targets

    before = targets.current()
    targets.use(targets.Target("cuda-bfloat16"))
    yield
    targets.use(before)


@pytest.mark.parametrize("method", ["kivi", "kivi:recent=0,bits=4", "kivi:sink=8,recent=40"])
def test_a_graph_decodes_sequences_of_very_different_lengths(method, bf16_target):
    """One has hundreds of packed tokens, one none, and both pack while the graph runs."""
    model, ids = llama(), prompt(3, 400)
    mask = torch.ones_like(ids)
    mask[1, :297] = 0
    mask[2, :150] = 0
    plain, captured = (kvfold.fold(model, method, max_length=512) for _ in range(2))
    for cache in (plain, captured):
        logits(model, cache, ids[:, :300], None, mask[:, :300])
    positions = mask.sum(-1, keepdim=True) - 100
    expected = []
    with torch.no_grad():
        for at in range(300, 400):
            step = model(ids[:, at : at + 1], position_ids=positions + at - 300, past_key_values=plain)
            expected.append(step.logits)
    graph = DecodeGraph(model, captured, room=100)
    got = [graph(ids[:, at : at + 1]).clone() for at in range(300, 400)]
    graph.finish()
    assert relative(torch.cat(got, 1), torch.cat(expected, 1)) < 2e-2
    for a, b in zip(plain.folded, captured.folded, strict=True):
        assert (a.lens, a.packed) == (b.lens, b.packed) and a.lens == [400, 103, 250]
