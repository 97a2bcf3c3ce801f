"""Why VQLLM is ahead of CommVQ: held-out errors of one layer's keys and values under parts of both, at equal bits of codes.

usage: python scripts/vqllm_commvq.py LEARNED.txt OTHER.txt --layers 10 21 --json benchmarks/vqllm-commvq.json

Codebooks are learned from 7,168 tokens of the first text. Errors are squared errors over variance, on 1,024 held-out tokens
of it and on 2,048 of the other one; of values also under the output projection's metric.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvfold import models
from kvfold.calibration import vqllm
from kvfold.calibration.collect import Collector, LayerSample
from kvfold.calibration.commvq_keys import learn_keys
from kvfold.calibration.commvq_schedule import Schedule
from kvfold.calibration.commvq_values import learn_values
from kvfold.calibration.run import windows_of
from kvfold.evaluation.text import load_text
from kvfold.formats import Format
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, stages_for
from kvfold.formats.residual import Codebook, ResidualCodes
from kvfold.methods.commvq import ValueCodebook

PLAIN = Schedule(metric=0.0, weight_limit=0.0)
"""All tokens and all directions alike."""


def read(form: Format, x: torch.Tensor) -> torch.Tensor:
    return form.decode(form.encode(x.unsqueeze(0)))[0]


def error(
    decode: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, metric: torch.Tensor | None = None
) -> list[float]:
    """Squared error and squared deviation from the mean, whole blocks of x [heads, tokens, d]."""
    x = x[:, : x.shape[1] // 32 * 32]
    missed, centred = decode(x) - x, x - x.mean(1, keepdim=True)
    return [float(((e if metric is None else e @ metric) * e).sum()) for e in (missed, centred)]


def ratio(parts: list[list[float]]) -> float:
    return round(sum(p[0] for p in parts) / sum(p[1] for p in parts), 4)


def residual(train: torch.Tensor, form: ResidualCodes) -> ResidualCodes:
    vectors = vqllm.scaled_vectors(form, train).flatten(0, -2)
    book = vqllm.residual_kmeans(vectors, form.stages, form.codes, torch.Generator().manual_seed(0))
    return dataclasses.replace(form, book=Codebook(book))


def keys(sample: LayerSample, other: torch.Tensor, held: torch.Tensor, bits: int) -> list[dict[str, Any]]:
    x, rows = sample.keys, []
    d, pairs = x.shape[-1], stages_for(bits, x.shape[-1], 64)
    cases = (
        ("vqllm: 32 channels, 256 codes a stage, one codebook for all heads", 32, 256, 4 * bits, False),
        ("whole heads, 256 codes a stage, one codebook for all heads", d, 256, bits * d // 8, False),
        ("whole heads, 256 codes a stage, a codebook per head", d, 256, bits * d // 8, True),
        ("whole heads, 64 codes a stage, a codebook per head: CommVQ's pairs untied", d, 64, 2 * pairs, True),
        ("16 channels, 256 codes a stage, one codebook for all heads", 16, 256, 2 * bits, False),
    )
    for what, vector, codes, stages, alone in cases:
        started, parts = time.perf_counter(), ([], [])
        for heads in [slice(i, i + 1) for i in range(len(x))] if alone else [slice(None)]:
            form = residual(x[heads][:, ~held], ResidualCodes(d, 32, "plain", vector, codes, stages, True))
            for part, y in zip(parts, (x[heads][:, held], other[heads]), strict=True):
                part.append(error(lambda y, form=form: read(form, y), y))
        found = {"bits": stages * math.log2(codes) / vector, "mse": [ratio(part) for part in parts]}
        rows.append({"what": what, **found, "seconds": round(time.perf_counter() - started, 1)})
    for passes in (0, 1):
        started = time.perf_counter()
        form = AdditiveCodes(d, 32, "plain", pairs, 64, passes)
        made, _ = learn_keys(sample, held, form, PLAIN, torch.Generator().manual_seed(0))
        fitted = dataclasses.replace(form, codebook=KeyCodebook(made["centres"], made["metric"].float(), d))
        mse = [ratio([error(lambda y, form=fitted: read(form, y), y)]) for y in (x[:, held], other)]
        what = f"commvq: whole heads, pairs z_a + i z_b of 64, a codebook per head, passes={passes}"
        seconds = round(time.perf_counter() - started, 1)
        rows.append({"what": what, "bits": pairs * 12 / d, "mse": mse, "seconds": seconds})
    return rows


def values(sample: LayerSample, other: torch.Tensor, held: torch.Tensor, bits: int) -> list[dict[str, Any]]:
    x, rows = sample.values, []
    d = x.shape[-1]

    def add(what: str, stored: float, decode: Callable[[torch.Tensor], torch.Tensor], started: float) -> None:
        mse = [ratio([error(decode, y, m)]) for y in (x[:, held], other) for m in (None, sample.value_metric)]
        rows.append({"what": what, "bits": stored, "mse": mse, "seconds": round(time.perf_counter() - started, 1)})

    started = time.perf_counter()
    form = residual(x[:, ~held], ResidualCodes(d, 32, "plain", 32, 256, 4 * bits))
    for fit in ("rms", "unbiased"):
        fitted = dataclasses.replace(form, fit=fit)
        add(f"vqllm values, scale {fit}", bits + 16 / d, lambda y, form=fitted: read(form, y), started)
    for what, schedule, flips in (
        ("plain loss, no search", PLAIN, 0),
        ("plain loss", PLAIN, 32),
        ("as calibrated", Schedule(), 32),
        ("12 rounds of all tokens", Schedule(value_rounds=12, value_tokens=0), 32),
    ):
        started = time.perf_counter()
        made, found = learn_values(
            sample, held, bits * d, False, schedule, torch.Generator().manual_seed(0), flips=flips
        )
        book = ValueCodebook({n: t.float() if t.is_floating_point() else t for n, t in made.items()})
        decode = lambda y, book=book, flips=flips: book.decode(book.bits(y, flips))  # noqa: E731
        add(f"commvq values, closed form, {what}", float(bits), decode, started)
        rows[-1]["output_mse"] = round(found["output_mse"], 4)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("text")
    parser.add_argument("other")
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 21], help="from 1")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    model, tokenizer, info = models.load(None, None, "cpu")
    texts = [load_text(path) for path in (given.text, given.other)]
    windows, far = (windows_of(tokenizer, [text], n, 512) for text, n in zip(texts, (8192, 2048), strict=True))
    held = torch.zeros(windows.shape, dtype=torch.bool)
    held[7::8] = True
    collectors = [Collector(model, ids, 4) for ids in (windows, far)]
    for collector in collectors:
        collector.start()
    rows: list[dict[str, Any]] = []
    while collectors[0].done < max(given.layers):
        sample, other = (collector.step() for collector in collectors)
        if (layer := collectors[0].done) not in given.layers:
            continue
        assert sample is not None and other is not None
        with torch.no_grad():
            for bits in (1, 2):
                for side, learn, x in (("keys", keys, other.keys), ("values", values, other.values)):
                    rows += [{"layer": layer, "side": side, **row} for row in learn(sample, x, held.flatten(), bits)]
        about = {"model": info.name, "texts": [text.sha256 for text in texts], "torch": torch.__version__}
        given.json.write_text(json.dumps({"header": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
