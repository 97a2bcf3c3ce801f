"""Compilation without a GPU of kernels that unpack: of what a basis turns, and of codes into tables in shared memory."""

from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from aot.report import Report, _compile, _signature, _width
from kvfold.formats import Format, Outliers, Paged, ResidualCodes
from kvfold.kernels.long import bits as unpack_bits
from kvfold.kernels.long import levels as unpack_levels
from kvfold.kernels.long import mixed as unpack_mixed
from kvfold.kernels.long import rotated as turned
from kvfold.kernels.long import tables as unpack_tables
from kvfold.kernels.long._bits import unpack_bits_kernel
from kvfold.kernels.long._levels import unpack_levels_kernel
from kvfold.kernels.long._mixed import unpack_mixed_kernel
from kvfold.kernels.long._rotated import turned_kernel
from kvfold.kernels.long._tables import unpack_tables_kernel
from kvfold.kernels.stored import inner


def compile_turned(form: Paged, bf16: bool = False, capability: int = 90) -> Report:
    """Compile the kernel that decodes a format that :func:`kvfold.kernels.long.rotated.serves` accepts on a GPU."""
    fixed = turned.constants(form, bf16)
    types = {"scale": "*fp16", "mean": "*fp16", "norm": "*u8", "table": "*fp16", "out": _width(bf16)}
    types |= {"codes": "*u8" if isinstance(inner(form), ResidualCodes) else "*i16", "rows": "*fp16"}
    source = GluonASTSource(turned_kernel, *_signature(turned_kernel, fixed, types), {})
    return _compile(source, capability, **turned.options(form))


def compile_unpack_tables(form: unpack_tables.Tabled, bf16: bool = False, capability: int = 90) -> Report:
    """Compile the kernel that decodes a format that :func:`kvfold.kernels.long.tables.serves` accepts on a GPU."""
    fixed: dict[str, Any] = unpack_tables.constants(form, bf16)
    types = {"codes": "*i16" if fixed["STEPS"] else "*u8", "norms": "*fp16", "rows": "*fp16", "turns_ptr": "*fp32"}
    types |= {"near_ptr": "*fp16", "position_ptr": "*i64", "mean_ptr": "*fp16", "out": _width(bf16)}
    types["gain"] = "fp32"
    source = GluonASTSource(unpack_tables_kernel, *_signature(unpack_tables_kernel, fixed, types), {})
    programs = 2 if unpack_tables.bytes_of(form) < 116 << 10 else 1
    return _compile(source, capability, **unpack_tables.options(form, programs))


def compile_unpack_levels(form: Outliers, rotated: bool, bf16: bool = False, capability: int = 90) -> Report:
    """Compile the kernel that decodes a format that :func:`kvfold.kernels.long.levels.serves` accepts on a GPU."""
    fixed: dict[str, Any] = unpack_levels.constants(form, rotated, bf16)
    types = dict.fromkeys(("codes", "where"), "*i16") | dict.fromkeys(("ranges", "outlier", "constants"), "*fp16")
    types |= {"turns_ptr": "*fp32", "near_ptr": "*fp16", "position_ptr": "*i64", "out": _width(bf16), "gain": "fp32"}
    source = GluonASTSource(unpack_levels_kernel, *_signature(unpack_levels_kernel, fixed, types), {})
    return _compile(source, capability, num_warps=unpack_levels.WARPS, maxnreg=unpack_levels.REGISTERS)


def compile_unpack_mixed(form: Format, bf16: bool = False, capability: int = 90) -> Report:
    """Compile the kernel that decodes a format that :func:`kvfold.kernels.long.mixed.serves` accepts on a GPU."""
    fixed: dict[str, Any] = unpack_mixed.constants(form, bf16)
    types = dict.fromkeys(("codes", "low", "which"), "*i16") | {"meta": "*fp16", "norm": "*u8"}
    types |= {"before_ptr": "*i32", "out": _width(bf16)}
    source = GluonASTSource(unpack_mixed_kernel, *_signature(unpack_mixed_kernel, fixed, types), {})
    return _compile(source, capability, num_warps=unpack_mixed.WARPS, maxnreg=unpack_mixed.REGISTERS)


def compile_unpack_bits(codes: int, bf16: bool = False, capability: int = 90) -> Report:
    """Compile the kernel that :func:`kvfold.kernels.long.bits.unpack_bits` runs."""
    wide = unpack_bits.WIDE and capability == 90
    fixed: dict[str, Any] = {"CODES": codes, "BF16": bf16, "WIDE": wide}
    types = {"bits": "*i16", "tables": "*u8", "out": _width(bf16)}
    source = GluonASTSource(unpack_bits_kernel, *_signature(unpack_bits_kernel, fixed, types), {})
    registers = unpack_bits.REGISTERS if wide else unpack_bits.APART[1]
    return _compile(source, capability, num_warps=unpack_bits.WARPS, maxnreg=registers)
