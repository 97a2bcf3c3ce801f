"""Variants of three decode kernels, gated and then timed in turn on one GPU: ``python scripts/bench_sooner.py``.

fold and QJL with copies asked for sooner (``Plan.sooner``), QJL with fewer registers, the merge in other shapes, and VQLLM's
sums of codes as they were before whole words were added. Every variant is compared with the float32 reference first; one whose
error is over the limit is not timed. ``--gate`` compares only, which leaves compiled kernels in Triton's cache.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfold.bench import attention
from kvfold.bench.attention import LIMIT, SINK, Inputs, Work
from kvfold.bench.timing import times_in_turn
from kvfold.kernels import REGISTRY, _residual_gluon, fragments, pages, partials, residual
from kvfold.kernels.decode import unit_capacity
from kvfold.kernels.device import multiprocessors

DTYPE = torch.float16
TOGETHER = (
    """            new_odd = new_odd + (odd[i] + _odd_bytes(a) + _odd_bytes(b),)
            new_whole = new_whole + (whole[i] + a + b,)
""",
    """            new_odd = new_odd + (odd[i] + _odd_bytes(a) + _odd_bytes(b),)
            new_whole = new_whole + (whole[i] + (a & 0xFF00FF) + (b & 0xFF00FF),)
""",
)
"""VQLLM's sums: whole words, and even bytes of their own, as before."""
LESS = ("whole = (words[0] * 0 + 0x64646400,)", "whole = (words[0] * 0 + 0x64006400,)")
EVEN = (
    "sums = (whole[0] - odd[0] * 256, odd[0], whole[1] - odd[1] * 256, odd[1])",
    "sums = (whole[0], odd[0], whole[1], odd[1])",
)


@dataclass(frozen=True)
class Variant:
    """What differs from the plan and the merge that are chosen; ``registers``: -1 leaves the plan's."""

    name: str
    sooner: int = 0
    registers: int | None = -1
    merge: tuple[int, int] = partials.FEW
    before: bool = False


MERGES = ((8, 1), (16, 1), (16, 2))
FOLD = (
    Variant("as it is"),
    Variant("halves", 1),
    Variant("second page to L2", 2),
    Variant("both", 3),
    Variant("each page to L2", 4),
    *(Variant(f"merge {part}x{warps}", merge=(part, warps)) for part, warps in MERGES),
    Variant("halves, merge 8x1", 1, merge=(8, 1)),
    Variant("second page, merge 8x1", 2, merge=(8, 1)),
    Variant("both, merge 8x1", 3, merge=(8, 1)),
    Variant("as it is, again"),
)
QJL = (
    Variant("as it is"),
    Variant("page before queries", 1),
    Variant("and norms apart", 2),
    Variant("merge 8x1", merge=(8, 1)),
    Variant("norms apart, merge 8x1", 2, merge=(8, 1)),
)
REGISTERS = (
    Variant("240 registers", 0, 240),
    Variant("240, merge 8x1", 0, 240, (8, 1)),
    Variant("240, norms apart, 8x1", 2, 240, (8, 1)),
    Variant("as it is, again"),
)
VQLLM = (
    Variant("as it was", before=True),
    Variant("whole words"),
    Variant("whole words, merge 8x1", merge=(8, 1)),
    Variant("as it was, again", before=True),
)
CASES: dict[str, tuple[Work, tuple[Variant, ...]]] = {
    "fold-32": (Work("fold", 0, 1, 32768), FOLD),
    "fold-128": (Work("fold", 0, 1, 131072), FOLD),
    "fold-16": (Work("fold", 0, 16, 32768), FOLD),
    "fold22-32": (Work("fold", 2, 1, 32768), FOLD),
    "qjl-128": (Work("qjl", 0, 1, 131072), QJL + REGISTERS),
    "qjl-32": (Work("qjl", 0, 1, 32768), QJL),
    "qjl-16": (Work("qjl", 0, 16, 32768), QJL),
    "vqllm-128": (Work("vqllm", 0, 1, 131072), VQLLM),
    "vqllm-16": (Work("vqllm", 0, 16, 32768), VQLLM),
    "vqllm1-128": (Work("vqllm:bits=1", 0, 1, 131072), VQLLM),
}


def kernel_before() -> Any:
    """VQLLM's kernel with even bytes added on their own."""
    text = Path(_residual_gluon.__file__).read_text()
    for new, old in (TOGETHER, LESS, EVEN):
        if text.count(new) != 1:
            raise RuntimeError(f"{_residual_gluon.__file__}: not as this script expects it: {new}")
        text = text.replace(new, old)
    place = Path(tempfile.mkdtemp()) / "residual_before.py"
    place.write_text(text)
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[place.stem] = module
    spec.loader.exec_module(module)
    return module.residual_kernel


def plan_of(work: Work, inputs: Inputs, variant: Variant) -> Any:
    """The launch shape that is chosen, with what the variant changes."""
    module: Any = pages if work.method == "fold" else fragments
    windows, span = inputs.windows, inputs.span
    capacity = unit_capacity(span) if module is pages else fragments.unit_capacity_of(work.formats[0], span)
    slots = windows.sink[0].shape[2] + windows.ring[0].shape[2]
    jobs, rows = work.batch * work.num_kv_heads, work.num_heads // work.num_kv_heads
    plan = module.make_plan(*work.formats, jobs, rows, capacity, slots, multiprocessors(inputs.q.device))
    registers = plan.registers if variant.registers == -1 else variant.registers
    return replace(plan, sooner=variant.sooner, registers=registers)


def call(work: Work, variant: Variant, kernels: tuple[Any, Any], inputs: Inputs) -> torch.Tensor:
    """One decode step's attention by a variant."""
    partials.FEW = variant.merge
    residual.residual_kernel = kernels[variant.before]
    if work.method.startswith("vqllm"):
        return REGISTRY["tables"].attend(attention._given(work, inputs, work.head_dim**-0.5))
    module: Any = pages if work.method == "fold" else fragments
    plan = plan_of(work, inputs, variant)
    return module.decode_attention(
        inputs.q, *work.formats, [inputs.span], inputs.windows, work.head_dim**-0.5, plan=plan
    )  # fmt: skip


def sound(work: Work, variants: tuple[Variant, ...], kernels: tuple[Any, Any], inputs: Inputs) -> Iterator[Variant]:
    """Variants whose errors are within the limit; all are printed, and whether a result is the first one's to the last bit."""
    chosen = sorted({0, work.batch - 1})
    want = torch.stack([attention.reference(work, inputs, b) for b in chosen])
    first = None
    for variant in variants:
        got = call(work, variant, kernels, inputs)
        first = got if first is None else first
        error = float((got[chosen].float() - want).norm() / want.norm())
        good = error <= LIMIT[DTYPE] and bool(torch.isfinite(got).all())
        same = "same bits" if torch.equal(got, first) else "other bits"
        print(
            f"gate {work} B={work.batch} N={work.context}: {variant.name:24} {error:.1e} {same}{'' if good else ' WRONG'}"
        )
        if good:
            yield variant


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--gate", action="store_true")
    args = parser.parse_args()
    device, kernels, wrong = torch.device("cuda"), (residual.residual_kernel, kernel_before()), 0
    for name in args.only:
        work, variants = CASES[name]
        inputs = attention.make_inputs(work, DTYPE, device)
        good = tuple(sound(work, variants, kernels, inputs))
        wrong += len(variants) - len(good)
        if args.gate or not good:
            continue
        packed = work.context - SINK - attention.RECENT
        size = work.batch * work.num_kv_heads * sum(attention.stored_bytes(form, packed) for form in work.formats)
        sets = [inputs]
        while len(sets) * size < attention.COLD_BYTES:
            sets.append(sets[-1].copy())
        groups: list[list[Callable[[], Any]]] = [[partial(call, work, v, kernels, x) for x in sets] for v in good]
        others = attention.baselines(replace(work, method="kivi", bits=2), DTYPE, device)
        best = min(others.values())
        found = times_in_turn(groups)
        print(
            f"\n{name}: {work} B={work.batch} N={work.context}, fp16 {1e3 * best:.1f} us, {torch.cuda.get_device_name()}"
        )
        for variant, (p20, p50, p80) in zip(good, found, strict=True):
            ratio = f"{best / p50:.2f}x fp16, {found[0][1] / p50:.3f}x the first"
            print(f"  {variant.name:24} {1e3 * p50:7.2f} us ({1e3 * p20:.2f} - {1e3 * p80:.2f})  {ratio}", flush=True)
        del groups, sets, inputs
        torch.cuda.empty_cache()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
