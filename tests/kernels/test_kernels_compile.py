"""Every GPU kernel compiles ahead of time, on a machine without a GPU, within the registers and the shared memory it may use.

Of the decode kernel's specializations a set that has every two choices together compiles for sm_90, and for sm_80 or sm_100 in
turn; ``pytest -m compile_all tests/kernels/test_kernels_compile.py`` compiles all of them for each.
"""

import pytest

pytest.importorskip("triton")

import aot
from kvfold.formats import AffineGroups
from kvfold.kernels.affine._keys import query_exponent
from kvfold.kernels.affine.decode import unsupported
from specializations import (
    BITS,
    CAPABILITIES,
    SHARED_MEMORY,
    decode_specializations,
    encode_specializations,
    formats,
    one_input_each,
    step_specializations,
    together,
    with_inputs,
)

EVERY = one_input_each(decode_specializations())
PAIRS = together(2, with_inputs(decode_specializations()))
ENCODE = together(2, encode_specializations())
STEPS = together(2, step_specializations())


def elsewhere(cases):
    """Every case for one of the other architectures, in turn."""
    return [(c, (80, 100)[i % 2]) for i, c in enumerate(cases)]


def everywhere(cases):
    """Every case for sm_90, and for one of the others."""
    return [(c, 90) for c in cases] + elsewhere(cases)


def check(case, capability):
    """A decode step's loop hardly touches the stack: a few registers may lie there where fewer of them make room for more
    warps. A loop over sixteen rows at once, or over 256 channels in groups along them, has more numbers than there are
    registers: one of forty instructions, at most, may move one of them; else one of ninety."""
    key, value = case.formats
    report = aot.compile_decode(key, value, bf16=case.bf16, has_bias=case.bias, capability=capability, plan=case.plan)
    full = case.tiles > 1 or case.shared or (case.head_dim == 256 and case.mode != "kivi")
    assert report.spills_in_loop <= report.loop / (40 if full else 90)
    assert report.spilled <= (256 if full else 64)  # bytes; outside of the loop a few addresses may wait
    assert report.registers <= (case.plan.cap(case.bias) or 255)
    assert report.shared <= min(SHARED_MEMORY.values())  # so that a plan fits wherever the kernel runs
    if capability < 100:
        assert report.instructions["HMMA"] > 0


@pytest.mark.parametrize(("case", "capability"), everywhere(PAIRS), ids=str)
def test_decode_kernels(case, capability):
    check(case, capability)


@pytest.mark.compile_all
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_decode_kernel(case, capability):
    check(case, capability)


WINDOWS = [(80, 86), (80, 80), (90, 90), (100, 100)]
"""Compute capability to compile for, and the one whose shared memory there is."""


SIZES, ROWS = (64, 80, 128, 256), (1, 64, 2048)


@pytest.mark.parametrize(
    ("head_dim", "rows", "architecture"),
    [(d, ROWS[(i + j) % 3], a) for i, d in enumerate(SIZES) for j, a in enumerate(WINDOWS)],  # every two together
    ids=str,
)
def test_windows_kernel(head_dim, rows, architecture):
    check_windows(head_dim, rows, architecture)


@pytest.mark.compile_all
@pytest.mark.parametrize("architecture", WINDOWS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", SIZES)
def test_every_windows_kernel(head_dim, rows, architecture):
    check_windows(head_dim, rows, architecture)


@pytest.mark.parametrize("stays", [False, True], ids=["", "beside attention"])
@pytest.mark.parametrize("bf16", [False, True])
def test_windows_of_calls_that_unpack(bf16, stays):
    report = aot.compile_windows(2048, 128, bf16, True, bf16, 90, 227 * 1024, stays)
    assert report.spills_in_loop == 0 and report.shared <= 227 * 1024


def check_windows(head_dim, rows, architecture):
    capability, room = architecture[0], SHARED_MEMORY[architecture[1]]
    report = aot.compile_windows(rows, head_dim, True, rows > 1, rows > 64, capability, room)
    full = head_dim == 256 and rows > 1
    assert report.spills_in_loop <= (report.loop / 40 if full else 0)
    assert report.spilled <= (128 if full else 0)
    assert report.shared <= room


def check_encoding(report, transform, group=32):
    """Only SQuat, which holds a tile and its error at once, spills more than a few addresses, and most where a tile is larger
    than a block; the exact sine's table of 2 / pi lies on the stack."""
    squat = 64 if group == 32 else 400
    assert report.spilled <= (320 if transform.get("rope") else squat if transform.get("width") else 16)
    assert report.shared <= min(SHARED_MEMORY.values())


@pytest.mark.parametrize(("case", "capability"), everywhere(ENCODE), ids=str)
def test_encoding_kernels(case, capability):
    options = {"rows": case.rows, "ring": case.ring, "bf16": case.bf16, "capability": capability}
    options |= {"numbers": "width" in case.transform and not case.other}  # as layers have it
    check_encoding(aot.compile_encode(case.form, **case.transform, **options), case.transform, case.group)


@pytest.mark.parametrize(("case", "capability"), everywhere(STEPS), ids=str)
def test_step_kernels(case, capability):
    options = {name: getattr(case, name) for name in ("tokens", "boundary", "advance", "counts", "bf16")}
    report = aot.compile_step(*case.formats, **case.transform, **options, capability=capability)
    check_encoding(report, case.transform)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("rows", [32, 512, 4096])
def test_merge_kernel_compiles_without_spills(has_sinks, rows, capability):
    report = aot.compile_merge(capability=capability, has_sinks=has_sinks, rows=rows)
    assert report.spilled == 0 and (capability < 90 or report.instructions["BAR"] == 0)  # warps do not meet


@pytest.mark.parametrize("bits", BITS)
def test_no_scale_takes_a_query_out_of_fp16(bits):
    """Where scales multiply queries: the largest scale of a group of fp16 numbers, and the largest element of a query."""
    exponent = int(query_exponent(bits, True))
    scale = min(65504, 2 * 65504 / (2**bits - 1))
    assert 2.0 ** (exponent + 1) * scale <= 65504 < 2.0 ** (exponent + 2) * scale or exponent == 3


def test_one_instruction_unpacks_two_elements():
    """The hot loop's size: 8,192 codes of 128 tokens and their share of masks, products and everything else per lane."""
    report = aot.compile_decode(*formats("kivi"))
    assert report.instructions["LOP3"] < 700
    assert report.instructions["HMMA"] < 200


def test_one_instruction_unpacks_two_signed_elements():
    """64 tokens: a mask for two codes and their signs, and the group's share of sign words."""
    report = aot.compile_decode(*formats("sym"))
    assert report.instructions["LOP3"] < 520


@pytest.mark.parametrize(
    "key, value, reason",
    [
        (*formats("kivi", head_dim=96), "head_dim=96"),
        (*formats("kivi", group=16), "group=16"),
        (AffineGroups(128, 32, "key", 2, "token", "sym"), formats("kivi")[1], "mode=sym"),
        (
            AffineGroups(128, 64, "key", 2, "channel", "asym"),
            AffineGroups(128, 64, "value", 2, "token", "asym", 64),
            "group=64",
        ),
    ],
)
def test_what_is_not_supported_is_named(key, value, reason):
    assert reason in unsupported(key, value)


def test_supported():
    assert unsupported(*formats("hybrid")) is None
