"""A calibration from text to artefact: layer by layer, resumable, deterministic for a seed."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold import artefact as artefacts
from kvfold.artefact import Artefact
from kvfold.calibration.commvq import CommVQLearner
from kvfold.calibration.commvq_schedule import PRESETS, Schedule
from kvfold.calibration.gsrq import GSRQLearner
from kvfold.calibration.kvquant import KVQuantLearner
from kvfold.calibration.learner import Learner
from kvfold.calibration.nova import ByteCodesLearner
from kvfold.calibration.state import State
from kvfold.calibration.vqllm import VQLLMLearner
from kvfold.errors import KVFoldError, OutputError
from kvfold.evaluation.text import Text
from kvfold.evaluation.windows import bos_of
from kvfold.methods.commvq import CommVQ
from kvfold.methods.gsrq import GSRQ
from kvfold.methods.kvquant import KVQuant
from kvfold.methods.learned import LearnedMethod, rotary_dim
from kvfold.methods.nova import ByteCodes
from kvfold.methods.vqllm import VQLLM
from kvfold.version import __version__

HELD_OUT = 8
"""Every so many windows, one is kept for measuring errors."""


@dataclasses.dataclass(frozen=True)
class LayerDone:
    """Progress: a layer's held-out errors; ``seconds`` is 0 where the layer was taken over from an earlier run."""

    layer_idx: int
    num_layers: int
    errors: dict[str, float]
    seconds: float


def windows_of(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], tokens: int, length: int) -> torch.Tensor:
    """Token windows spread evenly over all texts; each begins as the tokenizer has a text begin.

    Returns
    -------
    Tensor, int64 [tokens / length, length]

    Raises
    ------
    KVFoldError
        If the texts are too short.
    """
    wanted = tokens // length
    if wanted < 2:
        raise KVFoldError(f"tokens: {tokens} is too small; give at least {2 * length}, two windows of {length}")
    pieces, begins = [], None
    for text in texts:
        ids = tokenizer(text.text, return_tensors="pt", verbose=False).input_ids[0]
        begins = bos_of(tokenizer, ids) if begins is None else begins
        pieces.append(ids[: len(ids) // length * length].view(-1, length))
    windows = torch.cat(pieces)
    if len(windows) < wanted:
        raise KVFoldError(
            f"text: {len(texts)} file(s) hold {len(windows) * length} tokens in windows of {length}, and {tokens} are asked "
            "for; give more text, or fewer --tokens"
        )
    windows = windows[torch.arange(wanted) * len(windows) // wanted].to(torch.int64)
    if begins is not None:  # without it some models compute nothing that they do in use
        windows[:, 0] = begins
    return windows


def _learner(method: LearnedMethod, schedule: Schedule) -> Callable[..., Learner]:
    if isinstance(method, CommVQ):
        return partial(CommVQLearner, method, schedule)
    if isinstance(method, KVQuant):
        return partial(KVQuantLearner, method)
    if isinstance(method, GSRQ):
        return partial(GSRQLearner, method)
    if isinstance(method, ByteCodes):
        return partial(ByteCodesLearner, method)
    if isinstance(method, VQLLM):
        return partial(VQLLMLearner, method)
    raise KVFoldError(f"method: {method.name} has no calibration")


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model_name: str,
    method: LearnedMethod,
    texts: Sequence[Text],
    tokens: int,
    out: Path,
    *,
    preset: str = "fast",
    schedule: Schedule | None = None,
    encoder: str | None = None,
    seed: int = 0,
    force: bool = False,
    on_layer: Callable[[LayerDone], None] | None = None,
    on_window: Callable[[int, int], None] | None = None,
) -> Artefact:
    """Learn what a method needs and write it to a file.

    Parameters
    ----------
    model : PreTrainedModel
        On the device that is to compute.
    method : LearnedMethod
        What to learn; its options decide bits, stages, levels, outliers.
    texts : sequence of Text
        Calibration text. Every eighth window of it is held out.
    tokens : int
        Tokens to use of it, held-out ones included.
    out : Path
        The artefact. What is finished is kept in the folder ``<out>.partial`` until it is written; a killed run with the
        same arguments goes on there and ends with the same artefact.
    preset : str
        For CommVQ: name in :data:`~kvfold.calibration.commvq_schedule.PRESETS`.
    schedule : Schedule or None
        For CommVQ: instead of the preset's.
    encoder : {"scalar", "mlp"} or None
        For CommVQ: of values, instead of the schedule's.
    seed : int
        KVQuant draws nothing.
    force : bool
        Replace ``out`` if it exists.
    on_layer : callable or None
        Called after every layer.
    on_window : callable or None
        Called while KVQuant's backward passes run, with windows done and in all.

    Returns
    -------
    Artefact

    Raises
    ------
    KVFoldError
        If the text is too short, the model has no layer to fold, ``out`` exists, or a file cannot be written.
    """
    if preset not in PRESETS:
        raise KVFoldError(f"preset: {preset!r} is not known; allowed: {', '.join(PRESETS)}")
    artefacts.check_target(out, force)
    learns = isinstance(method, CommVQ)
    if encoder is not None and not learns:
        raise KVFoldError(f"encoder: {method.name} has no value encoder; allowed: leave it out, or method commvq")
    chosen = (schedule or PRESETS[preset]) if learns else Schedule(window=Learner.window)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    chosen = dataclasses.replace(
        chosen, window=min(chosen.window, limit or chosen.window), encoder=encoder or chosen.encoder
    )
    windows = windows_of(tokenizer, texts, tokens, chosen.window)
    held = torch.zeros(windows.shape, dtype=torch.bool)
    held[HELD_OUT - 1 :: HELD_OUT] = True
    if not held.any():
        held[-1] = True
    spec = str(dataclasses.replace(method, artefact=""))
    calibration: dict[str, Any] = {
        "texts": [{"name": Path(t.source).name, "sha256": t.sha256} for t in texts],
        "tokens": windows.numel(),
        "held_out_tokens": int(held.sum()),
        "preset": ("custom" if schedule else preset) if learns else "default",
        "schedule": dataclasses.asdict(chosen) if learns else {"window": chosen.window},
        "seed": seed,
    }
    versions = {"kvfold": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    learner = _learner(method, chosen)(model, windows, held.flatten(), seed)
    if learner.positions is not None:
        calibration["positions"] = learner.positions
    folded = [s for s in learner.specs if s is not None]
    if not folded:
        raise KVFoldError(f"model: {model_name} has no layer that kvfold folds")
    weights = artefacts.weights_hash(model)
    state = State(
        out.with_name(out.name + ".partial"),
        {
            "model": model_name,
            "weights": weights,
            "dtype": str(model.dtype),
            "method": spec,
            "calibration": calibration,
            "versions": versions,
        },
    )
    count, done = len(learner.specs), learner.start(state, on_window)
    for index in range(count):
        started = time.perf_counter()
        if index >= done:
            state.add(index, learner.learn(index, state))
            learner.keep(index, state)
        fit = state.layer(index)
        assert fit is not None
        if on_layer is not None:
            on_layer(LayerDone(index, count, fit.errors, time.perf_counter() - started if index >= done else 0.0))
    fits = {index: fit for index in range(count) if (fit := state.layer(index)) is not None and fit.tensors}
    rotary = {rotary_dim(s) for s in folded if s.rope is not None}
    result = Artefact(
        model=model_name,
        config_hash=artefacts.config_hash(model.config),
        method=spec,
        shape={
            "num_layers": count,
            "num_kv_heads": folded[0].num_kv_heads,
            "head_dim": folded[0].head_dim,
            "rotary_dim": rotary.pop() if rotary else folded[0].head_dim,
            "no_rope_layers": [s.layer_idx for s in folded if s.rope is None],
            **method.learned_shape(),
        },
        calibration=calibration,
        errors={str(layer): fit.errors for layer, fit in fits.items()},
        versions=versions,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tensors={f"layers.{layer}.{name}": t for layer, fit in fits.items() for name, t in fit.tensors.items()},
        weights_hash=weights,
    )
    try:
        artefacts.save(result, out)
    except artefacts.ArtefactError as error:
        raise OutputError(f"{error}; finished layers are kept in {state.folder}", result) from error
    state.remove()
    return result
