"""Second moments of the queries of a text: SQuat's subspace where nothing of a request's queries is kept, as in a server."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold import artefact as artefacts
from kvfold.artefact import Artefact
from kvfold.calibration import looking
from kvfold.errors import KVFoldError
from kvfold.evaluation.text import Text
from kvfold.methods.none import NoFolding
from kvfold.methods.squat import SQuat
from kvfold.version import __version__

IMPLEMENTATION = "kvfold_queries"
WINDOW = 2048
"""Tokens of a window: what queries look like changes with their position."""

_seen: dict[int, torch.Tensor] = {}


def _look(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = query.double().unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # all query heads of a KV head
    moment = (grouped.mT @ grouped).sum(0)
    _seen[layer] = _seen[layer] + moment if layer in _seen else moment
    return key, value


looking.register(IMPLEMENTATION, _look)


@contextlib.contextmanager
def _looking(model: PreTrainedModel) -> Iterator[None]:
    with looking.attending(model, IMPLEMENTATION):
        try:
            yield
        finally:
            _seen.clear()


def moments(
    model: PreTrainedModel, windows: torch.Tensor, on_window: Callable[[int, int], None] | None = None
) -> dict[int, torch.Tensor]:
    """Mean of ``q q'`` over all queries after RoPE of a KV head's query heads, by layer.

    Parameters
    ----------
    windows : Tensor, int64 [num_windows, length]
        Token ids; every window starts at position 0.

    Returns
    -------
    dict
        Float32 [num_kv_heads, head_dim, head_dim], on the CPU.
    """
    with _looking(model), torch.inference_mode():
        for index, ids in enumerate(windows):
            model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)
            if on_window is not None:
                on_window(index + 1, len(windows))
        return {layer: (t / windows.numel()).float().cpu() for layer, t in _seen.items()}


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model_name: str,
    method: SQuat,
    texts: Sequence[Text],
    tokens: int,
    out: Path,
    *,
    force: bool = False,
    on_window: Callable[[int, int], None] | None = None,
) -> Artefact:
    """Look at a text's queries, and write their moments to a file.

    Parameters
    ----------
    method : SQuat
        Its rank, lam and channels may be others when the file is read.

    Returns
    -------
    Artefact

    Raises
    ------
    KVFoldError
        If the text is too short, the model has no layer to fold or queries that are not finite, ``out`` exists, or cannot be
        written.
    """
    from kvfold.calibration.run import windows_of
    from kvfold.engines.transformers.planning import plan_layers

    artefacts.check_target(out, force)
    specs = [item.spec for item in plan_layers(model, NoFolding()) if item.spec is not None]
    if not specs:
        raise KVFoldError(f"model: {model_name} has no layer that kvfold folds")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or WINDOW
    windows = windows_of(tokenizer, texts, tokens, min(WINDOW, limit, max(tokens // 2, 1)))
    found = moments(model, windows, on_window)
    for spec in specs:
        if not found[spec.layer_idx].isfinite().all():
            raise KVFoldError(
                f"model: queries of layer {spec.layer_idx} of {model_name} are not finite on this text; nothing can be learned "
                "from them"
            )
    result = Artefact(
        model=model_name,
        config_hash=artefacts.config_hash(model.config),
        method=str(dataclasses.replace(method)),
        shape={
            "num_layers": specs[0].num_layers,
            "num_kv_heads": specs[0].num_kv_heads,
            "head_dim": specs[0].head_dim,
        },
        calibration={
            "texts": [{"name": Path(t.source).name, "sha256": t.sha256} for t in texts],
            "tokens": windows.numel(),
            "held_out_tokens": 0,
            "window": windows.shape[1],
        },
        errors={},
        versions={"kvfold": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tensors={f"layers.{s.layer_idx}.key.moment": found[s.layer_idx] for s in specs},
        weights_hash=artefacts.weights_hash(model),
    )
    artefacts.save(result, out)
    return result
