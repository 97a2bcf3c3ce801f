"""Kernels over pages: interpreted, compiled ahead, and (``-m gpu``) on a GPU, against the float32 reference."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.compiler import ASTSource

import aot
from aot.report import _compile, _pointer, _typed
from books_case import layer
from kvfold.kernels import paged
from kvfold.kernels.paged import attention, tables, work
from paged_case import Server, formats_of
from paged_kernels_case import (
    ATTENDS,
    attending,
    check_of_following,
    check_of_steering,
    follows,
    mixed,
    steered,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "names",
    [
        ("lists", "filling", "mixed", "checks", "attend-turboquant", "attend-kivi-sinks"),
        ("attend-fold-d96", "store-kivi", "follows", "store-fold", "attend-innerq-fragments", "attend-qjl-fragments"),
        ("attend-vqllm", "attend-commvq", "attend-tasq", "store-vqllm", "store-commvq"),
        ("attend-nova", "store-tasq", "store-tasq-fold", "store-nova", "store-affine-and-groups"),
        pytest.param(
            (
                "store-tasq-2",
                "store-tasq-plain-scales",
                "store-tasq-fold-1",
                "store-tasq-affine",
                "store-nova-codes",
                "store-nova-fold",
                "store-groups-and-levels",
                "store-vectors-and-affine",
                "groups",
                "attend-nova-fold",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(("attend-commvq-96", "store-commvq-network", "books"), marks=pytest.mark.slow),
        pytest.param(
            (
                "attend-gear",
                "attend-qjl",
                "attend-zipcache",
                "attend-turboquant-fragments",
                "store-fold-no-window",
                "store-innerq",
                "store-kivi-64",
                "store-fold-d128",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                "steered",
                "check-following",
                "check-steering",
                "store-fold-plain",
                "store-fold-codebook",
                "store-turboquant",
                "store-turboquant-plain",
                "store-sketch",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids="+".join,
)
def test_interpreted(names):
    """The interpreter is chosen when kernels are defined, so it needs a process of its own."""
    here = Path(__file__).parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (here, *sys.path)))}
    done = subprocess.run(
        [sys.executable, str(here / "paged_kernels_case.py"), *names], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["fold", "kivi"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_table_and_raw_tokens_cost_no_warps(method, bf16):
    """Three programs of four warps, as over a slab. What is spilled lies in the loop over pieces, not in that over pages."""
    report = aot.compile_pieces(*formats_of(method, 128, fragments=True), bf16=bf16)
    assert report.registers <= 168 and report.spills_in_loop <= 8
    assert report.shared <= 50176


def test_updates_of_whole_pages_are_compiled_to_tensor_cores():
    assert aot.compile_follow(64, group=3, heads=3).instructions["HMMA"] > 0


@pytest.mark.parametrize("name", ["commvq-96", "nova"])
def test_pieces_compile_as_they_are_launched(name, monkeypatch):
    """The interpreter minds no types: what one name stands for in a loop, say."""
    launched = {}

    class Launched:
        def __init__(self, kernel):
            self.kernel, self.arg_names = kernel, kernel.arg_names

        def __getitem__(self, grid):
            def run(*arguments, **options):
                launched[self.kernel] = dict(zip(self.arg_names, arguments, strict=False)) | options

            return run

    for kernel in ("raw_kernel", "pieces_kernel", "merge_pieces_kernel"):
        monkeypatch.setattr(attention, kernel, Launched(getattr(attention, kernel)))
    monkeypatch.setattr(work, "prepare", lambda *step: None)
    with pytest.raises(AssertionError):  # nothing was computed
        attending(**ATTENDS[name] | {"dtype": torch.float16, "lengths": (200,), "steps": 1})
    (pieces,) = (kernel for kernel in launched if kernel.__name__ == "pieces_kernel")
    assert len(launched) == 3 and compiled(pieces, launched[pieces]).registers <= 255


def compiled(kernel, given):
    """A plain Triton kernel for sm_90, from the arguments of a launch."""

    def typed(value):
        if isinstance(value, tuple):
            return tuple(map(typed, value))
        if isinstance(value, torch.Tensor):
            return _pointer(value)
        return "fp32" if isinstance(value, float) else "i32"

    fixed = {p.name for p in kernel.params if p.is_constexpr} | {"K_SPEC", "V_SPEC"}
    signature, constants, aligned = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        value = given[name] if name in fixed else typed(given[name])
        signature[name] = _typed((at,), value, name in fixed, constants, aligned)
    options = {name: given[name] for name in ("num_warps", "num_stages", "maxnreg") if name in given}
    return _compile(ASTSource(kernel, signature, constants, aligned), 90, **options)


GPU = {"device": "cuda", "dtype": torch.float16}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ATTENDS)
def test_plain_attention_on_a_gpu(name):
    attending(**ATTENDS[name] | GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method", ["fold", "fold:bits=2", "kivi", "kivi:bits=4", "kivi:group=64", "squat"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_for_tensor_cores_on_a_gpu(method, head_dim):
    sink = 64 if "64" in method else 32
    attending(method, (1, 2200, 131, 33, 1025), per_head=4, head_dim=head_dim, sink=sink, fragments=True, **GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "method", ["fold:bits=2,codebook=true", "fold:codebook=true", "fold:k_bits=2,v_bits=1,codebook=true"]
)
@pytest.mark.parametrize("per_head", [1, 4, 5, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_with_a_fixed_table_on_a_gpu(method, head_dim, per_head):
    attending(method, (1, 2200, 131, 33, 1025), per_head=per_head, head_dim=head_dim, fragments=True, **GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "method",
    [
        "commvq:bits=1",
        "commvq",
        "tasq:bits=2,values=fold",
        "tasq:bits=2,values=fold,v_bits=1",
    ],
)
def test_attention_with_tables_on_a_gpu(method, monkeypatch):
    """With four query rows of a KV head, and with eight."""
    rows = []

    def pieces(call, query, count, *more, own=tables.pieces):
        rows.append(count)
        own(call, query, count, *more)

    monkeypatch.setattr(tables, "pieces", pieces)
    attending(method, (1, 300, 131), steps=3, per_head=4, head_dim=128, short=2, learned={}, **GPU)
    assert rows[0] == 4 and set(rows) == {4, 8}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("per_head", [1, 4, 7])
@pytest.mark.parametrize("method", [
    *("nova", "nova:values=codes", "nova:values=fold", "vqllm:bits=1", "vqllm", "tasq", "tasq:mean=false", "tasq:bits=2"),
])  # fmt: skip
def test_attention_over_learned_codes_on_a_gpu(method, per_head):
    attending(method, (1, 300, 131), steps=3, per_head=per_head, head_dim=128, learned={}, **GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method", ["fold", "kivi", "fold:codebook=true"])
@pytest.mark.parametrize("processors", [1, 5, 12])
def test_raw_tokens_of_many_sequences_on_a_gpu(method, processors):
    """There are more parts of raw tokens than programs: who is done takes the next one, and the counters are zeros again."""
    options = {"per_head": 4, "head_dim": 128, "fragments": True, "processors": processors, "sinks": True}
    attending(method, (1, 2200, 131, 33, 1025), **options, **GPU)


@pytest.mark.gpu
@needs_gpu
def test_storing_steered_keys_on_a_gpu():
    steered("cuda")
    check_of_steering("cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("per_head", [1, 3, 4])
def test_pages_that_follow_their_own_queries_on_a_gpu(per_head, head_dim):
    follows("cuda", lengths=(150, 900, 257, 33), dtype=torch.float16, per_head=per_head, head_dim=head_dim)


@pytest.mark.gpu
@needs_gpu
def test_the_check_of_following_on_a_gpu():
    check_of_following("cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method, fragments", [("turboquant", False), ("fold", True)])
def test_decoding_beside_a_chunk_on_a_gpu(method, fragments):
    mixed(method, fragments=fragments, **GPU)


# ---- which formats are served ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, fragments, attended, stored",
    [
        ("fold", True, None, None),
        ("fold:bits=2,codebook=true", True, None, None),
        ("kivi", True, None, None),
        ("squat", True, None, None),
        ("innerq", True, None, None),
        ("innerq", False, None, "keys: operand=plain"),
        ("qjl", True, None, None),
        ("fold", False, None, None),
        ("turboquant", False, None, None),
        ("qjl", False, None, "values: operand=plain"),
        ("turboquant:residual=true", False, "keys: sketched residual storage", "keys: "),
    ],
)
def test_what_kernels_serve(method, fragments, attended, stored):
    forms = formats_of(method, 128, fragments=fragments)
    for why, wanted in (
        (paged.why_not(*forms, torch.device("cuda")), attended),
        (paged.why_not_stored(*forms), stored),
    ):
        assert (why is None) if wanted is None else wanted in why


@pytest.mark.parametrize(
    "method, why",
    [
        ("vqllm:bits=1", None),
        ("commvq:bits=1", None),
        ("commvq:bits=1,levels=128", "keys: levels=128; allowed: up to 64"),
        ("vqllm:bits=2,vector=64,codes=16", None),
        ("tasq", None),
        ("tasq:bits=2,values=fold", None),
        ("tasq:bits=8", "keys: vector=1; allowed: 2, 4, 8"),
        ("nova", None),
        ("nova:values=codes", None),
        ("kivi + tasq", None),
        ("tasq + kivi", None),
        ("vqllm:bits=1 + fold", None),
    ],
)
def test_which_codes_kernels_choose(method, why):
    made = layer(method, heads=1)
    maps = paged.Maps.of(1, made.maps(torch.device("cpu")))
    assert paged.why_not_stored(*made.formats, maps=maps) == why
    if method.startswith("commvq") and why is None:
        assert paged.why_not_stored(*made.formats) == "values: nothing says how bits are chosen"


def test_what_is_more_than_a_format_is_encoded_by_a_function():
    forms = formats_of("turboquant", 64)
    for given, why in (
        ({"rope": None, "encode_keys": None}, "keys: encoded by a function before RoPE"),
        ({"encode_keys": None}, "keys: encoded by a function"),
        ({"encode_values": None}, "values: encoded by a function"),
        ({}, None),
    ):
        assert paged.why_not_stored(*forms, maps=paged.Maps.of(2, given)) == why
    call = replace(Server("turboquant", (40,)).step([40]), encode_values=lambda *given: {})
    assert paged.why_not_stored(*forms, call) == "values: encoded by a function"


def test_a_workspace_that_is_too_small_is_refused():
    server = Server("turboquant", (40, 20))
    call = server.step([20, 20])
    sizes = {"num_heads": 4, "head_dim": 64, "device": "cpu", "max_len": 64}
    space = work.Workspace.make(max_seqs=2, max_tokens=64, **sizes)
    with pytest.raises(ValueError, match="workspace: made for 2 sequences, the step has 3"):
        work.prepare(call.step, space, call.seen)
    space = work.Workspace.make(max_seqs=3, max_tokens=64, short=16, **{**sizes, "num_heads": 1})
    with pytest.raises(ValueError, match="workspace: too small for 3 sequences of 12 tokens and 4 heads"):
        paged.attend(server.step([12, 0]), torch.empty(12, 4, 64), space)
    with pytest.raises(ValueError, match="short=17: allowed: 1 to 16"):
        work.Workspace.make(max_seqs=3, max_tokens=64, short=17, **sizes)
