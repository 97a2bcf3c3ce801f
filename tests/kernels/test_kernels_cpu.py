"""The CPU kernel against the reference: attention over packed affine groups and dense storage."""

import dataclasses
import itertools

import pytest
import torch

from kvfold import kernels
from kvfold.errors import KVFoldError
from kvfold.formats import AffineGroups, Dense, Format
from kvfold.kernels import AttentionCall, DensePart, NewTokens, Span
from kvfold.kernels.cpu import CPUKernel
from kvfold.kernels.cpu import kernel as module
from kvfold.kernels.reference import ReferenceKernel

pytest.importorskip("numba")

CPU = torch.device("cpu")
BLOCK = 64
MODES, BITS, AXES = ("asym", "sym", "hybrid"), (1, 2, 3, 4, 8), ("token", "channel")


def affine(bits: int = 2, axis: str = "token", mode: str = "asym", group: int = 32, dim: int = 64) -> AffineGroups:
    return AffineGroups(dim, BLOCK, "plain", bits, axis, mode, group)


def poisoned(form: Format, x: torch.Tensor, spare: int = 1) -> dict[str, torch.Tensor]:
    """Fields of ``x`` in storage whose unused blocks decode to NaN."""
    fields = form.encode(x)
    whole = form.allocate(x.shape[0], x.shape[1], x.shape[2] // form.block + spare, CPU)
    for name, tensor in whole.items():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        tensor[:, :, : tensor.shape[2] - spare] = fields[name]
    return whole


def make(
    keys: Format,
    values: Format,
    lengths: list[int],
    kv_heads: int = 2,
    per_kv: int = 2,
    tokens: int = 1,
    cuts: tuple[int, ...] = (),
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> AttentionCall:
    """A call with two windows that hold NaN where they are not valid, and packed storage in spans cut at ``cuts``."""
    generator = torch.Generator().manual_seed(seed)
    batch, dim, longest = len(lengths), keys.head_dim, max(lengths)

    def randn(*shape: int) -> torch.Tensor:
        return size * torch.randn(*shape, generator=generator)

    rows = randn(batch, kv_heads, per_kv * tokens, dim) / size
    spans = []
    for start, stop in itertools.pairwise((0, *cuts, longest)):
        sides = [poisoned(form, randn(batch, kv_heads, stop - start, dim)) for form in (keys, values)]
        for row, length in enumerate(lengths):  # what lies beyond a sequence's end is uninitialized
            for field in (f for side in sides for f in side.values()):
                field[row, :, max(length - start, 0) // BLOCK :] = float("nan") if field.is_floating_point() else -1
        used = (stop - start) // BLOCK
        spans.append(Span(start, *({n: t[:, :, :used] for n, t in side.items()} for side in sides)))
    dense = []
    for slots in (5, 40):
        valid = torch.rand(batch, slots, generator=generator) > 0.4
        window = [randn(batch, kv_heads, slots, dim).to(dtype) for _ in range(2)]
        dense.append(DensePart(*(x.masked_fill(~valid[:, None, :, None], float("nan")) for x in window), valid))
    new = [randn(batch, tokens, kv_heads, dim).to(dtype).transpose(1, 2) for _ in range(2)]  # as models make them
    bias = randn(batch, kv_heads, per_kv * tokens)
    return AttentionCall(
        rows.unflatten(2, (per_kv, tokens)).flatten(1, 2),
        dim**-0.5,
        kv_heads,
        keys,
        values,
        spans if longest else [],
        torch.tensor(lengths, dtype=torch.int32),
        dense,
        NewTokens(*new),
        uniform=len(set(lengths)) == 1,
        project=lambda queries, dtype: (1.1 * queries, bias),
    )


def error(call: AttentionCall) -> float:
    """Relative RMS error against the reference."""
    assert CPUKernel().why_not(call.key_format, call.value_format, CPU, False) is None
    got, expected = CPUKernel().attend(call), ReferenceKernel().attend(call)
    assert got.shape == expected.shape and got.dtype == torch.float32 and expected.isfinite().all()
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mode", MODES)
def test_formats(mode, bits, axis, group):
    form = affine(bits, axis, mode, group)
    assert error(make(form, form, [128, 64])) < 1e-5


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("mode", ["asym", "hybrid"])
def test_head_dims(mode, axis, dim):
    other = AXES[axis == "token"]
    group = 16 if dim == 80 else 32
    call = make(affine(3, axis, mode, group, dim), affine(2, other, mode, group, dim), [64, 0, 128], tokens=2)
    assert error(call) < 1e-5


@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 64, 65, 100])
@pytest.mark.parametrize("per_kv", [1, 3])
def test_query_tokens_and_heads(per_kv, tokens):
    assert error(make(affine(), affine(axis="channel"), [192, 64], 3, per_kv, tokens)) < 1e-5


@pytest.mark.parametrize("lengths", [[0], [64], [0, 0], [320], [64, 320, 0, 192]])
@pytest.mark.parametrize("cuts", [(), (64,), (64, 128, 256)])
def test_lengths_and_spans(cuts, lengths):
    cuts = tuple(c for c in cuts if c < max(lengths))
    assert error(make(affine(), affine(axis="channel"), lengths, cuts=cuts)) < 1e-5


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads(threads, monkeypatch):
    """Shares of the tiles are merged; some of them are empty."""
    monkeypatch.setattr(module, "TOKENS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert error(make(affine(), affine(axis="channel"), [192, 64, 0], 1, 2, 2)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_storage_and_windows(dtype):
    form = Dense(64, BLOCK, "key", dtype)
    assert error(make(form, form, [128, 64], dtype=dtype)) < 1e-5
    assert error(make(form, affine(), [128, 64], dtype=dtype)) < 1e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1e-6, 1e-3, 100.0, 3e4])
def test_sizes_of_values(size, mode):
    """From scales that are subnormal in fp16 to values at its end."""
    assert error(make(affine(2, "token", mode), affine(2, "channel", mode), [128], size=size)) < 1e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", AXES)
def test_constants(axis, mode):
    form = affine(2, axis, mode)
    call = make(form, form, [64])
    constant = form.encode(torch.full((1, 2, 64, 64), 0.37))
    assert error(dataclasses.replace(call, spans=[Span(0, constant, constant)])) < 1e-5


def test_padding_among_new_tokens():
    """Columns that are padding are not seen; a row that sees nothing at all is 0."""
    call = make(affine(), affine(axis="channel"), [0, 64], tokens=3)
    valid = torch.tensor([[False, True, True], [True, True, True]])
    nothing = [dataclasses.replace(d, valid=torch.zeros_like(d.valid)) for d in call.windows]
    for windows in (call.windows, nothing):
        new = [x.masked_fill(~valid[:, None, :, None], float("nan")) for x in (call.new.keys, call.new.values)]
        some = dataclasses.replace(call, new=NewTokens(*new, valid), windows=windows)
        assert error(some) < 1e-5
    assert CPUKernel().attend(some)[0, :, 0].eq(0).all()


def test_without_bias_and_strided_storage():
    call = make(affine(), affine(axis="channel"), [128, 128])
    call = dataclasses.replace(call, project=None)
    for span in call.spans:
        for side in (span.keys, span.values):
            for name, tensor in side.items():
                side[name] = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    assert error(call) < 1e-5


def test_nan_is_not_hidden():
    """A NaN that belongs to a sequence shows, as in the reference, and in that sequence only."""
    call = make(affine(), affine(axis="channel"), [64, 64])
    call.new.keys[0] = float("nan")
    got = CPUKernel().attend(call)
    assert got[0].isnan().all() and got[1].isfinite().all()


def test_gradients_are_left_to_the_reference():
    call = make(affine(), affine(axis="channel"), [64])
    call.query.requires_grad_()
    CPUKernel().attend(call).sum().backward()
    assert call.query.grad is not None


def test_what_it_does_not_serve_is_said(monkeypatch):
    why_not = CPUKernel().why_not
    good = affine()
    assert "head" not in (why_not(good, good, CPU, False) or "")
    assert why_not(good, good, CPU, True) is None
    assert "CPU" in (why_not(good, good, torch.device("meta"), False) or "")
    assert "tensor cores" in (why_not(dataclasses.replace(good, operand="key"), good, CPU, False) or "")
    assert "float64" in (why_not(good, Dense(64, BLOCK, "value", torch.float64), CPU, False) or "")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert "numba is not installed" in (why_not(good, good, CPU, False) or "")
    choice = kernels.choose(good, good, CPU)
    assert choice.kernel.name == "reference" and "numba is not installed" in choice.reason
    with pytest.raises(KVFoldError, match="numba is not installed"):
        kernels.choose(good, good, CPU, name="cpu")
