"""Compile GPU kernels where there is no GPU, and read what the compiler made of them."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from kvfold.formats import AffineGroups
from kvfold.kernels._decode_gluon import decode_kernel
from kvfold.kernels._tiles import tiles_kernel
from kvfold.kernels.decode import Plan, constants, make_plan
from kvfold.kernels.partials import merge_kernel
from kvfold.kernels.tiles import constants as tiles_constants
from kvfold.kernels.tiles import make_plan as make_tiles_plan
from kvfold.kernels.windows import tile_sizes, windows_kernel


@dataclass(frozen=True)
class Report:
    """Resources of one compiled kernel.

    Attributes
    ----------
    registers : int
        Per thread.
    spilled : int
        Bytes of stack per thread.
    spills_in_loop : int
        Instructions of the longest loop that read or write it.
    shared : int
        Bytes of shared memory per program.
    instructions : Counter
        Static count by mnemonic.
    """

    registers: int
    spilled: int
    spills_in_loop: int
    shared: int
    instructions: Counter[str]


def _report(cubin: bytes) -> Report:
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
    spills = sum(name in ("LDL", "STL") and first <= at <= last for at, name, _ in code)
    return Report(found["REG"], found["STACK"], spills, found["SHARED"], Counter(name for _, name, _ in code))


def compile_decode(
    key_format: AffineGroups,
    value_format: AffineGroups,
    rows: int = 4,
    bf16: bool = False,
    has_bias: bool = False,
    capability: int = 90,
    plan: Plan | None = None,
) -> Report:
    """Compile the decode kernel as a layer with ``rows`` query rows per KV head would use it.

    Parameters
    ----------
    capability : {80, 90, 100}
        Compute capability, times ten.
    plan : Plan or None
        Another launch shape than the one that is chosen.
    """
    plan = plan or make_plan(key_format, value_format, 128, rows, 1024, 160, 132)
    fixed: dict[str, Any] = constants(key_format, value_format, plan, bf16, has_bias, capability >= 90)
    if plan.columns == 1:
        fixed["columns"] = 1
    width = "*bf16" if bf16 else "*fp16"
    types = {"packed_q_ptr": width, "q_ptr": width, "bias_ptr": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("packed_len_ptr", "sink_len_ptr", "recent_len_ptr"), "*i32")
    types |= dict.fromkeys(("k_codes", "k_aux", "v_codes", "v_aux"), "*i16")
    types |= dict.fromkeys(("k_meta", "v_meta"), "*fp16")
    types |= dict.fromkeys(("sink_k", "sink_v", "ring_k", "ring_v"), width)
    types |= dict.fromkeys(("part_out", "part_top", "part_sum"), "*fp32")
    names = decode_kernel.arg_names
    signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
    values = {(names.index(n),): v for n, v in fixed.items()}
    source = GluonASTSource(decode_kernel, signature, values, {})
    return _compile(source, capability, num_warps=plan.warps, maxnreg=plan.cap(has_bias))


def compile_tiles(
    key_format: AffineGroups,
    value_format: AffineGroups,
    rows: int = 4,
    rotary: int = 0,
    has_bias: bool = False,
    capability: int = 90,
) -> Report:
    """Compile the kernel over plain packed storage as a layer with ``rows`` query rows per KV head would use it.

    Parameters
    ----------
    rotary : int
        Channels that are rotated as keys are read.
    """
    plan = make_tiles_plan(key_format.head_dim, 128, rows, 1024, rotary > 0, 132)
    fixed: dict[str, Any] = tiles_constants(key_format, value_format, plan, rotary, has_bias)
    types = dict.fromkeys(("k_codes", "v_codes"), "*u8") | dict.fromkeys(("k_aux", "v_aux"), "*i16")
    types |= dict.fromkeys(("k_meta", "v_meta", "table_ptr"), "*fp16")
    types |= {"packed_len_ptr": "*i32", "position_ptr": "*i64", "factor": "fp32"}
    types |= dict.fromkeys(("q_ptr", "bias_ptr", "freq_ptr", "step_ptr", "part_out", "part_top", "part_sum"), "*fp32")
    names = tiles_kernel.arg_names
    signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
    values = {(names.index(n),): v for n, v in fixed.items()}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t[0] == "*"}
    return _compile(ASTSource(tiles_kernel, signature, values, aligned), capability, num_warps=plan.warps)


def compile_merge(head_dim: int = 128, capability: int = 90) -> Report:
    """Compile the kernel that merges splits."""
    fixed = {"D": head_dim, "PART": 32, "N": 64, "EARLY": capability >= 90}
    types = {"part_out": "*fp32", "part_top": "*fp32", "part_sum": "*fp32", "out": "*fp16"}
    names = merge_kernel.arg_names
    signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
    values = {(names.index(n),): v for n, v in fixed.items()}
    return _compile(ASTSource(merge_kernel, signature, values, {}), capability, num_warps=4)


def compile_windows(
    rows: int = 2048,
    head_dim: int = 128,
    bf16: bool = False,
    has_new: bool = True,
    has_valid: bool = False,
    capability: int = 90,
) -> Report:
    """Compile the kernel over full-precision tokens for ``rows`` query rows per KV head."""
    m, n, warps = tile_sizes(rows, head_dim)
    padded = triton.next_power_of_2(head_dim)
    fixed = {"D": head_dim, "DP": padded, "M": m, "N": n, "HAS_NEW": has_new, "HAS_VALID": has_valid}
    width = "*bf16" if bf16 else "*fp16"
    types = dict.fromkeys(("q_ptr", "sink_k", "sink_v", "ring_k", "ring_v", "new_k", "new_v"), width)
    types |= dict.fromkeys(("sink_len_ptr", "packed_len_ptr", "recent_len_ptr"), "*i32")
    types |= dict.fromkeys(("part_out", "part_top", "part_sum"), "*fp32")
    types |= {"valid_ptr": "*u8", "factor": "fp32"}
    names = windows_kernel.arg_names
    signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
    values = {(names.index(n),): v for n, v in fixed.items()}
    aligned = [n for n in names if n in types and types[n].startswith("*")]
    aligned += ["k_batch", "k_head", "k_token", "v_batch", "v_head", "v_token"]  # strides are multiples of head_dim
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n != "valid_ptr"}
    return _compile(ASTSource(windows_kernel, signature, values, attributes), capability, num_warps=warps)


def _compile(source: Any, capability: int, **options: Any) -> Report:
    return _report(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"])
