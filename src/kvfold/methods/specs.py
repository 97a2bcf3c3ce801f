"""Methods as text: names, options and their values, and where one part of a recipe ends."""

import dataclasses
import difflib
import re
import types
import typing

from kvfold.errors import MethodError
from kvfold.methods.base import Method
from kvfold.methods.options import kinds

_LAYERS = r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*"
SELECTOR = re.compile(rf"(?P<what>k|v|keep|(?P<layers>{_LAYERS})(?:\.(?P<side>k|v))?)\s*=", re.IGNORECASE)
BETWEEN = re.compile(rf"\s*\+\s*(?=(?:k|v|keep|{_LAYERS}(?:\.[kv])?)\s*=)", re.IGNORECASE)
"""What separates two parts."""
WRONG = re.compile(rf"[;|&/]\s*(?:k|v|keep|{_LAYERS}(?:\.[kv])?)\s*=", re.IGNORECASE)
"""What others might write in its place."""
ARTEFACT = re.compile(rf"artefact\s*=.*?(?=,|{BETWEEN.pattern}|$)", re.IGNORECASE | re.DOTALL)
"""An option whose value is a file: folders are called ``k=4``, too."""

HELD = (
    "a method's string cannot hold it; allowed: a name without commas, without spaces at its ends, and without '+k=' and "
    "the like"
)


def holds(place: str) -> bool:
    """Whether a method's string can hold a file's name."""
    return not ("," in place or place != place.strip() or BETWEEN.search(place))


REGISTRY: dict[str, type[Method]] = {}
"""Methods by name; the package fills it."""

PRESETS: dict[str, str] = {
    # QJL, sec. 4.1: outlier channels. That they are 8, and more bits for the first 15 layers, is of its published script
    # (docs/methods/qjl.md says how the sizes differ)
    "qjl_outliers": "qjl:paper=true,outliers=8,early_layers=15",
    # SQuat, Appendix E.2: LongBench settings per model
    "squat_longbench_llama2": "squat:paper=true,rank=40,lam=0.001,channels=64",
    "squat_longbench_llama3": "squat:paper=true,rank=10,lam=0.0005,channels=64",
    "squat_pre_longbench_llama2": "squat_pre:paper=true,rank=5,lam=0.001,channels=32",
    "squat_pre_longbench_llama3": "squat_pre:paper=true,rank=60,lam=0.0005,channels=32",
    "squat_pre_longbench_mistral": "squat_pre:paper=true,rank=20,lam=0.0005,channels=64",
}
"""Published settings that have a name of their own."""


def single(spec: str) -> Method:
    """Build one method from ``name`` or ``name:key=value,key=value``.

    Raises
    ------
    MethodError
        For an unknown name, option or value; the message lists what is allowed.
    """
    name, _, options = spec.strip().partition(":")
    base: dict[str, typing.Any] = {}
    if name in PRESETS:
        name, _, preset = PRESETS[name].partition(":")
        base = _parse_options(REGISTRY[name], preset)
    if name not in REGISTRY:
        known = [*REGISTRY, *PRESETS]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        if "=" in name:  # a selector of the grammar, or what was meant as one
            hint = " (parts are k=METHOD, v=METHOD, keep=0,1,31 or 0-3=METHOD, joined by +)"
        raise MethodError(f"method: {name!r} is not known{hint}; allowed: {', '.join(known)}")
    method = REGISTRY[name]
    given = {**base, **_parse_options(method, options)}
    return method(**{**method.defaults(given.get("paper", False)), **given})


def options_of(method: type[Method]) -> dict[str, tuple[str, object]]:
    """Options of a method that have an effect: name -> (type as text, default)."""
    hints = kinds(method)
    used = (f for f in dataclasses.fields(method) if f.name not in method.unused)
    return {f.name: (_type_name(hints[f.name]), f.default) for f in used}


def _type_name(allowed: tuple[type, ...]) -> str:
    return " or ".join(t.__name__ for t in allowed).replace("NoneType", "none")


def _parse_options(method: type[Method], text: str) -> dict[str, typing.Any]:
    hints = kinds(method)
    fields = set(options_of(method))
    options: dict[str, typing.Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise MethodError(f"{method.name}: {item!r} is not an option; write key=value, e.g. bits=2")
        if key in method.unused:
            raise method.without_effect(key)
        if key not in fields:
            raise MethodError(f"{method.name}: option {key!r} is not known; allowed: {', '.join(sorted(fields))}")
        if key in options:
            raise MethodError(f"{method.name}: option {key!r} is given twice")
        options[key] = _parse_value(method.name, key, value, hints[key])
    return options


def _parse_value(method: str, key: str, text: str, allowed: tuple[type, ...]) -> typing.Any:
    if types.NoneType in allowed and text.lower() == "none":
        return None
    if bool in allowed:
        truth = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() in truth:
            return truth[text.lower()]
        raise MethodError(f"{method}: {key}={text} is not allowed; it must be true or false")
    for kind in (int, float):
        if kind in allowed:
            try:
                return kind(text)
            except ValueError:
                raise MethodError(f"{method}: {key}={text} is not allowed; it must be {_article(kind)}") from None
    return text


def _article(kind: type) -> str:
    return "an integer" if kind is int else "a number"
