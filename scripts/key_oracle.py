"""What else keeps keys: an oracle on three models, at equal bytes. Writes benchmarks/key-oracle.csv and docs/keys.md.

usage: python scripts/key_oracle.py prefill|measure|page [--models 135M,0.5B,1.5B] [--work FOLDER] [--parts a,b,...]

A prompt is run once in full precision and its keys and values are kept in --work. For every variant the keys between the
windows are then replaced by what the variant stores of them, and the tokens to be scored run over that cache alone. Values
stay exact, so that nothing but keys is measured. Rows are appended as they come; what is there is not measured again.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvfold import models
from kvfold.arithmetic import beside
from kvfold.evaluation.text import load_text
from kvfold.evaluation.windows import Window, library_source, retrieval_window, windows_of
from kvfold.formats import UniformTokens
from kvfold.formats.uniform import ROUNDS, STEP, fitted
from kvfold.methods import get
from kvfold.methods.base import LayerSpec
from kvfold.rope import Rope, rope_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "key-oracle.csv"
PAGE = ROOT / "docs" / "keys.md"
FIELDS = ("model", "length", "variant", "bits", "prompt", "scored", "kl", "nll_rise", "exact_change")
SINK, RECENT, TOKENS = 32, 96, 128  # windows and page of fold


@dataclass(frozen=True)
class Setting:
    """A model and what is measured on it."""

    file: str
    length: int
    scored: int
    judged: tuple[str, ...]
    chosen: tuple[str, ...]
    """Prompts by which bits are spread; with MORE what maps and means are learned from. None of them is judged."""
    large: bool = False
    """Of heads and layers alone only heads on pairs are measured: a layer is taken for the sum of its heads, and what text
    loses for the errors of scores that its queries have. """


MORE = ("code",)

SETTINGS = {
    "135M": Setting(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        2048,
        128,
        ("pairs0", "pairs1", "pairs2", "encyclopedia", "novel"),
        ("pairs100", "pairs101", "prose"),
    ),
    "0.5B": Setting(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        1024,
        96,
        ("pairs0", "pairs1", "pairs2", "encyclopedia", "novel"),
        ("pairs100", "prose"),
    ),
    "1.5B": Setting(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1024,
        96,
        ("pairs0", "pairs1", "encyclopedia"),
        ("pairs100", "prose"),
        large=True,
    ),
}


# ---- prompts ---------------------------------------------------------------------------------------------------------


@dataclass
class Prefix:
    """A prompt as the model ran it.

    Attributes
    ----------
    keys, values
        ``[layers, num_kv_heads, tokens, head_dim]``, after RoPE.
    hidden
        Of the scored tokens, ``[layers, scored, width]``: every layer's input.
    logp
        Of the full-precision model where it is judged, ``[places, vocabulary]``.
    places, targets
        Which scored tokens are judged, and what follows them.
    queries
        ``[layers, num_kv_heads, head_dim, head_dim]``: mean of q q' over the newer half of the prompt and a KV head's queries.
    """

    name: str
    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor
    logp: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    queries: torch.Tensor

    @property
    def end(self) -> int:
        """One after the last folded token: whole pages between the windows."""
        return SINK + (self.keys.shape[2] - SINK - RECENT) // TOKENS * TOKENS


class Patched:
    """A cache whose layers hold given keys and values; new tokens are joined and not kept."""

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.keys, self.values = keys, values
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, [batch, heads, tokens, head_dim]."""
        batch = len(key)
        found = []
        for held, new in ((self.keys[layer], key), (self.values[layer], value)):
            held = held if held.ndim == 4 else held[None]
            found.append(torch.cat((held.expand(batch, -1, -1, -1), new), 2))
        if batch == 1:
            self.seen[layer] = (key[0], value[0])
        return found[0], found[1]


class Oracle:
    """A model, and the prompts that it ran."""

    def __init__(self, name: str, work: pathlib.Path) -> None:
        self.name, self.setting, self.work = name, SETTINGS[name], work
        self.model, self.tokenizer, _ = models.load(str(models_folder() / self.setting.file), "float32", "cpu")
        config: Any = self.model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rope: Rope = rope_of(self.model)
        self.spec = LayerSpec(
            0, self.layers, config.num_attention_heads, self.heads, self.dim, rope=self.rope, fragments=False
        )
        self.inner: Any = self.model.model

    def run(
        self, hidden: torch.Tensor, past: int, cache: Patched, first: int = 0, keep: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Layers from ``first`` on, [batch, tokens, width] to the last one's output after its norm."""
        tokens = hidden.shape[1]
        positions = torch.arange(past, past + tokens)[None]
        turn = self.inner.rotary_emb(hidden, positions)
        mask = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)[None, None]
        for index in range(first, self.layers):
            if keep is not None:
                keep.append(hidden)
            hidden = self.inner.layers[index](
                hidden,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=turn,
            )
        return self.inner.norm(hidden)

    def window(self, prompt: str) -> Window:
        """A prompt by its name."""
        length, scored = self.setting.length, self.setting.scored
        if prompt.startswith("pairs"):
            return retrieval_window(self.tokenizer, length, scored, int(prompt[5:]))
        text = {"prose": load_text, "code": library_source, "encyclopedia": encyclopedia, "novel": novel}[prompt]()
        return windows_of(self.tokenizer, prompt, text, length, scored, 1)[0]

    def prefix(self, prompt: str) -> Prefix:
        """A prompt, run if it is not kept."""
        path = self.work / f"{self.name}-{prompt}.pt"
        if path.exists():
            return Prefix(**torch.load(path))
        begun = time.time()
        window = self.window(prompt)
        prefilled = window.prefilled
        empty = torch.zeros(self.heads, 0, self.dim)
        cache = Patched([empty] * self.layers, [empty] * self.layers)
        moments: list[torch.Tensor] = []
        hooks = [
            layer.self_attn.q_proj.register_forward_hook(lambda m, i, out: moments.append(self.moment(out)))
            for layer in self.inner.layers
        ]
        self.run(self.inner.embed_tokens(window.ids[:, :prefilled]), 0, cache)
        for hook in hooks:
            hook.remove()
        keys = torch.stack([cache.seen[i][0] for i in range(self.layers)])
        values = torch.stack([cache.seen[i][1] for i in range(self.layers)])
        hidden: list[torch.Tensor] = []
        ids = window.ids[:, prefilled:-1]
        last = self.run(self.inner.embed_tokens(ids), prefilled, Patched(list(keys), list(values)), 0, hidden)
        spans = window.answers or ((0, ids.shape[1]),)
        places = torch.cat([torch.arange(a, min(b, ids.shape[1])) for a, b in spans])
        found = Prefix(
            prompt,
            keys,
            values,
            torch.cat(hidden),
            self.model.lm_head(last[0, places]).log_softmax(-1),
            places,
            window.ids[0, prefilled + 1 + places],
            torch.stack(moments),
        )
        torch.save(vars(found), path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        say(f"{self.name} {prompt}: {prefilled} tokens run in {time.time() - begun:.0f} s")
        return found

    def moment(self, projected: torch.Tensor) -> torch.Tensor:
        """Mean of q q' after RoPE over the newer half of ``[1, tokens, heads * head_dim]``: [num_kv_heads, d, d]."""
        tokens = projected.shape[1]
        query = projected.unflatten(-1, (-1, self.dim)).transpose(1, 2)
        query = self.rope.rotate(query, torch.arange(tokens)[None, None])[0, :, tokens // 2 :]
        query = query.unflatten(0, (self.heads, -1)).flatten(1, 2)
        return query.mT @ query / query.shape[1]


def models_folder() -> pathlib.Path:
    """Where the models' files are."""
    return pathlib.Path(FOLDERS["models"])


def encyclopedia() -> Any:
    """A text that no map is learned from."""
    return load_text(pathlib.Path(FOLDERS["data"]) / "wikitext-2-raw" / "wiki.test.raw")


def novel() -> Any:
    """Another one."""
    return load_text(pathlib.Path(FOLDERS["data"]) / "gutenberg" / "moby-dick.txt")


FOLDERS = {"models": "", "data": ""}


def say(text: str) -> None:
    """One line to the terminal, at once."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


# ---- what is stored of keys ------------------------------------------------------------------------------------------


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


# ---- measuring -------------------------------------------------------------------------------------------------------


def whole(prefix: Prefix, layer: int, folded: torch.Tensor) -> torch.Tensor:
    """A layer's keys with the folded tokens' in place."""
    found = prefix.keys[layer].clone()
    found[:, SINK : prefix.end] = folded
    return found


def losses(prefix: Prefix, logp: torch.Tensor) -> tuple[float, float, float]:
    """(KL from full precision, rise of the negative log-likelihood, change of the share of right tokens), means."""
    exact, targets = prefix.logp, prefix.targets[:, None]
    kl = (exact.exp() * (exact - logp)).sum(-1).mean()
    rise = (exact - logp).gather(1, targets).mean()
    right = (logp.argmax(-1) == targets[:, 0]).float() - (exact.argmax(-1) == targets[:, 0]).float()
    return float(kl), float(rise), float(right.mean())


def judge(oracle: Oracle, prefix: Prefix, each: Sequence[torch.Tensor], first: int = 0) -> list[tuple[float, ...]]:
    """Losses of several caches that differ in the keys of layers from ``first`` on.

    ``each`` has those layers' keys, [caches, num_kv_heads, tokens, head_dim], or of one cache [num_kv_heads, ...].
    """
    caches = max(len(keys) if keys.ndim == 4 else 1 for keys in each)
    keys = [*prefix.keys[:first], *each]
    hidden = prefix.hidden[first][None].expand(caches, -1, -1)
    last = oracle.run(hidden, prefix.keys.shape[2], Patched(keys, list(prefix.values)), first)
    return [losses(prefix, oracle.model.lm_head(row[prefix.places]).log_softmax(-1)) for row in last]


class Rows:
    """The rows on disk."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        if not path.exists():
            path.write_text(",".join(FIELDS) + "\n")
        with path.open() as file:
            self.there = {(r["model"], r["variant"], r["prompt"]) for r in csv.DictReader(file)}

    def add(self, oracle: Oracle, variant: str, bits: float, prefix: Prefix, found: Sequence[float]) -> None:
        """One row."""
        length, scored = prefix.keys.shape[2], len(prefix.places)
        numbers = ",".join(f"{x:.4g}" for x in found) or ",,"
        with self.path.open("a") as file:
            file.write(f"{oracle.name},{length},{variant_field(variant)},{bits:.4g},{prefix.name},{scored},{numbers}\n")


def variant_field(name: str) -> str:
    """A name as a field: names have commas."""
    return f'"{name}"' if "," in name else name


def measure(oracle: Oracle, rows: Rows, variants: Sequence[Variant]) -> None:
    """Judge variants on all judged prompts, some in a batch: one at a time is several times slower."""
    if oracle.name != "135M":
        variants = [v for v in variants if v.name in FEW or (not oracle.setting.large and part_of(v.name) == "spread")]
    for name in oracle.setting.judged:
        left = [v for v in variants if (oracle.name, v.name, name) not in rows.there]
        if not left:
            continue
        prefix = oracle.prefix(name)
        for at in range(0, len(left), BATCH):
            begun = time.time()
            some = left[at : at + BATCH]
            keys = [torch.stack([whole(prefix, i, v.stored(prefix, i)) for v in some]) for i in range(oracle.layers)]
            encoded = time.time()
            for variant, found in zip(some, judge(oracle, prefix, keys), strict=True):
                rows.add(oracle, variant.name, variant.bits, prefix, found)
                say(f"{oracle.name} {name} {variant.name} ({variant.bits:.2f}): {found[0]:.4f} {found[1]:+.3f}")
            say(f"{len(some)} in {encoded - begun:.0f} + {time.time() - encoded:.0f} s")


BATCH = 6
FEW = (
    *(f"fold {bits}" for bits in (2, 3, 4)),
    *(
        "layers 3",
        "heads 3",
        "heads 2.5",
        "layers 2.5",
        "layers, less measured, eigen 3",
        "heads, less measured, eigen 2.5",
    ),
    *(
        "less measured 3",
        "less bias 3",
        "less measured, no page mean 3",
        "map 3",
        "eigen, page norms 3",
        "diag, page norms 3",
    ),
    *("coded 3", "less measured, eigen, page norms 3", "less measured, eigen, page norms, coded 3"),
    *("eigen, page norms 2", "diag, page norms 2", "less measured, eigen, page norms 2"),
)
"""Variants that are judged beyond the smallest model, where the others have lost already."""


# ---- bits per layer and per head -------------------------------------------------------------------------------------


def alone(oracle: Oracle, variants: Variants, prompt: str) -> list[list[list[float]]]:
    """Losses of 2-bit keys in one KV head, all others exact, and in all heads of a layer: [layers][heads + 1][3].

    The layers before have what they had, so that the model begins at the layer in question.
    """
    path = oracle.work / f"alone-{oracle.name}-{prompt}.json"
    found = json.loads(path.read_text()) if path.exists() else []
    prefix = oracle.prefix(prompt)
    coarse = variants.make("fold 2", "k_bits=2")
    begun = time.time()
    for layer in range(len(found), oracle.layers):
        near = whole(prefix, layer, coarse.stored(prefix, layer))
        each = prefix.keys[layer].repeat(oracle.heads + 1, 1, 1, 1)
        for head in range(oracle.heads):
            each[head, head] = near[head]
        each[-1] = near
        if oracle.setting.large:
            each = each[:-1]
        found.append(judge(oracle, prefix, [each, *prefix.keys[layer + 1 :]], layer))
        path.write_text(json.dumps(found))
    say(f"{oracle.name} {prompt} layers alone, {time.time() - begun:.0f} s")
    return found


def ratios(oracle: Oracle, variants: Variants) -> torch.Tensor:
    """Keys' errors as queries see them, over those of 2 bits: float64 [len(WIDTHS), layers, num_kv_heads]."""
    path = oracle.work / f"ratios-{oracle.name}.pt"
    if path.exists():
        return torch.load(path)
    errors = torch.zeros(len(WIDTHS), oracle.layers, oracle.heads, dtype=torch.float64)
    for at, bits in enumerate(WIDTHS):
        variant = variants.make(f"fold {bits}", f"k_bits={bits}")
        for prefix in variants.chosen():
            for layer in range(oracle.layers):
                off = variant.stored(prefix, layer) - prefix.keys[layer, :, SINK : prefix.end]
                errors[at, layer] += ((off @ prefix.queries[layer]) * off).sum(-1).mean(-1).double()
    torch.save(errors, path)
    return errors


def cheapest(loss: torch.Tensor, budget: float) -> list[int]:
    """Bits for every unit with the least sum of losses, of at most ``budget`` bits on average.

    Parameters
    ----------
    loss
        ``[len(WIDTHS), units]``.
    """
    units = loss.shape[1]
    room = int(budget * units + 1e-9) - 2 * units
    best = torch.zeros(room + 1, dtype=torch.float64)
    steps = []
    for unit in range(units):
        each = torch.full((len(WIDTHS), room + 1), math.inf, dtype=torch.float64)
        for at, bits in enumerate(WIDTHS):
            more = bits - 2
            if more <= room:
                each[at, more:] = best[: room + 1 - more] + loss[at, unit]
        best, which = each.min(0)
        steps.append(which)
    left, found = room, []
    for which in reversed(steps):
        found.append(WIDTHS[int(which[left])])
        left -= found[-1] - 2
    return found[::-1]


WIDTHS = (2, 3, 4, 8)


def entropies(oracle: Oracle, rows: Rows, variants: Variants) -> None:
    """Rows of a level's bits under ideal coding: mean over pages, and the worst page."""
    prompt = oracle.setting.judged[-1]
    prefix = oracle.prefix(prompt)
    for bits in (2, 3, 4):
        if (oracle.name, f"entropy {bits}, mean", prompt) in rows.there:
            continue
        form: Any = get(f"fold:k_bits={bits}").key_format(oracle.spec)
        inner = Levels(*(getattr(form.inner, f.name) for f in dataclasses.fields(UniformTokens)))
        form = dataclasses.replace(form, inner=inner)
        each = []
        for keys in prefix.keys:
            fields = form.encode(keys[None, :, SINK : prefix.end])
            codes = (fields["levels"] + inner.middle).long().flatten(2, 3).unflatten(2, (-1, TOKENS)).flatten(-2)
            counts = torch.nn.functional.one_hot(codes, 1 << bits).double().mean(-2)
            each.append(-(counts * counts.clamp_min(1e-12).log2()).sum(-1).flatten())
        found = torch.cat(each)
        for name, value in (("mean", found.mean()), ("worst page", found.max())):
            rows.add(oracle, f"entropy {bits}, {name}", float(value), prefix, ())


def spread(oracle: Oracle, rows: Rows, variants: Variants) -> list[Variant]:
    """fold's keys with bits per layer and per KV head, chosen on prompts that are not judged."""
    kinds: dict[str, list[torch.Tensor]] = {"pairs": [], "text": []}
    by_layer: dict[str, list[torch.Tensor]] = {"pairs": [], "text": []}
    measured = [p for p in oracle.setting.chosen if p.startswith("pairs") or not oracle.setting.large]
    for prompt in measured:
        found = torch.tensor(alone(oracle, variants, prompt), dtype=torch.float64)
        kind = "pairs" if prompt.startswith("pairs") else "text"
        kinds[kind].append(found[:, : oracle.heads, 0])
        by_layer[kind].append(found[:, : oracle.heads, 0].sum(1) if oracle.setting.large else found[:, -1, 0])
        for layer in range(oracle.layers):
            name = f"fold 2 in layer {layer} alone"
            if (oracle.name, name, prompt) not in rows.there:
                losses_ = found[layer].sum(0) if oracle.setting.large else found[layer, -1]
                rows.add(
                    oracle, name, variants.make("fold 2", "k_bits=2").bits, oracle.prefix(prompt), losses_.tolist()
                )
    errors = ratios(oracle, variants)
    if oracle.setting.large:
        kinds["text"], by_layer["text"] = [errors[0]], [errors[0].sum(1)]
    of_head = {k: torch.stack(v).mean(0) * errors / errors[0] for k, v in kinds.items()}
    summed = errors.sum(2)
    of_layer = {k: torch.stack(v).mean(0) * summed / summed[0] for k, v in by_layer.items()}

    def mixed(of: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(loss / loss[1].sum() for loss in of.values())  # as parts of what 3 bits everywhere lose

    d = oracle.dim
    plans: list[tuple[str, torch.Tensor, float, bool]] = [
        ("layers 3", mixed(of_layer), 3, False),
        ("heads 3", mixed(of_head), 3, False),
        ("heads 2.5", mixed(of_head), 2.5, False),
        ("heads 2.25", mixed(of_head), 2.25, False),
        ("layers 2.5", mixed(of_layer), 2.5, False),
        ("heads by pairs 3", of_head["pairs"], 3, False),
        ("layers by pairs 3", of_layer["pairs"], 3, False),
        ("layers, less measured, eigen 3", mixed(of_layer), 3, True),
        ("layers, less measured, eigen 2.5", mixed(of_layer), 2.5, True),
        ("heads, less measured, eigen 3", mixed(of_head), 3, True),
        ("heads, less measured, eigen 2.5", mixed(of_head), 2.5, True),
    ]
    found = []
    for name, loss, budget, better in plans:
        widths = torch.tensor(cheapest(loss.flatten(1), budget)).unflatten(0, loss.shape[1:])
        table = widths[:, None].expand(-1, oracle.heads) if widths.ndim == 1 else widths
        say(f"{oracle.name} {name}: {widths.tolist()}")
        forms = {}
        for bits in WIDTHS:
            forms[bits] = (
                variants.make(f"eigen {bits}", f"k_bits={bits},rotation={d}", "measured", "eigen", "all")
                if better
                else variants.make(f"fold {bits}", f"k_bits={bits}")
            )
        found.append(composed(name, forms, table))
    return found


def composed(name: str, forms: dict[int, Variant], table: torch.Tensor) -> Variant:
    """A variant whose heads have bits of their own, [layers, num_kv_heads]."""

    def stored(prefix: Prefix, layer: int) -> torch.Tensor:
        each = {bits: forms[bits].stored(prefix, layer) for bits in set(table[layer].tolist())}
        return torch.stack([each[int(bits)][head] for head, bits in enumerate(table[layer])])

    return Variant(name, sum(forms[int(b)].bits for b in table.flatten()) / table.numel(), stored)


# ---- the page --------------------------------------------------------------------------------------------------------


def fold_at(rows: list[dict[str, str]], prompt: str, bits: float, field: str) -> float:
    """What fold's own keys lose at these bits: between 2, 3 and 4 bits, log-linear for KL and linear for the rise."""
    points = sorted(
        (float(r["bits"]), math.log(float(r[field])) if field == "kl" else float(r[field]))
        for r in rows
        if r["prompt"] == prompt and r["variant"] in ("fold 2", "fold 3", "fold 4")
    )
    (x, y), (x_, y_) = points[:2] if bits <= points[1][0] else points[1:]
    found = y + (y_ - y) * (bits - x) / (x_ - x)
    return math.exp(found) if field == "kl" else found


def compared(rows: list[dict[str, str]], variant: str, pairs: bool) -> tuple[list[float], float] | None:
    """(KL over fold's at the same bits by prompt, rise of the negative log-likelihood less fold's)."""
    some = [r for r in rows if r["variant"] == variant and r["prompt"].startswith("pairs") == pairs]
    if not some:
        return None
    each = [float(r["kl"]) / fold_at(rows, r["prompt"], float(r["bits"]), "kl") for r in some]
    rises = [float(r["nll_rise"]) - fold_at(rows, r["prompt"], float(r["bits"]), "nll_rise") for r in some]
    return each, sum(rises) / len(rises)


def cell(found: tuple[list[float], float] | None, rise: bool) -> str:
    """A model's ratio with its range over prompts, and the difference in nats."""
    if found is None:
        return "-"
    each, difference = found
    mean = math.exp(sum(map(math.log, each)) / len(each))
    shown = f"{mean:.2f}"
    if len(each) > 1:
        shown += f" ({min(each):.2f}-{max(each):.2f})"
    return f"{shown} {difference:+.2f}" if rise else shown


def table(rows: list[dict[str, str]]) -> list[str]:
    """Variants against fold at equal bytes."""
    names = list(SETTINGS)
    head = ["keys", "bits", *(f"pairs, {n}" for n in names), *(f"text, {n}" for n in names), "worst: pairs, text"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    variants = dict.fromkeys(
        r["variant"] for r in rows if not r["variant"].startswith(("fold", "entropy", "spacing")) and r["kl"]
    )
    order = sorted(variants, key=lambda v: (PARTS.index(part_of(v)), not v.endswith(" 3"), v.endswith(" 2.5")))
    for variant in order:
        of = {n: [r for r in rows if r["model"] == n] for n in names}
        bits = sorted({float(r["bits"]) for r in rows if r["variant"] == variant}, reverse=True)
        each = {(n, k): compared(of[n], variant, k) for k in (True, False) for n in names}
        worst = []
        for k in (True, False):
            means = [math.exp(sum(map(math.log, f[0])) / len(f[0])) for n in names if (f := each[n, k])]
            worst.append(f"{max(means):.2f}" if len(means) == len(names) else "-")
        lines.append(
            f"| {variant} | {'; '.join(f'{b:.2f}' for b in (bits[0], bits[-1]))} | "
            + " | ".join(cell(each[n, k], k) for k in (True, False) for n in names)
            + f" | {', '.join(worst)} |"
        )
    return lines


PARTS = ("spread", "b", "c", "e", "bc")


def part_of(variant: str) -> str:
    """The part of the task that a variant belongs to."""
    if variant.startswith(("layers", "heads")):
        return "spread"
    if "less measured, eigen" in variant:
        return "bc"
    if variant.startswith(("less", "no page")):
        return "b"
    return "e" if variant.startswith(("coded", "learned")) else "c"


def layers(rows: list[dict[str, str]]) -> list[str]:
    """Where 2-bit keys lose, a layer alone: shares of the sum over layers."""
    lines = ["| model | on pairs: layer, share of KL | on text |", "| --- | --- | --- |"]
    for name in SETTINGS:
        cells = []
        for pairs in (True, False):
            sums: dict[str, float] = {}
            for r in rows:
                if r["model"] == name and "alone" in r["variant"] and r["prompt"].startswith("pairs") == pairs:
                    layer = r["variant"].split()[4]
                    sums[layer] = sums.get(layer, 0.0) + float(r["kl"])
            whole_ = sum(sums.values())
            top = sorted(sums.items(), key=lambda item: -item[1])[:4]
            cells.append(", ".join(f"L{layer} {100 * kl / whole_:.0f} %" for layer, kl in top) or "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def page() -> None:
    """Put the tables into the page."""
    with ROWS.open() as file:
        rows = list(csv.DictReader(file))
    text = PAGE.read_text()
    for name, lines in (("variants", table(rows)), ("layers", layers(rows))):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        text = text[: text.index(begin)] + begin + "\n" + "\n".join(lines) + "\n" + text[text.index(end) :]
    PAGE.write_text(text)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("prefill", "measure", "page"))
    parser.add_argument("--models", default="135M,0.5B,1.5B")
    parser.add_argument("--parts", default="a,b,c,e,bc,spread")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("key-oracle"))
    parser.add_argument("--folder", default="models", help="of the models' GGUF files")
    parser.add_argument("--data", default="../shared/data", help="folder with wikitext-2-raw and gutenberg")
    args = parser.parse_args()
    FOLDERS.update(models=args.folder, data=args.data)
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.what == "page":
        return page()
    rows = Rows(ROWS)
    with torch.inference_mode():
        for name in args.models.split(","):
            oracle = Oracle(name, args.work)
            for prompt in (*oracle.setting.chosen, *MORE, *oracle.setting.judged):
                oracle.prefix(prompt)
            if args.what == "measure":
                variants = Variants(oracle)
                parts = args.parts.split(",")
                measure(oracle, rows, [v for part in parts for v in variants.part(part)])
                if "e" in parts:
                    entropies(oracle, rows, variants)
                if "spread" in parts:
                    measure(oracle, rows, spread(oracle, rows, variants))


if __name__ == "__main__":
    main()
