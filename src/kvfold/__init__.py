"""kvfold folds the KV cache of a transformer into 1 to 4 bits per value and attends to it without unfolding it."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from kvfold.errors import (
    CacheFileError,
    CacheStateError,
    KVFoldError,
    KVFoldWarning,
    MethodError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from kvfold.always import folding
    from kvfold.attention import fold, unfold
    from kvfold.cache import FoldedCache
    from kvfold.explanation import Explanation, explain
    from kvfold.methods import DEFAULT, Method, Pair, Recipe
    from kvfold.saving import load_cache

__version__ = "0.1.0"

__all__ = [
    "DEFAULT",
    "CacheFileError",
    "CacheStateError",
    "Explanation",
    "FoldedCache",
    "KVFoldError",
    "KVFoldWarning",
    "Method",
    "MethodError",
    "Pair",
    "Recipe",
    "UnsupportedModelError",
    "explain",
    "fold",
    "folding",
    "load_cache",
    "unfold",
]

_MODULES = {
    "fold": "attention",
    "folding": "always",
    "unfold": "attention",
    "FoldedCache": "cache",
    "Explanation": "explanation",
    "explain": "explanation",
    "DEFAULT": "methods",
    "Method": "methods",
    "Pair": "methods",
    "Recipe": "methods",
    "load_cache": "saving",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: a command says how threads wait before it loads torch, and its help needs
    none of it."""
    if name in _MODULES:
        value = getattr(importlib.import_module(f"kvfold.{_MODULES[name]}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"kvfold.{name}"):
        value = importlib.import_module(f"kvfold.{name}")
    else:
        raise AttributeError(f"module 'kvfold' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
