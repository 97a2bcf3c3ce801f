"""What a refusal says is allowed is allowed: every such list is taken at its word, over all methods and options."""

import dataclasses
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import feed, layer, spec, tokens
from kvfold.errors import MethodError
from kvfold.methods import REGISTRY, get, options_of
from kvfold.methods.options import Numbers, listed, shown

WRONG = {
    "int": ["-1", "0", "1", "2", "5", "7", "15", "24", "48", "65", "96", "100", "256", "9999", "99999999", str(2**70)],
    "float": ["-1", "0.3", "1.5", "7", "nan", "inf", "-inf", "1e300"],
    "str": ["abacus", "page", "false"],
    "bool": ["true", "false", "maybe"],
}
BESIDE = {
    "": list(REGISTRY),
    "paper=true": [name for name in REGISTRY if name not in ("fold", "none")],
    "k_bits=8": [name for name in REGISTRY if name not in ("none", "zipcache")],
    "bits=1,sink=0,recent=0": [name for name in REGISTRY if name not in ("none", "zipcache")],
    "residual=true": ["turboquant"],
    "residual=true,k_bits=4": ["turboquant"],
    "outliers=8,normalize=false": ["qjl"],
    "early_layers=1": ["qjl"],
    "rotation=1": ["fold"],
    "outliers=0.1": ["gear", "kvquant"],
    "bits=4,salient_bits=8": ["zipcache"],
}
"""Options that others are tried beside, and where."""
DIMS = (64, 72, 80, 128)


def written(name: str, options: dict[str, str]) -> str:
    return name + "".join(f"{',' if i else ':'}{k}={v}" for i, (k, v) in enumerate(options.items()))


def choices(name: str) -> dict[str, tuple[str, object]]:
    """A method's options, but for the place of an artefact."""
    return {key: value for key, value in options_of(REGISTRY[name]).items() if key != "artefact"}


def refusal(name: str, options: dict[str, str], head_dim: int | None) -> MethodError | None:
    """The error of a spec, at a head size or before there is one; a learned method lacks its artefact, which is none."""
    try:
        method = get(written(name, options))
        if head_dim is not None:
            method.check_shape(spec(head_dim))
    except MethodError as error:
        return None if "artefact is missing" in str(error) else error
    return None


def check(name: str, options: dict[str, str], head_dim: int | None, error: MethodError) -> int:
    """Try everything that an error says is allowed; returns how much that was."""
    text = str(error)
    assert text.startswith(f"{name}: ") and "\n" not in text
    assert "[" not in text
    if error.allowed is None:
        if "; allowed:" not in text:
            return 0
        (names,) = re.findall(r"option '\w+' (?:is not known|has no effect); allowed: (.*)$", text)
        assert set(names.split(", ")) == set(options_of(REGISTRY[name]))
        return 1
    said = str(error.allowed) if isinstance(error.allowed, Numbers) else listed(error.allowed)
    if "with another option" in text:
        said = ", ".join(f"{error.field}={shown(value)}" for value in error.allowed)
    assert text.endswith(f": {said}") and list(error.allowed)
    for value in error.allowed:
        better = refusal(name, {**options, error.field: shown(value)}, head_dim)
        assert better is None, f"{text} -- but {error.field}={value}: {better}"
    return len(list(error.allowed))


@pytest.mark.parametrize("name", REGISTRY)
def test_every_allowed_value_of_a_refusal_is_allowed(name):
    tried = 0
    for beside, names in BESIDE.items():
        if name not in names:
            continue
        base = dict(option.split("=") for option in filter(None, beside.split(",")))
        for option, (kind, _) in choices(name).items():
            for value in WRONG[kind.split(" or ")[0]]:
                options = {**base, option: value}
                if (error := refusal(name, options, None)) is not None:
                    tried += check(name, options, None, error)
                    continue
                for head_dim in DIMS:
                    if (error := refusal(name, options, head_dim)) is not None:
                        tried += check(name, options, head_dim, error)
    assert tried >= 8


@st.composite
def specs(draw):
    name = draw(st.sampled_from(sorted(REGISTRY)))
    known = choices(name)
    chosen = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=4, unique=True))
    values = {key: draw(st.sampled_from(WRONG[known[key][0].split(" or ")[0]])) for key in chosen}
    return name, values, draw(st.sampled_from([None, *DIMS]))


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(specs())
def test_also_of_several_wrong_options_at_once(case):
    """With several wrong, mending one must not be refused for that one."""
    name, options, head_dim = case
    if (error := refusal(name, options, None)) is not None:
        head_dim = None
    else:
        error = refusal(name, options, head_dim)
    if error is None or error.allowed is None:
        return
    for value in error.allowed:
        better = refusal(name, {**options, error.field: shown(value)}, head_dim)
        assert better is None or (better.field != error.field and isinstance(error.allowed, Numbers))


@pytest.mark.parametrize(
    "text",
    ["squat:channels=48", "squat:rank=65", "gear:rank=65", "fold:rotation=128", "fold:group=96", "zipcache:group=256",
     "zipcache:salient_bits=9", "qjl:outliers=64,normalize=false", "turboquant:group=256", "kivi:group=128"],
)  # fmt: skip
def test_what_is_allowed_instead_encodes_and_decodes(text):
    name, _, option = text.partition(":")
    options = dict(part.split("=") for part in option.split(","))
    error = refusal(name, options, 64)
    values = list(error.allowed)
    for value in {values[0], values[len(values) // 2], values[-1]}:
        of = feed(layer(written(name, {**options, error.field: shown(value)}), spec(64)), tokens(1, 400))
        assert of.packed[0] >= 128 and all(part.isfinite().all() for part in of.decoded(0))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bits": 2.0}, "bits=2.0 is not allowed; it must be an integer"),
        ({"bits": True}, "bits=True is not allowed; it must be an integer"),
        ({"k_bits": "4"}, "k_bits='4' is not allowed; it must be an integer or none"),
        ({"sink": None}, "sink=None is not allowed; it must be an integer"),
        ({"paper": 1}, "paper=1 is not allowed; it must be true or false"),
        ({"center": False}, "center=False is not allowed; it must be text"),
        ({"lam": "much"}, "lam='much' is not allowed; it must be a number"),
    ],
)
def test_values_of_another_type_are_refused_in_python_too(options, says):
    with pytest.raises(MethodError, match=f"^squat: {re.escape(says)}$"):
        dataclasses.replace(get("squat"), **options)
    assert dataclasses.replace(get("squat"), lam=1) == get("squat")


def test_an_option_without_effect_is_refused_in_python_too():
    with pytest.raises(MethodError, match="none: option 'bits' has no effect; allowed: group, recent, sink"):
        dataclasses.replace(get("none"), bits=4)


@pytest.mark.parametrize(
    ("numbers", "inside", "outside", "text"),
    [
        (Numbers(0), (0, 1, 10**30), (-1, 0.5, float("inf"), float("nan")), "0 or more"),
        (Numbers(0, 0.25, 0), (0, 0.1, 0.25), (-0.1, 0.3, float("nan")), "0 to 0.25"),
        (Numbers(0, 64, 16), (0, 16, 64), (8, 80), "multiples of 16, 0 to 64"),
        (Numbers(0, (1 << 63) - 1), ((1 << 63) - 1,), (1 << 63,), "0 to 9223372036854775807"),
    ],
)
def test_intervals(numbers, inside, outside, text):
    assert all(value in numbers for value in inside) and not any(value in numbers for value in outside)
    assert str(numbers) == text and set(numbers) and all(value in numbers for value in numbers)
