"""Time parts of encoding a prompt with CommVQ, one layer of Llama-3.1-8B's shape, in several variants of its kernels.

usage: python scripts/commvq_prompt.py [--tokens 32768] [--rows benchmarks/commvq-prompt.csv] [--variants "as it is" ...]

A variant is timed when its kernels' self-tests pass and what it stores of 2,048 tokens has at most 1.005 times the squared
error of the format's own codes. Times are of one append behind other work (median of five), and of its kernels (profiler).
"""

import argparse
import csv
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kvfold.bench.prefill import Prompt
from kvfold.formats import Fields
from kvfold.formats.binary import BinaryCodes
from kvfold.formats.codebook import AdditiveCodes
from kvfold.kernels.common.encode_source import Source
from kvfold.kernels.commvq import encode as encode_pairs
from kvfold.kernels.residual import encode as encode_search

GATE = 1.005
TOKENS = 2048
PARTS = {
    "search": ("pairs_search_kernel",),
    "metric": ("units_kernel",),
    "tables": ("tables_kernel",),
    "flips": ("value_bits_kernel", "flip_kernel", "flips_kernel"),
    "products": ("gains_kernel", "values_kernel"),
    "packing": ("bits_kernel",),
}
Change = tuple[Any, str, Any]


def _item(table: dict[Any, Any], **values: Any) -> list[Change]:
    return [(table, name, value) for name, value in values.items()]


VARIANTS: dict[str, list[Change]] = {
    "as it is": [],
    "4 warps a program": _item(encode_pairs.TOGETHER, num_warps=4, EVERY=4),
    "products apart": _item(encode_pairs.TOGETHER, codes=()),
}
"""Each changes one thing of what runs."""


class Changed:
    """A variant's names and items, put back at the end."""

    def __init__(self, changes: list[Change]) -> None:
        self.changes = changes

    def __enter__(self) -> None:
        self.before = [c[0][c[1]] if isinstance(c[0], dict) else getattr(c[0], c[1]) for c in self.changes]
        self._set([c[2] for c in self.changes])

    def __exit__(self, *_: object) -> None:
        self._set(self.before)

    def _set(self, values: list[Any]) -> None:
        for (where, name, _), value in zip(self.changes, values, strict=True):
            if isinstance(where, dict):
                where[name] = value
            else:
                setattr(where, name, value)


def ratios(prompt: Prompt) -> Iterator[float]:
    """Squared errors of keys and values that the kernels encode, over those of the format; ValueError if a self-test fails."""
    device = prompt.keys.device
    for form, x in zip(prompt.layer.layout.formats, (prompt.keys, prompt.values), strict=True):
        encode_search.self_test.cache_clear()
        if why := encode_search.self_test(form, device):
            raise ValueError(why)
        x = x[:, :, :TOKENS].float()
        fields = form.allocate(1, x.shape[1], TOKENS // form.block, device)
        of: Callable[[Fields], torch.Tensor]
        if isinstance(form, AdditiveCodes):
            encode_pairs.encode_pairs(form, Source(x, fields, 0))
            want, of = form.encode(x), form.decode
        else:
            assert isinstance(form, BinaryCodes)
            book, flips = prompt.layer.method.value_tables(prompt.layer.spec, device)
            encode_pairs.encode_bits(form, Source(x, fields, 0, tables=(book, flips)))
            want = form.encode(book.bits(x.transpose(0, 1).flatten(1, 2), flips).unflatten(1, (1, -1)).transpose(0, 1))

            def of(stored: Fields, form: BinaryCodes = form, book: Any = book) -> torch.Tensor:
                return book.decode(form.decode(stored)[0, ..., : form.codes]).unsqueeze(0)

        got, least = (float((of(stored) - x).square().sum()) for stored in (fields, want))
        yield got / least


def parts(prompt: Prompt) -> dict[str, float]:
    """Milliseconds of an append's kernels, by what they do."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        prompt("triton")
    sums: Counter[str] = Counter()
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA and "spin" not in event.name:
            part = next((p for p, names in PARTS.items() if event.name in names), "other")
            sums[part] += event.time_range.elapsed_us() / 1e3
    return {part: sums[part] for part in (*PARTS, "other")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    device, rows = torch.device("cuda"), []
    for bits in given.bits:
        prompt = Prompt(f"commvq:bits={bits}", given.tokens, device)
        for name in given.variants:
            with Changed(VARIANTS[name]):
                try:
                    keys, values = ratios(prompt)
                except (ValueError, RuntimeError) as error:
                    print(f"{bits} bits  {name:42} not timed: {str(error)[:150]}", flush=True)
                    continue
                said = f"{bits} bits  {name:42} errors {keys:.4f} {values:.4f}"
                if not (keys <= GATE and values <= GATE):
                    print(f"{said}  > {GATE}: not timed", flush=True)
                    continue
                prompt("triton")
                busy = sorted(prompt("triton", 25.0)[0] for _ in range(5))[2]
                of = parts(prompt)
                print(f"{said}  busy {busy:.3f} ms  {'  '.join(f'{p} {ms:.3f}' for p, ms in of.items())}", flush=True)
                rows.append({"bits": bits, "variant": name, "keys": keys, "values": values, "busy_ms": busy, **of})
    if given.rows and rows:
        gpu = torch.cuda.get_device_name()
        with given.rows.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], "gpu"])
            writer.writeheader()
            writer.writerows(
                {**{k: round(v, 5) if isinstance(v, float) else v for k, v in r.items()}, "gpu": gpu} for r in rows
            )


if __name__ == "__main__":
    main()
