"""Calls of the kernel over dense storage, and their answers by the float32 reference.

``python dense_case.py NAME...`` runs cases by name, under Triton's interpreter where TRITON_INTERPRET is set.
"""

import math
import sys
from dataclasses import replace

import torch

from interpreter import quicken
from kvfold.formats import Dense
from kvfold.kernels import AttentionCall, NewTokens, Span, Windows
from kvfold.kernels.dense import decode as dense
from kvfold.kernels.reference import ReferenceKernel

LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Case:
    """One call; storage, and slots of windows, that hold no token are full of NaN.

    Parameters
    ----------
    packed : tuple of int
        Packed tokens, sequence by sequence.
    slabs : tuple of int
        Blocks of each; each has room for one more.
    recent : tuple of int or None
        Tokens of each sequence in the ring; None: nearly all of it.
    in_place : bool
        The call's tokens lie in the ring.
    padded : bool
        The first sequence's first new token is padding.
    """

    def __init__(
        self, head_dim=64, packed=(64, 160), slabs=(6,), block=32, tokens=1, per_head=2, in_place=True, padded=False,
        sinks=False, sink=4, ring=40, recent=None, heads=2, plan=None, dtype=torch.float16, device="cpu",
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(0)

        def rand(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        def numbers(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.tokens, self.padded, self.plan, self.dtype = tokens, padded, plan, dtype
        forms = [Dense(head_dim, block, side, dtype) for side in ("key", "value")]
        batch, spans, first = len(packed), [], 0
        for blocks in slabs:
            sides = []
            for form in forms:
                fields = form.allocate(batch, heads, blocks + 1, device)
                fields["x"].fill_(float("nan"))
                for b, n in enumerate(packed):
                    count = min(n // block - first, blocks)
                    if count > 0:
                        new = form.encode(rand(1, heads, count * block, head_dim) + rand(1, heads, 1, head_dim))
                        fields["x"][b : b + 1, :, :count] = new["x"]
                sides.append(form.take(fields, blocks))
            spans.append(Span(first * block, *sides))
            first += blocks
        recent = recent or [max(tokens, ring - 3 - 9 * b) for b in range(batch)]
        windows = [rand(batch, heads, n, head_dim).to(dtype) for n in (sink, sink, ring, ring)]
        for b, n in enumerate(packed):
            unused = torch.ones(ring, dtype=torch.bool, device=device)
            unused[(n + torch.arange(recent[b], device=device)) % max(ring, 1)] = False
            for x in windows[2:]:
                x[b, :, unused] = float("nan")
        held = Windows(
            (windows[0], windows[1]),
            (windows[2], windows[3]),
            numbers([sink] * batch),
            numbers(list(packed)),
            numbers(list(recent)),
        )
        valid = None
        if padded:
            valid = torch.ones(batch, tokens, dtype=torch.bool, device=device)
            valid[0, 0] = False
        new = [rand(batch, heads, tokens, head_dim).to(dtype) for _ in range(2)]
        for x in new if padded else ():
            x[0, :, 0] = float("nan")
        self.call = AttentionCall(
            rand(batch, heads * per_head, tokens, head_dim).to(dtype),
            1 / math.sqrt(head_dim),
            heads,
            *forms,
            spans,
            held.packed_len,
            held,
            None if in_place else NewTokens(*new, valid),
            sinks=rand(heads * per_head).to(dtype) if sinks else None,
        )

    def expected(self):
        """The reference's answer, over clean copies of what it decodes."""

        def clean(fields):
            return {n: torch.nan_to_num(t) for n, t in fields.items()}

        spans = [Span(s.start, clean(s.keys), clean(s.values)) for s in self.call.spans]
        return ReferenceKernel().attend(replace(self.call, spans=spans))

    def error(self):
        """Relative RMS error; every number is finite."""
        got, want = dense.attend(self.call, self.plan).float(), self.expected()
        assert got.shape == want.shape and torch.isfinite(got).all()
        if self.padded:  # what a padding query gets has no meaning
            got, want = (x[:, :, 1:] for x in (got, want))
        return float((got - want).norm() / want.norm())


CASES = {
    "ragged": {},
    "exact": {"dtype": torch.float32, "packed": (0, 160, 32)},
    **{f"d{d}": {"head_dim": d, "packed": (96,)} for d in (16, 48, 80, 96, 128)},
    "d256": {"head_dim": 256, "packed": (64,), "slabs": (2,), "heads": 1},
    "one-head-each": {"per_head": 1, "heads": 3},
    "group-of-7": {"per_head": 7},
    "group-of-16": {"per_head": 16, "heads": 1},
    "block-of-96": {"block": 96, "packed": (192, 96), "slabs": (3,)},
    "slabs": {"slabs": (2, 1, 3), "packed": (64, 192, 32)},
    "nothing-packed": {"packed": (0, 0)},
    "no-storage": {"packed": (0, 0), "slabs": ()},
    "no-windows-but-itself": {"sink": 0, "ring": 32, "recent": (1, 7)},
    "sinks": {"sinks": True, "per_head": 3},
    "in-place-5": {"tokens": 5, "per_head": 3, "sinks": True, "dtype": torch.float32},
    "in-place-16": {"tokens": 16, "sink": 70, "ring": 77, "heads": 1},
    "in-place-reaches-into-the-sink": {"tokens": 4, "packed": (0,), "sink": 8, "recent": (2,)},
    "splits": {"plan": dense.Plan(16, 64, 4, 3, 5), "packed": (288, 32), "slabs": (9,)},
    "splits-of-small-tiles": {"plan": dense.Plan(16, 32, 4, 2, 3), "packed": (160, 96), "slabs": (5,)},
    "new-token": {"in_place": False},
    "long": {"tokens": 20, "in_place": False, "sinks": True, "heads": 1},
    "long-padded": {
        "tokens": 20,
        "in_place": False,
        "padded": True,
        "head_dim": 80,
        "heads": 1,
        "packed": (64, 96),
        "slabs": (2, 1),
    },
}


if __name__ == "__main__":
    quicken()
    for name in sys.argv[1:]:
        case = Case(**CASES[name])
        error = case.error()
        assert error < LIMIT[case.dtype], f"{name}: relative RMS error {error:.2e}"
