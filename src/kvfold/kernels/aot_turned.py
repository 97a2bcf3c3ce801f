"""Compilation without a GPU of the kernel that unpacks what a basis turns."""

from triton.experimental.gluon._runtime import GluonASTSource

from kvfold.formats import Format
from kvfold.kernels import turned
from kvfold.kernels._turned_gluon import turned_kernel
from kvfold.kernels.aot import Report, _compile, _signature, _width


def compile_turned(form: Format, bf16: bool = False, capability: int = 90) -> Report:
    """Compile the kernel that decodes a format that :func:`kvfold.kernels.turned.serves` accepts on a GPU."""
    fixed = turned.constants(form, bf16)
    types = {"codes": "*i16", "scale": "*fp16", "mean": "*fp16", "norm": "*u8", "table": "*fp16", "out": _width(bf16)}
    source = GluonASTSource(turned_kernel, *_signature(turned_kernel, fixed, types), {})
    return _compile(source, capability, **turned.options(fixed["WIDTH"]))
