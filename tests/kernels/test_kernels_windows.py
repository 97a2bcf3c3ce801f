"""The kernel over full-precision tokens, in Triton's interpreter and with ``pytest -m gpu`` as real launches."""

import math

import pytest
import torch

pytest.importorskip("triton")


from helpers import interpreted_module
from kvfold.kernels import NewTokens, Windows
from kvfold.kernels.common import windows as compiled
from kvfold.kernels.common.partials import Partials

LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module("kvfold.kernels.common.windows")


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda" if request.param == "gpu" else "cpu")


@pytest.fixture
def kernels(device, interpreted):
    return compiled if device.type == "cuda" else interpreted


def merged(parts: Partials) -> torch.Tensor:
    """What the merge computes, by definition; rows that see nothing are 0."""
    weight = torch.exp2(parts.top - parts.top.amax(1, keepdim=True))
    total = (weight * parts.total).sum(1)
    out = (weight.unsqueeze(-1) * parts.out).sum(1)
    return torch.where(total.unsqueeze(-1) > 0, out / total.clamp_min(1e-30).unsqueeze(-1), 0.0)


def check(
    kernels, device, tokens, new=None, first=0, dim=64, heads=2, group=3, sink=8, ring=64, lens=((8, 96, 50), (8, 32, 64)),
    valid=None, dtype=FP32, seed=0, skip=0, programs=None,
):  # fmt: skip
    """``lens``: tokens in the sink, packed, and in the ring, by sequence. ``new``: how many new tokens there are; None: the
    call's tokens are the newest of the windows. Unused slots, and padding, are NaN."""
    generator, batch = torch.Generator().manual_seed(seed), len(lens)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    q = random(batch, heads * group, tokens, dim)
    sides = [(random(batch, heads, sink, dim), random(batch, heads, ring, dim)) for _ in range(2)]
    # as models make them: adjacent heads of a token
    fresh = [random(batch, new or 0, heads, dim).transpose(1, 2) for _ in range(2)]
    want = torch.zeros(batch, heads * group, tokens, dim)
    sums = torch.zeros(batch, heads * group, tokens)
    for b, (in_sink, packed, recent) in enumerate(lens):
        slots = (packed + torch.arange(recent)) % max(ring, 1)
        keys, values = (
            torch.cat([s[b, :, :in_sink], r[b, :, slots], n[b]], 1).float().repeat_interleave(group, 0)
            for (s, r), n in zip(sides, fresh, strict=True)
        )
        cached = in_sink + recent
        last = torch.arange(tokens) + (cached + first if new else cached - tokens)
        sees = torch.arange(keys.shape[1]) <= last[:, None]
        sees[:, : min(skip, cached)] = False
        if valid is not None:
            sees[:, cached:] &= valid[b]
        score = (q[b].float() @ keys.transpose(-1, -2) / math.sqrt(dim)).masked_fill(~sees, -1e30)
        sums[b] = score.logsumexp(-1)
        want[b] = score.softmax(-1).masked_fill(~sees, 0.0) @ values
        for s, r in sides:
            s[b, :, in_sink:] = float("nan")
            unused = torch.ones(ring, dtype=torch.bool)
            unused[slots] = False
            r[b, :, unused] = float("nan")
        for x in fresh if valid is not None else ():
            x[b, :, ~valid[b]] = float("nan")
    counts = [torch.tensor([x[i] for x in lens], dtype=torch.int32, device=device) for i in range(3)]
    pairs = [tuple(side[i].to(device) for side in sides) for i in range(2)]
    parts = Partials.empty(batch * heads, 3, group * tokens, dim, device)
    parts.out.fill_(float("nan")), parts.top.fill_(float("nan")), parts.total.fill_(float("nan"))
    added = [x.to(device) for x in fresh] if new else [None, None]
    held, scale = Windows(*pairs, *counts), 1 / math.sqrt(dim)
    given = None if valid is None else valid.to(device)
    want = want.unflatten(1, (heads, group)).flatten(2, 3)
    if not skip and programs is None:
        kernels.attend_windows(q.to(device), held, scale, parts, 1, *added, given, first)
        assert parts.out[:, ::2].isnan().all()  # other splits are not written
        got = merged(Partials(*(x[:, 1:2] for x in (parts.out, parts.top, parts.total)))).cpu()
        assert got.isfinite().all()
        assert (got - want.flatten(0, 1)).norm() <= LIMIT[dtype] * want.norm()
    if new and not first:
        found = kernels.windows_result(q.to(device), held, scale, NewTokens(*added, given), skip, programs)
        got, total = (x.cpu().float() for x in found)
        sums = sums.unflatten(1, (heads, group)).flatten(2, 3)
        assert got.isfinite().all() and total.isfinite().all() and found[0].dtype == dtype
        assert (got - want).norm() <= LIMIT[dtype] * want.norm()
        seen = sums > -1e29
        assert (total - sums)[seen].abs().max() < 2 * LIMIT[dtype] and (total[~seen] < -1e29).all()


@pytest.mark.parametrize("tokens", [1, 5, 40, 150])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_new_tokens(kernels, device, tokens, dtype):
    if dtype == BF16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies bf16's bits as if they were integers")
    check(kernels, device, tokens, tokens, dtype=dtype)


@pytest.mark.parametrize("dim", [16, 48, 80, 96, 128, 256])
def test_head_sizes(kernels, device, dim):
    check(kernels, device, 20, 20, dim=dim)


@pytest.mark.parametrize("heads, group", [(1, 1), (2, 7), (3, 16)])
def test_heads(kernels, device, heads, group):
    check(kernels, device, 9, 9, heads=heads, group=group)


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_tokens_that_lie_in_the_windows(kernels, device, tokens):
    """Also where the newest tokens reach back into the sink."""
    check(kernels, device, tokens, lens=((8, 96, 50), (8, 0, 9), (8, 32, 64)))
    check(kernels, device, min(tokens, 6), sink=32, lens=((32, 0, 3), (7, 0, 0)))


@pytest.mark.parametrize(
    "options",
    [
        {"sink": 0, "lens": ((0, 96, 50), (0, 0, 0))},
        {"ring": 0, "lens": ((8, 64, 0), (3, 0, 0))},
        {"sink": 0, "ring": 0, "lens": ((0, 0, 0), (0, 32, 0))},
        {"sink": 70, "ring": 77, "lens": ((70, 992, 76), (5, 0, 0), (70, 64, 1))},
    ],
)
def test_windows(kernels, device, options):
    check(kernels, device, 12, 12, **options)


@pytest.mark.parametrize("tokens, first", [(64, 0), (64, 64), (30, 98), (1, 127)])
def test_queries_in_pieces(kernels, device, tokens, first):
    check(kernels, device, tokens, 128, first, valid=None)


@pytest.mark.parametrize("skip", [3, 8, 40, 58, 100])
def test_tokens_that_others_attend_to(kernels, device, skip):
    check(kernels, device, 12, 12, skip=skip)


@pytest.mark.parametrize("programs", [1, 3, 4, 50])
def test_programs_that_take_block_after_block(kernels, device, programs):
    check(kernels, device, 150, 150, programs=programs)


@pytest.mark.parametrize("tokens", [3, 70])
def test_padding(kernels, device, tokens):
    """Left, right and in between; a sequence without a new token; a row that sees nothing is 0."""
    valid = torch.ones(4, tokens, dtype=torch.bool)
    valid[0, : tokens // 2] = False
    valid[1, 1:] = False
    valid[2] = False
    valid[3, ::2] = False
    check(kernels, device, tokens, tokens, valid=valid, lens=((8, 96, 50), (8, 0, 9), (0, 0, 0), (3, 0, 0)))


def test_what_does_not_fit_is_refused():
    windows = Windows(*(2 * (torch.zeros(1, 2, 4, 16),) for _ in range(2)), *3 * (torch.zeros(1, dtype=torch.int32),))
    with pytest.raises(ValueError, match="contiguous"):
        compiled.attend_windows(
            torch.zeros(1, 4, 3, 16), windows, 1.0, Partials.empty(2, 1, 5, 16, torch.device("cpu")), 0
        )
