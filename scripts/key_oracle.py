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
import time
from collections.abc import Sequence
from typing import Any

import torch
from key_prompts import FOLDERS, MORE, SINK, TOKENS, Oracle, Patched, Prefix, say
from key_tables import ROWS, page, part_of
from key_variants import Levels, Variant, Variants

from kvfold.formats import UniformTokens
from kvfold.methods import get

FIELDS = ("model", "length", "variant", "bits", "prompt", "scored", "kl", "nll_rise", "exact_change")


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
    if oracle.setting.large:
        variants = [v for v in variants if v.name in FEWEST]
    elif oracle.name != "135M":
        variants = [v for v in variants if v.name in FEW or part_of(v.name) == "spread"]
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
    *("less measured 3", "less bias 3", "less bias, no page mean 3", "less measured, no page mean 3", "map 3"),
    *("eigen, page norms 3", "diag, page norms 3", "coded 3", "less measured, eigen, page norms 3"),
    *("less measured, eigen, page norms, coded 3", "eigen, page norms 2", "diag, page norms 2"),
    *("less measured, eigen, page norms 2", "learned 2"),
)
"""Variants that are judged beyond the smallest model, where the others have lost already."""
FEWEST = (
    *(f"fold {bits}" for bits in (2, 3, 4)),
    *(
        "layers 3",
        "heads 3",
        "heads 2.5",
        "layers 2.5",
        "layers, less measured, eigen 3",
        "heads, less measured, eigen 2.5",
    ),
    *("less measured 3", "eigen, page norms 3", "diag, page norms 3", "coded 3", "less measured, eigen, page norms 3"),
    *("less measured, eigen, page norms 2",),
)
"""And those on the large one."""


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
        bits = variants.make("fold 2", "k_bits=2").bits
        for layer in range(oracle.layers):
            whole_layer = found[layer].sum(0) if oracle.setting.large else found[layer, -1]
            each = {f"fold 2 in layer {layer} alone": whole_layer}
            if prompt == oracle.setting.chosen[0]:
                each |= {f"fold 2 in head {layer}.{head} alone": found[layer, head] for head in range(oracle.heads)}
            for name, lost in each.items():
                if (oracle.name, name, prompt) not in rows.there:
                    rows.add(oracle, name, bits, oracle.prefix(prompt), lost.tolist())
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
