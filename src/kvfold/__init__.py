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
from kvfold.version import __version__

if TYPE_CHECKING:
    from kvfold.engines.transformers.cache import FoldedCache
    from kvfold.engines.transformers.explanation import Explanation, explain
    from kvfold.engines.transformers.fold import fold, folding, unfold
    from kvfold.engines.transformers.graph import decoding
    from kvfold.engines.transformers.loading import load_cache
    from kvfold.engines.transformers.profiles import measure
    from kvfold.methods import DEFAULT, Method, Pair, Recipe

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
    "__version__",
    "decoding",
    "explain",
    "fold",
    "folding",
    "load_cache",
    "measure",
    "unfold",
]

_MODULES = {
    "fold": "engines.transformers.fold",
    "folding": "engines.transformers.fold",
    "unfold": "engines.transformers.fold",
    "decoding": "engines.transformers.graph",
    "FoldedCache": "engines.transformers.cache",
    "Explanation": "engines.transformers.explanation",
    "explain": "engines.transformers.explanation",
    "load_cache": "engines.transformers.loading",
    "measure": "engines.transformers.profiles",
    "DEFAULT": "methods",
    "Method": "methods",
    "Pair": "methods",
    "Recipe": "methods",
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
