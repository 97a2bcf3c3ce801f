"""Calls of the Triton kernel over formats with readers, and their answers by the float32 reference.

``python blocks_case.py NAME...`` runs cases by name, under Triton's interpreter where TRITON_INTERPRET is set.
"""

import math
import sys
from dataclasses import replace
from functools import partial

import torch

from interpreter import quicken
from kvfold.formats import (
    AffineGroups,
    GroupCodes,
    Hadamard,
    Lookup,
    LowRank,
    MixedTokens,
    Outliers,
    Paged,
    ResidualCodes,
)
from kvfold.formats.binary import BinaryCodes
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook
from kvfold.formats.gaussian import gaussian_codes
from kvfold.formats.grouped import GroupBook
from kvfold.formats.lookup import ChannelScales
from kvfold.formats.outliers import outlier_count
from kvfold.formats.projected import HeadMaps
from kvfold.formats.residual import Codebook
from kvfold.kernels import AttentionCall, NewTokens, Span, Windows
from kvfold.kernels.common.partials import Partials
from kvfold.kernels.generic import decode as blocks
from kvfold.kernels.generic.decode import inner
from kvfold.kernels.reference import ReferenceKernel
from kvfold.methods import LayerSpec, get
from kvfold.methods.turboquant import lloyd_max
from kvfold.rope import Rope
from kvfold.storage.reader import mapped

LIMIT = 2e-3
HEADS = 2


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_method(spec, head_dim=64):
    """Key and value format of a method, in plain order."""
    method, layer = get(spec), LayerSpec(0, 1, HEADS, 2 * HEADS, head_dim, fragments=False)
    return method.key_format(layer), method.value_format(layer)


def lookup(bits=2, scaling="rms", head_dim=64, block=32, device="cpu"):
    channels = None
    if scaling == "channel":
        channels = ChannelScales(
            rand(HEADS, head_dim, seed=5).to(device), (1 + rand(HEADS, head_dim, seed=6).abs()).to(device)
        )
    return Lookup(head_dim, block, "plain", bits, lloyd_max(bits), scaling, channels)


def residual(stages=4, vector=32, codes=256, strided=False, head_dim=64, block=32, device="cpu", rounded=False):
    """Stages as learned ones are: each for what the ones before it left over."""
    book = rand(stages, codes, vector, seed=7) * 0.8 ** torch.arange(stages).view(-1, 1, 1)
    book = (Codebook.rounded if rounded else Codebook)(book.half().to(device))
    return ResidualCodes(head_dim, block, "plain", vector, codes, stages, strided, book)


def grouped(vector=4, strided=False, codes=256, head_dim=64, block=32, device="cpu", mean=0.0):
    centres = rand(HEADS, head_dim // vector, codes, vector, seed=7).half().to(device)
    book = GroupBook(centres, mean=(mean * rand(HEADS, head_dim, seed=9)).half().to(device))
    return GroupCodes(head_dim, block, "plain", vector, codes, strided, "size", book, mean > 0)


def by_groups(key=(4,), value=(4,), block=32, mean=0.0):
    """Vector, whether strided, and codes of both sides; how large the mean is that codes lack."""

    def formats(d, device):
        return tuple(grouped(*side, head_dim=d, block=block, device=device, mean=mean) for side in (key, value))

    return formats


def learned_keys(vector=4, mean=0.0, mix=64, block=32):
    """TaSQ's keys of four channels, and fold's codebook for as many of values as ``vector`` says."""

    def formats(d, device):
        codes = ResidualCodes(d, block, "plain", vector, 256, 1, False, gaussian_codes(vector), "unbiased")
        values = Paged(d, block, "plain", codes, True, "", Hadamard(d, min(d, mix)))
        return grouped(4, True, head_dim=d, block=block, device=device, mean=mean), values

    return formats


def additive(stages=11, levels=64, rotary=None, head_dim=64, block=32, device="cpu", rounded=False):
    """Keys of CommVQ; ``rotary`` None: all channels are pairs."""
    centres = rand(HEADS, stages, levels, head_dim, seed=8) * 0.8 ** torch.arange(stages).view(-1, 1, 1)
    book = (KeyCodebook.rounded if rounded else KeyCodebook)(
        centres.half().to(device), torch.eye(head_dim, device=device).expand(HEADS, -1, -1), rotary or head_dim
    )
    return AdditiveCodes(head_dim, block, "plain", stages, levels, 0, book)


def commvq(stages=11, levels=64, codes=64, rotary=None, block=32, rounded=False):
    """Both formats of CommVQ; a value's code is its first channels' signs."""
    return lambda d, device: (
        additive(stages, levels, rotary, d, block, device, rounded),
        BinaryCodes(d, block, "plain", codes),
    )


def unproject(heads, codes, head_dim, device):
    rows = rand(heads, codes + 1, head_dim, seed=9).to(device)
    return lambda sums: sums @ rows


def byte_codes(mix=64, block=32):
    """NOVA-KV's keys, a byte for four neighbours, and rotated 2-bit values; ``mix``: channels that are rotated together."""

    def formats(d, device):
        values = AffineGroups(d, block, "plain", 2, "channel", "asym", d)
        values = values if mix == 1 else Paged(d, block, "plain", values, False, "", Hadamard(d, mix))
        return grouped(4, head_dim=d, block=block, device=device), values

    return formats


def head_maps(dim, device):
    """Maps that mix channels, and a mean."""
    matrix = torch.eye(dim) + 0.05 * rand(HEADS, dim, dim, seed=11)
    return HeadMaps(*(x.to(device) for x in (2 * rand(HEADS, dim, seed=12), torch.linalg.inv(matrix), matrix)))


class Case:
    """One call; storage that holds no token is full of NaN and ones.

    Parameters
    ----------
    method : str or callable
        A method's, or a function from ``head_dim`` and device to both formats.
    packed : tuple of int
        Packed tokens, sequence by sequence.
    slabs : tuple of int
        Blocks of each.
    rotary : int
        Channels that are rotated as keys are read; 0: keys are stored after RoPE.
    in_place : bool
        The call's tokens lie in the ring.
    maps : bool
        Queries go through maps that mix channels, and keys have a mean.
    """

    def __init__(
        self, method, head_dim=64, packed=(64, 160), slabs=(8,), rotary=0, scaling=1.0, tokens=1, per_head=2, in_place=False,
        padded=False, gain=1.0, size=1.0, plan=None, dtype=torch.float32, device="cpu", sink=4, ring=40, unproject=None,
        maps=False,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        def numbers(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.plan, self.padded = plan, padded
        form = method(head_dim, device) if callable(method) else of_method(method, head_dim)
        batch, block, heads = len(packed), form[0].block, HEADS
        vectors = [draw(batch, heads, max(packed), head_dim) for _ in form]
        vectors[0] = vectors[0] * torch.exp(0.7 * draw(1, heads, 1, head_dim)) + draw(1, heads, 1, head_dim)
        vectors[1] = (vectors[1] + draw(1, heads, 1, head_dim)) * size
        spans, first = [], 0
        for count in slabs:
            sides = []
            for f, x in zip(form, vectors, strict=True):
                fields = f.allocate(batch, heads, count, device)
                for t in fields.values():
                    t.fill_(float("nan") if t.is_floating_point() else -1 if t.dtype != torch.uint8 else 255)
                for b, n in enumerate(packed):
                    low, high = first * block, min(n, (first + count) * block)
                    if high > low:
                        for name, t in self.encode(f, x[b : b + 1, :, low:high]).items():
                            fields[name][b : b + 1, :, : t.shape[2]] = t
                used = max(1, min(count, math.ceil(max(packed) / block) - first))
                sides.append(f.take(fields, used))
            spans.append(Span(first * block, *sides))
            first += count
        recent = [max(tokens, ring - 3 - 9 * b) for b in range(batch)]
        windows = [
            draw(batch, heads, n, head_dim).to(dtype) * f for n, f in ((sink, 1), (sink, size), (ring, 1), (ring, size))
        ]
        for b, n in enumerate(packed):
            unused = torch.ones(ring, dtype=torch.bool, device=device)
            unused[(n + torch.arange(recent[b], device=device)) % ring] = False
            for x in windows[2:]:
                x[b, :, unused] = float("nan")
        held = Windows(
            (windows[0], windows[1]), (windows[2], windows[3]), numbers([sink] * batch), numbers(list(packed)), numbers(recent)
        )  # fmt: skip
        valid = None
        if padded:
            valid = torch.ones(batch, tokens, dtype=torch.bool, device=device)
            valid[0, 0] = False
        rows = (draw(batch, heads, per_head * tokens, head_dim) * gain).to(dtype).float()
        new = [draw(batch, heads, tokens, head_dim).to(dtype) * factor for factor in (1, size)]
        rope = None
        if rotary:
            rope = Rope(10000.0 ** (-torch.arange(0, rotary, 2, device=device).float() / rotary), scaling)
        self.call = AttentionCall(
            rows.unflatten(2, (per_head, tokens)).flatten(1, 2),
            1 / math.sqrt(head_dim) / gain,
            heads,
            *form,
            spans,
            held.packed_len,
            held,
            None if in_place else NewTokens(*new, valid),
            first_position=torch.tensor([3, 70000][:batch], device=device),
            rope=rope,
            unproject=unproject and unproject(heads, form[1].codes, head_dim, device),
            project=partial(mapped, head_maps(head_dim, device)) if maps else None,
        )

    @staticmethod
    def encode(form, x):
        if isinstance(form, BinaryCodes):
            x = x.repeat(1, 1, 1, -(-form.codes // x.shape[-1]))[..., : form.codes]
        """Tokens that are to be salient where a format has such: random ones."""
        own = inner(form)
        how = {"score": rand(*x.shape[:-1], seed=7).to(x.device)} if isinstance(own, MixedTokens) else {}
        return form.encode(x, **how)

    def expected(self):
        """The reference's answer, over clean copies of what it decodes."""

        def clean(fields):
            return {n: torch.nan_to_num(t) if t.is_floating_point() else t for n, t in fields.items()}

        spans = [Span(s.start, clean(s.keys), clean(s.values)) for s in self.call.spans]
        return ReferenceKernel().attend(replace(self.call, spans=spans))

    def error(self, of=None):
        """Relative RMS error, with what reads packed spans in the place of readers; every number is finite."""
        assert (
            why := blocks.unsupported(self.call.key_format, self.call.value_format, self.call.rope is not None)
        ) is None, why
        got, want = blocks.attend(self.call, self.plan, of), self.expected()
        assert torch.isfinite(got).all()
        if self.padded:  # what a padding query gets has no meaning
            got, want = (x[:, :, 1:] for x in (got, want))
        return float((got - want).norm() / want.norm())


def attended(case, of):
    """Attention over the packed tokens alone, float32 [batch, heads, rows, head_dim]."""
    call = case.call
    plans = [replace(of.plan_of(call, span), splits=2) for span in call.spans]
    batch, heads, rows, dim = call.rows.shape
    parts = Partials.empty(batch * heads, sum(p.splits for p in plans), rows, dim, call.rows.device)
    at = 0
    for plan, span in zip(plans, call.spans, strict=True):
        blocks.attend_packed(call, span, call.rows, None, parts, at, plan, of)
        at += plan.splits
    weight = torch.exp2(parts.top - parts.top.amax(1, keepdim=True))
    out = (parts.out * weight.unsqueeze(-1)).sum(1) / (parts.total * weight).sum(1).unsqueeze(-1)
    return out.view(batch, heads, rows, dim)


def lookups(bits=2, value_bits=None, keys="rms", values="rms", block=32):
    return lambda d, device: (
        lookup(bits, keys, d, block, device),
        lookup(value_bits or bits, values, d, block, device),
    )


def residuals(key=(4, 32, 256), value=(4, 32, 256), block=32, rounded=False):
    """Stages, vector and codes of both sides; keys in groups of channels that do not lie together, as VQLLM has them."""
    return lambda d, device: tuple(
        residual(*size, strided, d, block, device, rounded) for size, strided in ((key, True), (value, False))
    )


def kvquant(bits=2, value_bits=None, fraction=0.01, block=32):
    """Both formats of KVQuant."""

    def formats(d, device):
        keys, values = lookups(bits, value_bits, "channel", "range", block)(d, device)
        count = outlier_count(fraction, block, d)
        return Outliers(d, block, "plain", keys, count, "token"), Outliers(d, block, "plain", values, count, "channel")

    return formats


MODES = ("asym", "sym", "hybrid")
PAGES = {"packed": (256, 128), "slabs": (2,)}


def affine(keys="channel", values="token", mode="hybrid", bits=2, group=32, value_group=None, block=32):
    """Affine groups, keys' and values' along ``keys`` and ``values``."""

    def form(d, device):
        sides = ((keys, group), (values, value_group or group))
        return tuple(AffineGroups(d, block, "plain", bits, axis, mode, size) for axis, size in sides)

    return form


def low_rank(of, rank=2):
    return lambda d, device: tuple(LowRank(d, f.block, "plain", f, rank) for f in of(d, device))


def mixed(bits=2, extra=2, salient=19, block=32, keys="token", values="channel"):
    return lambda d, device: tuple(
        MixedTokens(d, block, "plain", bits, extra, salient, axis) for axis in (keys, values)
    )


CASES = {
    **{f"kvquant-{bits}bit": {"method": kvquant(bits), "rotary": 64} for bits in (1, 2, 3, 4)},
    "kvquant-d128": {"method": kvquant(3, 2), "rotary": 128, "head_dim": 128, "packed": (224, 96)},
    "kvquant-d80-part": {"method": kvquant(4, 2, 0.05), "rotary": 32, "head_dim": 80, "slabs": (4, 4), "scaling": 1.1},
    "kvquant-d96-block128": {
        "method": kvquant(2, 3, 0.02, 128),
        "rotary": 96,
        "head_dim": 96,
        "packed": (256, 128),
        "slabs": (2,),
    },
    "kvquant-no-rope": {"method": kvquant(2, 2, 0.002), "tokens": 3, "in_place": True},
    "commvq-1bit": {
        "method": commvq(5),
        "rotary": 64,
        "unproject": unproject,
        "plan": blocks.Plan(8, 32, 4, 2, processors=3),
    },
    "commvq-1bit-d128": {
        "method": commvq(codes=128),
        "rotary": 128,
        "head_dim": 128,
        "unproject": unproject,
        "packed": (96, 64),
    },
    "commvq-2bit": {
        "method": commvq(8, codes=128),
        "rotary": 64,
        "unproject": unproject,
        "slabs": (2, 2),
        "packed": (32, 96),
    },
    "commvq-d96-levels-block128": {
        "method": commvq(4, 32, 96, block=128),
        "rotary": 96,
        "head_dim": 96,
        "unproject": unproject,
        "packed": (256, 128),
        "slabs": (2,),
    },
    "commvq-part-of-rope": {
        "method": commvq(6, 16, 80, 32),
        "rotary": 32,
        "head_dim": 80,
        "unproject": unproject,
        "scaling": 1.1,
    },
    "commvq-odd-rope": {"method": commvq(3, 256, 48, 24), "rotary": 24, "unproject": unproject},
    "commvq-no-rope": {"method": commvq(2, 2, 16), "unproject": unproject},
    "residual-1bit": {"method": residuals(), "rotary": 64},
    "residual-2bit-d128": {
        "method": residuals((8, 32, 256), (8, 32, 256)),
        "rotary": 128,
        "head_dim": 128,
        "packed": (96, 32),
        "slabs": (4,),
    },
    "residual-3stages-d96": {
        "method": residuals((3, 32, 64), (6, 8, 16)),
        "rotary": 96,
        "head_dim": 96,
        "slabs": (4, 4),
    },
    "residual-d80-block128": {
        "method": residuals((4, 16, 256), (4, 10, 256), 128),
        "rotary": 80,
        "head_dim": 80,
        "packed": (256, 128),
        "slabs": (2,),
    },
    "residual-part-of-rope": {"method": residuals(), "rotary": 32, "head_dim": 128, "scaling": 1.1},
    "residual-odd-rope": {"method": residuals((3, 16, 128)), "rotary": 24, "scaling": 1.1},
    "residual-odd-groups": {"method": residuals((2, 4, 256), (1, 2, 4)), "rotary": 64, "tokens": 3, "in_place": True},
    "residual-no-rope": {"method": residuals((4, 16, 256)), "head_dim": 96, "packed": (128, 32)},
    "kvarn": {"method": "kvarn", "packed": (256, 128), "slabs": (2,)},
    "kvarn-uneven": {"method": "kvarn:rotation=8", "packed": (128, 384), "slabs": (1, 2), "size": 100.0, "per_head": 5},
    "kvarn-as-it-is": {"method": "kvarn:rounds=0", **PAGES, "size": 1e-4, "tokens": 3, "in_place": True},
    "kvarn-d128-3bit": {"method": "kvarn:bits=3", "head_dim": 128, "packed": (256, 128), "slabs": (2,)},
    "kvarn-d96-64": {"method": "kvarn:group=64,k_bits=4", "head_dim": 96, "packed": (192, 64), "slabs": (2, 2)},
    "kvarn-d80-32-plain": {"method": "kvarn:group=32,rotation=1", "head_dim": 80, "slabs": (4, 4), "size": 1e3},
    "nova": {"method": byte_codes(), "maps": True, "slabs": (4, 4)},
    "nova-d128-small": {"method": byte_codes(128), "head_dim": 128, "maps": True, "packed": (96, 64), "size": 1e-4},
    "nova-block128": {"method": byte_codes(32, 128), "maps": True, **PAGES, "size": 100.0},
    "nova-no-rotation-3tokens": {
        "method": byte_codes(1),
        "maps": True,
        "packed": (96, 0),
        "tokens": 3,
        "in_place": True,
    },
    "groups-4": {"method": by_groups()},
    "groups-4-d128": {"method": by_groups(), "head_dim": 128, "packed": (96, 32), "slabs": (4,)},
    "groups-8-rope": {"method": by_groups((8, True), (8,)), "rotary": 64},
    "groups-8-rope-d128": {
        "method": by_groups((8, True), (8,), mean=3.0),
        "rotary": 128,
        "head_dim": 128,
        "slabs": (4, 4),
    },
    "groups-8-part-of-rope": {"method": by_groups((8, True), (8,)), "rotary": 32, "head_dim": 80, "scaling": 1.1},
    "groups-8-mean": {"method": by_groups((8, True), (8,), mean=3.0), "rotary": 64},
    "groups-8-mean-part-of-rope": {"method": by_groups((8, True), (8,), mean=1.0), "rotary": 32, "head_dim": 80},
    "groups-4-mean": {"method": by_groups(mean=1.0)},
    "groups-8-odd-rope": {"method": by_groups((8, True), (4,)), "rotary": 24},
    "groups-2-d80-block128": {
        "method": by_groups((2, False, 16), (16, False, 64), 128),
        "head_dim": 80,
        "packed": (256, 128),
        "slabs": (2,),
    },
    "groups-4-rope-d96": {
        "method": by_groups((4, True), (8,)),
        "rotary": 96,
        "head_dim": 96,
        "tokens": 3,
        "in_place": True,
    },
    **{f"turboquant-{bits}bit": {"method": f"turboquant:bits={bits}"} for bits in (1, 2, 3, 4)},
    "turboquant-d128": {"method": "turboquant:bits=3", "head_dim": 128, "packed": (256, 96)},
    "turboquant-d80-plain": {"method": "turboquant:bits=2,center=false,normalize=false", "head_dim": 80},
    "fold-d96": {"method": "fold", "head_dim": 96, "slabs": (4, 4)},
    "fold-d80-4rows": {"method": "fold:bits=4", "head_dim": 80, "per_head": 4, "tokens": 5, "in_place": True},
    "fold-8bit": {"method": "fold:bits=8"},
    "fold-codebook": {"method": "fold:codebook=true"},
    "fold-codebook-1bit-d128": {"method": "fold:bits=1,codebook=true", "head_dim": 128, "packed": (128, 96)},
    "fold-no-rotation": {"method": "fold:rotation=1"},
    "qjl": {"method": "k=qjl+v=turboquant"},
    "qjl-3": {"method": "k=qjl:bits=3,center=false+v=turboquant", "packed": (224,)},
    "lookup-range-values": {"method": lookups(3, 2, values="range")},
    "lookup-channel-keys-rope": {"method": lookups(3, keys="channel", values="range"), "rotary": 64},
    "lookup-rope-half-of-d80": {"method": lookups(4, keys="channel"), "rotary": 40, "head_dim": 80, "scaling": 1.2},
    "lookup-rope-slabs-d96": {"method": lookups(2), "rotary": 96, "head_dim": 96, "slabs": (4, 4), "packed": (192, 32)},
    "lookup-block128": {"method": lookups(2, block=128), "packed": (256, 128), "slabs": (2,)},
    **{
        f"affine-{mode}-{bits}bit": {"method": affine(mode=mode, bits=bits)}
        for mode, bits in (("asym", 1), ("asym", 4), ("sym", 2), ("hybrid", 3))
    },
    **{f"affine-turned-{mode}": {"method": affine("token", "channel", mode, 3), "head_dim": 96} for mode in MODES},
    "affine-16": {"method": affine("token", "channel", "hybrid", 2, 16), "head_dim": 80},
    "affine-16-turned": {"method": affine("channel", "token", "hybrid", 4, 16), "head_dim": 80},
    "affine-128": {"method": affine("token", "channel", "hybrid", 2, 128, block=128), "head_dim": 128} | PAGES,
    "affine-64": {"method": affine("token", "token", "hybrid", 2, 64, block=128)} | PAGES,
    "affine-48": {"method": affine("channel", "channel", "hybrid", 2, 48), "head_dim": 96},
    "affine-8bit": {"method": affine("token", "token", "hybrid", 8, 16)},
    "affine-rope-tokens": {"method": affine("token", "channel", "asym", 2), "rotary": 64},
    "affine-rope-channels": {"method": affine("channel", "token", "hybrid", 2, 16), "rotary": 40, "head_dim": 80},
    "affine-large-values": {"method": affine(bits=4), "size": 1e4},
    "innerq-d128": {"method": "innerq", "head_dim": 128, "packed": (256, 96)},
    "kivi-tiles-of-128": {"method": "kivi", "plan": blocks.Plan(32, 128, 4, 2), "packed": (288, 32), "slabs": (12,)},
    "gear": {"method": "gear"},
    "gear-d128": {"method": "gear:bits=4", "head_dim": 128, "packed": (256, 96), "slabs": (4, 5)},
    "gear-rank-1-d96": {"method": "gear:rank=1,bits=1", "head_dim": 96, "slabs": (5,), "packed": (64, 160)},
    "gear-rank-4-d80": {"method": "gear:rank=4,bits=3,group=16", "head_dim": 80},
    "gear-rank-20": {"method": "gear:rank=20", "packed": (288, 32), "slabs": (9,)},
    "gear-block128": {"method": low_rank(affine(mode="asym", group=64, block=128))} | PAGES,
    "gear-rope": {"method": low_rank(affine("token", "channel", "asym")), "rotary": 40, "head_dim": 96},
    **{f"mixed-{bits}+{extra}": {"method": mixed(bits, extra)} for bits, extra in ((1, 1), (1, 4), (2, 2))},
    "mixed-block64-d80": {"method": mixed(2, 2, 40, 64), "head_dim": 80, "packed": (64, 192), "slabs": (2, 2)},
    "mixed-block64-tiles-of-128": {
        "method": mixed(2, 4, 40, 64),
        "packed": (320, 64),
        "plan": blocks.Plan(8, 128, 4, 2),
    },
    "mixed-turned-d96": {"method": mixed(2, 1, 20, 32, "channel", "token"), "head_dim": 96},
    "mixed-rope": {"method": mixed(2, 2, 60, 128), "rotary": 40, "head_dim": 80} | PAGES,
    "mixed-rope-channels": {"method": mixed(2, 4, 10, 32, "channel"), "rotary": 64},
    "mixed-none": {"method": mixed(2, 2, 0)},
    "mixed-large-values": {"method": mixed(2, 2), "size": 1e4},
    "zipcache": {"method": "zipcache"} | PAGES,
    "zipcache-d128": {"method": "zipcache:group=32", "head_dim": 128, "packed": (288, 32), "slabs": (4, 5)},
    "long-padded": {"method": "turboquant", "tokens": 35, "padded": True, "packed": (32, 64)},
    "12-rows": {"method": "turboquant:bits=3", "per_head": 4, "tokens": 3, "in_place": True},
    "40-rows": {"method": "k=qjl+v=turboquant:bits=2", "per_head": 8, "tokens": 5, "in_place": True, "head_dim": 128},
    "large-queries": {"method": "turboquant", "gain": 1e4},
    "small-queries": {"method": "turboquant", "gain": 1e-6},
    "small-values": {"method": "turboquant", "size": 1e-5},
    "large-values": {"method": "turboquant", "size": 1e3},
    "nothing-packed": {"method": "turboquant", "packed": (0, 0), "slabs": (4,)},
    "tiles-of-32": {
        "method": "turboquant:bits=3",
        "plan": blocks.Plan(8, 32, 4, 3),
        "packed": (288, 32),
        "slabs": (12,),
    },
    "tiles-of-128": {
        "method": "turboquant:bits=3",
        "plan": blocks.Plan(8, 128, 4, 2),
        "packed": (288, 32),
        "slabs": (12,),
    },
}


if __name__ == "__main__":
    quicken()
    wrong = {name: error for name in sys.argv[1:] if (error := Case(**CASES[name]).error()) >= LIMIT}
    for name, error in wrong.items():
        print(f"{name}: {error:.2e}", file=sys.stderr)
    sys.exit(bool(wrong))
