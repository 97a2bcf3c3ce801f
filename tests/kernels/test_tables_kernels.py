"""Kernels with tables in shared memory (CommVQ, TaSQ's keys with fold's values): lanes run by PyTorch, compiled, chosen."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import lanes
from aot.tables import compile_table_pieces, compile_tables
from blocks_case import LIMIT, Case, attended, by_groups, byte_codes, commvq, learned_keys, residuals, unproject
from books_case import layer as books_layer
from kvfold import kernels
from kvfold.bench import storage
from kvfold.errors import KVFoldError
from kvfold.kernels.common import tables
from kvfold.kernels.commvq import decode as codebook
from kvfold.kernels.device import HOPPER
from kvfold.kernels.generic import decode as blocks
from kvfold.kernels.gluon import tables_of
from kvfold.kernels.learned import decode as tasq_fold
from kvfold.kernels.paged import attention
from kvfold.kernels.paged import tables as paged_tables
from kvfold.methods import LayerSpec, get
from kvfold.plan import choose_kernel, packed_for
from kvfold.rope import Rope
from paged_case import Server, formats_of
from pieces_case import Emulated, error_of_pieces

FORMATS = {
    "commvq-1bit": (commvq(11, codes=128, rounded=True), unproject),
    "commvq-2bit": (commvq(21, codes=256, rounded=True), unproject),
    "learned": (learned_keys(4, mean=3.0), None),
    "learned-1bit-values": (learned_keys(8, mix=128), None),
}
MODULES = {"commvq": codebook, "learned": tasq_fold}
KERNELS = {codebook: "codebook_kernel", tasq_fold: "learned_keys_kernel"}


def module(name):
    return MODULES[name.split("-")[0]]


def serving(name):
    return tables_of(*FORMATS[name][0](128, "cpu"))


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
    "name, per_head",
    [
        *((name, 4) for name in FORMATS),
        ("commvq-1bit", 6),
        ("commvq-2bit", 8),
        ("learned", 7),
        ("learned-1bit-values", 8),
    ],
)
def test_lanes_agree_with_decoding(name, per_head, monkeypatch):
    agrees(name, per_head, monkeypatch)


def agrees(name, per_head, monkeypatch):
    of = module(name)
    kernel = KERNELS[of]
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
    got, want = attended(case, serving(name)), wanted(case)
    assert torch.isfinite(got).all()
    for b in range(len(want)):
        assert float((got[b] - want[b]).norm() / want[b].norm()) < 1e-3


def test_lanes_hardly_ever_meet_in_a_bank(monkeypatch):
    """A quarter of a warp reads 16 bytes a lane at once, from eight times as many banks. CommVQ's bits do meet, once a unit."""
    read, times = lanes.Program.load_shared, {"least": 0, "found": 0}

    def load_shared(self, address, offset, count):
        if count == 4:
            for quarter in (address + offset).expand(32 * self.warps).view(-1, 8).tolist():
                banks = [at // 16 % 8 for at in set(quarter)]
                times["least"] += 1
                times["found"] += max(banks.count(bank) for bank in banks)
        return read(self, address, offset, count)

    monkeypatch.setattr(lanes.Program, "load_shared", load_shared)
    agrees("commvq-1bit", 4, monkeypatch)
    assert times["least"] > 1000 and times["found"] <= times["least"] * 1.02


@pytest.mark.parametrize(
    "method, per_head, tokens, sink, pages",
    [
        ("commvq:bits=1", 4, 1, None, 1),
        ("commvq", 4, 1, None, 1),
        ("commvq:bits=1", 3, 2, None, 1),
        ("tasq:bits=2,values=fold", 4, 1, None, 1),
        ("tasq:bits=2,values=fold", 7, 1, 64, 2),
        ("tasq:bits=2,values=fold,v_bits=1", 3, 2, None, 1),
        ("tasq:bits=2,values=fold", 8, 1, None, 1),
    ],
)
def test_lanes_read_pages(method, per_head, tokens, sink, pages, monkeypatch):
    """Two sequences through their tables: a piece of one, two of the other, of which the last page is not full."""
    name = ("codebook" if method.startswith("commvq") else "learned_keys") + "_pieces_kernel"
    monkeypatch.setattr(paged_tables, name, Emulated(getattr(paged_tables, name)))
    server = Server(
        method, (210, 300), 128, per_head=per_head, sink=sink, layer=books_layer(method, 128, per_head=per_head)
    )
    assert error_of_pieces(server, tokens, paged_tables.pieces, pages) < 1e-3


def test_sums_of_codes_are_turned_into_values():
    """The interpreter is chosen when kernels are defined, so it needs a process of its own."""
    here = Path(__file__).parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (here, *sys.path)))}
    done = subprocess.run([sys.executable, str(here / "turn_case.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name, rows", [*((name, 4) for name in FORMATS), ("commvq-2bit", 8)])
def test_compiles_without_spills(name, rows):
    report = compile_tables(*FORMATS[name][0](128, "cpu"), rows=rows)
    assert report.spills_in_loop == 0 and report.spilled <= (16 if name == "commvq-2bit" else 0)  # before the loop
    assert report.instructions["HMMA"] and report.shared <= 228 << 10


@pytest.mark.parametrize("name, rows, most", [("commvq-1bit", 4, 0), ("commvq-1bit", 8, 56), ("learned", 4, 40)])
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
    of = serving(name)
    keys, values = FORMATS[name][0](128, "cpu")
    if module(name) is tasq_fold:
        assert of.unsupported(keys, values, 128) is None
        assert "values: group codes storage; allowed: residual codes in pages" in of.unsupported(keys, keys, 128)
        assert "4 channels of 128" in of.unsupported(by_groups((8, True), (8,))(128, "cpu")[0], values, 128)
        assert "pages of 128 tokens with a mean" in of.unsupported(keys, replace(values, mean=False), 128)
        assert "Hadamard rotation" in of.unsupported(keys, replace(values, basis=None), 128)
        return
    assert of.unsupported(keys, values, 128) is None
    assert of.unsupported(keys, values, 64) == "keys: RoPE of 64 channels; allowed: 128"
    assert "values" in of.unsupported(keys, keys, 128)
    assert "64" in of.unsupported(*FORMATS[name][0](64, "cpu"), 64)
    assert "not in steps" in of.unsupported(*commvq(11, codes=128)(128, "cpu"), 128)


def test_programs_fill_the_multiprocessors_once():
    """Every program begins with its tables, so a second wave would cost them again."""
    of = codebook.CodebookTables
    for jobs, units in ((8, 4096), (128, 1024), (32, 1024)):
        plan = tables.make_plan(jobs, of().shape(4), 4, units, 132, of.begin)
        assert 0.9 * 132 < jobs * plan.splits <= 132
    for jobs, pages in ((8, 1024), (128, 256), (8, 256), (8, 64)):
        plan = tasq_fold.make_plan(jobs, tasq_fold.LearnedKeyTables().shape(4), 4, pages, 132)
        assert 0.9 * 132 < jobs * plan.splits <= 132


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as the choice of kernels goes; called with the bytes of shared memory of its programs."""

    def with_memory(there):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(tables, "device_info", lambda device: replace(HOPPER, shared_memory=there))

    with_memory(227 << 10)
    return with_memory


def chosen(name, rows=4, rotary=128, pre_rope=True, kernel=None, head_dim=128):
    formats = FORMATS[name][0](head_dim, "cpu")
    return kernels.choose(*formats, torch.device("cuda"), pre_rope, kernel, torch.float16, None, rows, rotary)


@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_that_serves_is_named(gpu, name):
    """And where it does not, why."""
    assert chosen(name).kernel.name == "tables" and "tables" not in chosen(name).reason
    for how, why in (
        ({"rows": 9}, "tables: 9 query rows; allowed: up to 8"),
        ({"rotary": 64}, "tables: keys: RoPE of 64 channels; allowed: 128"),
        ({"pre_rope": False}, "tables: keys are stored after RoPE"),
        ({"head_dim": 64}, "tables: "),
    ):
        found = chosen(name, **how)
        assert found.kernel.name == "blocks" and why in found.reason
    assert chosen(name, kernel="blocks").kernel.name == "blocks"
    with pytest.raises(KVFoldError, match="kernel: tables does not support this layer: 9 query rows"):
        chosen(name, rows=9, kernel="tables")


@pytest.mark.parametrize("method", ["commvq:bits=1", "tasq:bits=2,values=fold"])
@pytest.mark.parametrize(("heads", "rotated", "kernel"), [(16, 64, "tables"), (18, 64, "blocks"), (16, 32, "blocks")])
def test_layers_say_their_heads_and_rotation(method, heads, rotated, kernel, gpu):
    """What a layer is served by, as ``explain`` reads it."""
    made = storage.with_tables(get(method), 2, 128, torch.device("cpu"))
    spec = LayerSpec(0, 1, heads, 2, 128, torch.bfloat16, Rope(torch.ones(rotated)))
    cuda = torch.device("cuda")
    found = choose_kernel(made, packed_for(made, spec, cuda, None), cuda)
    assert found.kernel.name == kernel and ("tables: " in found.reason) == (kernel == "blocks")


@pytest.mark.parametrize(("name", "rows"), [("commvq-2bit", 4), ("learned", 8)])
def test_a_gpu_without_room_for_the_tables_is_refused_by_name(name, rows, gpu):
    """An A100's programs have 163 KB: another kernel serves there."""
    gpu(163 << 10)
    found = chosen(name, rows)
    assert found.kernel.name == "blocks" and "tables: 166912 bytes of shared memory; needed: " in found.reason


@pytest.mark.parametrize(("tokens", "by_tables"), [(2, True), (3, False)])
def test_calls_of_many_rows_go_to_the_kernel_with_readers(tokens, by_tables, gpu, monkeypatch):
    """Four query heads of a KV head, so that three tokens are twelve rows; ``limits`` says so in reports."""
    how = {"head_dim": 128, "rotary": 128, "packed": (64,), "slabs": (2,), "per_head": 4, "in_place": True}
    case = Case(FORMATS["learned"][0], tokens=tokens, **how)
    given = []
    monkeypatch.setattr(blocks, "attend", lambda call, plan=None, of=None: given.append(of) or call.query)
    kernels.REGISTRY["tables"].attend(case.call)
    assert [isinstance(of, tasq_fold.LearnedKeyTables) for of in given] == [by_tables]
    assert "more than 8 query rows" in kernels.REGISTRY["tables"].limits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("per_head, tokens", [(1, 1), (4, 1), (8, 1), (4, 2), (4, 3), (2, 40)])
@pytest.mark.parametrize("name", FORMATS)
def test_all_calls_on_a_gpu(name, per_head, tokens):
    """Rows for tables, rows for readers, and a long call."""
    method, turned = FORMATS[name]
    how = {"head_dim": 128, "rotary": 128, "packed": (2048, 1984), "slabs": (32, 32), "ring": 64, "unproject": turned}
    how |= {"tokens": tokens, "per_head": per_head, "in_place": tokens <= 16}
    case = Case(method, **how, device="cuda", dtype=torch.float16)
    case.call = replace(case.call, query=case.call.query.half())
    got, want = kernels.REGISTRY["tables"].attend(case.call).float(), case.expected()
    assert torch.isfinite(got).all()
    assert float((got - want).norm() / want.norm()) < LIMIT


def test_the_kernel_over_pages_is_named(gpu):
    rope, cuda = Rope(torch.ones(64)), torch.device("cuda")
    for name in FORMATS:
        formats = FORMATS[name][0](128, "cpu")
        many = attention.serving(*formats, rope, 9, cuda)
        assert attention.serving(*formats, rope, 4, cuda) == "tables"
        assert many.startswith("blocks (tables: ") and "9 query rows" in many
    ordered, spec = get("fold"), LayerSpec(0, 1, 4, 2, 128)
    assert attention.serving(ordered.key_format(spec), ordered.value_format(spec), None, 9, cuda) == "gluon"
    assert attention.serving(*formats_of("fold", 128), None, 4, cuda) == "blocks"


@pytest.mark.parametrize("rows", [4, 9])
def test_pages_of_baselines_are_read_by_the_plain_kernel(gpu, rows):
    rope, cuda = Rope(torch.ones(64)), torch.device("cuda")
    vectors, eights = residuals(rounded=True)(128, "cpu"), by_groups((8, True), (8,), mean=3.0)(128, "cpu")
    assert attention.serving(*vectors, rope, rows, cuda) == "blocks"
    assert "tables: keys: 256 codes for 8 channels" in attention.serving(*eights, rope, 4, cuda)
    named = attention.serving(*by_groups((4, True), (4,))(128, "cpu"), rope, 4, cuda)
    assert named == "blocks (tables: values: group codes storage; allowed: residual codes in pages)"
    assert attention.serving(*byte_codes(128)(128, "cpu"), None, rows, cuda).startswith("blocks")
