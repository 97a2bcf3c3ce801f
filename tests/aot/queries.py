"""Compile the kernels that take queries through statistics and maps where there is no GPU."""

import triton
from triton.compiler import ASTSource

from aot.report import Report, _aligned, _compile, _signature, _width
from kvfold.kernels.queries import OPTIONS, _map_kernel, _statistics_kernel, map_shape


def compile_map(head_dim: int, rows: int, bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel that takes ``rows`` queries of a KV head through its map."""
    shape = map_shape(rows, head_dim)
    warps = shape.pop("num_warps")
    types = {"q_ptr": _width(bf16)} | dict.fromkeys(["matrix_ptr", "mean_ptr", "out_ptr", "bias_ptr"], "*fp32")
    source = ASTSource(
        _map_kernel,
        *_signature(_map_kernel, shape | {"EARLY": capability >= 90}, types),
        _aligned(_map_kernel, list(types)),
    )
    return _compile(source, capability, num_warps=warps)


def compile_statistics(head_dim: int, bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel that puts statistics of whole sequences into queries."""
    fixed = {"D": head_dim, "DP": triton.next_power_of_2(head_dim), "HAS_NORM": True, "HAS_MEAN": True}
    types = {
        "q_ptr": _width(bf16),
        "norm_ptr": "*u8",
        "mean_ptr": "*fp16",
        "out_ptr": "*fp32",
        "bias_ptr": "*fp32",
        "step": "fp32",
    }
    signature = _signature(_statistics_kernel, fixed, types)
    source = ASTSource(_statistics_kernel, *signature, _aligned(_statistics_kernel, list(types)[:-1]))
    return _compile(source, capability, num_warps=1, **OPTIONS)
