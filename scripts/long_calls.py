"""CommVQ's calls of many tokens: times of what is behind switches, in turn with fp16, each gated first.

``python scripts/long_calls.py [--tokens 512] [--bits 1 2]``. Lines: what, relative RMS error, ms (20th, 50th, 80th percentile),
times fp16.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from kvfold.bench.attention import LIMIT, Work, _given, _unproject, baselines, call, full_precision, gate, make_inputs
from kvfold.bench.timing import times_in_turn
from kvfold.kernels import unpack, unpack_bits, unpack_steps

CALLS = {
    "keys of 8 warps, values beside": (8, True),
    "keys of 16 warps, then values by 3 programs": (16, False),
    "keys of 8 warps, then values by 3 programs": (8, False),
    "keys of 16 warps, then values by a program": (16, True),
}
"""Warps of keys, and whether programs of values are small enough to run beside."""


def under(settings: dict[tuple[Any, str], Any], run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` with attributes of modules set."""

    def f() -> Any:
        with ExitStack() as stack:
            for (module, name), x in settings.items():
                stack.enter_context(patch.object(module, name, x))
            return run()

    return f


def groups_of(work: Work, inputs: Any) -> dict[str, tuple[float, Callable[[], Any]]]:
    """Errors and calls, by name."""
    found = {}
    for name, (warps, beside) in CALLS.items():
        settings = {(unpack_steps, "WARPS"): warps, (unpack_bits, "BESIDE"): beside}
        found[name] = (under(settings, partial(gate, work, inputs))(), under(settings, partial(call, work, inputs)))
    given = _given(work, inputs, 1.0)
    span, keys, values = given.spans[0], given.key_format, given.value_format
    tokens = span.keys["rms"].shape[2] * keys.block
    turn = unpack.turn_of(_unproject(work), values, work.num_kv_heads, inputs.q.device)
    key = partial(unpack.unpack, keys, span.keys, 0, 0, tokens, torch.float16, given.rope, given.first_position)
    value = partial(unpack.unpack, values, span.values, 0, 0, tokens, torch.float16, turn=turn)
    for warps in (8, 16):
        found[f"keys alone, {warps} warps"] = 0.0, under({(unpack_steps, "WARPS"): warps}, key)
    for beside in (True, False):
        name = f"values alone, {'one program' if beside else 'three programs'}"
        found[name] = 0.0, under({(unpack_bits, "BESIDE"): beside}, value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.float16
    print(torch.cuda.get_device_name())
    for bits in args.bits:
        work = Work(f"commvq:bits={bits}", bits, 1, 32768, query_tokens=args.tokens)
        inputs = make_inputs(work, dtype, device)
        plain = Work("kivi", 2, 1, 32768, query_tokens=args.tokens)
        others = baselines(plain, dtype, device)
        best = min(others, key=others.__getitem__)
        theirs = dict(full_precision(plain, dtype, device))[best]()
        groups = groups_of(work, inputs)
        right = {name: f for name, (error, f) in groups.items() if error <= LIMIT[dtype]}
        times = times_in_turn([theirs, *([f] for f in right.values())], 20)
        fp16 = times[0][1]
        print(f"commvq:bits={bits}, {args.tokens} tokens: fp16 ({best}) {fp16:.4f}")
        for name, (error, _) in groups.items():
            if name not in right:
                print(f"  {name}: error {error:.2e}, not timed")
                continue
            p20, p50, p80 = times[1 + list(right).index(name)]
            print(f"  {name}: {error:.2e}  {p20:.4f} {p50:.4f} {p80:.4f}  {p50 / fp16:.3f}x")


if __name__ == "__main__":
    main()
