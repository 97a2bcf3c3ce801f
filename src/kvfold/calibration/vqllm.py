"""Learning VQLLM's codebooks: k-means, stage by stage, on what the stages before left over (Kumar, 2024, sec. 2)."""

from __future__ import annotations

import dataclasses

import torch
from transformers import PreTrainedModel

from kvfold.calibration.collect import LayerSample
from kvfold.calibration.learner import LayerwiseLearner
from kvfold.calibration.state import Fit, share_of
from kvfold.formats.residual import CHUNK, Codebook, ResidualCodes, nearest
from kvfold.methods.vqllm import VQLLM

ITERATIONS = 10
VECTORS = 49_152
"""Vectors that a codebook is learned from, about 200 per code."""


class VQLLMLearner(LayerwiseLearner):
    """K-means, stage by stage."""

    def __init__(
        self, method: VQLLM, model: PreTrainedModel, windows: torch.Tensor, held: torch.Tensor, seed: int
    ) -> None:
        super().__init__(model, windows, held, seed)
        self.method = method

    def fit(self, sample: LayerSample, generator: torch.Generator) -> Fit:
        return learn(sample.on(self.model.device), self.held, self.method, generator)


def learn(sample: LayerSample, held: torch.Tensor, method: VQLLM, generator: torch.Generator) -> Fit:
    """Learn one layer's codebooks.

    Parameters
    ----------
    sample : LayerSample
    held : Tensor, bool [tokens]
        Tokens to measure errors on instead of learning from them.
    method : VQLLM
    generator : torch.Generator
        Decides the start and the sub-sample.

    Returns
    -------
    Fit
        ``key.codes``, ``value.codes``, float16 [stages, codes, vector].
        Errors are squared error over squared length, on held-out tokens.
    """
    tensors, errors = {}, {}
    for operand, x in (("key", sample.keys), ("value", sample.values)):
        form = method.format(sample.spec, operand)
        vectors = scaled_vectors(form, x[:, ~held]).flatten(0, -2)
        codes = residual_kmeans(vectors, form.stages, form.codes, generator).to(torch.float16)
        tensors[f"{operand}.codes"] = codes
        errors[operand] = error_of(form, codes.float(), x[:, held])
    return Fit(tensors, errors)


def scaled_vectors(form: ResidualCodes, x: torch.Tensor) -> torch.Tensor:
    """What codes are learned from: groups of channels of tokens of unit size, [heads, tokens, groups, vector]."""
    return form.split(x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30))


def error_of(form: ResidualCodes, codes: torch.Tensor, x: torch.Tensor) -> float:
    """Squared error over squared length of what is stored of x, [heads, tokens, head_dim], with these codes."""
    whole = x[:, : x.shape[1] // form.block * form.block].unsqueeze(0)
    fitted = dataclasses.replace(form, book=Codebook.rounded(codes))
    error = fitted.decode(fitted.encode(whole)) - whole
    return share_of(error.square().sum(), whole.square().sum())


def residual_kmeans(x: torch.Tensor, stages: int, codes: int, generator: torch.Generator) -> torch.Tensor:
    """Codes of all stages, float32 [stages, codes, vector].

    Parameters
    ----------
    x : Tensor, float32 [n, vector]
    """
    if len(x) > VECTORS:
        x = x[torch.randperm(len(x), generator=generator)[:VECTORS].to(x.device)]
    rest = x
    learned = []
    for _ in range(stages):
        centres = kmeans(rest, codes, generator)
        learned.append(centres)
        rest = rest - centres[assign(rest, centres)]
    return torch.stack(learned)


def kmeans(x: torch.Tensor, codes: int, generator: torch.Generator, iterations: int = ITERATIONS) -> torch.Tensor:
    """Lloyd's algorithm; a centre that no vector is nearest to starts again at one of the vectors.

    The paper updates the codebook by moving averages over minibatches; over the whole of the data that is k-means.
    """
    centres = x[torch.randperm(len(x), generator=generator)[:codes].to(x.device)]
    if len(centres) < codes:  # fewer vectors than codes: repeat them
        centres = centres.repeat(-(-codes // len(centres)), 1)[:codes]
    for _ in range(iterations):
        chosen = assign(x, centres)
        counts = torch.bincount(chosen, minlength=codes)
        sums = torch.zeros_like(centres).index_add_(0, chosen, x)
        fresh = x[torch.randint(len(x), (codes,), generator=generator).to(x.device)]
        centres = torch.where((counts > 0).unsqueeze(-1), sums / counts.clamp_min(1).unsqueeze(-1), fresh)
    return centres


def assign(x: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Index of each vector's nearest centre, int64 [n]."""
    return torch.cat([nearest(part, centres) for part in x.split(CHUNK[x.device.type])])
