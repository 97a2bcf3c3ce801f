"""How much more CommVQ's values miss where fewer of their bits may be flipped, on codebooks learned from a model's own values.

usage: python scripts/commvq_flips.py LEARNED.txt OTHER.txt --model MODEL --layers 2 10 20 --csv benchmarks/commvq-flips.csv

Codebooks are learned from 4,096 tokens of the first text, in closed form. Rows have the squared error under the metric, of
1,024 tokens of the other one and all heads, as a multiple of that with as many flips as gain anything, and how many those are.
"""

import argparse
import csv
from pathlib import Path

import torch

from kvfold import models
from kvfold.calibration.collect import Collector
from kvfold.calibration.commvq_schedule import Schedule
from kvfold.calibration.commvq_values import learn_values
from kvfold.calibration.run import windows_of
from kvfold.evaluation.text import load_text
from kvfold.methods.commvq import ValueCodebook

COUNTS = (0, 8, 16, 20, 24, 28, 32)
"""Flips that are compared."""
COLUMNS = ("model", "layer", "bits", *(f"flips_{n}" for n in COUNTS), "mean_flips", "most_flips")


def errors(book: ValueCodebook, values: torch.Tensor) -> tuple[list[float], float, int]:
    """Squared errors under the metric with :data:`COUNTS` flips, as multiples of that with all; mean and most flips of a token.

    ``values``: float32 [heads, tokens, dim]. Flips are those of :meth:`ValueCodebook.bits`.
    """
    bits, slope, gram = book.start(values, True)
    square = gram.diagonal(dim1=-1, dim2=-2).unsqueeze(1)
    metric = book.tensors["metric"].float()

    def error() -> float:
        return float(((book.decode(bits) - values) @ metric).double().square().sum())

    found: list[float] = []
    flips = torch.zeros(bits.shape[:2], dtype=torch.int64)
    done = 0
    while True:
        if done in COUNTS:
            found.append(error())
        direction = 1 - 2 * bits
        gain, which = (2 * direction * slope - square).max(-1, keepdim=True)
        more = gain > 1e-6 * square.amax(-1, keepdim=True)
        if not more.any():
            break
        step = direction.gather(-1, which) * more
        bits = bits.scatter_add(-1, which, step)
        slope = slope - step * gram.gather(1, which.expand(-1, -1, gram.shape[-1]))
        flips += more.squeeze(-1)
        done += 1
    least = error()
    found += [least] * (len(COUNTS) - len(found))
    return [x / least for x in found], float(flips.float().mean()), int(flips.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("text")
    parser.add_argument("other")
    parser.add_argument("--model")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 10, 20], help="from 1")
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--csv", type=Path, required=True, help="rows are added")
    given = parser.parse_args()
    model, tokenizer, info = models.load(given.model, None, "cpu")
    parts = [windows_of(tokenizer, [load_text(p)], n, 512) for p, n in ((given.text, 4096), (given.other, 1024))]
    held = torch.cat([torch.full(part.shape, i == 1) for i, part in enumerate(parts)]).flatten()
    collector = Collector(model, torch.cat(parts), 4)
    collector.start()
    if not given.csv.exists():
        given.csv.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    while collector.done < max(given.layers):
        sample = collector.step()
        if sample is None or collector.done not in given.layers:
            continue
        for bits in given.bits:
            codes = bits * sample.values.shape[-1]
            made, _ = learn_values(sample, held, codes, False, Schedule(), torch.Generator().manual_seed(0))
            with torch.no_grad():
                found, mean, most = errors(ValueCodebook(made), sample.values[:, held])
            row = [Path(info.name).name, collector.done, bits, *(f"{x:.5f}" for x in found), f"{mean:.2f}", most]
            with given.csv.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(row)
            print(*row, flush=True)


if __name__ == "__main__":
    main()
