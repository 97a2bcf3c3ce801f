"""What a model's attention modules do, read from their code and shapes: which can be folded, and why others cannot."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvfold.engines.transformers.names import OF_ATTENTION

TABLE = "ALL_ATTENTION_FUNCTIONS"
LOOKUPS = frozenset({TABLE, "get_interface"})
"""Names in the code of modules that attend through Transformers' attention functions."""


@dataclass(frozen=True)
class Reading:
    """What the forward function of an attention class says.

    Attributes
    ----------
    stores : bool
        It hands keys and values to the cache.
    why_not : str
        What a folded cache cannot serve; empty if it can.
    only_with : str
        Attribute of a module without which ``why_not`` is not so; empty: it is always so.
    """

    stores: bool
    why_not: str = ""
    only_with: str = ""


def _name(node: ast.AST) -> str:
    """Last part of a name: ``c`` of ``a.b.c``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_cache(name: str) -> bool:
    return any(word in name for word in ("past", "cache"))


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _looks_up(value: ast.AST) -> bool:
    """Whether an expression takes an attention function from Transformers' table, by its method or as code of others does, by
    the name itself."""
    return any(_name(node) in LOOKUPS for node in ast.walk(value))


def _written(node: ast.AST) -> list[str]:
    """Names that a statement assigns to."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


@lru_cache(maxsize=256)
def read(kind: type[nn.Module]) -> Reading:
    """Read the forward function of an attention class. Without its source nothing is held against it."""
    forward: Any = inspect.unwrap(kind.forward)
    arguments = set(inspect.signature(forward).parameters)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return Reading(bool(arguments & set(OF_ATTENTION)))
    stored = [
        (node.lineno, _written(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for call in _calls(node.value)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "update" and _is_cache(_name(call.func.value))
    ]
    if not stored:
        return Reading(False)
    return Reading(True, *_why_not(kind, tree, *stored[-1]))


def _why_not(kind: type[nn.Module], tree: ast.AST, line: int, stored: list[str]) -> tuple[str, str]:
    name = kind.__name__
    interfaces = {
        written
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for written in _written(node)
        if _looks_up(node.value)
    }
    attending = [
        call
        for call in _calls(tree)
        if (isinstance(call.func, ast.Name) and call.func.id in interfaces)
        or (isinstance(call.func, ast.Subscript) and _name(call.func.value) == TABLE)
    ]
    if not attending:
        return f"{name} computes attention itself, not through Transformers' attention functions", ""
    if len(attending) > 1:
        return f"{name} attends to its keys more than once", ""
    call = attending[0]
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    key, value, mask = (
        ast.unparse(call.args[at]) if len(call.args) > at else ast.unparse(named[word]) if word in named else ""
        for at, word in ((2, "key"), (3, "value"), (4, "attention_mask"))
    )
    between = {
        written
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and line < node.lineno < call.lineno
        for written in _written(node)
    }
    if [key, value] != stored[:2] or between & set(stored):
        return f"{name} changes keys or values after the cache returned them", ""
    if any(set(_written(node)) & set(stored) for node in _instead(tree, line)):
        return f"{name} attends to keys and values that the cache did not return", ""
    if "position_bias" in named:
        return f"{name} adds a bias of positions to its scores", ""
    own = f"{name} makes an attention mask of its own"
    if mask not in ("attention_mask", "causal_mask"):
        return own, ""
    crossing = {id(part) for node in ast.walk(tree) if _asks_for_crossing(node) for part in ast.walk(node)}
    if any(
        mask in _written(node) for node in ast.walk(tree) if isinstance(node, ast.stmt) and id(node) not in crossing
    ):
        return own, _condition(tree, mask)
    return "", ""


def _instead(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    """What is done in calls in which the statement of a line is not, cross-attention and other kinds of modules aside."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or _asks_for_crossing(node) or _asks_the_module(node.test):
            continue
        branches = [[part for kept in branch for part in ast.walk(kept)] for branch in (node.body, node.orelse)]
        done = [any(getattr(part, "lineno", 0) == line for part in branch) for branch in branches]
        if any(done):
            yield from branches[done.index(False)] if False in done else ()


def _asks_the_module(test: ast.expr) -> bool:
    """Whether a condition is on the module alone, and so the same in every call."""
    return {part.id for part in ast.walk(test) if isinstance(part, ast.Name)} == {"self"} and not any(_calls(test))


def _asks_for_crossing(node: ast.AST) -> bool:
    """Whether a statement is one of cross-attention, in a class that serves both."""
    return isinstance(node, ast.If) and "cross" in ast.unparse(node.test)


def _condition(tree: ast.AST, written: str) -> str:
    """``x`` where a name is only written to under ``if self.x is not None``."""
    inside: list[str] = []
    guarded: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
            continue
        if isinstance(node.test.left, ast.Attribute) and isinstance(node.test.ops[0], ast.IsNot):
            writes = [part for part in ast.walk(node) if isinstance(part, ast.stmt) and written in _written(part)]
            if writes and ast.unparse(node.test.left).startswith("self."):
                inside.append(node.test.left.attr)
                guarded.update(map(id, writes))
    writes = [part for part in ast.walk(tree) if isinstance(part, ast.stmt) and written in _written(part)]
    return inside[0] if inside and all(id(part) in guarded for part in writes) else ""


def crosses(module: nn.Module) -> bool:
    """Whether an attention module attends to another sequence than its own."""
    return bool(getattr(module, "is_cross_attention", "CrossAttention" in type(module).__name__))


def is_causal(module: nn.Module) -> bool:
    """Whether an attention module says that it sees earlier tokens only, or does not say."""
    return bool(getattr(module, "is_causal", True))


def why_not(module: nn.Module) -> str:
    """Why an attention module cannot read a folded cache; empty if it can."""
    reading = _read(module)
    if reading.why_not and (not reading.only_with or getattr(module, reading.only_with, None) is not None):
        return reading.why_not
    return ""


@lru_cache(maxsize=256)
def _asks_before_rotating(kind: type[nn.Module]) -> CodeType | None:
    """The question about itself that an attention class asks before it rotates queries and keys; None if it asks none."""
    forward: Any = inspect.unwrap(kind.forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and any(
            "rotary" in _name(call.func) for part in node.body for call in _calls(part)
        ):
            if _asks_the_module(node.test):
                return compile(ast.Expression(node.test), kind.__name__, "eval")
    return None


def rotates(module: nn.Module | None, config: Any, layer: int) -> bool:
    """Whether a layer's attention rotates its queries and keys, in a model that has rotary embeddings: layers of some models
    have no positions."""
    thetas = getattr(config, "layer_rope_theta", None)
    if isinstance(thetas, list | tuple) and layer < len(thetas) and not thetas[layer]:
        return False
    if module is None or not getattr(module, "use_rope", True):
        return module is None
    kind: Any = type(module)
    asked = _asks_before_rotating(kind)
    return asked is None or bool(eval(asked, {"self": module}))


def of_decoder(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Attention modules of a model's text decoder, by layer; under -1 one that several layers share.

    Where a model has several decoders (one that speaks, one that draws), that of ``get_text_config(decoder=True)``.
    """
    by_layer: dict[int, nn.Module] = {}
    for module in storing(model):
        index: Any = module.layer_idx
        by_layer.setdefault(-1 if index is None else int(index), module)  # -1: told with every call which layer it is
    return by_layer


def storing(model: PreTrainedModel) -> list[nn.Module]:
    """Attention modules of a model's text decoder that hand keys to the cache."""
    text = model.config.get_text_config(decoder=True)
    found = [m for m in model.modules() if _of_a_layer(m) and _read(m).stores]
    return [module for module in found if getattr(module, "config", None) is text] or found


def _read(module: nn.Module) -> Reading:
    kind: Any = type(module)
    return read(kind)


def _of_a_layer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", ""), int | None) and not crosses(module)


@dataclass(frozen=True)
class Shape:
    """Of one layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    why_not: str = ""


def shape_of(module: nn.Module | None, config: Any) -> Shape:
    """Heads and their size, from the module where it says, and otherwise from the configuration."""
    heads = _count(module, "num_heads", "num_attention_heads") or config.num_attention_heads
    kv_heads = _count(module, "num_key_value_heads", "num_kv_heads", "kv_heads")
    kv_heads = kv_heads or getattr(config, "num_key_value_heads", None) or heads
    dim = _count(module, "head_dim", "head_size") or getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // config.num_attention_heads
    keys, values = (_count(getattr(module, name, None), "out_features") for name in ("k_proj", "v_proj"))
    if keys and keys % dim == 0:
        kv_heads = keys // dim
    if keys and values and keys != values:
        return Shape(heads, kv_heads, dim, f"keys of {keys} channels and values of {values} are not folded together")
    return Shape(heads, kv_heads, dim)


def _count(module: nn.Module | None, *candidates: str) -> int | None:
    """The first of a module's attributes that is a positive whole number."""
    found = (getattr(module, name, None) for name in candidates)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
