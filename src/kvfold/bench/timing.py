"""Times of calls on a GPU, of replayed CUDA graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def times(calls: Sequence[Callable[[], Any]], replays: int = 40) -> tuple[float, float, float]:
    """p20, p50 and p80 in milliseconds of one call, over replays of a CUDA graph that makes each call in turn."""
    return times_in_turn([calls], replays)[0]


def times_in_turn(groups: Sequence[Sequence[Callable[[], Any]]], replays: int = 40) -> list[tuple[float, float, float]]:
    """:func:`times` of several groups of calls, whose graphs are replayed in turn: a GPU that gets slower, does so for all."""
    graphs = []
    for calls in groups:
        for f in calls:
            f()
        torch.cuda.synchronize()
        graph, rounds = torch.cuda.CUDAGraph(), max(1, 8 // len(calls))
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for f in calls:
                    f()
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        graphs.append((graph, rounds * len(calls), marks))
    for _ in range(3):
        for graph, _, _ in graphs:
            graph.replay()
    for i in range(replays):
        for graph, _, marks in graphs:
            marks[i][0].record()
            graph.replay()
            marks[i][1].record()
    torch.cuda.synchronize()
    quantiles = torch.tensor([0.2, 0.5, 0.8])
    found = []
    for _, count, marks in graphs:
        samples = torch.tensor([start.elapsed_time(stop) / count for start, stop in marks])
        p20, p50, p80 = samples.quantile(quantiles).tolist()
        found.append((p20, p50, p80))
    return found
