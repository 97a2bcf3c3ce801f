"""CommVQ's ablations on a model's own keys and values: its Tables 9 to 11 and Figure 4, and what our schedule rests on.

usage: python -m kvfold.calibration.ablation --text FILE [FILE ...] [--model M] [--json FILE]

Tables of the paper are of the first layer: plain mean squared error on held-out tokens, no metric, no token weights. Codebooks
of g pairs of channels, N vectors and R stages take ``R log2(N) / g`` bits per element (eq. 38); g below head_dim / 2 cuts a key
into pieces that are coded apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfold import files
from kvfold.calibration.collect import Collector, LayerSample
from kvfold.calibration.commvq_keys import learn_keys, learn_stage
from kvfold.calibration.commvq_schedule import Schedule
from kvfold.calibration.commvq_values import learn_values
from kvfold.calibration.run import HELD_OUT, windows_of
from kvfold.errors import KVFoldError
from kvfold.formats import AffineGroups
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, stages_for
from kvfold.methods.learned import rotary_dim

PLAIN = Schedule(metric=0.0, weight_limit=0.0)
"""The paper's loss, on our short schedule."""
TABLE_10 = ((8, 2, 8), (16, 4, 8), (32, 16, 8), (64, 64, 11))
"""g, N and R of the paper's tables 9 (R = 1) and 10 (as close to 1 bit as R allows)."""


def cut(keys: torch.Tensor, pairs: int, rotary: int) -> torch.Tensor:
    """Pieces of ``pairs`` neighbouring pairs of channels.

    Parameters
    ----------
    keys : Tensor, float32 [heads, tokens, head_dim]
        All channels rotated: pair j is (j, j + head_dim / 2).

    Returns
    -------
    Tensor, float32 [heads * head_dim / (2 pairs), tokens, 2 pairs]
        Every piece paired like a head of its own.
    """
    if rotary != keys.shape[-1] or rotary // 2 % pairs:
        raise KVFoldError(f"g: {pairs} does not divide the {rotary // 2} pairs of RoPE")
    real, imaginary = (half.unflatten(-1, (-1, pairs)) for half in keys.chunk(2, -1))
    return torch.cat([real, imaginary], -1).transpose(1, 2).flatten(0, 1)


def key_error(
    keys: torch.Tensor, held: torch.Tensor, levels: int, stages: int, passes: int = 0, seed: int = 0
) -> list[float]:
    """Mean squared error on held-out tokens after 1 ... ``stages`` stages.

    Parameters
    ----------
    keys : Tensor, float32 [heads, tokens, 2 g]
    held : Tensor, bool [tokens]
    levels : int
        N.
    passes : int
        Of the search when encoding; 0 as published.
    """
    generator = torch.Generator().manual_seed(seed)
    identity = torch.eye(keys.shape[-1]).expand(len(keys), -1, -1)
    train, test, rotary = keys[:, ~held].clone(), keys[:, held], keys.shape[-1]
    learned: list[torch.Tensor] = []
    errors = []
    for _ in range(stages):
        learned.append(learn_stage(train, torch.ones(train.shape[:2]), levels, rotary, PLAIN, generator))
        stage = KeyCodebook(learned[-1].unsqueeze(1), identity, rotary)
        train -= stage.sum(stage.assign(train, 0))
        book = KeyCodebook(torch.stack(learned, 1), identity, rotary)
        errors.append(float((book.sum(book.assign(test, passes)) - test).square().mean()))
    return errors


def asymmetric_error(values: torch.Tensor, held: torch.Tensor, bits: int, group: int = 32) -> float:
    """Mean squared error of asymmetric quantization of held-out values, in groups of channels."""
    form = AffineGroups(values.shape[-1], 32, "plain", bits, "channel", "asym", group)
    test = values[:, held]
    test = test[:, : test.shape[1] // form.block * form.block].unsqueeze(0)
    return float((form.decode(form.encode(test)) - test).square().mean())


def ablate(sample: LayerSample, held: torch.Tensor, seed: int = 0) -> list[dict[str, Any]]:
    """All rows for one layer: ``table``, what was varied, ``bits`` per element and ``mse`` on held-out tokens."""
    rows: list[dict[str, Any]] = []
    spec, keys, values = sample.spec, sample.keys, sample.values
    rotary, whole = rotary_dim(spec), spec.head_dim // 2

    def add(table: str, g: int, n: int, r: int, mse: float) -> None:
        bits = r * (n.bit_length() - 1) / g
        rows.append({"table": table, "what": "commvq keys", "g": g, "N": n, "R": r, "bits": bits, "mse": mse})

    for g, n, r in TABLE_10:
        if whole % g == 0:
            errors = key_error(cut(keys, g, rotary), held, n, r, seed=seed)
            add("9", g, n, 1, errors[0])
            add("10", g, n, r, errors[-1])
    errors = key_error(cut(keys, whole, rotary), held, 64, round(2 * whole / 6), seed=seed)
    for stage, mse in enumerate(errors, 1):
        add("figure 4", whole, 64, stage, mse)
    for bits in (1, 2):
        rows.append(
            {"table": "11", "what": "asymmetric values, groups of 32", "bits": bits + 1.0,
             "mse": asymmetric_error(values, held, bits)}
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            _, found = learn_values(sample, held, bits * spec.head_dim, False, PLAIN, generator)
        mse = found["value_mse"] * float(values[:, held].square().mean())
        rows.append({"table": "11", "what": "commvq values", "bits": float(bits), "mse": mse})
    return rows


KEY_SCHEDULES = (
    (10, 0, 0.05, 0.002), (30, 0, 0.5, 0.0005), (10, 3, 0.05, 0.005), (10, 5, 0.05, 0.005), (10, 7, 0.05, 0.005),
    (10, 7, 0.1, 0.02), (10, 9, 0.05, 0.005), (10, 10, 0.05, 0.005), (20, 17, 0.05, 0.005),
)  # fmt: skip
"""EM steps, how many of them are hard, first and last temperature of the others."""
NETWORK_STEPS = (600, 1800)


def ablate_training(sample: LayerSample, held: torch.Tensor, seed: int = 0) -> list[dict[str, Any]]:
    """Held-out errors of one layer under other schedules, and under the paper's value encoder; with the seconds it took.

    Keys at 1 bit, ``mse`` of scores (``score_mse`` of calibration); values at 1 and 2 bits, ``mse`` of attention outputs.
    """
    rows: list[dict[str, Any]] = []
    dim = sample.spec.head_dim
    form = AdditiveCodes(dim, 32, "plain", stages_for(1, dim, 64), 64, passes=1)

    def timed(what: str, bits: int, learn: Any, error: str) -> None:
        started = time.perf_counter()
        with torch.no_grad():
            _, errors = learn(torch.Generator().manual_seed(seed))
        seconds = time.perf_counter() - started
        rows.append({"table": "training", "what": what, "bits": float(bits), "mse": errors[error], "seconds": seconds})

    for steps, hard, hot, cold in KEY_SCHEDULES:
        schedule = Schedule(em_steps=steps, hard_steps=hard, hot=hot, cold=cold)
        soft = f"{steps - hard} soft from T = {hot} to {cold}" if hard < steps else "none soft"
        timed(
            f"keys: {steps} steps, {soft}", 1,
            partial(learn_keys, sample, held, form, schedule), "score_mse",
        )  # fmt: skip
    for bits in (1, 2):
        timed(
            "values: closed form",
            bits,
            partial(learn_values, sample, held, bits * dim, False, Schedule()),
            "output_mse",
        )
        for steps in NETWORK_STEPS:
            schedule = Schedule(encoder="mlp", network_steps=steps)
            timed(
                f"values: network, {steps} steps", bits,
                partial(learn_values, sample, held, bits * dim, False, schedule), "output_mse",
            )  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; exit status 0, or 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m kvfold.calibration.ablation", description=__doc__)
    parser.add_argument("--text", nargs="+", required=True, help="UTF-8 text")
    parser.add_argument("--model", help="hub id, local folder or .gguf file; default: the embedded model")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text, an eighth held out")
    parser.add_argument("--training-layer", type=int, default=21, help="layer of the schedules' comparison; from 1")
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args(argv)
    from kvfold import models
    from kvfold.evaluation.schema import write_json
    from kvfold.evaluation.text import load_text

    try:
        target = Path(arguments.json) if arguments.json else None
        if target:
            files.check(target, "json")
        texts = [load_text(path) for path in arguments.text]
        model, tokenizer, info = models.load(arguments.model, None, "cpu")
        windows = windows_of(tokenizer, texts, arguments.tokens, PLAIN.window)
        held = torch.zeros(windows.shape, dtype=torch.bool)
        held[HELD_OUT - 1 :: HELD_OUT] = True
        if not held.any():
            held[-1] = True
        collector = Collector(model, windows, 4)
        collector.start()
        sample = collector.step()
        if sample is None:
            raise KVFoldError(f"model: the first layer of {info.name} is not folded")
        rows = ablate(sample, held.flatten())
        deep = sample
        while collector.done < min(arguments.training_layer, len(collector.specs)):
            deep = collector.step() or deep
        rows += ablate_training(deep, held.flatten())
        variance = float(sample.keys[:, held.flatten()].var(1).mean())
    except KVFoldError as error:
        print(f"kvfold: error: {error}", file=sys.stderr)
        return 2
    print(
        f"{info.name}, first layer, {windows.numel()} tokens, {int(held.sum())} held out; variance of keys {variance:.4f}"
    )
    for row in rows:
        shape = "".join(f" {name}={row[name]}" for name in ("g", "N", "R") if name in row)
        print(f"{row['table']:>8}: {row['what']}{shape}: {row['bits']:.3f} bits, error {row['mse']:.6f}")
    if target:
        about = {
            "model": info.name,
            "layer": 1,
            "training_layer": deep.spec.layer_idx + 1,
            "tokens": windows.numel(),
            "held_out_tokens": int(held.sum()),
            "texts": [{"name": Path(t.source).name, "sha256": t.sha256} for t in texts],
            "schedule": dataclasses.asdict(PLAIN),
            "key_variance": variance,
            "torch": torch.__version__,
        }
        write_json(target, json.loads(json.dumps({"header": about, "rows": rows})))
        print(f"written: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
