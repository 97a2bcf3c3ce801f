"""Attention over keys under a map and rotated 2-bit values by the Gluon kernel: its lanes run by PyTorch, compiled, chosen."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import lanes
from aot import plain as aot_plain
from blocks_case import HEADS, Case, attended, grouped, rand
from kvfold.formats import AffineGroups, Hadamard, Paged
from kvfold.formats.projected import HeadMaps
from kvfold.kernels import REGISTRY
from kvfold.kernels.device import HOPPER
from kvfold.kernels.mapped import decode as mapped
from kvfold.storage.reader import mapped as through
from pieces_case import Emulated


def formats(mix=128, block=32, dim=128, operand="plain", device="cpu"):
    affine = AffineGroups(dim, block, operand, 2, "channel", "asym", dim)
    values = affine if mix == 1 else Paged(dim, block, operand, affine, False, "", Hadamard(dim, mix))
    return grouped(4, head_dim=dim, block=block, device=device), values


def case(mix=128, block=32, maps=True, device="cpu", **options):
    """A call; queries go through maps that mix channels, and keys have a mean."""
    made = Case(lambda dim, device: formats(mix, block, dim, device=device), 128, device=device, **options)
    if maps:
        matrix = torch.eye(128) + 0.05 * rand(HEADS, 128, 128, seed=11)
        own = HeadMaps(2 * rand(HEADS, 128, seed=12), torch.linalg.inv(matrix), matrix)
        held = HeadMaps(*(x.to(device) for x in (own.mean, own.apply, own.restore)))
        made.call = replace(made.call, project=lambda queries, dtype: through(held, queries, dtype))
    return made


def error(made):
    """Relative RMS error of attention over packed tokens alone, of the worse sequence that has some."""
    call = made.call
    got, (queries, bias) = attended(made, mapped.MappedTiles()), call.projected
    worst = 0.0
    for b, tokens in enumerate(call.packed_len.tolist()):
        if tokens == 0:
            continue
        sides = []
        for form, name in ((call.key_format, "keys"), (call.value_format, "values")):
            parts = []
            for span in call.spans:
                stored = getattr(span, name)
                if count := min(max(tokens - span.start, 0) // form.block, next(iter(stored.values())).shape[2]):
                    parts.append(form.decode({n: x[b : b + 1, :, :count] for n, x in stored.items()}))
            sides.append(torch.cat(parts, 2)[0].float())
        scores = queries[b] @ sides[0].transpose(-1, -2) + (0 if bias is None else bias[b].unsqueeze(-1))
        want = (scores * call.scale).softmax(-1) @ sides[1]
        worst = max(worst, float((got[b] - want).norm() / want.norm()))
    return worst


@pytest.fixture(params=[1, 2], ids=["units", "pairs"])
def emulated(request, monkeypatch):
    monkeypatch.setattr(mapped, "mapped_kernel", Emulated(mapped.mapped_kernel))
    monkeypatch.setattr(mapped, "make_plan", lambda *shape: mapped.Plan(2, request.param))


@pytest.mark.parametrize("options", [
    {"per_head": 4, "packed": (288, 32), "slabs": (4, 8)},
    {"per_head": 1, "packed": (640, 0), "slabs": (32,)},
    {"per_head": 12, "packed": (160, 96), "slabs": (8,), "maps": False},
    {"per_head": 4, "packed": (256, 128), "slabs": (2,), "block": 128, "mix": 32},
    {"per_head": 3, "packed": (96, 64), "slabs": (8,), "mix": 1},
], ids=["slabs", "one query", "more than eight", "blocks of a page", "no rotation"])  # fmt: skip
def test_lanes_agree_with_decoding(options, emulated):
    assert error(case(**options, in_place=True)) < 1e-3


@pytest.mark.parametrize("size", [1e-4, 100.0])
def test_small_and_large_values_keep_their_digits(size, emulated):
    assert error(case(per_head=4, packed=(160, 96), slabs=(8,), in_place=True, size=size)) < 1.5e-3


def test_lanes_never_meet_in_a_bank_where_they_look_up(monkeypatch, emulated):
    """A half of a warp reads a row of 8 bytes a lane at once, all of one code's 128 bytes; 32 lanes a word of codes each."""
    read, met = lanes.Program.load_shared, []

    def load_shared(self, address, offset, count):
        at = address + offset
        if count == 2 and int(at.max()) < 65536:
            met.append((at.view(-1, 16) // 8 % 16).sort(-1)[0].diff(dim=-1).min().item())
        return read(self, address, offset, count)

    monkeypatch.setattr(lanes.Program, "load_shared", load_shared)
    assert error(case(per_head=4, packed=(128, 96), slabs=(4,), in_place=True)) < 1e-3
    assert met and min(met) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, limit", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("per_head, tokens", [(1, 1), (4, 1), (8, 1), (4, 4)])
@pytest.mark.parametrize("packed, slabs, options", [
    ((4096, 3968), (128,), {}),
    ((96, 1280), (16, 32), {}),
    ((640, 0), (8, 8, 8), {"maps": False}),
    ((1024, 896), (4, 4), {"block": 128, "mix": 32}),
    ((8192, 8160), (256,), {"mix": 1}),
])  # fmt: skip
def test_calls_on_a_gpu(packed, slabs, options, per_head, tokens, dtype, limit):
    """Ragged sequences, several slabs, storage that holds no token full of NaN."""
    of = {"packed": packed, "slabs": slabs, "in_place": True, "ring": 160, "tokens": tokens, "per_head": per_head}
    assert case(**of, **options, dtype=dtype, device="cuda").error(mapped.MappedTiles()) < limit


def changed(side, **changes):
    keys, values = formats()
    return (replace(keys, **changes), values) if side == "keys" else (keys, replace(values, **changes))


@pytest.mark.parametrize("forms, reason", [
    (formats(), None),
    (changed("keys", strided=True), "keys: strided groups, or less a mean; allowed: groups of neighbours"),
    (changed("keys", book=None), "keys: no codebook"),
    (changed("values", inner=AffineGroups(128, 32, "plain", 3, "channel", "asym", 128)),
     "values: 3 bits, mode=asym, operand=plain; allowed: 2, asym, plain"),
    (changed("values", inner=AffineGroups(128, 32, "plain", 2, "channel", "asym", 32)),
     "values: groups of 32 along channels; allowed: of 128 along channels"),
    ((formats()[1], formats()[1]), "keys: paged storage; allowed: group codes"),
])  # fmt: skip
def test_what_it_does_not_serve_it_names(forms, reason):
    assert mapped.unsupported(*forms) == reason


def test_more_query_heads_are_left_to_another_kernel_by_name(monkeypatch):
    monkeypatch.setattr(mapped, "device_info", lambda device: HOPPER)
    kernel, gpu = REGISTRY["mapped"], torch.device("cuda")
    assert kernel.why_not_queries(*formats(), gpu, 16, 0) is None
    assert kernel.why_not_queries(*formats(), gpu, 24, 0) == "24 query rows; allowed: up to 16"
    monkeypatch.setattr(mapped, "device_info", lambda device: replace(HOPPER, shared_memory=99 << 10))
    assert "bytes of shared memory; needed: 143360" in kernel.why_not_queries(*formats(), gpu, 4, 0)


def test_queries_pass_their_map_once(emulated):
    """For all spans of a call, which leaves them and their bias to the kernel."""
    made, seen = case(per_head=2, packed=(160, 96), slabs=(4, 4), in_place=True), []
    project = made.call.project

    def counted(queries, dtype):
        seen.append(dtype)
        return project(queries, dtype)

    made.call = replace(made.call, project=counted)
    assert error(made) < 1e-3 and seen == [torch.float32]


@pytest.mark.parametrize("jobs, units, shape", [
    (1, 1, (1, 1)), (8, 4096, (16, 2)), (8, 1016, (16, 1)), (8, 248, (16, 1)), (128, 1024, (1, 2)), (4096, 16, (1, 1)),
])  # fmt: skip
def test_launch_shapes(jobs, units, shape):
    """Storage of 131,072 tokens of eight heads, of 32,512, 8,000 and others, on 132 multiprocessors."""
    assert mapped.make_plan(jobs, units, 132) == mapped.Plan(*shape)
    assert mapped.program_bytes() <= 227 << 10


@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("mix", [1, 128])
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_with_few_spills(mix, units, capability):
    report = aot_plain.compile_mapped(formats(mix)[1], units, capability)
    assert report.registers <= mapped.REGISTERS and report.spills_in_loop <= 3 * (units - 1)
