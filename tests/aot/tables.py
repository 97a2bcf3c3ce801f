"""Compile the kernels with tables in shared memory where there is no GPU; as :mod:`aot`."""

from typing import Any

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from aot.report import Report, _aligned, _compile, _signature, _width
from kvfold.formats import Format, GroupCodes
from kvfold.formats.codebook import AdditiveCodes
from kvfold.kernels.commvq import encode as encode_pairs
from kvfold.kernels.commvq._bits import value_bits_kernel
from kvfold.kernels.commvq._encode import gains_kernel, tables_kernel, units_kernel, values_kernel
from kvfold.kernels.commvq._flips import flip_kernel
from kvfold.kernels.commvq._pairs import pairs_search_kernel, stage_bytes
from kvfold.kernels.gluon import tables_of
from kvfold.kernels.paged import PageLayout
from kvfold.kernels.paged.tables import kernel_of
from kvfold.kernels.searched import tiles as encode_tiles
from kvfold.kernels.searched._tiles import project_kernel, tile_kernel


def compile_tables(
    key_format: AdditiveCodes | GroupCodes,
    value_format: Format,
    rows: int = 4,
    capability: int = 90,
) -> Report:
    """Compile the kernel with tables of codes in shared memory as a layer with ``rows`` query rows per KV head would use it."""
    types = dict.fromkeys(("freq_ptr", "part_out", "part_top", "part_sum", "size_ptr"), "*fp32")
    types |= {"q_ptr": "*fp16", "packed_len_ptr": "*i32", "position_ptr": "*i64", "turns_ptr": "*fp16", "scale": "fp32"}
    types |= dict.fromkeys(("rows_ptr", "k_rows_ptr", "v_rows_ptr", "norms_ptr", "k_norms_ptr", "v_norms_ptr"), "*fp16")
    types |= dict.fromkeys(("codes_ptr", "bits_ptr"), "*i16") | dict.fromkeys(("k_codes_ptr", "v_codes_ptr"), "*u8")
    types |= dict.fromkeys(("k_mean_ptr", "v_mean_ptr"), "*fp16") | {"signs_ptr": "*fp32"}
    of = tables_of(key_format, value_format)
    assert of is not None
    plan = of.shape(rows)
    kernel = of.kernel()
    fixed = of.constants(key_format, value_format, plan) | {"EARLY": capability >= 90}
    source = GluonASTSource(kernel, *_signature(kernel, fixed, types), {})
    return _compile(source, capability, num_warps=plan.warps)


def compile_table_pieces(
    key_format: AdditiveCodes | GroupCodes, value_format: Format, rows: int = 4, capability: int = 90
) -> Report:
    """Compile the kernel that reads pages with tables of codes in shared memory."""
    types = dict.fromkeys(("freq_ptr", "part_out", "part_top", "part_sum", "sums_ptr", "size_ptr"), "*fp32")
    types |= {"q_ptr": "*bf16", "turns_ptr": "*fp16", "matrix_ptr": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("rows_ptr", "k_rows_ptr", "v_rows_ptr", "k_mean_ptr", "v_mean_ptr"), "*fp16")
    types |= dict.fromkeys(("items_ptr", "item_list", "table"), "*i32") | {"signs_ptr": "*fp32"}
    keys, values = PageLayout(key_format, value_format)._places
    of = tables_of(key_format, value_format)
    assert of is not None
    plan = of.shape(rows)
    kernel = kernel_of(of)
    types["region"] = "*i16" if isinstance(key_format, AdditiveCodes) else "*u8"
    fixed = of.constants(key_format, value_format, plan)
    fixed["AT"] = (keys["rms"].at, *(values[name].at for name in of.value_fields))
    source = GluonASTSource(kernel, *_signature(kernel, fixed, types), {})
    return _compile(source, capability, num_warps=plan.warps)


def compile_pairs(fmt: AdditiveCodes, capability: int = 90) -> Report:
    """Compile the kernel that finds pairs of codes of keys."""
    fixed, options = encode_pairs.constants(fmt)
    types = dict.fromkeys(("unit_ptr", "shift_ptr", "rms_ptr"), "*fp16") | dict.fromkeys(
        ("rows_ptr", "codes_ptr"), "*i16"
    )
    types |= {"size_ptr": "*fp32", "tables_ptr": "*fp16"}
    signature = _signature(pairs_search_kernel, fixed | {"PICKED": False}, types)
    return _compile(GluonASTSource(pairs_search_kernel, *signature, {}), capability, **options)


def compile_pair_tables(stages: int, bf16: bool = False, capability: int = 90) -> Report:
    """Compile the kernel that makes the tables with which pairs are found."""
    types = dict.fromkeys(("centres", "metric"), _width(bf16)) | dict.fromkeys(
        ("out", "near_shift", "high", "low"), "*fp16"
    )
    types |= dict.fromkeys(("shift", "scale"), "*fp32")
    fixed = {"STAGES": stages, "BYTES": stage_bytes(True), "WIDE": True}
    source = ASTSource(tables_kernel, *_signature(tables_kernel, fixed, types), _aligned(tables_kernel, list(types)))
    return _compile(source, capability, **encode_pairs.TABLES)


def compile_values(codes: int, head_dim: int = 128, bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel that begins with bits of values by levels."""
    tables = dict.fromkeys(("matrix", "shift", "top", "place", "along", "origin", "gram", "bits", "slope"), "*fp32")
    types = {"x": _width(bf16), **tables}
    fixed = {"D": head_dim, "C": codes, "T": encode_pairs.VALUES["T"], "FLIPS": True}
    aligned = _aligned(values_kernel, [*types, "stride_b", "stride_h", "stride_t"])
    source = ASTSource(values_kernel, *_signature(values_kernel, fixed, types), aligned)
    return _compile(source, capability, **encode_pairs.values_options(codes))


def compile_units(head_dim: int = 128, bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel that puts keys under the metric."""
    types = {"x": _width(bf16), "rows": "*i64", "high": "*fp16", "low": "*fp16", "units": "*fp16", "factor": "fp32"}
    types |= dict.fromkeys(("cosines", "sines", "scale", "shift", "sizes"), "*fp32")
    given: dict[str, Any] = encode_pairs.UNITS | {"D": head_dim, "HALF": head_dim // 2, "PICKED": False}
    fixed = {name: given.pop(name) for name in list(given) if name.isupper()}
    pointers = [name for name, kind in types.items() if kind[0] == "*"]
    aligned = _aligned(units_kernel, [*pointers, "stride_b", "stride_h", "stride_t", "turns"])
    source = ASTSource(units_kernel, *_signature(units_kernel, fixed, types), aligned)
    return _compile(source, capability, num_stages=1, **given)


def compile_gains(codes: int, head_dim: int = 128, bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel that says what flipping each bit of values gains."""
    vectors = ("offset", "scale", "shift", "top", "place", "half", "gains")
    types = {"x": _width(bf16), "bits": "*u8"} | dict.fromkeys(vectors, "*fp32")
    types |= dict.fromkeys(("matrix", "along", "gram"), "*fp16")
    fixed = {"D": head_dim, "C": codes, "T": encode_pairs.GAINS["T"]}
    aligned = _aligned(gains_kernel, [*types, "stride_b", "stride_h", "stride_t"])
    source = ASTSource(gains_kernel, *_signature(gains_kernel, fixed, types), aligned)
    return _compile(source, capability, **encode_pairs.gains_options(codes))


def compile_flips(codes: int, capability: int = 90) -> Report:
    """Compile the kernel that flips bits of values and packs them."""
    types = {"gains_ptr": "*fp32", "gram_ptr": "*fp16", "least_ptr": "*fp32", "rows_ptr": "*i64", "bits_ptr": "*i32"}
    fixed = {"C": codes, "ORDER": 1, "PICKED": False}
    source = GluonASTSource(flip_kernel, *_signature(flip_kernel, fixed, types), {})
    return _compile(source, capability, num_warps=1, maxnreg=encode_pairs.FLIP[codes])


def compile_value_bits(codes: int, head_dim: int = 128, capability: int = 90) -> Report:
    """Compile the kernel that chooses bits of values, flips and packs them."""
    types = {"x_ptr": "*bf16", "rows_ptr": "*i64", "bits_ptr": "*i32", "operands_ptr": "*fp16", "gram_ptr": "*fp16"}
    types |= dict.fromkeys(("offset_ptr", "scale_ptr", "vectors_ptr", "least_ptr"), "*fp32")
    given = encode_pairs.TOGETHER
    fixed = {"D": head_dim, "C": codes, "KIND": 1, "EVERY": given["EVERY"], "ORDER": 1, "PICKED": False}
    source = GluonASTSource(value_bits_kernel, *_signature(value_bits_kernel, fixed, types), {})
    return _compile(source, capability, num_warps=given["num_warps"], maxnreg=encode_pairs.CHOSEN[codes])


def compile_tile(fmt: Format, bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel that encodes rotated and balanced tiles."""
    given = encode_tiles.constants(fmt) | {"PICKED": False}
    fixed = {name: given.pop(name) for name in list(given) if name.isupper()}
    types = {"x": _width(bf16), "rows": "*i64", "signs": "*fp32", "codes": "*u8", "meta": "*fp16", "factor": "*fp16"}
    aligned = _aligned(tile_kernel, [*types, "stride_b", "stride_h", "stride_t"])
    return _compile(ASTSource(tile_kernel, *_signature(tile_kernel, fixed, types), aligned), capability, **given)


def compile_map(head_dim: int, bf16: bool = True, capability: int = 90) -> Report:
    """Compile the kernel that puts keys under a learned map."""
    given = encode_tiles.PROJECT | {"D": head_dim}
    fixed = {name: given.pop(name) for name in list(given) if name.isupper()}
    types = {"x": _width(bf16)} | dict.fromkeys(("mean", "matrix", "out"), "*fp32")
    aligned = _aligned(project_kernel, [*types, "stride_b", "stride_h", "stride_t"])
    source = ASTSource(project_kernel, *_signature(project_kernel, fixed, types), aligned)
    return _compile(source, capability, num_stages=1, **given)
