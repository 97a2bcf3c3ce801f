"""What modules of this folder share: arguments' types, and what the compiler made of a kernel."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import mangle_type


@dataclass(frozen=True)
class Report:
    """Resources of one compiled kernel.

    Attributes
    ----------
    registers : int
        Per thread.
    spilled : int
        Bytes of stack per thread.
    loop, spills_in_loop : int
        Instructions of the longest loop; those of them that read or write the stack.
    shared : int
        Bytes of shared memory per program: what the machine code declares, and what the launch asks for.
    instructions, code : Counter, tuple
        Mnemonics: how many of each, and all in order.
    """

    registers: int
    spilled: int
    loop: int
    spills_in_loop: int
    shared: int
    instructions: Counter[str]
    code: tuple[str, ...] = ()


def _report(cubin: bytes, dynamic: int) -> Report:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def dump(option: str) -> str:
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = dump("--dump-resource-usage"), dump("--dump-sass")
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)([^;]*);", sass)
    code = [(int(at, 16), name, rest) for at, name, rest in lines]
    targets = [(at, re.search(r"0x([0-9a-f]+)\s*$", rest)) for at, name, rest in code if name == "BRA"]
    loops = [(int(to[1], 16), at) for at, to in targets if to and int(to[1], 16) < at]
    first, last = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    loop = [name for at, name, _ in code if first <= at <= last]
    spills = sum(name in ("LDL", "STL") for name in loop)
    shared = found["SHARED"] + dynamic
    names = tuple(name for _, name, _ in code)
    return Report(found["REG"], found["STACK"], len(loop), spills, shared, Counter(names), names)


def _width(bf16: bool) -> str:
    return "*bf16" if bf16 else "*fp16"


def _signature(
    function: Any, fixed: dict[str, Any], types: dict[str, str]
) -> tuple[dict[str, str], dict[tuple[int], Any]]:
    """Types of all arguments, "i32" where ``types`` says nothing, and values of those known when compiling."""
    names = function.arg_names
    signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
    return signature, {(names.index(n),): v for n, v in fixed.items()}


def _aligned(function: Any, names: list[str]) -> dict[tuple[int], list[list[Any]]]:
    """Pointers and strides that are multiples of 16 bytes or elements."""
    return {(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in names}


def _compile(source: Any, capability: int, **options: Any) -> Report:
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _report(compiled.asm["cubin"], compiled.metadata.shared)


def _typed(
    path: tuple[int, ...],
    value: Any,
    fixed: bool,
    constants: dict[tuple[int, ...], Any],
    aligned: dict[tuple[int, ...], list[list[Any]]],
) -> Any:
    """Type of an argument, or of a tuple of them; notes what is constant and which pointers are aligned."""
    if isinstance(value, tuple):
        return tuple(_typed((*path, i), x, fixed, constants, aligned) for i, x in enumerate(value))
    if fixed:
        constants[path] = getattr(value, "value", value)
        return "constexpr"
    if value[0] == "*":
        aligned[path] = [["tt.divisibility", 16]]
    return value


def _pointer(x: torch.Tensor) -> str:
    return mangle_type(x)
