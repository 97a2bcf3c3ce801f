"""Learning NOVA-KV's and TaSQ's tables: maps and codebooks of every KV head for the distance that queries see."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvfold.calibration.collect import LayerSample, distance_factor, to_complex
from kvfold.calibration.learner import LayerwiseLearner
from kvfold.calibration.state import Fit
from kvfold.formats import Format, GroupCodes
from kvfold.formats.affine import to_fp16
from kvfold.formats.grouped import GroupBook
from kvfold.formats.projected import HeadMaps
from kvfold.methods.base import LayerSpec
from kvfold.methods.learned import rotary_dim, span
from kvfold.methods.nova import CODES, ByteCodes, Tables

ITERATIONS = 16
VECTORS = 12_288
"""Vectors that a codebook is learned from, 48 per code."""

RIDGE = 1e-4
"""Of the largest eigenvalue of a metric: what its smallest ones are raised by."""


class ByteCodesLearner(LayerwiseLearner):
    """Maps in closed form, codebooks by k-means."""

    positions: int

    def __init__(
        self, method: ByteCodes, model: PreTrainedModel, windows: torch.Tensor, held: torch.Tensor, seed: int
    ) -> None:
        super().__init__(model, windows, held, seed)
        self.method = method
        self.positions = span(model.config.get_text_config())

    def fit(self, sample: LayerSample, generator: torch.Generator) -> Fit:
        here = sample.on(self.model.device)
        return learn(here, self.held, self.windows.shape[1], self.positions, self.method, generator)


def learn(
    sample: LayerSample,
    held: torch.Tensor,
    window: int,
    positions: int,
    method: ByteCodes,
    generator: torch.Generator,
) -> Fit:
    """Learn one layer's tables.

    Parameters
    ----------
    sample : LayerSample
    held : Tensor, bool [tokens]
        Tokens to measure errors on instead of learning from them.
    window, positions : int
        Tokens of a calibration window; positions that keys are taken to lie at, and distances that queries look back.
    method : ByteCodes
    generator : torch.Generator
        Decides the positions of windows, starts and sub-samples.

    Returns
    -------
    Fit
        ``key.codes`` fp16 [heads, groups, 256, vector]; with a map ``key.mean``, ``key.map``, ``key.inverse``, else
        ``key.metric``; of values with codes ``value.codes`` and ``value.metric``; where the method centres them,
        ``key.mean`` and ``value.mean`` fp16 [heads, d]. Errors are those of held-out scores and attention outputs, over their
        variance.
    """
    spec = sample.spec
    keys_form, values_form = method.formats(spec)
    queries = real_moment(
        sample.query_moment * distance_factor(spec, positions).to(sample.query_moment.device),
        rotary_dim(spec),
        spec.head_dim,
    )
    tensors: dict[str, torch.Tensor | None] = {}
    errors: dict[str, float] = {}
    if method.maps_keys:
        keys = placed(sample.keys, window, positions, spec, generator)
        maps = query_maps(keys[:, ~held], queries, inner_codes(keys_form).vector)
        tensors |= {"key.mean": maps.mean, "key.map": maps.apply, "key.inverse": maps.restore}
        prepared = (keys - maps.mean.unsqueeze(-2)) @ maps.apply
        book = learn_book(inner_codes(keys_form), prepared[:, ~held], None, generator)
    else:
        keys, maps = sample.keys, None
        book = learn_book(inner_codes(keys_form), keys[:, ~held], queries, generator)
        tensors |= {"key.metric": book.metric, "key.mean": book.mean}
    tensors["key.codes"] = book.codes
    values = None
    if method.values == "codes":
        assert isinstance(values_form, GroupCodes)
        values = learn_book(values_form, sample.values[:, ~held], sample.value_metric, generator)
        tensors |= {"value.codes": values.codes, "value.metric": values.metric, "value.mean": values.mean}
    fitted = method.formats(spec, Tables(book, maps, values))
    sides = zip(("key", "value"), fitted, (keys, sample.values), (queries, sample.value_metric), strict=True)
    for operand, form, x, metric in sides:
        errors[operand] = weighted_error(form, x[:, held], metric)
    return Fit({name: t for name, t in tensors.items() if t is not None}, errors)


def inner_codes(form: Format) -> GroupCodes:
    """The codes of a key format, under its map or alone."""
    inner = getattr(form, "inner", form)
    assert isinstance(inner, GroupCodes)
    return inner


def real_moment(moment: torch.Tensor, rotary: int, head_dim: int) -> torch.Tensor:
    """A moment of RoPE's complex pairs as one of channels: complex [heads, d / 2, d / 2] -> float32 [heads, d, d].

    ``e M e'`` is the mean squared score of an error e, twice over.
    """
    pairs = to_complex(torch.eye(head_dim, device=moment.device), rotary)
    return (pairs.conj() @ moment.to(pairs.dtype) @ pairs.T).real.float()


def placed(keys: torch.Tensor, window: int, count: int, spec: LayerSpec, generator: torch.Generator) -> torch.Tensor:
    """Keys after RoPE, as if windows lay anywhere among ``count`` positions.

    A mean over calibration windows that all begin at position 0 is the mean of a sequence's beginning, and no other.
    """
    if spec.rope is None:
        return keys
    first = torch.randint(count, (keys.shape[1] // window,), generator=generator)
    positions = (first.unsqueeze(-1) + torch.arange(window)).view(1, 1, -1).to(keys.device)
    return spec.rope.rotate(keys.unsqueeze(0), positions)[0]


def root(metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric root of a metric and its inverse, float64 [..., n, n]; small eigenvalues are raised."""
    values, vectors = torch.linalg.eigh(metric.double())
    values = (values.clamp_min(0) + RIDGE * values.amax(-1, keepdim=True).clamp_min(1e-30)).sqrt()
    turned = vectors.transpose(-1, -2)
    return vectors @ (values.unsqueeze(-1) * turned), vectors @ (turned / values.unsqueeze(-1))


def query_maps(keys: torch.Tensor, queries: torch.Tensor, vector: int) -> HeadMaps:
    """NOVA-KV's mean and map: ``R = M^(1/2) E``, coordinates dealt out to groups in the order of their variance.

    Parameters
    ----------
    keys : Tensor, float32 [heads, tokens, d]
        After RoPE.
    queries : Tensor, float32 [heads, d, d]
        M, the second moment of the queries.
    vector : int
        Channels of a group.
    """
    mean = keys.mean(1)
    centred = (keys - mean.unsqueeze(1)).double()
    covariance = centred.transpose(-1, -2) @ centred / centred.shape[1]
    half, inverse = root(queries)
    vectors = torch.linalg.eigh(half @ covariance @ half).eigenvectors.flip(-1)  # largest variance first
    # coordinate i belongs to group i modulo the number of groups; neighbours form a group
    vectors = vectors.unflatten(-1, (vector, -1)).transpose(-1, -2).flatten(-2)
    apply, restore = half @ vectors, vectors.transpose(-1, -2) @ inverse
    # of unit size, so that fp16 queries and codes are far from its ends
    size = ((centred @ apply).square().mean((1, 2)).sqrt()).clamp_min(1e-30)[:, None, None]
    return HeadMaps(mean.float(), (apply / size).float(), (restore * size).float())


def learn_book(form: GroupCodes, x: torch.Tensor, metric: torch.Tensor | None, generator: torch.Generator) -> GroupBook:
    """Codebooks of all KV heads and groups.

    Parameters
    ----------
    x : Tensor, float32 [heads, tokens, d]
    metric : Tensor or None, float32 [heads, d, d]
        Of the distance, within groups.
    """
    mean = None
    if form.centred:
        mean = to_fp16(x.mean(1))
        x = x - mean.float().unsqueeze(1)
    unit = form.split(x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30))  # [heads, tokens, groups, vector]
    chosen = torch.randperm(unit.shape[1], generator=generator)[:VECTORS].to(x.device)
    vectors = unit[:, chosen].transpose(1, 2)  # [heads, groups, n, vector]
    factor = inverse = None
    if metric is not None:
        index = form.split(torch.arange(form.head_dim, device=x.device))
        own = metric[:, index.unsqueeze(-1), index.unsqueeze(-2)]
        half, back = root(own)
        size = half.diagonal(dim1=-1, dim2=-2).mean(-1)[..., None, None].clamp_min(1e-30)
        factor, inverse = (half / size).float(), (back * size).float()
        vectors = vectors @ factor
    centres = kmeans(vectors.flatten(0, 1), CODES, generator).unflatten(0, vectors.shape[:2])
    if inverse is not None:
        centres = centres @ inverse
    return GroupBook(centres.to(torch.float16), factor, mean)


def kmeans(x: torch.Tensor, codes: int, generator: torch.Generator, iterations: int = ITERATIONS) -> torch.Tensor:
    """Lloyd's algorithm for many sets at once: x [sets, n, vector] -> [sets, codes, vector].

    A centre that no vector is nearest to starts again at the worst coded ones.
    """
    sets, n, vector = x.shape
    start = torch.randperm(n, generator=generator)[:codes].to(x.device)
    if len(start) < codes:
        start = start.repeat(-(-codes // n))[:codes]
    centres = x[:, start].clone()
    for _ in range(iterations):
        half = centres.square().sum(-1).unsqueeze(1) / 2
        distance, chosen = [], []
        for part in x.split(2048, 1):
            best = (half - part @ centres.transpose(-1, -2)).min(-1)
            distance.append(best.values + part.square().sum(-1) / 2)
            chosen.append(best.indices)
        at, far = torch.cat(chosen, 1), torch.cat(distance, 1)
        counts = torch.zeros(sets, codes, device=x.device).scatter_add_(1, at, torch.ones_like(far))
        sums = torch.zeros_like(centres).scatter_add_(1, at.unsqueeze(-1).expand(-1, -1, vector), x)
        worst = far.topk(min(codes, n), 1).indices
        worst = worst.repeat(1, -(-codes // worst.shape[1]))[:, :codes]
        fresh = x.gather(1, worst.unsqueeze(-1).expand(-1, -1, vector))
        centres = torch.where((counts > 0).unsqueeze(-1), sums / counts.clamp_min(1).unsqueeze(-1), fresh)
    return centres


def weighted_error(form: Format, x: torch.Tensor, metric: torch.Tensor) -> float:
    """``e M e'`` of what is stored of x, [heads, tokens, d], over that of x less its mean."""
    whole = x[:, : x.shape[1] // form.block * form.block]
    error = form.decode(form.encode(whole.unsqueeze(0)))[0] - whole
    centred = whole - whole.mean(1, keepdim=True)
    return float(((error @ metric) * error).sum() / ((centred @ metric) * centred).sum().clamp_min(1e-30))
