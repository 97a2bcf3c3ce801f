"""Compile GPU kernels where there is no GPU, and read what the compiler made of them."""

from dataclasses import replace
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from aot.report import Report, _aligned, _compile, _pointer, _signature, _typed, _width
from kvfold.formats import AffineGroups, Format, Paged
from kvfold.kernels.affine import encode
from kvfold.kernels.affine._decode import decode_kernel
from kvfold.kernels.affine._tiles import tiles_kernel
from kvfold.kernels.affine.decode import Plan, constants, make_plan
from kvfold.kernels.affine.tiles import Plan as TilesPlan
from kvfold.kernels.affine.tiles import constants as tiles_constants
from kvfold.kernels.affine.tiles import make_plan as make_tiles_plan
from kvfold.kernels.common._encode_step import _step_kernel
from kvfold.kernels.common._encode_tile import _encode_kernel
from kvfold.kernels.common._merge import merge_rows_kernel
from kvfold.kernels.common.partials import merge_kernel, merge_shape
from kvfold.kernels.common.windows import ROWS, stages, tile_sizes, windows_kernel
from kvfold.kernels.dense import _encode as _encode_dense
from kvfold.kernels.dense import decode as dense
from kvfold.kernels.dense._decode import dense_kernel
from kvfold.kernels.device import HOPPER
from kvfold.kernels.fold import _encode as _encode_pages
from kvfold.kernels.fold import decode as pages
from kvfold.kernels.fold import encode as encode_pages
from kvfold.kernels.fold._decode import pages_kernel
from kvfold.kernels.fragments import decode as fragments
from kvfold.kernels.fragments._decode import fragments_kernel
from kvfold.kernels.generic import unpack
from kvfold.kernels.generic._decode import blocks_kernel
from kvfold.kernels.generic._unpack import unpack_kernel
from kvfold.kernels.generic.decode import Plan as BlocksPlan
from kvfold.kernels.generic.decode import constants as blocks_constants
from kvfold.kernels.generic.decode import is_turned, most_tokens, readers_of, resident
from kvfold.kernels.generic.decode import make_plan as make_blocks_plan
from kvfold.kernels.generic.decode import options as blocks_options
from kvfold.kernels.paged import PageLayout, follow
from kvfold.kernels.paged import gluon as paged_gluon
from kvfold.kernels.paged._follow import follow_kernel


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
    plan = plan or make_plan(key_format, value_format, 128, rows, 1024, 160, HOPPER)
    fixed: dict[str, Any] = constants(key_format, value_format, plan, bf16, has_bias, capability >= 90)
    if plan.columns == 1:
        fixed["columns"] = 1
    width = _width(bf16)
    types = {"packed_q_ptr": width, "q_ptr": width, "bias_ptr": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("packed_len_ptr", "sink_len_ptr", "recent_len_ptr"), "*i32")
    types |= dict.fromkeys(("k_codes", "k_aux", "v_codes", "v_aux"), "*i16")
    types |= dict.fromkeys(("k_meta", "v_meta"), "*fp16")
    types |= dict.fromkeys(("sink_k", "sink_v", "ring_k", "ring_v"), width)
    types |= dict.fromkeys(("part_out", "part_top", "part_sum"), "*fp32")
    source = GluonASTSource(decode_kernel, *_signature(decode_kernel, fixed, types), {})
    return _compile(source, capability, num_warps=plan.warps, maxnreg=plan.cap(has_bias))


def compile_pages(
    key_format: Paged,
    value_format: Paged,
    rows: int = 4,
    bf16: bool = False,
    capability: int = 90,
    plan: Plan | None = None,
) -> Report:
    """Compile the decode kernel over pages as a layer with ``rows`` query rows per KV head would use it."""
    plan = plan or pages.make_plan(key_format, value_format, 128, rows, 1024, 160, HOPPER)
    fixed: dict[str, Any] = pages.constants(key_format, value_format, plan, bf16, capability >= 90)
    if plan.columns == 1:
        fixed["columns"] = 1
    width = _width(bf16)
    types = {"q_ptr": width, "scale": "fp32", "k_norm": "*u8"}
    types |= dict.fromkeys(("packed_len_ptr", "sink_len_ptr", "recent_len_ptr"), "*i32")
    types |= dict.fromkeys(("k_codes", "v_codes"), "*i16")
    types |= dict.fromkeys(("k_scale", "k_mean", "v_scale", "v_mean", "k_rows", "v_rows"), "*fp16")
    types |= dict.fromkeys(("sink_k", "sink_v", "ring_k", "ring_v"), width)
    types |= dict.fromkeys(("k_signs", "v_signs", "part_out", "part_top", "part_sum"), "*fp32")
    source = GluonASTSource(pages_kernel, *_signature(pages_kernel, fixed, types), {})
    return _compile(source, capability, num_warps=plan.warps, maxnreg=plan.registers)


def compile_pieces(
    key_format: Format, value_format: Format, rows: int = 4, bf16: bool = False, raw: int = 16, capability: int = 90
) -> Report:
    """Compile the kernel over pieces of a server's pages as a layer with ``rows`` query rows per KV head would use it."""
    layout = PageLayout(key_format, value_format)
    keys, values = layout.views(torch.zeros(1, 1, layout.bytes, dtype=torch.uint8, device="cpu"))
    shape = paged_gluon.shape(key_format, value_format, rows, bf16, replace(HOPPER, capability=divmod(capability, 10)))
    fields = (*paged_gluon.arrays(key_format, keys, True), *paged_gluon.arrays(value_format, values, False))
    fixed: dict[str, Any] = shape.fixed | {"AT": paged_gluon.region_of(fields)[1], "RAW": raw, "HAS_SINKS": False}
    if shape.plan.columns == 1:
        fixed["columns"] = 1
    types = {"q_ptr": _width(bf16), "scale": "fp32", "region": "*i16"}
    numbers = ("items_ptr", "item_list", "table", "query_start", "seq_lens", "before_ptr", "sink_ptr", "packed_ptr")
    types |= dict.fromkeys((*numbers, "window_table", "counters"), "*i32")
    types |= dict.fromkeys(("window_k", "window_v", "out_ptr", "sinks"), _width(bf16))
    types |= dict.fromkeys(("k_rows", "v_rows"), "*fp16")
    types |= dict.fromkeys(("k_signs", "v_signs", "part_out", "part_top", "part_sum"), "*fp32")
    source = GluonASTSource(shape.kernel, *_signature(shape.kernel, fixed, types), {})
    return _compile(source, capability, num_warps=shape.plan.warps, maxnreg=shape.plan.registers)


def compile_fragments(
    key_format: Format,
    value_format: Format,
    rows: int = 4,
    bf16: bool = False,
    capability: int = 90,
    plan: Plan | None = None,
) -> Report:
    """Compile the decode kernel over pages of any codes as a layer with ``rows`` query rows per KV head would use it."""
    plan = plan or fragments.make_plan(key_format, value_format, 128, rows, 1024, 160, HOPPER)
    fixed: dict[str, Any] = fragments.constants(key_format, value_format, plan, bf16, capability >= 90)
    if plan.columns == 1:
        fixed["columns"] = 1
    width = _width(bf16)
    types = {"q_ptr": width, "scale": "fp32", "k_norm": "*u8"}
    types |= dict.fromkeys(("packed_len_ptr", "sink_len_ptr", "recent_len_ptr"), "*i32")
    types |= dict.fromkeys(("k_codes", "k_aux", "v_codes", "v_aux"), "*i16")
    types |= dict.fromkeys(("k_meta", "k_mean", "k_table", "v_meta"), "*fp16")
    types |= dict.fromkeys(("sink_k", "sink_v", "ring_k", "ring_v"), width)
    types |= dict.fromkeys(("part_out", "part_top", "part_sum"), "*fp32")
    source = GluonASTSource(fragments_kernel, *_signature(fragments_kernel, fixed, types), {})
    return _compile(source, capability, num_warps=plan.warps, maxnreg=plan.registers)


def compile_tiles(
    key_format: AffineGroups,
    value_format: AffineGroups,
    rows: int = 4,
    rotary: int = 0,
    has_bias: bool = False,
    capability: int = 90,
    plan: TilesPlan | None = None,
) -> Report:
    """Compile the kernel over plain packed storage as a layer with ``rows`` query rows per KV head would use it.

    Parameters
    ----------
    rotary : int
        Channels that are rotated as keys are read.
    """
    plan = plan or make_tiles_plan(key_format.head_dim, 128, rows, 1024, rotary > 0, 132)
    fixed: dict[str, Any] = tiles_constants(key_format, value_format, plan, rotary, has_bias)
    types = dict.fromkeys(("k_codes", "v_codes"), "*u8") | dict.fromkeys(("k_aux", "v_aux"), "*i16")
    types |= dict.fromkeys(("k_meta", "v_meta", "table_ptr"), "*fp16")
    types |= {"packed_len_ptr": "*i32", "position_ptr": "*i64", "factor": "fp32"}
    types |= dict.fromkeys(("q_ptr", "bias_ptr", "freq_ptr", "part_out", "part_top", "part_sum"), "*fp32")
    aligned = _aligned(tiles_kernel, [n for n, t in types.items() if t[0] == "*"])
    source = ASTSource(tiles_kernel, *_signature(tiles_kernel, fixed, types), aligned)
    return _compile(source, capability, num_warps=plan.warps)


def compile_blocks(
    key_format: Format,
    value_format: Format,
    rows: int = 4,
    rotary: int = 0,
    plan: BlocksPlan | None = None,
    capability: int = 90,
) -> Report:
    """Compile the kernel over formats with readers as a layer with ``rows`` query rows per KV head would use it."""
    sides = (key_format, value_format)
    readers = readers_of(key_format, value_format, rotary)
    plan = plan or make_blocks_plan(
        max(r.width for r in readers),
        128,
        rows,
        32768,
        132,
        is_turned(key_format),
        resident(readers),
        most_tokens(readers),
    )
    fixed = blocks_constants(key_format, value_format, plan, rotary)
    types: dict[str, Any] = {"packed_len_ptr": "*i32", "position_ptr": "*i64", "table_ptr": "*fp16", "factor": "fp32"}
    types["scratch_ptr"] = "*i64"
    types |= dict.fromkeys(("q_ptr", "bias_ptr", "freq_ptr", "part_out", "part_top", "part_sum"), "*fp32")
    for letter, form, reader in zip("kv", sides, readers, strict=True):
        stored = reader.fields(form.allocate(1, 1, max(1, 128 // form.block), "cpu"))
        types[f"{letter}_fields"] = tuple(_pointer(x) for x in stored)
        types[f"{letter}_tables"] = tuple(_pointer(x) for x in reader.tables(torch.device("cpu")))
        types |= {f"{letter}_mean": "*fp16", f"{letter}_norm": "*u8", f"{letter}_basis": "*fp16"}
    names = blocks_kernel.arg_names
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for at, name in enumerate(names):
        value = fixed.get(name, types.get(name, "i32"))
        signature[name] = _typed((at,), value, name in fixed, constants, aligned)
    source = ASTSource(blocks_kernel, signature, constants, aligned)
    return _compile(source, capability, **blocks_options(readers, plan.warps))


def compile_unpack(
    form: Format, rotary: int = 0, turn: bool = False, bf16: bool = False, capability: int = 90
) -> Report:
    """Compile the kernel that unpacks a format; ``rotary`` channels are rotated, ``turn``: every head has a matrix."""
    reader, fixed = unpack._reader(form, rotary), unpack.constants(form, rotary, turn)
    stored = form.allocate(1, 1, max(1, 128 // form.block), "cpu")
    types: dict[str, Any] = {
        "fields": tuple(_pointer(x) for x in reader.fields(stored)),
        "tables": tuple(_pointer(x) for x in reader.tables(torch.device("cpu"))),
        "mean_ptr": "*fp32" if turn else "*fp16",
        "norm_ptr": "*u8",
        "basis_ptr": "*fp16",
        "table_ptr": "*fp16",
        "position_ptr": "*i64",
        "scratch_ptr": "*i64",
        "out_ptr": _width(bf16),
    }
    types |= dict.fromkeys(("size_ptr", "freq_ptr"), "*fp32")
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for at, name in enumerate(unpack_kernel.arg_names):
        value = fixed.get(name, types.get(name, "i32"))
        signature[name] = _typed((at,), value, name in fixed, constants, aligned)
    source = ASTSource(unpack_kernel, signature, constants, aligned)
    return _compile(source, capability, **unpack.OPTIONS)


def compile_dense(
    head_dim: int = 128,
    rows: int = 4,
    bf16: bool = False,
    windows: bool = True,
    capability: int = 90,
    shared_memory: int = 227 * 1024,
) -> Report:
    """Compile the kernel over dense storage as a layer with ``rows`` query rows per KV head would use it, on a device whose
    programs may have ``shared_memory`` bytes.

    Parameters
    ----------
    windows : bool
        Whether programs of the same launch attend to the windows.
    """
    plan = dense.make_plan(head_dim, 128, rows, 32768, replace(HOPPER, shared_memory=shared_memory))
    fixed: dict[str, Any] = dense.constants(head_dim, plan, windows, capability >= 90)
    tensors = ("q_ptr", "keys", "values", "sink_k", "sink_v", "ring_k", "ring_v")
    types = dict.fromkeys(tensors, _width(bf16)) | {"factor": "fp32"}
    types |= dict.fromkeys(("packed_len_ptr", "sink_len_ptr", "recent_len_ptr"), "*i32")
    types |= dict.fromkeys(("part_out", "part_top", "part_sum"), "*fp32")
    aligned = _aligned(dense_kernel, [n for n, t in types.items() if t[0] == "*" and not n.endswith("len_ptr")])
    source = ASTSource(dense_kernel, *_signature(dense_kernel, fixed, types), aligned)
    return _compile(source, capability, num_warps=plan.warps, num_stages=plan.stages)


def compile_dense_encoding(
    head_dim: int = 128, tokens: int | None = 1, bf16: bool = True, advance: bool = False, capability: int = 90
) -> Report:
    """Compile what takes ``tokens`` new ones into dense storage in a decode step, or (None) what copies a prompt's blocks."""
    width = _width(bf16)
    if tokens is None:
        function, fixed = _encode_dense._copy_kernel, {"D": head_dim, "PICKED": True, "RING": True}
        types = {"source": width, "target": width, "rows": "*i64"}
    else:
        function = _encode_dense._step_kernel
        fixed = {"BLOCK": 32, "D": head_dim, "NEW": triton.next_power_of_2(tokens) if tokens else 0, "ADVANCE": advance}
        fixed["EARLY"] = capability >= 90
        types = dict.fromkeys(("key", "value", "sink_k", "sink_v", "ring_k", "ring_v", "keys", "values"), width)
        types |= dict.fromkeys(("total_len", "packed_len", "sink_len", "recent_len", "ticket"), "*i32")
    fixed |= {n: 1 for n in function.arg_names if n.endswith("stride_c")}
    strides = [n for n in function.arg_names if "stride" in n and n not in fixed]
    aligned = _aligned(function, [*strides, *(n for n, t in types.items() if t == width)])
    types |= dict.fromkeys(strides, "i64")
    source = ASTSource(function, *_signature(function, fixed, types), aligned)
    return _compile(source, capability, num_warps=4)


def compile_merge(
    head_dim: int = 128, capability: int = 90, has_sinks: bool = False, rows: int = 32, splits: int = 32
) -> Report:
    """Compile the kernel that merges ``splits`` parts of ``rows`` query rows of all heads."""
    shape = merge_shape(rows, splits, head_dim)
    fixed: dict[str, Any] = {"D": head_dim, "PART": shape.part, "HAS_SINKS": has_sinks, "FLAT": shape.flat}
    types = {"part_out": "*fp32", "part_top": "*fp32", "part_sum": "*fp32", "out": "*fp16", "sinks": "*bf16"}
    fixed |= {"SOON": True} if capability >= 90 else {"N": 8 if shape.flat else 64}
    kernel, build = (merge_rows_kernel, GluonASTSource) if capability >= 90 else (merge_kernel, ASTSource)
    return _compile(build(kernel, *_signature(kernel, fixed, types), {}), capability, num_warps=shape.warps)


def compile_windows(
    rows: int = 2048,
    head_dim: int = 128,
    bf16: bool = False,
    has_new: bool = True,
    has_valid: bool = False,
    capability: int = 90,
    shared_memory: int = 99 * 1024,
    stays: bool | None = None,
) -> Report:
    """Compile the kernel over full-precision tokens for ``rows`` query rows per KV head, and programs that may have
    ``shared_memory`` bytes. ``stays`` not None: for normalized results, by programs that take one block of rows or many."""
    (m, n, warps), padded = tile_sizes(rows, head_dim, 2 * ROWS if stays else ROWS), triton.next_power_of_2(head_dim)
    fixed = {"D": head_dim, "DP": padded, "M": m, "N": n, "HAS_NEW": has_new, "HAS_VALID": has_valid, "EARLY": False}
    fixed |= {"STAYS": bool(stays)} | dict.fromkeys(("NORMAL", "SKIPS"), stays is not None)
    types = dict.fromkeys(("q_ptr", "sink_k", "sink_v", "ring_k", "ring_v", "new_k", "new_v"), _width(bf16))
    types |= dict.fromkeys(("sink_len_ptr", "packed_len_ptr", "recent_len_ptr"), "*i32")
    types |= dict.fromkeys(("part_out", "part_top", "part_sum"), "*fp32")
    types |= {"part_out": "*fp32" if stays is None else _width(bf16), "valid_ptr": "*u8", "factor": "fp32"}
    strides = ["k_batch", "k_head", "k_token", "v_batch", "v_head", "v_token"]  # multiples of head_dim
    aligned = [*(n for n, t in types.items() if t[0] == "*" and n != "valid_ptr"), *strides]
    source = ASTSource(windows_kernel, *_signature(windows_kernel, fixed, types), _aligned(windows_kernel, aligned))
    return _compile(source, capability, num_warps=warps, num_stages=stages(head_dim, shared_memory))


_ENCODE_TYPES = {
    "*i32": (
        *("codes_out", "aux_out", "k_codes", "k_aux", "v_codes", "v_aux"),
        *("total_len", "packed_len", "sink_len", "recent_len", "ticket", "counts"),
    ),
    "*i64": ("rows", "first_position", "boundary", "numbers"),
    "*fp32": ("mean", "norm", "inverse", "update", "inv_freq"),
    "*fp16": ("meta_out", "k_meta", "v_meta"),
    "fp32": ("rope_factor",),
}


def compile_encode(
    form: AffineGroups,
    center: bool = False,
    norm: bool = False,
    width: int = 0,
    rope: bool = False,
    rows: bool = True,
    ring: bool = False,
    numbers: bool = False,
    bf16: bool = True,
    capability: int = 90,
) -> Report:
    """Compile the kernel that encodes whole blocks.

    Parameters
    ----------
    center, norm, rope : bool
        Keys lose a mean; are divided by norms; are un-rotated.
    width : int
        Channels of a slice of SQuat's update; 0: none.
    rows, ring : bool
        Sequences are picked by an index; tokens come from the ring.
    numbers : bool
        Blocks have updates of their own.
    """
    tile, group, axis, mode, bits = encode._constants(form)
    fixed = {"T": tile, "D": form.head_dim, "G": group, "AXIS": axis, "MODE": mode, "BITS": bits}
    fixed |= {"VALUE": form.operand == "value", "ROWS": rows, "RING": ring}
    fixed |= {"MEAN": center, "NORM": norm, "ROPE": rope, "WIDTH": width, "NUMBERS": numbers}
    return _compile_encode(_encode_kernel, fixed, ("x",), bf16, encode._warps(form, cut=rope or width > 0), capability)


def compile_step(
    key_format: AffineGroups,
    value_format: AffineGroups,
    center: bool = False,
    norm: bool = False,
    width: int = 0,
    rope: bool = False,
    tokens: int = 1,
    boundary: bool = False,
    advance: bool = False,
    counts: bool = False,
    bf16: bool = True,
    capability: int = 90,
) -> Report:
    """Compile the kernel of a decode step: close what is due, append ``tokens``; 0: close only.

    The other parameters are those of :func:`compile_encode` and of :func:`kvfold.kernels.affine.encode.append_and_close`.
    """
    fixed = {"BLOCK": key_format.block, "NEW": triton.next_power_of_2(tokens) if tokens else 0, "CLOSE": True}
    fixed |= {"ADVANCE": advance, "COUNTS": counts, "BOUNDARY": boundary, "D": key_format.head_dim}
    for letter, form in (("K", key_format), ("V", value_format)):
        tile, group, axis, mode, bits = encode._constants(form)
        fixed |= {f"{letter}T": tile, f"{letter}G": group, f"{letter}_AXIS": axis}
        fixed |= {f"{letter}_MODE": mode, f"{letter}_BITS": bits}
    fixed |= {"MEAN": center, "NORM": norm, "ROPE": rope, "WIDTH": width, "EARLY": capability >= 90}
    inputs = ("key", "value", "sink_k", "sink_v", "ring_k", "ring_v")
    warps = encode._warps(key_format, value_format, cut=rope or width > 0)
    return _compile_encode(_step_kernel, fixed, inputs, bf16, warps, capability)


def _compile_encode(
    function: Any, fixed: dict[str, Any], inputs: tuple[str, ...], bf16: bool, warps: int, capability: int
) -> Report:
    names = function.arg_names
    fixed |= {"WARPS": warps, **{n: 1 for n in names if n.endswith("stride_c")}}
    types = {n: "i64" for n in names if "stride" in n} | dict.fromkeys(inputs, _width(bf16))
    types |= {name: kind for kind, of in _ENCODE_TYPES.items() for name in of}
    aligned = _aligned(
        function, [n for n in names if n not in fixed and ("stride" in n or types.get(n, "")[:1] == "*")]
    )
    source = ASTSource(function, *_signature(function, fixed, types), aligned)
    return _compile(source, capability, num_warps=warps, num_stages=1, enable_fp_fusion=False)


def compile_encode_pages(
    form: Format, statistics: bool = False, picked: bool = True, bf16: bool = True, capability: int = 90
) -> Report:
    """Compile the kernel that encodes a call's blocks of a format with statistics per page.

    Parameters
    ----------
    statistics : bool
        The kernel that makes the statistics, instead.
    picked : bool
        Sequences are picked by an index.
    """
    of = encode_pages.side(form)
    fixed = {"D": of.inner.head_dim, "FORM": of.form, "PICKED": picked}
    if statistics:
        return _compile_pages(_encode_pages._statistics_kernel, fixed, {}, ("ring", "new"), bf16, 4, capability)
    fixed |= {"VALUE": of.inner.operand == "value", "WARPS": of.warps}
    return _compile_pages(
        _encode_pages._blocks_kernel, fixed, _words(of, ""), ("ring", "new"), bf16, of.warps, capability
    )


def compile_pages_step(
    key_format: Format,
    value_format: Format,
    tokens: int = 1,
    boundary: bool = False,
    advance: bool = False,
    counts: bool = False,
    each: int = 1,
    bf16: bool = True,
    capability: int = 90,
) -> Report:
    """Compile the kernel of a decode step of such formats, as :func:`compile_step`."""
    k, v = encode_pages.side(key_format), encode_pages.side(value_format)
    warps = max(k.warps, v.warps)
    fixed = {"BLOCK": k.inner.block, "NEW": triton.next_power_of_2(tokens) if tokens else 0, "CLOSE": True}
    fixed |= {"ADVANCE": advance, "COUNTS": counts, "BOUNDARY": boundary, "D": k.inner.head_dim}
    fixed |= {"KEY": k.form, "VALUE": v.form, "WARPS": warps, "EACH": each, "EARLY": capability >= 90}
    inputs = ("key", "value", "sink_k", "sink_v", "ring_k", "ring_v")
    types = _words(k, "k_") | _words(v, "v_")
    most = encode_pages.most_registers(k, v)
    return _compile_pages(_encode_pages._step_kernel, fixed, types, inputs, bf16, warps, capability, most)


def compile_follow(
    head_dim: int = 128, group: int = 4, heads: int = 8, bf16: bool = True, capability: int = 90
) -> Report:
    """Compile the kernel that makes the updates of pages that follow their own queries."""
    fixed = {"GROUP": group, "D": head_dim, "WIDTH": head_dim // 2, "WINDOW_BLOCK": 16}
    fixed |= {"ROUNDS": follow.rounds(head_dim, 1.0), "H": triton.next_power_of_2(heads)}
    types = dict.fromkeys(("window", "query"), _width(bf16)) | {"lam": "fp32", "slots": "*i64", "updates": "*fp32"}
    numbers = ("query_start", "window_table", "before_ptr", "closes_ptr", "close_list")
    types |= dict.fromkeys(numbers, "*i32")
    aligned = [*(n for n, t in types.items() if t[0] == "*"), "w_block", "w_place", "w_head", "q_token", "q_head"]
    source = ASTSource(follow_kernel, *_signature(follow_kernel, fixed, types), _aligned(follow_kernel, aligned))
    return _compile(source, capability, num_warps=follow.WARPS, num_stages=1, enable_fp_fusion=False)


def _words(of: encode_pages.Side, letter: str) -> dict[str, str]:
    """Types of a side's codes and 32 bits of groups."""
    width = {0: "*i32", 4: "*u8"}.get(of.form[0], "*i16")
    return {f"{letter}codes": width, f"{letter}aux": width}


def _compile_pages(
    function: Any,
    fixed: dict[str, Any],
    types: dict[str, str],
    inputs: tuple[str, ...],
    bf16: bool,
    warps: int,
    capability: int,
    most: int | None = None,
) -> Report:
    names = function.arg_names
    fixed = fixed | {n: 1 for n in names if n.endswith("stride_c")}
    types = types | {n: "i64" for n in names if "stride" in n} | dict.fromkeys(inputs, _width(bf16))
    types |= {n: "*i32" for n in names if n.endswith("_len") or n in ("ticket", "counts", "boundary")} | {
        "rows": "*i64"
    }
    for letter in ("", "k_", "v_"):
        types |= dict.fromkeys((f"{letter}meta", f"{letter}mean"), "*fp16") | {f"{letter}norm": "*u8"}
        types |= {f"{letter}signs": "*fp32", "table": "*fp32"}
    aligned = [n for n in names if n not in fixed and ("stride" in n or types.get(n, "")[:1] == "*")]
    source = ASTSource(function, *_signature(function, fixed, types), _aligned(function, aligned))
    return _compile(source, capability, num_warps=warps, num_stages=1, enable_fp_fusion=False, maxnreg=most)
