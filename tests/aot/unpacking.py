"""Compilation without a GPU of the kernel that unpacks keys of codes into tables in shared memory."""

from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from aot.report import Report, _compile, _signature, _width
from kvfold.formats.codebook import AdditiveCodes
from kvfold.kernels.long import tables as unpack_tables
from kvfold.kernels.long._tables import unpack_tables_kernel


def compile_unpack_tables(form: unpack_tables.Tabled, bf16: bool = False, capability: int = 90) -> Report:
    """Compile the kernel that decodes a format that :func:`kvfold.kernels.long.tables.serves` accepts on a GPU."""
    fixed: dict[str, Any] = unpack_tables.constants(form, bf16)
    types = {"codes": "*i16" if fixed["STEPS"] else "*u8", "norms": "*fp16", "rows": "*fp16", "turns_ptr": "*fp32"}
    types |= {"near_ptr": "*fp16", "position_ptr": "*i64", "mean_ptr": "*fp16", "out": _width(bf16)}
    types["gain"] = "fp32"
    source = GluonASTSource(unpack_tables_kernel, *_signature(unpack_tables_kernel, fixed, types), {})
    programs = 1 if isinstance(form, AdditiveCodes) else 2
    return _compile(source, capability, **unpack_tables.options(programs))
