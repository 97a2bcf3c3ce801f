"""Methods, windows and calls that tests of caches share."""

import torch

import kvfold
from kvfold.engines.transformers.names import passing
from kvfold.kernels import AttentionKernel
from kvfold.methods import LayerSpec, Method

VARIANTS = (
    "kivi:group=64",
    "fold:rotation=64",
    "fold:bits=8",
    "fold:group=64",
    "innerq:sink=5,recent=7",
    "innerq:group=16,sink=0,recent=0",
    "squat:sink=40,recent=0",
    "squat_pre:sink=3,recent=1",
    "qjl:outliers=8,normalize=false",
    "turboquant:center=false",
)


METHODS = (*kvfold.DEFAULT, *VARIANTS)


def cut(new, start: int, stop: int | None = None):
    return tuple(t[:, :, start:stop] for t in new)


def storages(thing, seen: set[int], found: dict[int, int]) -> dict[int, int]:
    """Bytes of every tensor storage that can be reached from ``thing``, by address."""
    if id(thing) in seen or isinstance(thing, (Method, LayerSpec, AttentionKernel, type, str, int, float)):
        return found
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        thing = getattr(thing, "__dict__", {})
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple, set)) else ()
    for each in (*inner, *vars(thing).values()) if hasattr(thing, "__dict__") else inner:
        storages(each, seen, found)
    return found


SMALL = "sink=5,recent=7"


def small(method: str, options: str = SMALL) -> str:
    return method + ("," if ":" in method else ":") + options


def step(model, cache, ids: torch.Tensor, start: int, stop: int, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[:, start:stop], **passing(model, cache), use_cache=True, **options).logits
