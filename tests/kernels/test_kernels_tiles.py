"""The Triton kernel over packed groups in plain order: interpreted, compiled ahead, chosen, and (``-m gpu``) on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import aot
from kvfold import kernels
from kvfold.errors import KVFoldError
from kvfold.formats import AffineGroups
from kvfold.formats.paged import plain
from kvfold.kernels.affine import tiles
from kvfold.methods import LayerSpec, get
from kvfold.plan import packed_for, wants_plain_order
from tiles_case import CASES, LIMIT, Case, formats, model_error

CUDA = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ---- against the reference -------------------------------------------------------------------------------------------


def run_interpreted(*names):
    """The interpreter is chosen when kernels are defined, so it needs a process of its own."""
    here = Path(__file__).parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (here, *sys.path)))}
    done = subprocess.run(
        [sys.executable, str(here / "tiles_case.py"), *names], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", range(0, len(CASES), 24))
def test_interpreted(first):
    run_interpreted(*list(CASES)[first : first + 24])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    assert Case(**{**CASES[name], "device": "cuda", "dtype": torch.float16}).error() < LIMIT


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["kivi-2bit", "rope", "in-place-3tokens", "long-padded"])
def test_bf16_on_a_gpu(name):
    assert Case(**{**CASES[name], "device": "cuda", "dtype": torch.bfloat16}).error() < 1e-2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows, packed", [((1, 4), 4096), ((3, 8), 1024), ((200, 4), 2048), ((513, 1), 1024)])
@pytest.mark.parametrize("rotary", [0, 128], ids=["plain", "rope"])
def test_shapes_of_calls(rows, packed, rotary):
    tokens, per_head = rows
    options = {
        "head_dim": 128,
        "rotary": rotary,
        "packed": (packed, packed - 96),
        "slabs": (packed // 64, packed // 64),
    }
    case = Case(**options, tokens=tokens, per_head=per_head, device="cuda", dtype=torch.float16)
    assert case.error() < LIMIT


# ---- compiled ahead --------------------------------------------------------------------------------------------------

COMPILED = {
    "kivi": {},
    "kivi-sm80": {"capability": 80},
    "kivi-sm100": {"capability": 100},
    "kivi-d80-3bit": {"form": {"head_dim": 80, "group": 16, "bits": 3}},
    "kivi-d96": {"form": {"head_dim": 96}},
    "kivi-d256-group64": {"form": {"head_dim": 256, "group": 64}},
    "hybrid-d96": {"form": {"method": "hybrid", "head_dim": 96}},
    "rope": {"rotary": 128},
    "rope-sm80": {"rotary": 128, "capability": 80},
    "rope-sm100": {"rotary": 128, "capability": 100},
    "bias-12rows": {"rows": 12, "has_bias": True},
    "long": {"rows": 2048},
    "long-sm80": {"rows": 2048, "capability": 80},
    "long-rope": {"rows": 2048, "rotary": 128},
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_almost_without_spills(name):
    options = dict(COMPILED[name])
    key, value = formats(**{"head_dim": 128, **options.pop("form", {})})
    report = aot.compile_tiles(key, value, **options)
    # what is turned back needs all registers, and 64 rows without warpgroup MMAs a few more; sines of large angles take some
    # stack before the loop
    in_loop, stack = {"rope": (8, 96), "rope-sm80": (8, 96), "rope-sm100": (8, 96), "long-sm80": (64, 160)}.get(
        name, (0, 48)
    )
    assert report.spills_in_loop <= in_loop and report.spilled <= stack
    assert report.shared <= 99 * 1024


def test_tiles_stay_in_registers():
    """8,192 codes of 32 tokens by 128 channels, keys and values, in one warp: masks, codes, scales for two at a time."""
    report = aot.compile_tiles(*formats(head_dim=128))
    assert report.shared < 4 * 1024 and report.registers <= 144  # a tile would take 8 KB
    count = report.instructions
    assert count["HFMA2"] < 2 * 128 + 40 and count["LOP3"] < 128 + 120


# ---- which layers it serves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, value, pre_rope, reason",
    [
        (AffineGroups(64, 32, "key", 2, "token"), formats()[1], False, "keys: packed for tensor cores"),
        (*formats(head_dim=272, group=16), False, "head_dim=272"),
        (*formats(head_dim=96, group=96), False, "group=96"),
        (*formats("asym"), True, "along channels"),
    ],
)
def test_what_is_not_supported_is_named(key, value, pre_rope, reason):
    assert reason in tiles.unsupported(key, value, pre_rope)


@pytest.fixture
def hopper(monkeypatch):
    """A GPU as far as the choice of kernels goes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def spec(head_dim, dtype=torch.float16):
    return LayerSpec(0, 2, 4, 2, head_dim, dtype)


@pytest.mark.parametrize(
    "method, head_dim, kernel, reason",
    [
        ("kivi", 128, "gluon", "first choice"),
        ("innerq:paper=true", 64, "gluon", "first choice"),
        ("innerq", 64, "fragments", "pages: keys: affine storage in pages"),
        ("turboquant:bits=4", 128, "blocks", "fragments: keys: lookup storage; allowed: affine, sign sketch"),
        ("turboquant", 128, "blocks", "fragments: keys: lookup storage; allowed: affine, sign sketch"),
        ("k=qjl+v=turboquant", 128, "blocks", "fragments: values: lookup storage"),
        ("kivi", 96, "triton", "gluon: keys: head_dim=96"),
        ("kivi:group=16", 80, "triton", "gluon: keys: head_dim=80"),
        ("kivi:group=16", 64, "triton", "gluon: keys: group=16"),
        ("kivi:group=64", 128, "triton", "gluon, pages: blocks of 64 tokens"),
        ("innerq:paper=true,group=16", 128, "triton", "gluon: keys: group=16"),
        ("squat_pre", 128, "triton", "gluon, pages, fragments, dense: keys are stored before RoPE"),
        ("qjl", 128, "fragments", "pages: keys: sign sketch storage in pages"),
        ("gear", 128, "blocks", "fragments: keys: low rank storage; allowed: paged"),
        ("zipcache", 128, "blocks", "fragments: keys: mixed precision storage; allowed: paged"),
        ("zipcache", 64, "blocks", "fragments: keys: mixed precision storage; allowed: paged"),
    ],
)
def test_the_order_of_codes_follows_the_kernel(hopper, method, head_dim, kernel, reason):
    method = get(method)
    stored = packed_for(method, spec(head_dim), CUDA, None)
    choice = kernels.choose(
        plain(method.key_format(stored)), method.value_format(stored), CUDA, method.pre_rope, None, torch.float16
    )
    assert choice.kernel.name == kernel and reason in choice.reason
    assert stored.fragments == (kernel not in ("triton", "blocks"))


def test_a_named_kernel_decides_the_order(hopper):
    assert not packed_for(get("kivi"), spec(128), CUDA, "triton").fragments
    assert packed_for(get("kivi"), spec(128), CUDA, "gluon").fragments
    assert packed_for(get("squat_pre"), spec(128), CUDA, "reference").fragments


@pytest.mark.parametrize(
    "method, kernel, wanted",
    [
        *((name, None, True) for name in ("turboquant", "turboquant:bits=3", "gear", "zipcache")),
        *((name, None, False) for name in ("innerq", "qjl", "fold", "kivi", "none")),
        *(("turboquant", "reference", False), ("turboquant", "blocks", True), ("kivi", "triton", True)),
    ],
)
def test_codes_of_before_are_wanted_in_plain_order_where_only_that_has_a_kernel(hopper, method, kernel, wanted):
    assert wants_plain_order(get(method), spec(128), CUDA, kernel) is wanted
    assert not wants_plain_order(get(method), spec(128, torch.float32), CUDA, None)


def test_float32_layers_go_to_the_reference(hopper):
    method = get("squat_pre")
    key, value = (f(LayerSpec(0, 2, 4, 2, 128, fragments=False)) for f in (method.key_format, method.value_format))
    assert kernels.choose(key, value, CUDA, True, None, torch.float32).kernel.name == "reference"
    with pytest.raises(KVFoldError, match="dtype=float32"):
        kernels.choose(key, value, CUDA, True, "triton", torch.float32)


# ---- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "method, head_dim",
    [
        ("squat_pre", 64),
        ("squat_pre", 128),
        ("kivi", 96),
        ("kivi:bits=4,group=16", 80),
        ("kivi:group=64", 128),
        ("innerq:paper=true,group=16", 96),
        ("innerq:paper=true,mode=sym", 96),
    ],
)
def test_a_model_decodes_like_the_reference(method, head_dim):
    assert model_error(method, head_dim, "cuda") < 1e-2


@pytest.mark.slow
def test_a_model_decodes_like_the_reference_interpreted():
    run_interpreted("model")
