"""Compile the Gluon kernels of plain order where there is no GPU; as :mod:`aot`."""

from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from aot.report import Report, _compile, _signature
from kvfold.formats import AffineGroups
from kvfold.kernels.affine import row_major as plain
from kvfold.kernels.affine._row_major import plain_kernel
from kvfold.kernels.device import HOPPER


def compile_plain(
    key_format: AffineGroups, value_format: AffineGroups, rotary: bool = False, capability: int = 90
) -> Report:
    """Compile the Gluon kernel over plain packed storage as a layer would use it; ``rotary``: keys are stored before RoPE."""
    plan = plain.make_plan(key_format, value_format, 128, 1024, rotary, HOPPER)
    fixed: dict[str, Any] = plain.constants(key_format, value_format, plan, rotary)
    types = dict.fromkeys(("k_codes", "v_codes"), "*u8") | dict.fromkeys(("k_meta", "v_meta", "table_ptr"), "*fp16")
    types |= {"packed_len_ptr": "*i32", "position_ptr": "*i64", "factor": "fp32"}
    types |= dict.fromkeys(("q_ptr", "freq_ptr", "part_out", "part_top", "part_sum"), "*fp32")
    source = GluonASTSource(plain_kernel, *_signature(plain_kernel, fixed, types), {})
    return _compile(source, capability, num_warps=plan.warps, maxnreg=plan.registers)
