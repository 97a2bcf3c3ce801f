"""Variants of what unpacks storage for calls of many tokens, gated and then timed in turn with fp16 on one GPU:
``python scripts/bench_unpacking.py``.

TaSQ by the plain kernel and by tables in shared memory; CommVQ at 2 bits with more warps for its keys, and with values that fit
beside its keys; fold by products with its basis and by the Hadamard matrix in registers. Every variant is compared with the
float32 reference first; one whose error is over the limit is not timed. A variant that wins becomes the default by its
switch, which is printed. ``--gate`` compares only.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvfold.bench import attention
from kvfold.bench.attention import COLD_BYTES, LIMIT, Inputs, Work
from kvfold.bench.timing import times, times_in_turn
from kvfold.kernels import unpack, unpack_bits, unpack_hadamard, unpack_tables, unpacked

FP16 = torch.float16
REPLAYS = 12
BOTH = ("tasq-512",)
"""Cases whose variants are gated in bf16, too."""


@dataclass(frozen=True)
class Variant:
    """``sets``: modules, names and values of what differs from the defaults."""

    name: str
    sets: tuple[tuple[Any, str, Any], ...] = ()

    @contextmanager
    def chosen(self) -> Iterator[None]:
        before = [(module, name, getattr(module, name)) for module, name, _ in self.sets]
        for module, name, value in self.sets:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)

    @property
    def switch(self) -> str:
        return ", ".join(f"{m.__name__.rpartition('.')[2]}.{name} = {value}" for m, name, value in self.sets)


def always(turn: object) -> bool:
    return True


TABLES = (unpack_tables, "GROUPS_USED", True)
TASQ = (
    Variant("plain kernel", ((unpack_tables, "GROUPS_USED", False),)),
    Variant("tables", (TABLES,)),
    Variant("tables, values beside keys", (TABLES, (unpacked, "_beside", always))),
)
COMMVQ = (
    Variant("as it is"),
    Variant("16 warps of keys", ((unpack_tables, "ALONE", 16),)),
    Variant("values of 32 channels", ((unpack_bits, "SPLIT", True),)),
)
FOLD = (
    Variant("products with the basis", ((unpack_hadamard, "USED", False),)),
    Variant("Hadamard in registers", ((unpack_hadamard, "USED", True),)),
)
CASES: dict[str, tuple[Work, tuple[Variant, ...]]] = {
    "tasq-512": (Work("tasq", 0, 1, 32768, query_tokens=512), TASQ),
    "commvq-512": (Work("commvq", 0, 1, 32768, query_tokens=512), COMMVQ),
    "fold-512": (Work("fold", 0, 1, 32768, query_tokens=512), FOLD),
    "tasq-2048": (Work("tasq", 0, 1, 32768, query_tokens=2048), TASQ[:2]),
}


def error_of(work: Work, inputs: Inputs, variant: Variant, want: torch.Tensor) -> float:
    with variant.chosen():
        got = attention.call(work, inputs).float()
    return float((got[:1] - want).norm() / want.norm()) if bool(torch.isfinite(got).all()) else math.inf


def sound(
    work: Work, variants: tuple[Variant, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> tuple[Inputs, list[Variant]]:
    """Inputs in the last dtype, and the variants within the limits in all of them; all errors are printed."""
    good = list(variants)
    for dtype in dtypes:
        inputs = attention.make_inputs(work, dtype, device)
        want = attention.reference(work, inputs, 0)[None]
        for variant in variants:
            error = error_of(work, inputs, variant, want)
            right = error <= LIMIT[dtype]
            name = str(dtype).removeprefix("torch.")
            print(f"gate {work} T={work.query_tokens} {name}: {variant.name:28} {error:.2e}{'' if right else ' WRONG'}")
            if not right and variant in good:
                good.remove(variant)
    return inputs, good


def alone(work: Work, inputs: Inputs, variant: Variant) -> dict[str, float]:
    """Median milliseconds of unpacking keys, and values, without the rest of a call."""
    given = attention._given(work, inputs, work.head_dim**-0.5)
    span, tokens, device = given.spans[0], work.context - attention.SINK - attention.RECENT, inputs.q.device
    rope, place, turn = given.rope, given.first_position, None
    if given.unproject is not None:
        turn = unpack.turn_of(given.unproject, given.value_format, work.num_kv_heads, device)
    sides: dict[str, Callable[[], Any]] = {
        "keys": partial(unpack.unpack, given.key_format, span.keys, 0, 0, tokens, FP16, rope, place),
        "values": partial(unpack.unpack, given.value_format, span.values, 0, 0, tokens, FP16, turn=turn),
    }
    with variant.chosen():
        for form, of in ((given.key_format, rope), (given.value_format, None)):
            unpack.make_constants(form, device, of)
        return {side: times([run], REPLAYS)[1] for side, run in sides.items()}


def timed(work: Work, variant: Variant, inputs: Inputs) -> torch.Tensor:
    with variant.chosen():
        return attention.call(work, inputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--gate", action="store_true")
    args = parser.parse_args()
    device, wrong = torch.device("cuda"), 0
    for name in args.only:
        work, variants = CASES[name]
        inputs, good = sound(work, variants, (torch.bfloat16, FP16) if name in BOTH else (FP16,), device)
        wrong += len(variants) - len(good)
        if args.gate or not good:
            continue
        size = work.num_kv_heads * sum(attention.stored_bytes(form, work.context) for form in work.formats)
        sets = [inputs]
        while len(sets) * size < COLD_BYTES // 2:
            sets.append(sets[-1].copy())
        groups = [[partial(timed, work, variant, some) for some in sets] for variant in good]
        shape = replace(work, method="kivi", bits=2, group=32)
        theirs = next(attention.full_precision(shape, FP16, device))
        groups.append(theirs[1]())
        found = times_in_turn(groups, REPLAYS)
        base = found[-1][1]
        for variant, (p20, p50, p80) in zip(good, found, strict=False):
            sides = ", ".join(f"{side} {1e3 * ms:.1f}" for side, ms in alone(work, inputs, variant).items())
            line = f"{work} T={work.query_tokens}: {variant.name:28} {p50:.4f} ms ({p20:.4f} - {p80:.4f}) {p50 / base:.3f}x"
            print(f"{line}; alone, us: {sides}; {variant.switch}", flush=True)
        print(f"{theirs[0]}, in turn: {base:.4f} ms ({found[-1][0]:.4f} - {found[-1][2]:.4f})", flush=True)
        del inputs, sets, groups, theirs
        torch.cuda.empty_cache()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
