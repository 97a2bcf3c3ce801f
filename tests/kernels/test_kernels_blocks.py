"""The Triton kernel over formats with readers: interpreted, compiled ahead, chosen, and (``-m gpu``) on a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import aot
from blocks_case import CASES, LIMIT, Case, affine, by_groups, byte_codes, commvq, kvquant, of_method, residuals
from kvfold.bench import storage
from kvfold.formats.paged import plain
from kvfold.kernels.generic import decode as blocks
from kvfold.methods import LayerSpec, get
from kvfold.plan import choose_kernel, packed_for
from kvfold.rope import Rope

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ---- against the reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, len(CASES), 40))
def test_interpreted(first):
    """The interpreter is chosen when kernels are defined, so it needs a process of its own."""
    here = Path(__file__).parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (here, *sys.path)))}
    names = list(CASES)[first : first + 40]
    done = subprocess.run(
        [sys.executable, str(here / "blocks_case.py"), *names], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    assert Case(**{**CASES[name], "device": "cuda", "dtype": torch.float16}).error() < LIMIT


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["turboquant-3bit", "qjl", "lookup-channel-keys-rope", "long-padded"])
def test_bf16_on_a_gpu(name):
    assert Case(**{**CASES[name], "device": "cuda", "dtype": torch.bfloat16}).error() < 1e-2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("per_head, tokens", [(1, 1), (4, 1), (8, 1), (4, 4), (8, 8), (4, 16)])
@pytest.mark.parametrize(
    "method", ["turboquant:bits=3", "turboquant:bits=2,center=false,normalize=false", "k=qjl+v=turboquant"]
)
def test_shapes_of_calls(method, per_head, tokens):
    options = {"head_dim": 128, "packed": (4096, 4000), "slabs": (64, 64), "in_place": True, "ring": 64}
    case = Case(method, **options, tokens=tokens, per_head=per_head, device="cuda", dtype=torch.float16)
    assert case.error() < LIMIT


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype, limit", [(torch.float16, LIMIT), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("per_head, tokens", [(1, 1), (4, 1), (8, 1), (4, 4)])
@pytest.mark.parametrize("method, packed, slabs, options", [
    (byte_codes(128), (4096, 3968), (128,), {}),
    (byte_codes(128), (640, 0), (8, 8, 8), {}),
    (byte_codes(32, 128), (1024, 896), (4, 4), {}),
    ("kvarn", (4096, 3968), (32,), {}),
    ("kvarn", (128, 1280), (4, 8), {}),
    ("kvarn", (640, 0), (8,), {"head_dim": 64}),
    ("kvarn:rotation=1", (1024, 896), (4, 4), {"head_dim": 96}),
    ("kvarn:rotation=16", (1024, 896), (12,), {"head_dim": 80}),
    (residuals(rounded=True), (2048, 1984), (32, 32), {"rotary": 128}),
    (residuals((8, 32, 256), (8, 32, 256), rounded=True), (2048, 1984), (32, 32), {"rotary": 128}),
    (by_groups((8, True), (8,), mean=3.0), (2048, 1984), (32, 32), {"rotary": 128}),
    (by_groups((8, True), (8,)), (2048, 1984), (32, 32), {"rotary": 128}),
    (by_groups((4, True), (4,), mean=3.0), (2048, 1984), (32, 32), {"rotary": 128}),
], ids=lambda x: x.__qualname__.partition(".")[0] if callable(x) else str(x))  # fmt: skip
def test_ragged_calls_of_baselines(method, packed, slabs, options, per_head, tokens, dtype, limit):
    """Several slabs, storage that holds no token full of NaN."""
    of = {
        "head_dim": 128,
        "packed": packed,
        "slabs": slabs,
        "in_place": True,
        "ring": 160,
        "maps": callable(method) and "rotary" not in options,
    }
    case = Case(method, **of | options, tokens=tokens, per_head=per_head, device="cuda", dtype=dtype)
    assert case.error() < limit


# ---- compiled ahead --------------------------------------------------------------------------------------------------

COMPILED = {
    "turboquant": ("turboquant:bits=3", {}),
    "turboquant-plain": ("turboquant:bits=2,center=false,normalize=false", {}),
    "turboquant-sm80": ("turboquant:bits=3", {"capability": 80}),
    "kivi": ("kivi", {}),
    "innerq": ("innerq", {}),
    "gear": ("gear", {}),
    "zipcache": ("zipcache", {}),
    "zipcache-12rows": ("zipcache", {"rows": 12}),
    "qjl-12rows": ("k=qjl+v=turboquant:bits=2", {"rows": 12}),
    "vqllm-1bit": (residuals(), {"rotary": 128}),
    "vqllm-2bit": (residuals((8, 32, 256), (8, 32, 256)), {"rotary": 128}),
    "commvq-1bit": (commvq(11, codes=128), {"rotary": 128}),
    "commvq-2bit": (commvq(21, codes=256), {"rotary": 128}),
    "kvquant": (kvquant(2), {"rotary": 128}),
    "kvarn": ("kvarn", {}),
    "nova": (byte_codes(128), {}),
    "nova-codes": (by_groups(), {}),
    "tasq": (by_groups((8, True), (8,)), {"rotary": 128}),
    "tasq-mean": (by_groups((8, True), (8,), mean=1.0), {"rotary": 128}),
}
FEW = 100
"""Spills where registers are limited, so that as many programs as planned run at a time; 10 are those of a cosine's."""


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_spills_in_the_loop(name):
    method, options = COMPILED[name]
    forms = method(128, "cpu") if callable(method) else of_method(method, 128)
    report = aot.compile_blocks(*forms, **options)
    allowed = 600 if "rows" in name else FEW if "rotary" in options or name == "kvarn" else 0
    assert report.spills_in_loop <= allowed and report.shared <= 160 * 1024


def test_small_products_are_no_warpgroup_mmas():
    """Of 16 columns and more, those of Triton 3.6 gave wrong numbers."""
    for rows in (1, 8, 12, 40):
        report = aot.compile_blocks(*of_method("turboquant:bits=3", 128), rows=rows)
        assert report.instructions["HMMA"] and not report.instructions["HGMMA"]


# ---- which layers it serves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, reason",
    [
        ("turboquant", None),
        ("k=qjl+v=turboquant", None),
        ("kivi", None),
        ("innerq", None),
        ("gear", None),
        ("zipcache", None),
        ("innerq:paper=true", "keys: statistics of all tokens; allowed: 128"),
        ("gear:paper=true", "keys: statistics of all tokens; allowed: 128"),
        ("gear:outliers=0.01", "keys: low rank beside outliers; allowed: affine"),
        ("gear:rank=40", "keys: rank 40; allowed: up to 32"),
        ("turboquant:residual=true", "keys: sketched residual storage"),
        ("qjl:normalize=false,outliers=4", "keys: split sketch storage"),
    ],
)
def test_what_is_refused(method, reason):
    why = blocks.unsupported(*of_method(method), False)
    assert (why is None) if reason is None else reason in why


@pytest.mark.parametrize("method", ["kivi", "innerq", "gear", "zipcache"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_head_sizes_of_groups(method, head_dim):
    spec = f"{method}:group=16" if head_dim == 80 and method != "zipcache" else method  # groups of 32 do not divide 80
    assert blocks.unsupported(*of_method(spec, head_dim), False) is None


def test_groups_that_no_unit_of_tokens_holds():
    keys, values = affine("token", "token", group=48, block=384)(64, "cpu")
    assert "groups of 48 tokens; allowed: 16, and multiples of 32" in blocks.unsupported(keys, values, False)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(
    "method",
    [
        *("qjl", "turboquant", "innerq", "gear", "zipcache", "vqllm", "kvquant", "commvq", "kivi", "squat", "fold"),
        *("kvarn", "gsrq", "nova", "nova:values=codes", "tasq", "tasq:mean=false"),
    ],
)
def test_defaults_of_all_methods_are_served(method, head_dim):
    """Formats as a layer on a GPU would have them; learned tables are random."""
    keys, values, _ = storage.formats(method, 2, head_dim, torch.device("cpu"), fused=False)
    pre_rope = get(method).pre_rope
    assert blocks.unsupported(plain(keys), values, pre_rope) is None


def test_what_no_shared_memory_holds_is_refused():
    forms = of_method("qjl", 256)  # two projections a channel
    assert blocks.unsupported(*forms, False) == "keys: vectors of 512 stored channels; allowed: up to 256"


def test_a_joint_code_is_refused():
    forms = get("commvq:joint=true").formats(LayerSpec(0, 1, 2, 4, 64, fragments=False))
    assert blocks.unsupported(*forms, True) == "values: one code for all heads"


@pytest.mark.parametrize("method", [
    *("kvarn", "kvarn:bits=3", "nova", "vqllm", "vqllm:bits=1", "gsrq", "tasq", "tasq:mean=false", "tasq:bits=2"),
])  # fmt: skip
def test_baselines_are_decoded_by_this_kernel_in_graphs(method, monkeypatch):
    """In plain order, which it reads, whatever a kernel for tensor cores would take."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    cuda = torch.device("cuda")
    made = storage.with_tables(get(method), 2, 128, torch.device("cpu"))
    for heads in (2, 8, 16, 48):
        spec = LayerSpec(0, 1, heads, 2, 128, torch.bfloat16, Rope(torch.ones(64)))
        choice = choose_kernel(made, packed_for(made, spec, cuda, None), cuda)
        assert choice.kernel.name == "blocks" and choice.kernel.captures, choice.reason


def test_a_layer_on_a_gpu_is_packed_as_its_kernel_reads(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    spec = LayerSpec(0, 1, 2, 4, 64, dtype=torch.float16)
    assert not packed_for(get("turboquant:bits=4"), spec, torch.device("cuda"), None).fragments
    assert packed_for(get("qjl"), spec, torch.device("cuda"), None).fragments
    part = replace(spec, rope=Rope(torch.ones(16)))  # rotated as they are read, and not all channels
    assert not packed_for(get("qjl"), part, torch.device("cuda"), None).fragments
