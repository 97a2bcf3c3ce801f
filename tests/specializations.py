"""Every specialization of the GPU kernels that a layer can ask for; smaller sets with every two choices together."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import TypeVar

from kvfold.formats import AffineGroups
from kvfold.kernels.affine import encode
from kvfold.kernels.affine.decode import Plan, make_long_plan, make_plan
from kvfold.kernels.device import HOPPER

CAPABILITIES = (80, 90, 100)
MODES = ("kivi", "asym", "sym", "hybrid")
BITS = (1, 2, 3, 4, 8)
HEAD_DIMS = (64, 128, 256)
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that a program may have, by compute capability; 86 stands for 89 and 120 as well."""

ENCODED = ("kivi", "squat", "asym", "sym", "hybrid")
"""Families of methods that the kernels encode: "kivi" and "squat" share formats, the others are InnerQ's."""

Item = TypeVar("Item")


def formats(
    mode: str, bits: int = 2, head_dim: int = 128, group: int = 32, value_bits: int | None = None
) -> tuple[AffineGroups, AffineGroups]:
    """Keys' and values' formats of KIVI and SQuat ("kivi") or of InnerQ in one of its modes."""
    inner = mode != "kivi"
    how, block = "asym" if mode == "kivi" else mode, max(32, group)
    key = AffineGroups(head_dim, block, "key", bits, "channel" if inner else "token", how, group)
    axis, value_group = ("token", 32) if inner else ("channel", group)
    value = AffineGroups(head_dim, block, "value", value_bits or bits, axis, how, value_group)
    return key, value


@dataclass(frozen=True)
class Decode:
    """One specialization of the decode kernel: format, launch shape, and what a call brings."""

    mode: str
    bits: int
    head_dim: int
    group: int
    warps: int
    blocks: int
    tiles: int
    shared: bool
    center: bool
    registers: int | None
    single: bool
    """One program for all query rows: their number of columns, one, is known when the kernel is compiled."""
    bf16: bool = False
    bias: bool = False

    @property
    def formats(self) -> tuple[AffineGroups, AffineGroups]:
        return formats(self.mode, self.bits, self.head_dim, self.group)

    @property
    def plan(self) -> Plan:
        columns = 1 if self.single else 3
        return Plan(self.warps, self.blocks, self.tiles, columns, 8, 1, self.center, self.registers, self.shared)

    def __str__(self) -> str:
        words = [self.mode, f"{self.bits}bit", f"d{self.head_dim}", f"g{self.group}"]
        words += [f"{self.warps}w{self.blocks}b{self.tiles}t"]
        words += [f"r{self.registers}"] if self.registers else []
        return "-".join([*words, *(n for n in ("shared", "center", "single", "bf16", "bias") if getattr(self, n))])


def _plans(key: AffineGroups, value: AffineGroups) -> Iterable[Plan]:
    """Launch shapes that differ in more than the number of splits; small work to large, A100 and H100."""
    devices = replace(HOPPER, sms=108), HOPPER
    for heads, rows, capacity, device in product((1, 8, 128), (1, 8, 9, 16, 64), (4, 64, 512, 4096), devices):
        yield make_plan(key, value, heads, rows, capacity, 160, device)
    for rows in (1, 9):  # so many short sequences that a warp takes each
        yield make_plan(key, value, 2048, rows, 64, 160, HOPPER)
    for rows in (65, 2048):
        yield make_long_plan(key, value, 8, rows, 1024, HOPPER)


@cache
def decode_specializations() -> list[Decode]:
    """Format by format, every launch shape; the windows' dtype and a bias come on top of each."""
    found: dict[Decode, None] = {}
    for mode, bits, head_dim, group in product(MODES, BITS, HEAD_DIMS, (32, 64, 128)):
        if group > head_dim or (group > 32 and (mode != "kivi" or bits != 2)):
            continue
        for plan in _plans(*formats(mode, bits, head_dim, group)):
            shape = (plan.warps, plan.blocks, plan.tiles, plan.shared, plan.center, plan.registers, plan.columns == 1)
            found[Decode(mode, bits, head_dim, group, *shape)] = None
    return list(found)


@dataclass(frozen=True)
class Encode:
    """One specialization of the kernel that encodes blocks: format, side, and where the tokens come from."""

    family: str
    bits: int
    head_dim: int
    group: int
    value: bool
    rows: bool = False
    ring: bool = False
    bf16: bool = False
    other: bool = False
    """Keys that are centred (KIVI), un-rotated (SQuat), not normalized (InnerQ)."""

    @property
    def form(self) -> AffineGroups:
        return _family(self.family, self.bits, self.head_dim, self.group)[self.value]

    @property
    def transform(self) -> dict[str, object]:
        return {} if self.value else transform(self.family, self.head_dim, self.other)

    def __str__(self) -> str:
        words = [
            self.family,
            f"{self.bits}bit",
            f"d{self.head_dim}",
            f"g{self.group}",
            "value" if self.value else "key",
        ]
        return "-".join([*words, *(n for n in ("rows", "ring", "bf16", "other") if getattr(self, n))])


@dataclass(frozen=True)
class Step:
    """One specialization of a decode step's kernel: formats, tokens it appends, and what it keeps count of."""

    family: str
    bits: int
    head_dim: int
    tokens: int
    boundary: bool
    advance: bool
    counts: bool
    bf16: bool
    other: bool

    @property
    def formats(self) -> tuple[AffineGroups, AffineGroups]:
        return _family(self.family, self.bits, self.head_dim, 32)

    @property
    def transform(self) -> dict[str, object]:
        return transform(self.family, self.head_dim, self.other)

    def __str__(self) -> str:
        words = [self.family, f"{self.bits}bit", f"d{self.head_dim}", f"{self.tokens}tokens"]
        flags = ("boundary", "advance", "counts", "bf16", "other")
        return "-".join([*words, *(n for n in flags if getattr(self, n))])


def _family(family: str, bits: int, head_dim: int, group: int) -> tuple[AffineGroups, AffineGroups]:
    return formats("kivi" if family == "squat" else family, bits, head_dim, group)


def transform(family: str, head_dim: int, other: bool) -> dict[str, object]:
    """What happens to keys first, as :func:`aot.compile_encode` takes it."""
    if family == "kivi":
        return {"center": other}
    if family == "squat":
        return {"width": head_dim // 2, "rope": other}
    return {"center": True, "norm": not other}


def encode_specializations() -> list[Encode]:
    """Every format and side, with every source of tokens and kind of input."""
    found = []
    for family, bits, head_dim, group in product(ENCODED, BITS, HEAD_DIMS, (32, 64, 128)):
        if group > head_dim or (group > 32 and (family not in ("kivi", "squat") or bits != 2)):
            continue
        if family == "squat" and encode.unsupported(_family(family, bits, head_dim, group)[0], head_dim // 2):
            continue
        for flags in product((False, True), repeat=5):
            found.append(Encode(family, bits, head_dim, group, *flags))
    return found


def step_specializations() -> list[Step]:
    """Every method, width and head size with 0, 1 and 16 tokens and every kind of count; a boundary for hybrid groups."""
    found = []
    for family, bits, head_dim, tokens, *flags in product(ENCODED, BITS, HEAD_DIMS, (0, 1, 16), *[(False, True)] * 5):
        if family == "hybrid" or not flags[0]:
            found.append(Step(family, bits, head_dim, tokens, *flags))
    return found


def with_inputs(specializations: Sequence[Decode]) -> list[Decode]:
    """Each of them with every kind of input."""
    return [replace(s, bf16=b, bias=a) for s in specializations for b, a in product((False, True), repeat=2)]


def one_input_each(specializations: Sequence[Decode]) -> list[Decode]:
    """Each format and launch shape once, with kinds of input in turn."""
    shapes: dict[Decode, list[Decode]] = {}
    for each in specializations:
        shapes.setdefault(replace(each, single=True), []).append(each)
    turns = enumerate(shapes.values())
    return [replace(each[i // 4 % len(each)], bf16=i % 2 > 0, bias=i % 4 > 1) for i, each in turns]


def together(count: int, items: Sequence[Item]) -> list[Item]:
    """As few of ``items`` (dataclasses) as a greedy choice needs so that every ``count`` field values that one of them has
    together occur together."""
    sets = [set(combinations(enumerate(astuple(item)), count)) for item in items]  # type: ignore[call-overload]
    missing, chosen = set().union(*sets), []
    while missing:
        best = max(range(len(items)), key=lambda i: len(sets[i] & missing))
        missing -= sets[best]
        chosen.append(items[best])
    return chosen
