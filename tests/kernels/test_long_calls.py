"""How calls reach the GPU kernels: spans, splits, pieces of queries. Without a GPU.

The kernel over packed storage cannot be interpreted, so a few lines of PyTorch stand for it, which read what it would read, at
the addresses where it would; the kernel over windows runs in Triton's interpreter.
"""

import math
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")


import helpers
from kvfold.kernels import NewTokens, ReferenceKernel
from kvfold.kernels.affine import decode
from kvfold.kernels.common import spans as over
from kvfold.kernels.common.partials import Partials
from kvfold.kernels.device import HOPPER
from kvfold.kernels.gluon import GluonKernel

METHODS = [
    "kivi:sink=0,recent=32",
    "squat:sink=0,recent=32",
    "innerq:paper=true,center=page,sink=32,recent=32",
    "innerq:paper=true,mode=sym,recent=96",
]


@pytest.fixture(scope="module")
def windows():
    return helpers.interpreted_module("kvfold.kernels.common.windows")


def stored(form, fields, capacity):
    """A span's vectors as the kernel addresses them: KV heads ``capacity`` blocks apart; [batch * heads, tokens, head_dim]."""
    heads = fields["codes"].shape[0] * fields["codes"].shape[1]
    used = fields["codes"].shape[2]
    flat = {}
    for name in form.fields():  # not the statistics of whole sequences, which queries have
        x = fields[name]
        inner = math.prod(x.shape[3:])
        whole = x.as_strided((heads, used, inner), (capacity * inner, inner, 1))
        flat[name] = whole.reshape(heads, 1, used, *x.shape[3:])
    return form.decode(flat)[:, 0]


@pytest.fixture
def launches(monkeypatch, windows):
    """Stand-ins for the kernels; gives the list of launches of the one over packed storage."""
    seen = []

    def launch(q, packed_q, bias, key_format, value_format, span, held, scale, partials, part, plan, early):
        seen.append((span, plan, part))
        capacity = decode.unit_capacity(span)
        keys, values = (
            stored(form, fields, capacity) for form, fields in ((key_format, span.keys), (value_format, span.values))
        )
        for form, fields in ((key_format, span.keys), (value_format, span.values)):
            over.slab_fields(fields, decode._names(form))
        rows, heads = partials.out.shape[2], held.sink[0].shape[1]
        assert plan.columns * 8 * plan.tiles * (plan.warps if plan.shared else 1) >= rows
        queries = packed_q.reshape(-1, rows, q.shape[3]).float()
        for head in range(len(queries)):
            blocks = min(max(int(held.packed_len[head // heads]) - span.start, 0) // 32, capacity)
            for split in range(plan.splits):
                at = slice(32 * (blocks * split // plan.splits), 32 * (blocks * (split + 1) // plan.splits))
                score = queries[head] @ keys[head, at].T
                if bias is not None:
                    score = score + bias.reshape(-1, rows, 1)[head]
                score = score * scale * math.log2(math.e)
                top = score.amax(-1) if score.shape[-1] else torch.full((rows,), -1e30)
                weight = torch.exp2(score - top[:, None])
                for whole, one in zip(
                    (partials.out, partials.top, partials.total), (weight @ values[head, at], top, weight.sum(-1)), strict=True
                ):  # fmt: skip
                    whole[head, part + split] = one
        for split in range(plan.dense_splits):  # all windows in the first of them
            partials.out[:, part + plan.splits + split], partials.total[:, part + plan.splits + split] = 0.0, 0.0
            partials.top[:, part + plan.splits + split] = -1e30
        if plan.dense_splits:
            windows.attend_windows(q, held, scale, partials, part + plan.splits)

    def merge(self, out, early=False, sinks=None, tokens=1):
        assert sinks is None
        weight = torch.exp2(self.top - self.top.amax(1, keepdim=True))
        total = (weight * self.total).sum(1).clamp_min(1e-30)
        return out.copy_(((weight.unsqueeze(-1) * self.out).sum(1) / total.unsqueeze(-1)).view_as(out))

    def empty(cls, heads, splits, rows, dim, device):
        return cls(*(torch.full((heads, splits, rows, *rest), float("nan")) for rest in ((dim,), (), ())))

    monkeypatch.setattr(decode, "_launch", launch)
    monkeypatch.setattr(decode, "device_info", helpers.multiprocessors(4))
    monkeypatch.setattr(decode, "attend_windows", windows.attend_windows)
    monkeypatch.setattr(Partials, "empty", classmethod(empty))
    monkeypatch.setattr(Partials, "merge", merge)
    return seen


def sequences(method, lens, cuts=None):
    """A layer in the GPU's packing that holds sequences of ``lens`` tokens, left-padded, appended in calls of ``cuts``."""
    layer = helpers.layer(method, helpers.spec(rope=None, fragments=True))
    longest = max(lens)
    valid = torch.arange(longest) >= torch.tensor([[longest - n] for n in lens])
    return helpers.feed(layer, helpers.tokens(len(lens), longest), cuts, valid)


def check(layer, tokens, valid=None):
    keys, values, queries = helpers.tokens(len(layer.lens), tokens, seed=1)
    if valid is not None:
        keys, values = (x.masked_fill(~valid[:, None, :, None], float("nan")) for x in (keys, values))
    call = layer.reader.call(queries, NewTokens(keys, values, valid), 0.125)
    got, want = GluonKernel().attend(call), ReferenceKernel().attend(call)
    assert got.shape == want.shape
    if valid is not None:  # what a padding query gets has no meaning
        assert got.isfinite().all()
        got, want = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (got, want))
    assert helpers.relative(got, want) < 1e-5


@pytest.mark.parametrize("tokens", [1, 16, 17, 70])
@pytest.mark.parametrize("method", METHODS)
def test_ragged_sequences(launches, method, tokens):
    check(sequences(method, (300, 170)), tokens)
    assert len(launches) == 1 and launches[0][1].dense_splits == 0


def test_padding(launches):
    valid = torch.ones(3, 40, dtype=torch.bool)
    valid[0, :25], valid[1], valid[2, ::3] = False, False, False
    check(sequences(METHODS[2], (300, 170, 200)), 40, valid)


@pytest.mark.parametrize("method", METHODS)
def test_one_launch_per_slab(launches, method):
    """Sequences end in slabs of their own; every launch has splits of its own; in place as well."""
    layer = sequences(method, (700, 330, 20), [300, 100, 100, 100, 100])
    assert len(layer.slabs) >= 3
    check(layer, 70)
    assert len(launches) == len(layer.slabs)
    for (_, plan, part), (_, _, following) in pairwise(launches):
        assert part + plan.splits == following
    assert launches[0][2] == 1  # the windows' comes first

    launches.clear()
    keys, values, queries = helpers.tokens(3, 4, seed=2)
    want = ReferenceKernel().attend(layer.reader.call(queries, NewTokens(keys, values), 0.125))
    layer.append(keys, values, queries, None, pack=False)
    call = layer.reader.call(queries, None, 0.125)
    for kernel in (GluonKernel(), ReferenceKernel()):
        assert helpers.relative(kernel.attend(call), want) < 1e-5
    assert [bool(plan.dense_splits) for _, plan, _ in launches] == [True] + [False] * (len(layer.slabs) - 1)


def test_nothing_packed(launches):
    check(sequences(METHODS[2], (60, 9)), 30)
    assert not launches


def test_queries_in_pieces(launches, monkeypatch):
    """A small workspace: pieces of 64 queries, each of which sees the new tokens before it."""
    monkeypatch.setattr(decode, "WORKSPACE", 1 << 18)
    valid = torch.arange(150) >= torch.tensor([[0], [70]])
    layer = sequences(METHODS[0], (300, 170))
    check(layer, 150)
    assert len(launches) == 3
    check(layer, 150, valid)


def test_the_workspace_does_not_know_the_context():
    elements = 32 * 128
    for spans in (1, 7):
        for tokens in (17, 512, 2048, 100_000):
            step = decode._piece(elements, spans, tokens)
            assert step <= tokens
            assert step * elements * 4 * (spans + 1) <= max(1.2 * decode.WORKSPACE, 64 * elements * 4 * (spans + 1))
            assert math.ceil(tokens / step) <= math.ceil(tokens * elements * 4 * (spans + 1) / decode.WORKSPACE)


def test_splits_fill_the_gpu_once():
    key, value = (
        helpers.layer("kivi", helpers.spec(128)).key_format,
        helpers.layer("kivi", helpers.spec(128)).value_format,
    )
    for batch_heads in (1, 8, 128):
        for rows in (65, 256, 2048, 8192):
            plan = decode.make_long_plan(key, value, batch_heads, rows, 1024, HOPPER)
            programs = batch_heads * plan.columns * plan.splits
            assert plan.splits == 1 or programs <= 2 * 132
            assert plan.splits == 1024 // (12 * plan.blocks) or programs > 132  # as many as are worth it, or enough


def test_storage_that_is_no_slab_is_refused():
    layer = sequences(METHODS[0], (300, 170))
    (span,) = layer.slabs.spans()
    fields = {n: x.transpose(0, 1) for n, x in span.keys.items()}
    with pytest.raises(ValueError, match="slab"):
        over.slab_fields(fields, decode._names(layer.key_format))
