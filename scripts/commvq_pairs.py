"""How much more CommVQ's keys miss where few pairs of codes are compared, on a codebook learned from a model's own keys.

usage: python scripts/commvq_pairs.py LEARNED.txt OTHER.txt --model MODEL --layer 2 --bits 1 2

The codebook is learned from 4,096 tokens of the first text. Ratios of squared errors under the metric, on 1,024 tokens of the
other one, to those of the format, which compares all pairs. Rules are run in float32; that of the GPU kernel is the one "with
the code at hand".
"""

import argparse
from collections.abc import Callable

import torch

from kvfold import models
from kvfold.calibration.collect import Collector
from kvfold.calibration.commvq_keys import learn_keys
from kvfold.calibration.commvq_schedule import Schedule
from kvfold.calibration.run import windows_of
from kvfold.evaluation.text import load_text
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, Search, again_from, nearest, stages_for
from kvfold.kernels.encode_pairs import shifted

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of all codes a and b, float32 [heads, tokens, 64], and what a pair takes off, [heads, 64, 64]."""
Codes = tuple[torch.Tensor, torch.Tensor]
Rule = Callable[[int, int, Scores, Codes | None], Codes]
"""Chooses codes by the turn, the stage, scores, and the codes of the turn before."""


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


def few(given: Scores, had: Codes | None, of_lane_b: int, of_lane_a: int) -> Codes:
    """The rule of :mod:`kvfold.kernels._pairs_gluon`; ``had``: the code at hand, if the search begins with it."""
    of_a, of_b, by_a = given
    starts = best_of_lanes(of_b, of_lane_b)
    if had is not None:
        starts = torch.cat((starts, had[1].unsqueeze(-1)), -1)
    a, b = from_starts(of_a, of_b, by_a.mT, starts)
    if of_lane_a:
        d, c = from_starts(of_b, of_a, by_a, best_of_lanes(of_a, of_lane_a))
        better = at(of_a, c) + at(beside(of_b, by_a, c), d) > at(of_a, a) + at(beside(of_b, by_a, a), b)
        a, b = torch.where(better, c, a), torch.where(better, d, b)
    return a, b


def error(unit: torch.Tensor, search: Search, shift: torch.Tensor | float, find: Rule) -> float:
    """Squared error of vectors [heads, tokens, d], of which ``shift`` is taken off for the search, in two turns."""
    rest: torch.Tensor = unit - shift
    chosen: dict[int, Codes] = {}
    stages = search.halves.shape[1]
    for turn in range(2):
        for stage in range(again_from(stages) if turn else 0, stages):
            halves = search.halves[:, stage]
            had = chosen.get(stage)
            if had is not None:
                rest += sum(beside(torch.zeros_like(rest), -halves, c + 64 * i) for i, c in enumerate(had))
            scores = 2 * rest @ halves.mT - search.squares[:, stage].unsqueeze(1)
            a, b = find(turn, stage, (scores[..., :64], scores[..., 64:], search.cross[:, stage]), had)
            chosen[stage] = a, b
            rest -= sum(beside(torch.zeros_like(rest), -halves, c + 64 * i) for i, c in enumerate((a, b)))
    centre = unit - rest
    gain = (unit * centre).sum(-1, keepdim=True) / centre.square().sum(-1, keepdim=True).clamp_min(1e-12)
    return float((unit - gain * centre).square().sum())


OLD: Rule = lambda turn, stage, given, had: few(given, None, 2 - turn, 1)  # noqa: E731
RULES: dict[str, Rule] = {
    "all pairs": lambda turn, stage, given, had: nearest(*given),
    "few pairs in both turns": OLD,
    "and all of the first stage": lambda turn, stage, given, had: (
        nearest(*given) if turn + stage == 0 else few(given, None, 2 - turn, 1)
    ),
    "with the code at hand": lambda turn, stage, given, had: (
        nearest(*given) if turn + stage == 0 else few(given, had, 2 - turn, 1 - turn)
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("text")
    parser.add_argument("other")
    parser.add_argument("--model")
    parser.add_argument("--layer", type=int, default=2, help="from 1")
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    model, tokenizer, _ = models.load(given.model, None, "cpu")
    parts = [windows_of(tokenizer, [load_text(p)], n, 512) for p, n in ((given.text, 4096), (given.other, 1024))]
    held = torch.cat([torch.full(part.shape, i == 1) for i, part in enumerate(parts)]).flatten()
    collector = Collector(model, torch.cat(parts), 4)
    collector.start()
    while collector.done < given.layer:
        sample = collector.step()
    head_dim = sample.keys.shape[-1]
    for bits in given.bits:
        form = AdditiveCodes(head_dim, 32, "plain", stages_for(bits, head_dim, 64), 64, 1)
        made, _ = learn_keys(sample, held, form, Schedule(), torch.Generator().manual_seed(0))
        book = KeyCodebook.rounded(made["centres"], made["metric"], head_dim)
        seen = sample.keys[:, held] @ book.metric.float()
        unit, exact = seen / seen.square().mean(-1, keepdim=True).sqrt(), book.search()
        least = error(unit, exact, 0.0, RULES["all pairs"])
        plain = error(unit, KeyCodebook(made["centres"], made["metric"], head_dim).search(), 0.0, RULES["all pairs"])
        print(f"{bits} bits, all pairs, centres not rounded to steps: {plain / least:.4f}")
        search, shift = shifted(exact)
        for name, rule in RULES.items():
            print(f"{bits} bits, {name}: {error(unit, search, shift.unsqueeze(1), rule) / least:.4f}", flush=True)
        print(f"{bits} bits, few pairs in both turns, nothing taken off: {error(unit, exact, 0.0, OLD) / least:.4f}")


if __name__ == "__main__":
    main()
