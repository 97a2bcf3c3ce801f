"""What options may be: allowed values as data, so that what a refusal names is what is accepted."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.arithmetic import lasting

SEEDS = (1 << 63) - 1
"""The largest seed: what every generator takes."""


@dataclass(frozen=True)
class Numbers:
    """Numbers from ``low`` to ``high``; with a ``step`` every so many, whole ones, with 0 all real ones.

    ``text`` says the same in other words.
    """

    low: float
    high: float = math.inf
    step: int = 1
    text: str = ""

    def __contains__(self, value: Any) -> bool:
        return (
            self.low <= value <= self.high and value < math.inf and not (self.step and (value - self.low) % self.step)
        )

    def __iter__(self) -> Iterator[float]:
        """Some of them: the ends, and what lies next to the lower one."""
        step = self.step or (min(self.high, self.low + 1) - self.low) / 4
        near = [self.low + i * step for i in range(4)]
        yield from dict.fromkeys(value for value in (*near, self.high) if value in self)

    def __str__(self) -> str:
        if self.text:
            return self.text
        multiples = f"multiples of {self.step}, " if self.step > 1 else ""
        return f"{multiples}{self.low} " + ("or more" if self.high == math.inf else f"to {self.high}")


Allowed = Numbers | Sequence[Any]


@dataclass(frozen=True)
class Problem:
    """An option that cannot be what it is.

    Attributes
    ----------
    field
        The option.
    allowed
        What it may be, as far as this rule goes; a sequence is thinned out to what the other rules accept as well.
    why
        What is wrong with the value; follows it in the message.
    """

    field: str
    allowed: Allowed
    why: str = " is not allowed"


def listed(values: Iterable[Any]) -> str:
    """Allowed values for people: ``1, 2, 4`` or ``0 to 64``."""
    values = list(values)
    whole = all(type(value) is int for value in values)
    if whole and len(values) > 4 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(shown, values))


def shown(value: object) -> str:
    """A value as it is written in a spec."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


@lasting(64)
def kinds(method: type) -> dict[str, tuple[type, ...]]:
    """Types that a method's options may have, by name."""
    return {name: alternatives(hint) for name, hint in typing.get_type_hints(method).items()}


def alternatives(hint: object) -> tuple[type, ...]:
    """The types of an annotation."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (typing.cast(type, hint),)


def misfit(value: object, allowed: tuple[type, ...]) -> str | None:
    """What a value of another type should have been; None where its type is one of the allowed."""
    if type(value) in allowed or (float in allowed and type(value) is int):
        return None
    return " or ".join(NAMES.get(kind, kind.__name__) for kind in allowed)


NAMES: dict[type, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "none"}
