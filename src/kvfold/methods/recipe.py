"""Methods apart: other methods for keys than for values, for some layers than for the rest, or none.

One grammar says it everywhere, in parts joined by ``+``::

    fold:bits=2                             one method for everything
    k=fold:bits=3+v=kivi:bits=2             keys and values apart
    fold:bits=2+keep=0,1,31                 layers in full precision, in the model's own cache
    fold:bits=2+0-3=kivi:bits=4+9.k=squat   other methods for some layers, or for their keys or values

No sign in it means anything to a shell, so it needs no quotes. Commas separate a method's options and the numbers of a list;
a part ends only where ``+`` and a selector (``k=``, ``v=``, ``keep=``, layers) begin the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch

from kvfold.errors import MethodError
from kvfold.formats import Fields, Format
from kvfold.formats.binary import BitSearch
from kvfold.methods.base import LayerSpec, Method, Observation, State
from kvfold.methods.specs import ARTEFACT, BETWEEN, SELECTOR, WRONG, single

MOST_LAYERS = 10_000
"""Beyond every model's."""

Layers = int | str | Iterable[int]
"""Layers by number: one, several, or as in the grammar (``"0-3,7"``)."""


def derived() -> Any:
    """A field that follows from the parts."""
    return field(init=False, repr=False, compare=False, default=None)


@dataclass(frozen=True, init=False)
class _Composed(Method):
    """Made of other methods: every option is one of theirs."""

    bits: int = derived()
    k_bits: int | None = derived()
    v_bits: int | None = derived()
    sink: int = derived()
    recent: int = derived()
    group: int = derived()
    center: str = derived()
    paper: bool = derived()

    source = "-"
    url = ""


@dataclass(frozen=True, init=False)
class Pair(_Composed):
    """One method for keys and another for values: ``k=METHOD+v=METHOD``.

    Windows (``sink``, ``recent``) and blocks are those of both, and must agree; ``none`` takes the other's.

    Parameters
    ----------
    keys, values : Method or str

    Raises
    ------
    MethodError
        If windows or blocks differ, or the method of the values needs to see keys (ZipCache).
    """

    keys: Method = None  # type: ignore[assignment]  # __init__ asks for it
    values: Method = None  # type: ignore[assignment]  # __init__ asks for it

    summary = "one method for keys, another for values"

    def __init__(self, keys: Method | str, values: Method | str) -> None:
        keys, values = _single(keys, "keys"), _single(values, "values").of_values
        keys, values = _windowed(keys, values), _windowed(values, keys)
        if values.values_need_keys:
            raise MethodError(
                f"v={values.name}: it chooses by keys what it stores of values, so it cannot store values alone; allowed: "
                f"k={values.name}, or {values.name} for both"
            )
        for name in ("sink", "recent", "block"):
            ours, theirs = getattr(keys, name), getattr(values, name)
            if ours != theirs:
                remedy = "group" if name == "block" else name
                raise MethodError(
                    f"k={keys}+v={values}: {name}={ours} of keys is not {name}={theirs} of values, and both are packed "
                    f"together; allowed: the same {remedy} for both"
                )
        own = {"keys": keys, "values": values, "bits": keys.bits, "k_bits": keys.key_bits, "v_bits": values.value_bits}
        shared = {name: getattr(keys, name) for name in ("sink", "recent", "group", "center", "paper")}
        for name, value in {**own, **shared}.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"k={self.keys.name}+v={self.values.name}"

    def __str__(self) -> str:
        one = self.as_one()
        return f"k={self.keys}+v={self.values}" if one is self else str(one)

    def as_one(self) -> Method:
        """The same as one method, where one has an option for such values (``tasq:values=fold``): a recipe has one name."""
        return self.keys.joined(self.values) or self

    def parts(self) -> Iterator[Method]:
        yield from (self.keys, self.values)

    def mapped(self, change: Callable[[Method], Method]) -> Method:
        return Pair(change(self.keys), change(self.values))

    # ---- keys' or values' --------------------------------------------------------------------------------------------

    @property
    def block(self) -> int:
        return self.keys.block

    @property
    def query_window(self) -> int:  # type: ignore[override]
        return self.keys.query_window

    @property
    def pre_rope(self) -> bool:  # type: ignore[override]
        return self.keys.pre_rope

    @property
    def maps_values(self) -> bool:  # type: ignore[override]
        return self.values.maps_values

    @property
    def kernel_encodes(self) -> bool:
        modes = [(m.group_mode(True), m.group_mode(False)) for m in self.parts()]
        return self.keys.kernel_encodes and self.values.kernel_encodes and modes[0] == modes[1]

    def value_tables(self, spec: LayerSpec, device: torch.device) -> Any:
        return self.values.value_tables(spec, device)

    def group_mode(self, prompt: bool) -> str | None:
        return self.keys.group_mode(prompt)

    def slice_width(self, head_dim: int) -> int | None:
        return self.keys.slice_width(head_dim)

    def key_format(self, spec: LayerSpec) -> Format:
        return self.keys.key_format(spec)

    def value_format(self, spec: LayerSpec) -> Format:
        return self.values.value_format(spec)

    def check_shape(self, spec: LayerSpec) -> None:
        for method, formats in (
            (self.keys, (self.keys.key_format, lambda spec: self.keys.slice_width(spec.head_dim))),
            (self.values, (self.values.value_format,)),
        ):
            for problem in method.shape_problems(spec):
                raise method.refusal(problem, spec)
            try:
                for make in formats:
                    make(spec)
            except MethodError:
                method.check_shape(spec)  # says what suits
                raise

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        keys, values = (
            {f"{side}: {name}": t for name, t in method.tables(spec, device).items() if not name.startswith(other)}
            for side, method, other in (("keys", self.keys, "value."), ("values", self.values, "key."))
        )
        return keys | values

    def check_model(self, config: object) -> None:
        for part in self.parts():
            part.check_model(config)

    def observe(self, seen: Observation, spec: LayerSpec) -> State:
        return self.keys.observe(seen, spec)

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        return self.keys.transform_keys(keys, state, spec, positions)

    def restore_keys(self, stored: torch.Tensor, spec: LayerSpec, positions: torch.Tensor) -> torch.Tensor:
        return self.keys.restore_keys(stored, spec, positions)

    def value_map(self, spec: LayerSpec, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.values.value_map(spec, device)

    def value_search(self, spec: LayerSpec, device: torch.device) -> BitSearch | None:
        return self.values.value_search(spec, device)

    def unproject_values(self, values: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        return self.values.unproject_values(values, spec)

    def encode_keys(
        self,
        keys: torch.Tensor,
        state: State,
        spec: LayerSpec,
        positions: torch.Tensor,
        prompt: bool,
        page: Fields | None = None,
    ) -> Fields:
        return self.keys.encode_keys(keys, state, spec, positions, prompt, page)

    def encode_values(
        self, values: torch.Tensor, state: State, spec: LayerSpec, prompt: bool, page: Fields | None = None
    ) -> Fields:
        return self.values.encode_values(values, state, spec, prompt, page)


@dataclass(frozen=True, init=False)
class Recipe(_Composed):
    """A method for most layers, others for some, and layers that stay in full precision: ``METHOD+keep=0,1+5=METHOD``.

    Parameters
    ----------
    method : Method or str
        Of the layers that the others do not name.
    keep : layers
        Left in full precision, in the model's own cache.
    layers : mapping of layers to methods
        ``{5: "kivi:bits=4", "8-11": Pair("fold:bits=4", "fold:bits=2")}``.

    Raises
    ------
    MethodError
        If a layer is named twice.
    """

    method: Method = None  # type: ignore[assignment]  # __init__ asks for it
    keep: tuple[int, ...] = ()
    layers: tuple[tuple[int, Method], ...] = ()

    summary = "a method for most layers, others for some"

    def __init__(
        self, method: Method | str, keep: Layers = (), layers: Mapping[Any, Method | str] | None = None
    ) -> None:
        if not isinstance(layers, Mapping | None):
            raise MethodError(f"layers: {layers!r} is not a mapping; allowed: {{5: METHOD, '8-11': METHOD}}")
        method = _plain(method, "method")
        kept = tuple(sorted(numbers(keep, "keep")))
        found: dict[int, Method] = {}
        for names, other in (layers or {}).items():
            for index in numbers(names, "layers"):
                if index in found or index in kept:
                    raise MethodError(f"layer {index}: it is named twice; allowed: keep, or one method")
                found[index] = _plain(other, f"layer {index}")
        own = {index: other for index, other in sorted(found.items()) if other != method}
        inherited = {name: getattr(method, name) for name in COMMON}
        for name, value in {**inherited, "method": method, "keep": kept, "layers": tuple(own.items())}.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:  # type: ignore[override]
        return str(self)

    def __str__(self) -> str:
        parts = [str(self.method)]
        if self.keep:
            parts.append(f"keep={spelled(self.keep)}")
        groups: dict[Method, list[int]] = {}
        for index, method in self.layers:
            groups.setdefault(method, []).append(index)
        for method, indices in groups.items():
            where = spelled(indices)
            if isinstance(method, Pair):
                parts += [f"{where}.k={method.keys}", f"{where}.v={method.values}"]
            else:
                parts.append(f"{where}={method}")
        return "+".join(parts)

    def parts(self) -> Iterator[Method]:
        yield from self.method.parts()
        for _, method in self.layers:
            yield from method.parts()

    def mapped(self, change: Callable[[Method], Method]) -> Method:
        layers = {index: method.mapped(change) for index, method in self.layers}
        return Recipe(self.method.mapped(change), self.keep, layers)

    def at(self, layer_idx: int) -> Method | None:
        return None if layer_idx in self.keep else dict(self.layers).get(layer_idx, self.method)

    @property
    def pre_rope(self) -> bool:  # type: ignore[override]
        return self.method.pre_rope or any(method.pre_rope for _, method in self.layers)

    @property
    def named(self) -> tuple[int, ...]:
        """Layers with a method of their own."""
        return tuple(index for index, _ in self.layers)

    def check_layers(self, count: int) -> None:
        for index in (*self.keep, *self.named):
            if index >= count:
                raise MethodError(f"layer {index}: the model has {count} layers; allowed: 0 to {count - 1}")

    def check_model(self, config: object) -> None:
        for part in self.parts():
            part.check_model(config)

    @property
    def block(self) -> int:
        return self.method.block

    def _of(self, spec: LayerSpec) -> Method:
        found = self.at(spec.layer_idx)
        if found is None:
            raise MethodError(f"layer {spec.layer_idx}: it stays in full precision")
        return found

    def key_format(self, spec: LayerSpec) -> Format:
        return self._of(spec).key_format(spec)

    def value_format(self, spec: LayerSpec) -> Format:
        return self._of(spec).value_format(spec)


COMMON = ("bits", "k_bits", "v_bits", "sink", "recent", "group", "center", "paper")


# ---- the grammar -----------------------------------------------------------------------------------------------------


def get(spec: str | Method) -> Method:
    """Build a method from its spec, ``name`` or ``name:key=value,key=value``; names of presets work as names.

    Several methods are joined by ``+``: ``k=fold:bits=3+v=kivi:bits=2`` for keys and values, ``fold+keep=0,1`` for layers that
    stay in full precision, ``fold+0-3=kivi:bits=4`` for layers with another method.

    Raises
    ------
    MethodError
        For an unknown name, option or value; the message lists what is allowed.
    """
    if isinstance(spec, Method):
        return spec
    if not isinstance(spec, str):
        raise MethodError(f"method: {spec!r} is not a method; allowed: text as in 'fold:bits=2', or a kvfold.Method")
    return parse(spec) if is_recipe(spec) else single(spec)


def canonical(name: str) -> str:
    """A method's name as results show it now: older rows may have a pair's for what one method does (``tasq:values=fold``).

    What is not known any more keeps its name.
    """
    if "+v=" not in name:
        return name
    try:
        return str(get(name))
    except MethodError:
        return name


def is_recipe(text: str) -> bool:
    """Whether a spec has parts or selectors."""
    return bool(SELECTOR.match(text.strip()) or BETWEEN.search(text))


def parse(text: str) -> Method:
    """A spec of several parts; see the module.

    Raises
    ------
    MethodError
        For a part that is given twice, missing or not understood; as :func:`kvfold.methods.get`.
    """
    if wrong := WRONG.search(ARTEFACT.sub("", text)):
        raise MethodError(f"method: {text!r}: parts are joined by '+', not by {wrong[0][0]!r}")
    base: Method | None = None
    sides: dict[str, Method] = {}
    keep: str | None = None
    layers: dict[int, dict[str, Method]] = {}
    for i, part in enumerate(BETWEEN.split(text.strip())):
        found = SELECTOR.match(part)
        if found is None:
            assert i == 0
            base = _single(part, "method")
            continue
        what, rest = found["what"].lower(), part[found.end() :].strip()
        if what == "keep":
            if keep is not None:
                raise MethodError(f"keep: it is given twice; write keep={keep},{rest}")
            if not rest:
                raise MethodError("keep: no layer is named; write keep=0,1,31")
            keep = rest
        elif what in ("k", "v"):
            if what in sides:
                raise MethodError(f"{what}: it is given twice")
            sides[what] = _single(rest, what)
        else:
            side = (found["side"] or "").lower()
            for index in numbers(found["layers"], "layers"):
                taken = layers.setdefault(index, {})
                if side in taken or "" in taken or (taken and not side):
                    raise MethodError(f"layer {index}: it is named twice")
                taken[side] = _single(rest, what)
    method = _joined(base, sides, "")
    others = {index: named.get("") or _joined(method, named, f"layer {index}: ") for index, named in layers.items()}
    return Recipe(method, keep or "", others) if keep is not None or others else method


def _joined(base: Method | None, sides: Mapping[str, Method], where: str) -> Method:
    """Keys and values of their own; what is missing is that of ``base``."""
    if not sides:
        if base is None:
            raise MethodError("method: no part names one; write it first, e.g. fold:bits=2+keep=0,1")
        return base
    if base is None and len(sides) < 2:
        other = "v" if "k" in sides else "k"
        raise MethodError(f"{where}{other}= is missing; write k=METHOD+v=METHOD")
    mine, theirs = (base.keys, base.values) if isinstance(base, Pair) else (base, base)
    return Pair(sides.get("k") or mine, sides.get("v") or theirs).as_one()  # type: ignore[arg-type]


def numbers(layers: Layers, what: str) -> list[int]:
    """Layers as a list without repetition, in the order given.

    Raises
    ------
    MethodError
        If a layer is named twice, or there is something else than numbers and ranges.
    """
    found: list[int] = []
    if isinstance(layers, str):
        for item in filter(None, (part.strip() for part in layers.split(","))):
            first, dash, last = item.partition("-")
            if not first.isdecimal() or (dash and (not last.isdecimal() or int(last) < int(first))):
                raise MethodError(
                    f"{what}={layers}: {item!r} is not a layer; allowed: numbers and ranges, as in 0,1,28-31"
                )
            if int(last or first) >= MOST_LAYERS:
                raise MethodError(f"{what}={layers}: {item!r} is not a layer; allowed: below {MOST_LAYERS}")
            found += range(int(first), int(last or first) + 1)
    else:
        several = isinstance(layers, Iterable) and not isinstance(layers, bytes)
        for index in layers if several else (layers,):  # type: ignore[union-attr]
            if isinstance(index, bool) or not isinstance(index, Integral) or index < 0:
                raise MethodError(f"{what}: {index!r} is not a layer; allowed: numbers from 0 on")
            found.append(int(index))
    for one, other in pairwise(sorted(found)):
        if one == other:
            raise MethodError(f"{what}: layer {one} is named twice")
    return found


def spelled(layers: Iterable[int]) -> str:
    """``0,1,28-31``: three and more in a row as a range."""
    runs: list[list[int]] = []
    for index in sorted(layers):
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _plain(method: Method | str, what: str) -> Method:
    found = get(method)
    if isinstance(found, Recipe):
        raise MethodError(f"{what}: {found} speaks of layers itself; allowed: a method, or k=METHOD+v=METHOD")
    return found.as_one() if isinstance(found, Pair) else found


def _single(method: Method | str, what: str) -> Method:
    found = _plain(method, what)
    if isinstance(found, Pair):
        raise MethodError(f"{what}: {found} speaks of keys and values itself; allowed: a method")
    return found


def _windowed(method: Method, other: Method) -> Method:
    """Full precision has no windows of its own and takes the other side's."""
    from kvfold.methods.none import NoFolding

    if not isinstance(method, NoFolding) or isinstance(other, NoFolding) or (method.sink, method.recent) != (0, 0):
        return method
    return replace(method, sink=other.sink, recent=other.recent, group=other.group)
