"""Calls of the Triton kernel over packed groups in plain order, and their answers by the float32 reference.

``python tiles_case.py NAME...`` runs cases by name, under Triton's interpreter where TRITON_INTERPRET is set.
"""

import copy
import math
import sys
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvfold
from interpreter import quicken
from kvfold import kernels
from kvfold.engines.transformers.names import passing
from kvfold.formats import AffineGroups
from kvfold.kernels import AttentionCall, NewTokens, Span, Windows
from kvfold.kernels.affine import tiles
from kvfold.kernels.reference import ReferenceKernel
from kvfold.rope import Rope

LIMIT = 2e-3


def formats(method="kivi", head_dim=64, bits=2, value_bits=None, group=32, value_group=None):
    """Formats of KIVI ("kivi") or of InnerQ in a mode ("asym", "sym", "hybrid"); "kivi+sym": keys of one, values of another."""
    if "+" in method:
        of_keys, _, of_values = method.partition("+")
        key, _ = formats(of_keys, head_dim, bits, value_bits, group, value_group)
        return key, formats(of_values, head_dim, bits, value_bits, group, value_group)[1]
    inner, mode = method != "kivi", "asym" if method == "kivi" else method
    block = max(32, group, value_group or 0)
    axes = ("channel", "token") if inner else ("token", "channel")
    key = AffineGroups(head_dim, block, "plain", bits, axes[0], mode, group)
    return key, AffineGroups(head_dim, block, "plain", value_bits or bits, axes[1], mode, value_group or group)


class Case:
    """One call; storage that holds no token is full of NaN and ones.

    Parameters
    ----------
    packed : tuple of int
        Packed tokens, sequence by sequence.
    slabs : tuple of int
        Blocks of each.
    rotary : int
        Channels that are rotated as keys are read; 0: keys are stored after RoPE.
    in_place : bool
        The call's tokens lie in the ring.
    padded : bool
        The first sequence's first new token is padding.
    gain : float
        Factor of queries; ``scale`` makes up for it.
    """

    def __init__(
        self, method="kivi", head_dim=64, bits=2, value_bits=None, group=32, value_group=None, packed=(64, 160), slabs=(6,),
        rotary=0, scaling=1.0, tokens=1, per_head=2, in_place=False, padded=False, bias=False, gain=1.0, plan=None,
        dtype=torch.float32, device="cpu", sink=4, ring=40, heads=2,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(0)

        def rand(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        def numbers(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.tokens, self.in_place, self.plan, self.padded = tokens, in_place, plan, padded
        form = formats(method, head_dim, bits, value_bits, group, value_group)
        batch, block = len(packed), form[0].block
        vectors = [rand(batch, heads, max(packed), head_dim) for _ in form]
        vectors[0] = vectors[0] * torch.exp(0.7 * rand(1, heads, 1, head_dim)) + rand(1, heads, 1, head_dim)
        vectors[1][:, :, :16] += 3  # so that hybrid groups choose either mode
        spans, first = [], 0
        for blocks in slabs:
            sides = []
            for f, x in zip(form, vectors, strict=True):
                fields = f.allocate(batch, heads, blocks, device)
                for t in fields.values():
                    t.fill_(float("nan") if t.is_floating_point() else -1)
                for b, n in enumerate(packed):
                    low, high = first * block, min(n, (first + blocks) * block)
                    if high > low:
                        for name, t in f.encode(x[b : b + 1, :, low:high]).items():
                            fields[name][b : b + 1, :, : (high - low) // block] = t
                used = max(1, min(blocks, math.ceil(max(packed) / block) - first))
                sides.append({name: t[:, :, :used] for name, t in fields.items()})
            spans.append(Span(first * block, *sides))
            first += blocks
        recent = [max(tokens, ring - 3 - 9 * b) for b in range(batch)]
        windows = [rand(batch, heads, n, head_dim).to(dtype) for n in (sink, sink, ring, ring)]
        for b, n in enumerate(packed):
            unused = torch.ones(ring, dtype=torch.bool, device=device)
            unused[(n + torch.arange(recent[b], device=device)) % ring] = False
            for x in windows[2:]:
                x[b, :, unused] = float("nan")
        held = Windows(
            (windows[0], windows[1]),
            (windows[2], windows[3]),
            numbers([sink] * batch),
            numbers(list(packed)),
            numbers(recent),
        )
        valid = None
        if padded:
            valid = torch.ones(batch, tokens, dtype=torch.bool, device=device)
            valid[0, 0] = False
        rows = (rand(batch, heads, per_head * tokens, head_dim) * gain).to(dtype).float()
        new = [rand(batch, heads, tokens, head_dim).to(dtype) for _ in range(2)]
        for x in new if padded else ():
            x[0, :, 0] = float("nan")
        rope = None
        if rotary:
            rope = Rope(10000.0 ** (-torch.arange(0, rotary, 2, device=device).float() / rotary), scaling)
        factor = 1.0 if rotary else torch.exp(0.3 * rand(head_dim))
        shift = 3 * rand(batch, heads, per_head * tokens) if bias else None
        self.call = AttentionCall(
            rows.unflatten(2, (per_head, tokens)).flatten(1, 2),
            1 / math.sqrt(head_dim) / gain,
            heads,
            *form,
            spans,
            held.packed_len,
            held,
            None if in_place else NewTokens(*new, valid),
            project=lambda queries, dtype: ((queries * factor).to(dtype), shift),
            first_position=torch.tensor([3, 70000][:batch], device=device),
            rope=rope,
        )

    def expected(self):
        """The reference's answer, over clean copies of what it decodes."""

        def clean(fields):
            return {n: torch.nan_to_num(t) if t.is_floating_point() else t for n, t in fields.items()}

        spans = [Span(s.start, clean(s.keys), clean(s.values)) for s in self.call.spans]
        return ReferenceKernel().attend(replace(self.call, spans=spans))

    def error(self):
        """Relative RMS error; every number is finite."""
        got, want = tiles.attend(self.call, self.plan), self.expected()
        assert torch.isfinite(got).all()
        if self.padded:  # what a padding query gets has no meaning
            got, want = (x[:, :, 1:] for x in (got, want))
        return float((got - want).norm() / want.norm())


CASES = {
    **{f"kivi-{bits}bit": {"bits": bits} for bits in (1, 2, 3, 4, 8)},
    "kivi-d96": {"head_dim": 96},
    "kivi-d80-group16": {"head_dim": 80, "group": 16, "packed": (0, 96)},
    "kivi-d112-group16": {"head_dim": 112, "group": 16, "bits": 4},
    "kivi-d16-group16": {"head_dim": 16, "group": 16},
    "kivi-d256-group128": {"head_dim": 256, "group": 128, "packed": (256,), "slabs": (3,)},
    "kivi-group64": {"head_dim": 128, "group": 64, "packed": (128, 64), "slabs": (1, 2)},
    "kivi-3bit-8bit-bias-slabs": {"bits": 3, "value_bits": 8, "bias": True, "slabs": (2, 1, 3)},
    **{f"asym-{bits}bit": {"method": "asym", "bits": bits} for bits in (1, 4)},
    "asym-d96-values128": {"method": "asym", "head_dim": 96, "value_group": 128, "packed": (128,), "slabs": (3,)},
    **{f"sym-{bits}bit": {"method": "sym", "bits": bits} for bits in (2, 3)},
    "sym-d80-group16": {"method": "sym", "head_dim": 80, "group": 16, "bits": 8},
    "sym-values64": {"method": "sym", "value_group": 64, "packed": (128,)},
    **{f"hybrid-{bits}bit": {"method": "hybrid", "bits": bits} for bits in (1, 2)},
    "hybrid-d48-group16": {"method": "hybrid", "head_dim": 48, "group": 16, "bits": 4},
    "hybrid-values64": {"method": "hybrid", "value_group": 64, "packed": (128,), "bits": 8},
    "rope": {"rotary": 64},
    "rope-half-of-d80": {"rotary": 40, "head_dim": 80, "group": 16, "scaling": 1.2},
    "rope-d96-slabs-in-place": {"rotary": 96, "head_dim": 96, "slabs": (2, 4), "tokens": 2, "in_place": True},
    "rope-1unit-4bit": {"rotary": 64, "bits": 4, "plan": tiles.Plan(8, 1, 1, 1, 2)},
    "in-place-3tokens": {"tokens": 3, "in_place": True, "per_head": 3, "bits": 4, "value_bits": 1},
    "long-padded": {"tokens": 35, "padded": True, "packed": (32, 64)},
    "long-d16": {"tokens": 35, "head_dim": 16, "group": 16, "packed": (64,)},
    "long-d48-4bit": {"tokens": 35, "head_dim": 48, "group": 16, "bits": 4, "packed": (64,)},
    "long-d80-sym": {"tokens": 35, "head_dim": 80, "group": 16, "method": "sym", "packed": (64,)},
    "long-d96": {"tokens": 35, "head_dim": 96, "packed": (64, 96)},
    "long-d112-8bit": {"tokens": 35, "head_dim": 112, "group": 16, "bits": 8, "packed": (64,)},
    "long-rope-d32": {"tokens": 33, "head_dim": 32, "rotary": 32, "packed": (64,)},
    "long-rope-half-of-d80": {"tokens": 33, "head_dim": 80, "group": 16, "rotary": 40, "packed": (64,)},
    "long-rope": {"tokens": 33, "rotary": 64, "packed": (64,), "slabs": (1, 1)},
    "large-queries": {"gain": 1e4},
    "small-queries": {"gain": 1e-6},
    "kivi-keys-hybrid-values": {"method": "kivi+hybrid", "bits": 3, "value_bits": 2},
    "kivi-keys-sym-values-long": {"method": "kivi+sym", "tokens": 35, "packed": (64,)},
    "sym-keys-kivi-values": {"method": "sym+kivi", "bits": 4, "value_bits": 1, "bias": True},
    "hybrid-keys-asym-values": {"method": "hybrid+asym", "tokens": 3, "in_place": True},
    "nothing-packed": {"packed": (0, 0), "slabs": (2,)},
    "4units-3splits": {"plan": tiles.Plan(16, 4, 2, 1, 3), "packed": (288, 32), "slabs": (9,)},
}


def model_error(method, head_dim, device, prompt=500, turn=130):
    """Largest relative RMS difference between logits of a tiny fp16 model over the Triton kernel and over the reference,
    which attends to a copy of the same cache in every call.

    Two sequences: a prompt, a short turn with padding, a long turn, and single tokens.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=2048, initializer_range=0.3,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).to(device, torch.float16).eval()
    cache = kvfold.fold(llama, method, kernel="triton")
    mask = torch.ones(2, 0, dtype=torch.long, device=device)
    errors = []
    for size, padding in ((prompt, 0), (7, 3), (turn, 0), (1, 0), (1, 0)):
        ids = torch.randint(0, 96, (2, size), generator=torch.Generator().manual_seed(size)).to(device)
        new = torch.ones(2, size, dtype=torch.long, device=device)
        new[0, :padding] = 0
        mask = torch.cat((mask, new), 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -size:]
        options = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
        twin = copy.deepcopy(cache)
        for layer in twin.folded:
            layer.kernel = kernels.REGISTRY["reference"]
        with torch.no_grad():
            got = llama(ids, **passing(llama, cache), **options).logits
            if size != prompt:  # which attends exactly
                want = llama(ids, **passing(llama, twin), **options).logits
                errors.append(float((got - want)[new.bool()].norm() / want[new.bool()].norm()))
    for layer in cache.folded:
        assert layer.kernel.name == "triton" and layer.key_format.operand == "plain" and len(layer.slabs) > 1
    return max(errors)


if __name__ == "__main__":
    quicken()
    if "model" in sys.argv:
        tiles.TilesKernel.why_not = lambda self, key, value, device, pre_rope: tiles.unsupported(key, value, pre_rope)
        error = model_error("squat_pre:group=16,sink=0,recent=16", 32, "cpu", prompt=100, turn=40)
        assert error < 1e-2, f"relative RMS error of logits {error:.2e}"
        sys.exit()
    for name in sys.argv[1:]:
        error = Case(**CASES[name]).error()
        assert error < LIMIT, f"{name}: relative RMS error {error:.2e}"
