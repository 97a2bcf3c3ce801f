"""One call of the fused decode attention, and its answer by definition."""

import math
from itertools import pairwise

import torch

from kvfold.kernels import Span, Windows

FP16, BF16 = torch.float16, torch.bfloat16
LIMIT = {FP16: 2e-3, BF16: 1e-2}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS of the difference relative to that of ``want``; infinite unless all is finite."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm()) if got.isfinite().all() else math.inf


def _outliers(x: torch.Tensor) -> torch.Tensor:
    """One key in fifty has a channel far beyond fp16's range."""
    x = x.clone()
    x[:, :, ::50, 3] = 1e6
    x[:, :, 7::50, 5] = -3e5
    return x


def _constant_groups(x: torch.Tensor) -> torch.Tensor:
    """Half of the channels, and half of the blocks, are the same number throughout: their scale is 0."""
    x = x.clone()
    x[..., ::2] = 1.7
    x[:, :, : x.shape[2] // 64 * 32] = -0.4
    return x


KINDS = {
    "normal": lambda x: x,
    "constant": lambda x: torch.full_like(x, 2.3),
    "constant-groups": _constant_groups,
    "zero": torch.zeros_like,
    "huge": lambda x: 6e4 * x.sign(),
    "small": lambda x: 1e-3 * x,
    "tiny": lambda x: 1e-6 * x,
    "denormal": lambda x: 2.0**-24 * x.sign(),
    "outliers": _outliers,
}
"""What keys or values may look like before they are encoded."""


class Case:
    """Inputs of one call, and the answer by definition. Unused storage holds ``poison``.

    Parameters
    ----------
    form : pair of AffineGroups
    packed : tuple of int
        Packed tokens, sequence by sequence.
    sink, ring : int
        Slots of the windows; may be 0.
    sink_len, recent : tuple of int or None
        Valid tokens of the sink, of the ring.
    separate, bias : bool
        Whether packed keys meet queries of their own; whether their scores are shifted.
    gain, key_gain, scale_gain : float
        Factors of queries, keys and ``scale``; the product with ``scale`` keeps scores of ordinary size.
    keys, values : str
        What is packed, by :data:`KINDS`.
    largest : float or None
        Choose ``scale`` so that no score of a packed token is larger.
    pieces : int
        Tensors that packed storage is cut into.
    poison : float
    """

    def __init__(
        self, form, packed=(320, 1056), heads=2, group_heads=4, tokens=1, dtype=FP16, sink=32, ring=128, recent=None,
        sink_len=None, bias=False, separate=False, gain=1.0, key_gain=1.0, scale_gain=1.0, keys="normal", values="normal",
        largest=None, pieces=1, poison=math.nan, seed=0, device="cuda",
    ):  # fmt: skip
        g = torch.Generator(device).manual_seed(seed)

        def rand(*shape):
            return torch.randn(*shape, device=device, generator=g)

        self.form, (key, value) = form, form
        d, batch = key.head_dim, len(packed)
        blocks = -(-max(packed) // key.block) + 2
        stored = []
        for f, kind in ((key, keys), (value, values)):
            fields = f.allocate(batch, heads, blocks, torch.device(device))
            for x in fields.values():
                x.fill_(poison if x.is_floating_point() else -1)
            factor = torch.exp(0.7 * rand(1, heads, 1, d)) * key_gain if f is key else 1.0
            for b, n in enumerate(packed):
                encoded = f.encode(KINDS[kind]((rand(1, heads, n, d) + 0.3) * factor)) if n else {}
                for name, x in encoded.items():
                    fields[name][b : b + 1, :, : n // f.block] = x
            stored.append(fields)
        self.keys, self.values = stored
        recent = recent or tuple((ring - 7, tokens, ring // 2)[b % 3] for b in range(batch))
        self.lens = [
            (sink if sink_len is None else sink_len[b], n, max(recent[b % len(recent)], tokens) if ring else 0)
            for b, n in enumerate(packed)
        ]
        self.sink, self.ring = (
            tuple(rand(batch, heads, n, d).to(dtype) for _ in range(2)) for n in (sink, ring)
        )  # fmt: skip
        for b, (s, n, r) in enumerate(self.lens):
            unused = torch.ones(ring, dtype=torch.bool, device=device)
            unused[(n + torch.arange(r, device=device)) % max(ring, 1)] = False
            for of_sink, of_ring in zip(self.sink, self.ring, strict=True):
                of_sink[b, :, s:] = poison
                of_ring[b, :, unused] = poison
        self.q = (rand(batch, heads * group_heads, tokens, d) * gain).to(dtype)
        self.packed_q = self.q.float() * torch.exp(0.3 * rand(1, 1, 1, d)) if separate else None
        self.bias = 3 * rand(batch, heads * group_heads, tokens) if bias else None
        self.lengths = [torch.tensor(side, dtype=torch.int32, device=device) for side in zip(*self.lens, strict=True)]
        self.pieces = pieces
        self.scale = scale_gain / math.sqrt(d) / gain
        if largest is not None:
            self.scale = 1.0
            self.scale = largest / max(float(score.abs().max()) for score in self.packed_scores() if score.numel())

    @property
    def windows(self) -> Windows:
        sink_len, packed_len, recent_len = self.lengths
        return Windows(self.sink, self.ring, sink_len, packed_len, recent_len)

    @property
    def spans(self) -> list[Span]:
        if self.pieces == 1:
            return [Span(0, self.keys, self.values)]
        blocks, spans = self.keys["codes"].shape[2], []
        for a, b in pairwise(blocks * i // self.pieces for i in range(self.pieces + 1)):
            sides = [{n: x[:, :, a:b].contiguous() for n, x in f.items()} for f in (self.keys, self.values)]
            spans.append(Span(a * self.form[0].block, *sides))
        return spans

    def relength(self, lens) -> None:
        """Other lengths, in the same tensors."""
        self.lens = lens
        for tensor, side in zip(self.lengths, zip(*lens, strict=True), strict=True):
            tensor.copy_(torch.tensor(side, dtype=torch.int32))

    def call(self, **options):
        from kvfold.kernels.affine.decode import decode_attention

        return decode_attention(
            self.q, *self.form, self.spans, self.windows, self.scale, packed_q=self.packed_q, bias=self.bias, **options
        )  # fmt: skip

    def packed_scores(self):
        """Scores of packed tokens, sequence by sequence, float32 [kv_heads, rows, tokens, packed]."""
        keys, queries = self.form[0].decode(self.keys), self.q if self.packed_q is None else self.packed_q
        for b, (_, n, _) in enumerate(self.lens):
            rows = queries[b].float().unflatten(0, (keys.shape[1], -1))
            score = torch.einsum("hrtd,hnd->hrtn", rows, keys[b, :, :n])
            if self.bias is not None:
                score = score + self.bias[b].unflatten(0, (keys.shape[1], -1)).unsqueeze(-1)
            yield score * self.scale

    def expected(self):
        values = self.form[1].decode(self.values)
        heads, tokens = values.shape[1], self.q.shape[2]
        out = torch.empty_like(self.q, dtype=torch.float32)
        for b, ((s, n, r), packed) in enumerate(zip(self.lens, self.packed_scores(), strict=True)):
            rows = self.q[b].float().unflatten(0, (heads, -1))
            slots = (n + torch.arange(r, device=rows.device)) % max(self.ring[0].shape[2], 1)
            (sink_k, sink_v), (ring_k, ring_v) = (
                [x[b, :, at].float() for x in window] for window, at in ((self.sink, slice(0, s)), (self.ring, slots))
            )
            before, after = (
                torch.einsum("hrtd,hnd->hrtn", rows, k) * self.scale for k in (sink_k, ring_k)
            )  # fmt: skip
            score = torch.cat([before, packed, after], -1)
            position = torch.arange(score.shape[-1], device=score.device)
            if r:
                score = score.masked_fill(position > position[-tokens:].unsqueeze(-1), -math.inf)
            seen = torch.cat([sink_v, values[b, :, :n], ring_v], 1)
            out[b] = torch.einsum("hrtn,hnd->hrtd", score.softmax(-1), seen).flatten(0, 1)
        return out

    def check(self, limit=None):
        error = relative(self.call(), self.expected())
        assert error < (limit or LIMIT[self.ring[0].dtype]), f"relative RMS error {error:.2e}"
