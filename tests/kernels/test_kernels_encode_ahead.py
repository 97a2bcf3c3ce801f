"""Encoding kernels compile ahead of time without spills."""

import pytest

pytest.importorskip("triton")

from triton.compiler import ASTSource

from helpers import spec
from kvfold.formats.paged import plain
from kvfold.kernels.affine import encode as compiled
from kvfold.methods import get
from kvfold.methods.innerq import InnerQ

MODES = ("asym", "sym", "hybrid")
BITS = (1, 2, 3, 4, 8)


POINTERS = {
    "*i32": (
        "codes_out",
        "k_codes",
        "v_codes",
        "aux_out",
        "k_aux",
        "v_aux",
        "total_len",
        "packed_len",
        "sink_len",
        "recent_len",
        "ticket",
        "counts",
    ),
    "*i64": ("rows", "first_position", "boundary", "numbers"),
    "*fp32": ("mean", "norm", "inverse", "update", "inv_freq"),
    "*fp16": ("meta_out", "k_meta", "v_meta"),
    "*bf16": ("x", "key", "value", "sink_k", "sink_v", "ring_k", "ring_v"),
    "fp32": ("rope_factor",),
}


def compile_ahead(function, fixed, warps, capability):
    from aot.report import _compile

    types = {name: kind for kind, names in POINTERS.items() for name in names}
    names = function.arg_names
    fixed = {**fixed, "WARPS": warps, **{n: 1 for n in names if n.endswith("stride_c")}}
    signature = {n: "constexpr" if n in fixed else types.get(n, "i64" if "stride" in n else "i32") for n in names}
    multiples = {n for n in names if signature[n].startswith("*") or ("stride" in n and n not in fixed)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in multiples}
    source = ASTSource(function, signature, {(names.index(n),): v for n, v in fixed.items()}, aligned)
    return _compile(source, capability, num_warps=warps, num_stages=1, enable_fp_fusion=False)


def shapes(head_dim, method="kivi", bits=2, group=32):
    shape = spec(head_dim)
    paper = ",paper=true" if method == "innerq" else ""  # statistics of a sequence, which kernels take with the keys
    method = get(f"{method}:bits={bits},group={group}{paper}")
    width = head_dim // 2 if method.query_window else 0
    inner = isinstance(method, InnerQ)
    return plain(method.key_format(shape)), method.value_format(shape), {"MEAN": inner, "NORM": inner, "WIDTH": width}


AHEAD = {
    **{f"{m}-sm{c}": (shapes(128, m), c) for m in ("kivi", "innerq", "squat") for c in (80, 90, 100)},
    **{f"{m}-d{d}": (shapes(d, m), 90) for m in ("kivi", "innerq", "squat") for d in (64, 256)},
    "kivi-g128-d256": (shapes(256, "kivi", group=128), 90),
    "innerq-3bit": (shapes(128, "innerq", bits=3), 90),
    "kivi-8bit": (shapes(128, "kivi", bits=8), 90),
}


@pytest.mark.parametrize("case", AHEAD.values(), ids=AHEAD.keys())
def test_kernels_compile_without_spills(case):
    (key_format, value_format, how), capability = case
    nothing = {"MEAN": False, "NORM": False, "WIDTH": 0}
    for form, options in ((key_format, how), (value_format, nothing)) if capability == 90 else ():
        tile, group, axis, mode, bits = compiled._constants(form)
        fixed = {"T": tile, "D": form.head_dim, "G": group, "AXIS": axis, "MODE": mode, "BITS": bits}
        fixed |= {"VALUE": form.operand == "value", "ROWS": True, "RING": True, "ROPE": False, **options}
        fixed |= {"NUMBERS": options["WIDTH"] > 0}
        warps = compiled._warps(form, cut=options["WIDTH"] > 0)
        report = compile_ahead(compiled._encode_kernel, fixed, warps, capability)
        assert report.spilled == 0
    fixed = {"BLOCK": key_format.block, "NEW": 1, "CLOSE": True, "ADVANCE": True, "COUNTS": True, "ROPE": False}
    for letter, form in (("K", key_format), ("V", value_format)):
        tile, group, axis, mode, bits = compiled._constants(form)
        fixed |= {f"{letter}T": tile, f"{letter}G": group, f"{letter}_AXIS": axis}
        fixed |= {f"{letter}_MODE": mode, f"{letter}_BITS": bits}
    fixed |= {"D": key_format.head_dim, "BOUNDARY": key_format.mode == "hybrid", "EARLY": capability >= 90, **how}
    warps = compiled._warps(key_format, value_format, cut=how["WIDTH"] > 0)
    spilled = compile_ahead(compiled._step_kernel, fixed, warps, capability).spilled
    assert spilled <= (96 if how["WIDTH"] == 128 else 0)  # a warp's share of 256 channels, and of two slices of them


def test_un_rotating_kernels_compile():
    key_format, _, how = shapes(128, "squat")
    tile, group, axis, mode, bits = compiled._constants(key_format)
    fixed = {"T": tile, "D": 128, "G": group, "AXIS": axis, "MODE": mode, "BITS": bits, "VALUE": False, "ROWS": False}
    report = compile_ahead(
        compiled._encode_kernel, {**fixed, "RING": False, "ROPE": True, "NUMBERS": True, **how}, 4, 90
    )
    assert report.spilled < 64  # the exact sine's table of 2 / pi lies on the stack
