"""Packed storage in slabs with its windows, as kernels over pages take them, and what float32 attention makes of it."""

import math

import torch

from kvfold.kernels import Span, Windows
from kvfold.kernels.fold import decode as pages
from kvfold.methods import LayerSpec, get

LIMIT = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
SINK, RECENT = 32, 96


class Case:
    """Sequences of ``lens`` packed tokens, in storage that is larger than they need and poisoned beyond them."""

    def __init__(
        self, method, lens=(1000 // 32 * 32, 0, 32, 128, 416), heads=8, kv_heads=2, dim=128, tokens=1,
        dtype=torch.float16, size=1.0, mean=1.0, query=1.0, split=None, seed=0, kernel=pages, device="cuda",
    ):  # fmt: skip
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)
        spec = LayerSpec(0, 1, heads, kv_heads, dim, dtype)
        method = get(method)
        self.formats = method.key_format(spec), method.value_format(spec)
        self.kernel = kernel
        assert kernel.unsupported(*self.formats) is None
        self.lens, batch = lens, len(lens)
        most = max(lens)
        gain, offset = torch.exp(0.7 * self.random(1, kv_heads, 1, dim)), mean * self.random(1, kv_heads, 1, dim)
        fields = []
        for form, is_key in zip(self.formats, (True, False), strict=True):
            x = self.random(batch, kv_heads, most, dim)
            x = x * gain + offset if is_key else size * (x + offset)
            stored = form.allocate(batch, kv_heads, most // 32 + 3, device)
            for y in stored.values():
                y.fill_(float("nan") if y.is_floating_point() else -1)
            for b, n in enumerate(lens):
                if n:
                    for name, y in form.encode(x[b : b + 1, :, :n]).items():
                        stored[name][b : b + 1, :, : y.shape[2]] = y
            fields.append(stored)
        self.fields = fields
        slots = RECENT + 32
        windows = [self.random(batch, kv_heads, n, dim).to(dtype) for n in (SINK, SINK, slots, slots)]
        for x in windows[1::2]:
            x.mul_(size)
        self.packed = torch.tensor(lens, dtype=torch.int32, device=device)
        for x in windows[2:]:
            for b, n in enumerate(lens):
                free = torch.ones(slots, dtype=torch.bool, device=device)
                free[(n + torch.arange(RECENT, device=device)) % slots] = False
                x[b, :, free] = float("nan")
        full = torch.full_like(self.packed, SINK), torch.full_like(self.packed, RECENT)
        self.windows = Windows((windows[0], windows[1]), (windows[2], windows[3]), full[0], self.packed, full[1])
        self.q = (query * self.random(batch, heads, tokens, dim)).to(dtype)
        self.scale = 1 / math.sqrt(dim)
        if split is None:
            self.spans = [Span(0, *fields)]
        else:
            firsts = [form.take(f, split) for form, f in zip(self.formats, fields, strict=True)]
            blocks = most // 32 + 3
            lasts = [form.take(f, blocks - split, split) for form, f in zip(self.formats, fields, strict=True)]
            # slabs of their own: the first is full
            firsts, lasts = ([{n: x.clone() for n, x in f.items()} for f in side] for side in (firsts, lasts))
            self.spans = [Span(0, *firsts), Span(split * 32, *lasts)]

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, generator=self.generator)

    def reference(self):
        out = torch.empty(self.q.shape, dtype=torch.float32, device=self.device)
        tokens = self.q.shape[2]
        for b, n in enumerate(self.lens):
            ring = (n + torch.arange(RECENT, device=self.device)) % self.windows.ring[0].shape[2]
            sides = []
            for i, form in enumerate(self.formats):
                parts = [self.windows.sink[i][b].float()]
                if n:
                    of = {name: x[b : b + 1] for name, x in self.fields[i].items()}
                    parts.append(form.decode(form.take(of, n // form.block))[0])
                sides.append(torch.cat([*parts, self.windows.ring[i][b][:, ring].float()], 1))
            keys, values = (x.double() for x in sides)
            q = self.q[b].double().unflatten(0, (keys.shape[0], -1)).flatten(1, 2)
            position = torch.arange(keys.shape[1], device=self.device)
            sees = (position <= position[-tokens:].unsqueeze(-1)).repeat(q.shape[1] // tokens, 1)
            scores = (q @ keys.transpose(-1, -2) * self.scale).masked_fill(~sees, float("-inf"))
            out[b] = (scores.softmax(-1) @ values).float().view(out[b].shape)
        return out

    def error(self, plan=None):
        got = self.kernel.decode_attention(self.q, *self.formats, self.spans, self.windows, self.scale, plan=plan)
        want = self.reference()
        assert torch.isfinite(got).all()
        each = (got.float() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
        return float(each.max())
