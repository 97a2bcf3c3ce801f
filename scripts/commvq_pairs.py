"""How much CommVQ's keys miss by the rules of which pairs of codes are compared, on codebooks learned from a model's own keys.

usage: python scripts/commvq_pairs.py LEARNED.txt OTHER.txt --model MODEL --layers 2 10 20 [--rows benchmarks/commvq-search.csv]

Codebooks are learned from 4,096 tokens of the first text. Rows are squared errors under the metric, on 1,024 tokens of the
other one, as multiples of those of all pairs in two turns. The first stages of a codebook of 2 bits are one of 1 bit. Rules are
run in float32.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kvfold import models
from kvfold.calibration.collect import Collector, LayerSample
from kvfold.calibration.commvq_keys import learn_keys
from kvfold.calibration.commvq_schedule import Schedule
from kvfold.calibration.run import windows_of
from kvfold.evaluation.text import load_text
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, choices, first_pair, nearest, next_pair, stages_for
from kvfold.kernels.commvq.encode import shifted

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of all codes a and b, float32 [heads, tokens, 64], and what a pair takes off, [heads, 64, 64]."""
Codes = tuple[torch.Tensor, torch.Tensor]
Rule = Callable[[int, Scores, Codes | None], Codes]
"""Chooses codes by the stage, scores, and the codes that there are if the stage is chosen again."""


def beside(scores: torch.Tensor, table: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """``scores`` less what their pairs with ``code`` [heads, tokens] of the other side take off, by whose codes rows go."""
    return scores - table.gather(1, code.unsqueeze(-1).expand_as(scores))


def at(scores: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    return scores.gather(-1, code.unsqueeze(-1)).squeeze(-1)


def from_starts(of_a: torch.Tensor, of_b: torch.Tensor, by_b: torch.Tensor, starts: torch.Tensor) -> Codes:
    """The best a beside any of the codes b ``starts`` [heads, tokens, n], and the best b beside that."""
    sums = torch.stack([beside(of_a, by_b, b).amax(-1) + at(of_b, b) for b in starts.unbind(-1)], -1)
    b = at(starts, sums.argmax(-1))
    a = beside(of_a, by_b, b).argmax(-1)
    return a, beside(of_b, by_b.mT, a).argmax(-1)


def best_of_lanes(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The best ``count`` of each 16 codes."""
    found = scores.unflatten(-1, (4, 16)).topk(count, -1).indices
    return (found + 16 * torch.arange(4)[:, None]).flatten(-2)


def few(given: Scores) -> Codes:
    """A GPU kernel's rule for the first stage: pairs begin with each lane's two best codes b, or with its best code a."""
    of_a, of_b, by_a = given
    a, b = from_starts(of_a, of_b, by_a.mT, best_of_lanes(of_b, 2))
    d, c = from_starts(of_b, of_a, by_a, best_of_lanes(of_a, 1))
    better = at(of_a, c) + at(beside(of_b, by_a, c), d) > at(of_a, a) + at(beside(of_b, by_a, a), b)
    return torch.where(better, c, a), torch.where(better, d, b)


def error(book: KeyCodebook, unit: torch.Tensor, order: tuple[int, ...], find: Rule) -> float:
    """Squared error of vectors [heads, tokens, d] whose stages are chosen in this order."""
    search, shift = shifted(book.search())
    rest: torch.Tensor = unit - shift.unsqueeze(1)
    chosen: dict[int, Codes] = {}
    for stage in order:
        halves, had = search.halves[:, stage], chosen.get(stage)
        if had is not None:
            rest += sum(beside(torch.zeros_like(rest), -halves, c + 64 * i) for i, c in enumerate(had))
        scores = 2 * rest @ halves.mT - search.squares[:, stage].unsqueeze(1)
        found = find(stage, (scores[..., :64], scores[..., 64:], search.cross[:, stage]), had)
        chosen[stage] = found
        rest -= sum(beside(torch.zeros_like(rest), -halves, c + 64 * i) for i, c in enumerate(found))
    return missed(unit, unit - rest)


def missed(unit: torch.Tensor, centre: torch.Tensor) -> float:
    gain = (unit * centre).sum(-1, keepdim=True) / centre.square().sum(-1, keepdim=True).clamp_min(1e-12)
    return float((unit - gain * centre).square().sum())


def all_pairs(stage: int, given: Scores, had: Codes | None) -> Codes:
    return nearest(*given)


def as_the_format(stage: int, given: Scores, had: Codes | None) -> Codes:
    if had is not None:
        return next_pair(*given, had[1])
    return nearest(*given) if stage == 0 else first_pair(*given)


def as_the_kernel(stage: int, given: Scores, had: Codes | None) -> Codes:
    return few(given) if stage == 0 and had is None else as_the_format(stage, given, had)


def compared(book: KeyCodebook, unit: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Rules and what they miss of vectors, float32 [heads, tokens, d] under the metric, of unit root mean square."""
    stages, search = book.stages, book.search()
    order, turns = choices(stages, 1), (*range(stages), *range(stages // 5, stages))
    yield "all pairs in two turns", error(book, unit, turns, all_pairs)
    yield "all pairs in today's order", error(book, unit, order, all_pairs)
    yield "the format", missed(unit, book.sum(book.assign(unit, 1, search), search.halves))
    yield "few pairs of the first stage", error(book, unit, order, as_the_kernel)
    yield "all stages again at the end", error(book, unit, (*range(stages), *range(stages)), as_the_format)
    yield "all pairs once (passes=0)", missed(unit, book.sum(book.assign(unit, 0, search), search.halves))


def of_layer(sample: LayerSample, held: torch.Tensor) -> Iterator[tuple[int, str, float]]:
    """Bits, rules and multiples of the first rule's error."""
    head_dim = sample.keys.shape[-1]
    form = AdditiveCodes(head_dim, 32, "plain", stages_for(2, head_dim, 64), 64, 1)
    made, _ = learn_keys(sample, held, form, Schedule(), torch.Generator().manual_seed(0))
    yield from of_book(made["centres"], made["metric"], sample.keys[:, held])


def of_book(centres: torch.Tensor, metric: torch.Tensor, keys: torch.Tensor) -> Iterator[tuple[int, str, float]]:
    head_dim = keys.shape[-1]
    for bits in (1, 2):
        book = KeyCodebook.rounded(centres[:, : stages_for(bits, head_dim, 64)], metric, head_dim)
        seen = keys @ book.metric.float()
        rows = list(compared(book, seen / seen.square().mean(-1, keepdim=True).sqrt()))
        yield from ((bits, name, found / rows[0][1]) for name, found in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("text")
    parser.add_argument("other")
    parser.add_argument("--model")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 10, 20], help="from 1")
    parser.add_argument("--rows", type=Path, help="a file to write")
    given = parser.parse_args()
    model, tokenizer, info = models.load(given.model, None, "cpu")
    parts = [windows_of(tokenizer, [load_text(p)], n, 512) for p, n in ((given.text, 4096), (given.other, 1024))]
    held = torch.cat([torch.full(part.shape, i == 1) for i, part in enumerate(parts)]).flatten()
    collector = Collector(model, torch.cat(parts), 4)
    collector.start()
    rows = [("model", "layer", "bits", "rule", "error")]
    while collector.done < max(given.layers):
        sample = collector.step()
        if collector.done in given.layers:
            for bits, rule, ratio in of_layer(sample, held):
                rows.append((info.name, str(collector.done), str(bits), rule, f"{ratio:.4f}"))
                print(*rows[-1], sep=", ", flush=True)
    if given.rows:
        with given.rows.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
