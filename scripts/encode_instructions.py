"""Warp instructions that encoding takes, read from machine code compiled here: ``python scripts/encode_instructions.py``.

A program encodes a tile of 32 tokens by ``head_dim`` channels. The count is of a whole program, its loop as often as it runs,
times 32 lanes and warps, over the tile's elements: instructions per element and thread.
"""

import sys
from pathlib import Path

from kvfold.formats import AffineGroups
from kvfold.kernels.affine import encode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from aot import compile_encode

HEAD_DIM = 128
CASES = (
    ("KIVI keys, 2 bits", AffineGroups(HEAD_DIM, 32, "key", 2, "token"), {}),
    ("KIVI values, 2 bits", AffineGroups(HEAD_DIM, 32, "value", 2, "channel"), {}),
    ("SQuat keys, 2 bits", AffineGroups(HEAD_DIM, 32, "key", 2, "token"), {"width": HEAD_DIM // 2}),
    *(
        case
        for mode in encode.MODES
        for case in (
            (
                f"InnerQ {mode} keys",
                AffineGroups(HEAD_DIM, 32, "key", 2, "channel", mode),
                {"center": True, "norm": True},
            ),
            (f"InnerQ {mode} values", AffineGroups(HEAD_DIM, 32, "value", 2, "token", mode), {}),
        )
    ),
)


def trips(form: AffineGroups) -> int:
    """How often a program's loop over channel tiles runs."""
    return HEAD_DIM // 16 // max(1, HEAD_DIM * form.bits_per_code // 256, form.group // 16 * (form.axis == "channel"))


def main() -> None:
    print(f"{'':24} per element  registers  shared")
    for name, form, options in CASES:
        report = compile_encode(form, rows=False, **options)
        warps = encode._warps(form, cut="width" in options)
        total = sum(report.instructions.values()) + (trips(form) - 1) * report.loop * ("width" not in options)
        print(f"{name:24} {total * 32 * warps / (32 * HEAD_DIM):11.1f}  {report.registers:9}  {report.shared:6}")


if __name__ == "__main__":
    main()
