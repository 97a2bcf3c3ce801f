"""Compile the kernels of a model's small operations where there is no GPU; as :mod:`aot`."""

import triton
from triton.compiler import ASTSource

from aot.report import Report, _aligned, _compile, _signature, _width
from kvfold.engines.transformers.ops._row import row_kernel, three_kernel
from kvfold.engines.transformers.ops.product import Plan, make_plan
from kvfold.engines.transformers.ops.small import (
    OPTIONS,
    ROUNDINGS,
    Rounding,
    _gate_kernel,
    _norm_kernel,
    _rotate_kernel,
    warps_of,
)


def compile_norm(size: int, rounding: Rounding = ROUNDINGS[0], bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel of a norm over ``size`` numbers."""
    fixed = {
        "D": size,
        "DP": triton.next_power_of_2(size),
        "ROUNDING": rounding,
        "ADDS": True,
        "EARLY": capability >= 90,
    }
    names = ["x_ptr", "more_ptr", "weight_ptr", "sum_ptr", "out_ptr"]
    types = dict.fromkeys(names, _width(bf16)) | {"eps": "fp32"}
    source = ASTSource(_norm_kernel, *_signature(_norm_kernel, fixed, types), _aligned(_norm_kernel, names))
    return _compile(source, capability, num_warps=warps_of(size), **OPTIONS)


def compile_rotate(head_dim: int, bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel that rotates queries and keys."""
    fixed = {"D": head_dim, "DP": triton.next_power_of_2(head_dim), "EARLY": capability >= 90}
    names = ["q_ptr", "k_ptr", "cos_ptr", "sin_ptr", "q_out", "k_out"]
    types = dict.fromkeys(names, _width(bf16))
    source = ASTSource(_rotate_kernel, *_signature(_rotate_kernel, fixed, types), _aligned(_rotate_kernel, names))
    return _compile(source, capability, num_warps=1, **OPTIONS)


def compile_gate(bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel of gates."""
    names = ["gate_ptr", "up_ptr", "out_ptr"]
    signature = _signature(_gate_kernel, {"N": 512, "EARLY": capability >= 90}, dict.fromkeys(names, _width(bf16)))
    source = ASTSource(_gate_kernel, *signature, _aligned(_gate_kernel, names))
    return _compile(source, capability, num_warps=4, **OPTIONS)


def compile_row(
    channels: int, gated: bool = False, bf16: bool = True, capability: int = 90, plan: Plan | None = None
) -> Report:
    """Compile the kernel of products of one row."""
    rows, part, ahead, warps = plan or make_plan(channels, gated)
    fixed = {
        "K": channels,
        "R": rows,
        "C": part,
        "AHEAD": ahead,
        "HAS_BIAS": True,
        "GATED": gated,
        "EARLY": capability >= 90,
    }
    names = ["x_ptr", "weight_ptr", "other_ptr", "bias_ptr", "out_ptr"]
    signature = _signature(row_kernel, fixed, dict.fromkeys(names, _width(bf16)))
    source = ASTSource(row_kernel, *signature, _aligned(row_kernel, names))
    return _compile(source, capability, num_warps=warps)


def compile_three_rows(channels: int, bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel of one row times three weights."""
    rows, part, ahead, warps = make_plan(channels, False)
    fixed = {"K": channels, "R": rows, "C": part, "AHEAD": ahead, "HAS_BIAS": True, "EARLY": capability >= 90}
    names = [name for name in three_kernel.arg_names if name.endswith(("_ptr", "_bias"))]
    signature = _signature(three_kernel, fixed, dict.fromkeys(names, _width(bf16)))
    source = ASTSource(three_kernel, *signature, _aligned(three_kernel, names))
    return _compile(source, capability, num_warps=warps)
