"""What the key oracle's variants store of keys: see key_oracle.py."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from key_prompts import MORE, SINK, TOKENS, Oracle, Prefix

from kvfold.arithmetic import beside
from kvfold.formats import UniformTokens
from kvfold.formats.uniform import ROUNDS, STEP, fitted
from kvfold.methods import get


@dataclass(frozen=True)
class Levels(UniformTokens):
    """The same levels and scales, not packed: packing takes most of the time."""

    kind = "levels"

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.bits_per_code in STEP:
            scale = x.square().mean(-1, keepdim=True).sqrt() * STEP[self.bits_per_code]
        else:
            scale = x.abs().amax(-1, keepdim=True) / self.middle
        for _ in range(ROUNDS):
            levels = self._levels(x, scale)
            scale = (x * levels).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True)
        levels = self._levels(x, scale)
        scale = fitted(x, levels, self.fit).half().float()
        return {
            "levels": levels.unflatten(-2, (-1, self.block)),
            "decoded": (levels * scale).unflatten(-2, (-1, self.block)),
        }

    def decode(self, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        return fields["decoded"].flatten(-3, -2)


@dataclass(frozen=True)
class Coded(UniformTokens):
    """Uniform levels without end, coded into the bytes that levels of ``bits_per_code`` bits take: a container per page.

    A page's spacing is the finest with which its levels fit, under the code lengths of a normal distribution; ``LANES``
    states of 16 bits, which a coder begins with, are taken off. What :meth:`encode` gives is not packed.
    """

    kind = "coded"

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        size = x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
        unit = (x / size).unflatten(-2, (-1, TOKENS)).flatten(-2)
        room = TOKENS * self.head_dim * self.bits_per_code - 16 * LANES
        levels = torch.zeros_like(unit)
        done = torch.zeros(unit.shape[:-1], dtype=torch.bool)
        for spacing in spacings(self.bits_per_code):
            found = (unit / spacing).round()
            fits = (lengths(found, spacing).sum(-1) <= room) & ~done
            levels = torch.where(fits[..., None], found, levels)
            done |= fits
            if done.all():
                break
        assert done.all()
        levels = levels.unflatten(-1, (TOKENS, self.head_dim)).flatten(-3, -2)
        return {"decoded": (levels * fitted(x, levels, self.fit)).unflatten(-2, (-1, self.block))}

    def decode(self, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        return fields["decoded"].flatten(-3, -2)


LANES = 32


def spacings(bits: int) -> Iterator[float]:
    """Spacings of levels, in roots of a vector's mean square, the finest first."""
    begin = 4.13 * 2.0**-bits * 0.9
    return (begin * 2 ** (i / 32) for i in range(200))


def lengths(levels: torch.Tensor, spacing: float) -> torch.Tensor:
    """Bits of a level under a normal distribution, at most 24."""
    top = int(levels.abs().max())
    edges = (torch.arange(top + 2, dtype=torch.float64) - 0.5) * spacing
    tail = torch.special.erfc(edges / math.sqrt(2)) / 2
    mass = (tail[:-1] - tail[1:]).clamp_min(2.0**-24)
    return (-mass.log2()).float()[levels.abs().long()]


@dataclass(frozen=True)
class Variant:
    """What is stored of keys.

    Attributes
    ----------
    bits
        Of a key's element, all that is stored counted.
    stored
        (prefix, layer) to the folded tokens' keys as decoded, [num_kv_heads, tokens, head_dim].
    """

    name: str
    bits: float
    stored: Callable[[Prefix, int], torch.Tensor]


class Variants:
    """All variants of a model; what they learn is of the prompts that are not judged."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.compared: set[str] = set()

    @beside
    def chosen(self) -> list[Prefix]:
        return [self.oracle.prefix(name) for name in (*self.oracle.setting.chosen, *MORE)]

    def averaged(self, each: Sequence[torch.Tensor]) -> torch.Tensor:
        """A mean over what is learned from, of which pairs are half and texts the other half."""
        pairs = torch.tensor([p.name.startswith("pairs") for p in self.chosen()])
        stacked = torch.stack(list(each))
        return (stacked[pairs].mean(0) + stacked[~pairs].mean(0)) / 2

    def turned(self, mean: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        """A vector per head before RoPE as the folded tokens' keys have it."""
        at = torch.arange(SINK, prefix.end)[None, None]
        return self.oracle.rope.rotate(mean[None, :, None].expand(-1, -1, at.shape[-1], -1), at)[0]

    @beside
    def measured(self, layer: int) -> torch.Tensor:
        """Mean of keys before RoPE, [num_kv_heads, head_dim]."""
        found = []
        for p in self.chosen():
            at = torch.arange(SINK, p.end)[None, None]
            found.append(self.oracle.rope.unrotate(p.keys[None, layer, :, SINK : p.end], at)[0].mean(1))
        return self.averaged(found)

    @beside
    def bias(self, layer: int) -> torch.Tensor:
        """The keys' bias of the weights, [num_kv_heads, head_dim]."""
        return self.oracle.inner.layers[layer].self_attn.k_proj.bias.unflatten(0, (self.oracle.heads, -1))

    @property
    def biased(self) -> bool:
        return self.oracle.inner.layers[0].self_attn.k_proj.bias is not None

    @beside
    def moments(self, layer: int, source: str, mean: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Second moment of queries, and covariance of keys about their page's mean, float64 [num_kv_heads, d, d]."""
        asked, held = [], []
        for p in self.chosen():
            keys = p.keys[layer, :, SINK : p.end]
            if mean:
                keys = keys - self.turned(getattr(self, mean)(layer), p)
            pages = keys.unflatten(1, (-1, TOKENS))
            rows = (pages - pages.mean(2, keepdim=True)).flatten(1, 2).double()
            moments = rows.mT @ rows / rows.shape[1], p.queries[layer].double()
            for moment, of in zip(moments, (held, asked), strict=True):
                size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
                of.append(moment / size + RIDGE * torch.eye(moment.shape[-1], dtype=torch.float64))
        if source == "prose":
            at = [p.name for p in self.chosen()].index("prose")
            return asked[at], held[at]
        return self.averaged(asked), self.averaged(held)

    @beside
    def map(self, layer: int, kind: str, source: str, mean: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix per head that keys are multiplied with, and its inverse, [num_kv_heads, d, d].

        With C the queries' second moment, C = L L', and M the keys' covariance: ``white`` is C^(1/2); ``diag`` the root of
        C's diagonal; ``eigen`` U' L' with U of L' M L = U D U'; ``map`` D^(-1/4) U' L'.
        """
        asked, held = self.moments(layer, source, mean)
        if kind == "diag":
            found = torch.diag_embed(asked.diagonal(dim1=-2, dim2=-1).sqrt())
        elif kind == "white":
            value, vector = torch.linalg.eigh(asked)
            found = vector * value.sqrt()[:, None] @ vector.mT
        else:
            low = torch.linalg.cholesky(asked)
            value, vector = torch.linalg.eigh(low.mT @ held @ low)
            found = vector.mT @ low.mT
            if kind == "map":
                found = value.clamp_min(1e-12 * float(value.max()))[..., None] ** -0.25 * found
        # Only ratios matter; sizes near 1 keep fp16 page means in range.
        found = found / torch.linalg.matrix_norm(found)[:, None, None] * self.oracle.dim**0.5
        return found.float(), torch.linalg.inv(found).float()

    def make(
        self, name: str, options: str, mean: str = "", kind: str = "", source: str = "", coded: bool = False
    ) -> Variant:
        """fold's keys with options, less a mean before RoPE, mapped, and coded, each if named."""
        form: Any = get(f"fold:{options}").key_format(self.oracle.spec)
        kept = form
        inner = (Coded if coded else Levels)(*(getattr(form.inner, f.name) for f in dataclasses.fields(UniformTokens)))
        form = dataclasses.replace(form, inner=inner)
        if not coded and name not in self.compared:
            x = self.chosen()[0].keys[None, 1, :, SINK : SINK + 2 * TOKENS]
            assert torch.equal(form.decode(form.encode(x)), kept.decode(kept.encode(x))), name
            self.compared.add(name)

        def stored(prefix: Prefix, layer: int) -> torch.Tensor:
            x = prefix.keys[layer, :, SINK : prefix.end]
            static = self.turned(getattr(self, mean)(layer), prefix) if mean else None
            if static is not None:
                x = x - static
            if kind:
                forth, back = self.map(layer, kind, source, mean)
                x = x @ forth.mT
            x = form.decode(form.encode(x[None]))[0]
            if kind:
                x = x @ back.mT
            return x if static is None else x + static

        return Variant(name, form.bits, stored)

    def learned(self, bits: int, path: pathlib.Path) -> Variant:
        """TaSQ's keys, with codebooks of ``kvfold calibrate --method tasq:bits=BITS,values=fold``."""
        method = get(f"tasq:bits={bits},values=fold,artefact={path}")

        def stored(prefix: Prefix, layer: int) -> torch.Tensor:
            spec = dataclasses.replace(self.oracle.spec, layer_idx=layer)
            at = torch.arange(SINK, prefix.end)[None, None]
            fields = method.encode_keys(prefix.keys[None, layer, :, SINK : prefix.end], {}, spec, at, True)
            return method.restore_keys(method.key_format(spec).decode(fields), spec, at)[0]

        return Variant(f"learned {bits}", method.key_format(self.oracle.spec).bits, stored)

    def part(self, part: str) -> Iterator[Variant]:
        """Variants of a part of the task."""
        d = self.oracle.dim
        plain = f"normalize=false,rotation={d}"
        if part == "a":
            for bits in (2, 3, 4):
                yield self.make(f"fold {bits}", f"k_bits={bits}")
        if part == "b":
            for bits in (3, 2):
                for mean in ("measured", "bias") if self.biased and bits == 3 else ("measured",):
                    yield self.make(f"less {mean} {bits}", f"k_bits={bits}", mean)
                    yield self.make(f"less {mean}, no page mean {bits}", f"k_bits={bits},center=false", mean)
            yield self.make("no page mean 3", "k_bits=3,center=false")
        if part == "c":
            for bits in (3, 2):
                yield self.make(f"map {bits}", f"k_bits={bits},{plain}", "", "map", "all")
                yield self.make(f"eigen, page norms {bits}", f"k_bits={bits},rotation={d}", "", "eigen", "all")
                yield self.make(f"diag, page norms {bits}", f"k_bits={bits}", "", "diag", "all")
            yield self.make("eigen of prose, page norms 3", f"k_bits=3,rotation={d}", "", "eigen", "prose")
            yield self.make("white 3", f"k_bits=3,{plain}", "", "white", "all")
        if part == "e":
            for bits in (3, 2):
                yield self.make(f"coded {bits}", f"k_bits={bits}", coded=True)
        if part == "d":
            for bits in (2, 4):
                path = self.oracle.work / f"tasq{bits}-{self.oracle.name}.safetensors"
                if path.exists():
                    yield self.learned(bits, path)
        if part == "bc":
            for bits in (3, 2):
                how = f"k_bits={bits},rotation={d}"
                for coded in (False, True):
                    name = f"less measured, eigen, page norms{', coded' if coded else ''} {bits}"
                    yield self.make(name, how, "measured", "eigen", "all", coded)


RIDGE = 1e-2
