"""Encoded blocks and what is compared of them: bytes, storage that must not be written, random tokens."""

import pytest
import torch

pytest.importorskip("triton")


from kvfold.formats.affine import FP16_MAX
from kvfold.methods.base import finite

MODES = ("asym", "sym", "hybrid")
BITS = (1, 2, 3, 4, 8)


def poisoned(fields):
    for t in fields.values():
        t.fill_(float("nan") if t.is_floating_point() else -1)
    return fields


def allocate(form, batch, heads, blocks, device):
    return poisoned(form.allocate(batch, heads, blocks, device))


def raw(x):
    return x.contiguous().view(torch.uint8)


def plain_zero(fields):
    """Zero-points without the sign of 0: which zero is the smallest of several is nobody's promise."""
    fields = {n: t.cpu() for n, t in fields.items()}
    if "meta" in fields:
        fields["meta"] = torch.where(fields["meta"] == 0, torch.zeros_like(fields["meta"]), fields["meta"])
    return fields


def assert_same_bytes(got, want, form, x):
    """Equal bytes; hybrid groups may choose either mode where float32 cannot tell the two errors apart."""
    got, want = plain_zero(got), plain_zero(want)
    different = {n: int((raw(got[n]) != raw(want[n])).sum()) for n in want}
    if not any(different.values()):
        return
    assert form.mode == "hybrid", f"bytes that differ: {different}"
    truth = form._split(finite(x.cpu()))
    ours, theirs = (form._split(form.decode(f)) for f in (got, want))
    mixed = (ours != theirs).any(-1)
    within = mixed & (truth.abs().amax(-1) <= FP16_MAX)  # groups beyond fp16 saturate, here in the better mode
    assert within.sum() <= max(2, 0.01 * mixed.numel()), f"bytes that differ: {different}"
    ours, theirs = ((y - truth)[mixed].double().square().sum(-1) for y in (ours, theirs))
    assert (ours <= theirs * (1 + 1e-5)).all()


def check(kernels, device, form, x, **options):
    """Encode ``x`` at an offset into poisoned storage; compare, and see that nothing else was written."""
    batch, heads, count, _ = x.shape
    blocks = count // form.block
    out = allocate(form, batch, heads, blocks + 3, device)
    kernels.encode_blocks(x.to(device) if x.device != device else x, out, form, 2, **options)
    want = form.encode(finite(x.cpu()), **{k: v for k, v in options.items() if k == "mode"})
    assert_same_bytes({n: t[:, :, 2:-1] for n, t in out.items()}, want, form, x)
    untouched = poisoned({n: t.clone() for n, t in out.items()})
    for name, t in out.items():
        for part in (slice(0, 2), slice(blocks + 2, None)):
            assert torch.equal(raw(t[:, :, part]), raw(untouched[name][:, :, part])), f"{name}: written out of bounds"


def random(*shape, seed=0):
    """Channels of different size and offset, tokens of different offset: neither of a hybrid's modes always wins."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    return randn(*shape) * torch.exp(randn(shape[-1])) + 4 * randn(shape[-1]) + 4 * randn(shape[-2], 1)
