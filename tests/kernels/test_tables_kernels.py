"""Kernels with tables of codes in shared memory (CommVQ, VQLLM, TaSQ): their lanes run by PyTorch, compiled ahead, chosen."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import lanes
from blocks_case import Case, by_groups, commvq, residuals, unproject
from books_case import layer as books_layer
from kvfold.kernels import blocks, codebook, groups, paged, residual, tables
from kvfold.kernels.aot_tables import compile_table_pieces, compile_tables
from kvfold.kernels.paged import Workspace
from kvfold.kernels.paged import tables as paged_tables
from kvfold.kernels.partials import Partials
from kvfold.rope import Rope
from paged_case import Server, formats_of

FORMATS = {
    "commvq-1bit": (commvq(11, codes=128, rounded=True), unproject),
    "commvq-2bit": (commvq(21, codes=256, rounded=True), unproject),
    "vqllm-1bit": (residuals(rounded=True), None),
    "vqllm-2bit": (residuals((8, 32, 256), (8, 32, 256), rounded=True), None),
    "tasq": (by_groups((8, True), (8,), mean=3.0), None),
    "tasq-no-mean": (by_groups((8, True), (8,)), None),
}


class Emulated:
    """A kernel whose launches PyTorch runs."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, **constants):
            lanes.run(self.kernel, grid, arguments, constants, num_warps, 227 << 10)

        return launch


def module(name):
    return codebook if name.startswith("commvq") else groups if name.startswith("tasq") else residual


def attended(case, of):
    """Attention over the packed tokens alone, float32 [batch, heads, rows, head_dim]."""
    call = case.call
    plans = [replace(of.plan_of(call, span), splits=2) for span in call.spans]
    batch, heads, rows, dim = call.rows.shape
    parts = Partials.empty(batch * heads, sum(p.splits for p in plans), rows, dim, call.rows.device)
    at = 0
    for plan, span in zip(plans, call.spans, strict=True):
        blocks.attend_packed(call, span, call.rows, None, parts, at, plan)
        at += plan.splits
    weight = torch.exp2(parts.top - parts.top.amax(1, keepdim=True))
    out = (parts.out * weight.unsqueeze(-1)).sum(1) / (parts.total * weight).sum(1).unsqueeze(-1)
    return out.view(batch, heads, rows, dim)


def wanted(case):
    """The same by decoding."""
    call, out = case.call, []
    for b, tokens in enumerate(call.packed_len.tolist()):
        sides = []
        for form, fields in ((call.key_format, "keys"), (call.value_format, "values")):
            parts = []
            for span in call.spans:
                stored = getattr(span, fields)
                room = next(iter(stored.values())).shape[2]
                if count := min(max(tokens - span.start, 0) // form.block, room):
                    parts.append(form.decode({n: x[b : b + 1, :, :count] for n, x in stored.items()}))
            sides.append(torch.cat(parts, 2).float())
        keys, values = sides
        keys = call.rope.rotate(keys, call.first_position[b] + torch.arange(tokens))[0]
        values = (values if call.unproject is None else call.unproject(values))[0]
        out.append((call.rows[b] @ keys.transpose(-1, -2) * call.scale).softmax(-1) @ values)
    return torch.stack(out)


@pytest.mark.parametrize(
    "name, per_head", [*((name, 4) for name in FORMATS), ("commvq-1bit", 6), ("vqllm-1bit", 8), ("tasq", 6)]
)
def test_lanes_agree_with_decoding(name, per_head, monkeypatch):
    of = module(name)
    kernel = "codebook_kernel" if of is codebook else "residual_kernel"
    monkeypatch.setattr(of, kernel, Emulated(getattr(of, kernel)))
    method, turned = FORMATS[name]
    case = Case(
        method,
        head_dim=128,
        rotary=128,
        packed=(288, 32),
        slabs=(4, 8),
        per_head=per_head,
        in_place=True,
        unproject=turned,
    )
    got, want = attended(case, of), wanted(case)
    assert torch.isfinite(got).all()
    for b in range(len(want)):
        assert float((got[b] - want[b]).norm() / want[b].norm()) < 1e-3


@pytest.mark.parametrize(
    "method, per_head, tokens",
    [("commvq:bits=1", 4, 1), ("commvq", 4, 1), ("vqllm:bits=1", 4, 2), ("vqllm", 2, 1), ("tasq", 4, 1)],
)
def test_lanes_read_pages(method, per_head, tokens, monkeypatch):
    """Two sequences through their tables: a piece of one, two of the other, of which the last page is not full."""
    name = "codebook_pieces_kernel" if method.startswith("commvq") else "residual_pieces_kernel"
    monkeypatch.setattr(paged_tables, name, Emulated(getattr(paged_tables, name)))
    monkeypatch.setattr(paged_tables, "program_memory", lambda device: 227 << 10)
    server = Server(method, (210, 300), 128, per_head=per_head, layer=books_layer(method, 128, per_head=per_head))
    paged.store(server.step([210 - tokens, 300 - tokens]))
    call = server.step([tokens, tokens], in_place=True)
    space = Workspace.make(3, 4, 512, 2 * per_head, 128, "cpu", short=2, piece_pages=1)
    pieces = [(i, page, page + 1) for i in range(2) for page in range(-(-call.step.host[i].packed // 128))]
    for at, (i, first, stop) in enumerate(pieces):
        row = call.step.host[i]
        line = (i, first, stop, row.packed, row.sink, row.start, row.count, 0)
        space.item_list[at] = torch.tensor(line, dtype=torch.int32)
    space.items[call.step.seqs] = len(pieces)
    rows = per_head * tokens
    paged_tables.pieces(call, call.query, rows, replace(space, processors=2), call.query)
    parts = [x.view(-1, 2, rows, *x.shape[1:]) for x in (space.out[:, :128], space.top, space.total)]
    for i, row in enumerate(call.step.host[:2]):
        own = [at + i + 1 for at, piece in enumerate(pieces) if piece[0] == i]
        sums, top, total = (x[own] for x in parts)
        weight = torch.exp2(top - top.amax(0))
        got = (sums * weight.unsqueeze(-1)).sum(0) / (total * weight).sum(0).unsqueeze(-1)
        keys, values = paged.reference.unpacked(call, row, row.sink, row.packed)
        query = call.query[row.start : row.start + tokens].transpose(0, 1).unflatten(0, (2, -1)).flatten(1, 2)
        want = (query @ keys[0].mT * call.scale).softmax(-1) @ (call.unproject(values) if call.unproject else values)[0]
        assert float((got - want).norm() / want.norm()) < 1e-3


def test_sums_of_codes_are_turned_into_values():
    """The interpreter is chosen when kernels are defined, so it needs a process of its own."""
    here = Path(__file__).parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (here, *sys.path)))}
    done = subprocess.run([sys.executable, str(here / "turn_case.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name, rows", [*((name, 4) for name in FORMATS), ("commvq-2bit", 8)])
def test_compiles_without_spills(name, rows):
    report = compile_tables(*FORMATS[name][0](128, "cpu"), rows=rows)
    assert report.spilled == 0
    assert report.instructions["HMMA"] and report.shared <= 228 << 10


@pytest.mark.parametrize(
    "name, rows, most", [("commvq-1bit", 4, 0), ("commvq-1bit", 8, 40), ("vqllm-1bit", 8, 0), ("tasq", 4, 0)]
)
def test_reading_pages_compiles_with_few_spills(name, rows, most):
    report = compile_table_pieces(*FORMATS[name][0](128, "cpu"), rows=rows)
    assert report.spilled <= most
    assert report.instructions["HMMA"] and report.shared <= 227 << 10


def test_which_pages_the_kernels_leave_to_others():
    keys, values = FORMATS["commvq-1bit"][0](128, "cpu")
    rope, cuda = Rope(torch.ones(64)), torch.device("cuda")

    def why(keys=keys, values=values, rope=rope, rows=4, device=cuda):
        return paged_tables.unsupported(keys, values, rope, rows, device)

    assert "9 query rows" in why(rows=9)
    assert "device cpu" in why(device=torch.device("cpu"))
    assert "rope None" in why(rope=None)
    assert "RoPE of 64 channels" in why(rope=Rope(torch.ones(32)))
    assert "not seen right" in why(values=replace(values, codes=256))
    assert "keys: uniform" in why(keys=formats_of("fold", 128)[0].inner)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_served(name):
    of = module(name)
    keys, values = FORMATS[name][0](128, "cpu")
    if of is groups:
        assert of.unsupported(keys, values, 128) is None
        assert "values: strided=True" in of.unsupported(keys, keys, 128)
        assert "8 channels of 128" in of.unsupported(*by_groups((4, True), (4,))(128, "cpu"), 128)
        return
    assert of.unsupported(keys, values, 128) is None
    assert of.unsupported(keys, values, 64) == "keys: RoPE of 64 channels; allowed: 128"
    assert "values" in of.unsupported(keys, keys, 128)
    assert "64" in of.unsupported(*FORMATS[name][0](64, "cpu"), 64)
    plain = (commvq(11, codes=128) if of is codebook else residuals())(128, "cpu")
    assert "whole steps" in of.unsupported(*plain, 128)


def test_programs_fill_the_multiprocessors_once():
    """Every program begins with its tables, so a second wave would cost them again."""
    for of in (codebook, residual):
        for jobs, units in ((8, 4096), (128, 1024), (32, 1024)):
            plan = tables.make_plan(jobs, 4, units, 132, of.BEGIN)
            assert 0.9 * 132 < jobs * plan.splits <= 132


@pytest.mark.parametrize(("name", "rows"), [("commvq-2bit", 4), ("vqllm-2bit", 8)])
def test_a_gpu_without_room_for_the_tables_is_refused_by_name(name, rows, monkeypatch):
    """An A100's programs have 163 KB: another kernel serves there, and ``explain`` says why."""
    case = Case(FORMATS[name][0], head_dim=128, rotary=128, packed=(64,), slabs=(2,), per_head=rows, in_place=True)
    for there, expected in ((227 << 10, None), (163 << 10, "166912 bytes of shared memory; needed: ")):
        monkeypatch.setattr(tables, "program_memory", lambda device, there=there: there)
        why = module(name).declines(case.call)
        assert why is None if expected is None else why.startswith(expected), why
