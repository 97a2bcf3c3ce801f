"""Learning GSRQ's codebooks: gain-shape k-means, stage by stage, on weighted tokens (Kim et al., 2026)."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from kvfold.calibration.collect import LayerSample
from kvfold.calibration.learner import LayerwiseLearner
from kvfold.calibration.state import Fit
from kvfold.calibration.vqllm import VECTORS, assign, error_of, kmeans, scaled_vectors
from kvfold.methods.gsrq import GSRQ

ROUNDS = 10
LEAST = 1e-4
"""Gains are not below."""


class GSRQLearner(LayerwiseLearner):
    """Gain-shape k-means, stage by stage."""

    def __init__(
        self, method: GSRQ, model: PreTrainedModel, windows: torch.Tensor, held: torch.Tensor, seed: int
    ) -> None:
        super().__init__(model, windows, held, seed)
        self.method = method

    def fit(self, sample: LayerSample, generator: torch.Generator) -> Fit:
        return learn(sample.on(self.model.device), self.held, self.method, generator)


def learn(sample: LayerSample, held: torch.Tensor, method: GSRQ, generator: torch.Generator) -> Fit:
    """Learn one layer's codebooks; see :func:`kvfold.calibration.vqllm.learn`."""
    tensors, errors = {}, {}
    sides = (("key", sample.keys, sample.key_weight), ("value", sample.values, sample.value_weight))
    for operand, x, importance in sides:
        form = method.format(sample.spec, operand)
        vectors = scaled_vectors(form, x[:, ~held])
        weight = smoothed(importance[:, ~held]).unsqueeze(-1).expand(*vectors.shape[:-1]).flatten()
        codes = residual_gain_shape(vectors.flatten(0, -2), weight, form.stages, form.codes, generator)
        tensors[f"{operand}.codes"] = codes.to(torch.float16)
        errors[operand] = error_of(form, codes.to(torch.float16).float(), x[:, held])
    return Fit(tensors, errors)


def smoothed(importance: torch.Tensor) -> torch.Tensor:
    """Weights that grow as the logarithm of what is above the median: a few tokens do not decide all codes."""
    median = importance.median(-1, keepdim=True).values.clamp_min(1e-30)
    return torch.log1p(importance / median)


def residual_gain_shape(
    x: torch.Tensor, weight: torch.Tensor, stages: int, codes: int, generator: torch.Generator
) -> torch.Tensor:
    """Codes of all stages, float32 [stages, codes, vector], of x [n, vector] with weights [n]."""
    if len(x) > VECTORS:
        chosen = torch.randperm(len(x), generator=generator)[:VECTORS].to(x.device)
        x, weight = x[chosen], weight[chosen]
    rest, learned = x, []
    for _ in range(stages):
        centres = gain_shape_kmeans(rest, weight, codes, generator)
        learned.append(centres)
        rest = rest - centres[assign(rest, centres)]
    return torch.stack(learned)


def gain_shape_kmeans(
    x: torch.Tensor, weight: torch.Tensor, codes: int, generator: torch.Generator, rounds: int = ROUNDS
) -> torch.Tensor:
    """K-means whose centres are gains times unit shapes (GSKM).

    It starts from spherical k-means with the mean length of each cluster as gain, so that centres begin as long as
    their vectors instead of as short as their means. A round assigns vectors by squared distance, turns the shapes to
    the sums of their vectors, and makes the gains the mean projections on the shapes before.
    """
    unit = F.normalize(x, dim=-1)
    shape = F.normalize(kmeans(unit, codes, generator), dim=-1)
    size = x.norm(dim=-1)
    chosen = assign(unit, shape)
    gain = _mean(size, weight, chosen, torch.ones(codes, device=x.device))
    for _ in range(rounds):
        chosen = assign(x, shape * gain.unsqueeze(-1))
        along = (x * shape[chosen]).sum(-1)
        sums = torch.zeros_like(shape).index_add_(0, chosen, x * weight.unsqueeze(-1))
        there = sums.norm(dim=-1, keepdim=True) > 0
        shape = torch.where(there, F.normalize(sums, dim=-1), shape)
        gain = _mean(along, weight, chosen, gain).clamp_min(LEAST)
    return shape * gain.unsqueeze(-1)


def _mean(x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Weighted mean of each cluster's numbers; ``otherwise`` where it has none."""
    total = torch.zeros_like(otherwise).index_add_(0, chosen, weight)
    sums = torch.zeros_like(otherwise).index_add_(0, chosen, x * weight)
    return torch.where(total > 0, sums / total.clamp_min(1e-30), otherwise)
