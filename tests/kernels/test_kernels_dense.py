"""The kernel over dense storage: interpreted, compiled ahead, chosen, and (``-m gpu``) on a GPU."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import aot
from dense_case import CASES, LIMIT, Case
from kvfold import explain, kernels
from kvfold.errors import KVFoldError
from kvfold.formats import Dense
from kvfold.kernels.base import AttentionKernel
from kvfold.kernels.dense import decode as dense
from kvfold.kernels.device import HOPPER
from kvfold.methods import LayerSpec, get
from kvfold.plan import choose_kernel
from tiny_model import tiny_llama

CUDA = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ---- against the reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, len(CASES), 24))
def test_interpreted(first):
    """The interpreter is chosen when kernels are defined, so it needs a process of its own."""
    here, names = Path(__file__).parents[1], list(CASES)[first : first + 24]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (here, *sys.path)))}
    done = subprocess.run(
        [sys.executable, str(here / "dense_case.py"), *names], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, dtype):
    assert Case(**{**CASES[name], "device": "cuda", "dtype": dtype}).error() < LIMIT[dtype]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows, packed", [((1, 4), 8192), ((3, 8), 1024), ((16, 1), 4096), ((200, 4), 2048)])
def test_shapes_of_calls(rows, packed):
    tokens, per_head = rows
    case = Case(
        head_dim=128, packed=(packed, packed - 96), slabs=(packed // 64, packed // 64), tokens=tokens, per_head=per_head,
        in_place=tokens <= 16, device="cuda",
    )  # fmt: skip
    assert case.error() < LIMIT[torch.float16]


def test_a_long_call_is_taken_in_pieces(monkeypatch):
    """No more partial results exist at a time than :data:`WORKSPACE` says, whatever the call's length."""
    case = Case(tokens=50, in_place=False, packed=(64,))
    pieces = []

    def piece(call, query, first, plan, out):
        pieces.append((first, query.shape[2]))
        return query

    monkeypatch.setattr(dense, "_attend", piece)
    monkeypatch.setattr(dense, "WORKSPACE", 8 * 4 * 64 * 20)
    assert torch.equal(dense.attend(case.call), case.call.query)
    assert pieces == [(0, 20), (20, 20), (40, 10)]


def test_other_storage_is_refused():
    case = Case()
    case.call.spans[0].keys["x"] = case.call.spans[0].keys["x"].transpose(-1, -2)
    with pytest.raises(ValueError, match="not those of a slab"):
        dense.attend(case.call)


# ---- launch shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, held", [(1, 131072), (1, 32768), (16, 32768), (64, 8192)])
def test_programs_fill_the_device(batch, held):
    """On an H100, three programs for each of 132 multiprocessors."""
    plan = dense.make_plan(128, 8 * batch, 4, held, HOPPER)
    assert plan.rows == 16 and plan.splits * 2 <= held // plan.tokens
    waves = 8 * batch * plan.splits / 396
    assert waves / math.ceil(waves) > 0.85


def test_short_storage_is_not_split():
    assert dense.make_plan(128, 8, 4, 32, HOPPER).splits == 1


# ---- compiled ahead --------------------------------------------------------------------------------------------------

COMPILED = {
    "d64": {"head_dim": 64},
    "d80": {"head_dim": 80},
    "d128-bf16": {"bf16": True},
    "d128-without-windows": {"windows": False},
    "d256": {"head_dim": 256},
    "sm80": {"capability": 80, "shared_memory": 163 * 1024},
    "sm86": {"capability": 80, "shared_memory": 99 * 1024, "head_dim": 256},
    "64rows-sm100": {"rows": 64, "capability": 100},
    "long-d256": {"rows": 2048, "windows": False, "head_dim": 256},
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_spills(name):
    """And loads tiles asynchronously: several are on their way at once."""
    options = COMPILED[name]
    report = aot.compile_dense(**options)
    assert report.spilled == 0 and report.spills_in_loop == 0
    assert report.shared <= options.get("shared_memory", 227 * 1024)
    assert report.instructions["LDGSTS"]


def test_three_programs_fit_a_multiprocessor():
    report = aot.compile_dense()
    assert 3 * (report.shared + 1024) <= 228 * 1024 and 3 * 128 * report.registers <= 64 * 1024


# ---- which layers it serves ------------------------------------------------------------------------------------------


def forms(head_dim=64, dtype=torch.float16):
    return tuple(Dense(head_dim, 32, side, dtype) for side in ("key", "value"))


@pytest.mark.parametrize(
    "key, value, reason",
    [
        (*forms(dtype=torch.float32), "keys: stored in float32; allowed: float16, bfloat16"),
        (*forms(72), "keys: head_dim=72; allowed: multiples of 16"),
        (*forms(272), "head_dim=272"),
        (forms()[0], forms(dtype=torch.bfloat16)[1], "different shapes or dtypes"),
        (forms()[0], get("kivi").value_format(LayerSpec(0, 1, 1, 1, 64)), "values: affine storage; allowed: dense"),
    ],
)
def test_what_is_not_supported_is_named(key, value, reason):
    assert reason in dense.unsupported(key, value)


@pytest.fixture
def hopper(monkeypatch):
    """A GPU as far as the choice of kernels goes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def spec(head_dim, dtype=torch.float16, **options):
    return LayerSpec(0, 2, 4, 2, head_dim, dtype, **options)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_full_precision_is_served(hopper, head_dim, dtype):
    kernel = choose_kernel(get("none"), spec(head_dim, dtype), CUDA).kernel
    assert isinstance(kernel, AttentionKernel) and kernel.name == "dense" and kernel.captures


@pytest.mark.parametrize(
    "method, shape, reason",
    [
        ("none", spec(64, torch.float32), "dense: keys: stored in float32"),
        ("none", spec(64, softcap=30.0), "dense: soft-capped scores"),
        ("k=none+v=kivi", spec(64), "dense: values: affine storage"),
    ],
)
def test_the_reference_serves_the_rest(hopper, method, shape, reason):
    found = choose_kernel(get(method), shape, CUDA)
    assert found.kernel.name == "reference" and reason in found.reason


def test_insisting_on_it_is_refused_by_name():
    with pytest.raises(KVFoldError, match="dense does not support this layer: needs an NVIDIA GPU"):
        kernels.choose(*forms(), torch.device("cpu"), name="dense")


@pytest.mark.gpu
@needs_gpu
def test_explain_names_it():
    rows = explain(tiny_llama().to("cuda", torch.bfloat16), "none").layers
    assert {(row.kernel, row.encoder.partition(":")[0]) for row in rows} == {("dense", "triton")}
