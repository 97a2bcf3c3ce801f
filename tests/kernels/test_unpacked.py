"""Calls of many tokens that unpack what is packed: in Triton's interpreter, compiled ahead, and on a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import aot
import unpacked_case
from blocks_case import of_method
from helpers import multiprocessors
from kvfold.bench import storage
from kvfold.formats.paged import plain
from kvfold.kernels import REGISTRY, AttentionCall
from kvfold.kernels.base import GPUKernel
from kvfold.kernels.generic import unpack
from kvfold.kernels.long import attend as unpacked
from kvfold.kernels.reference import ReferenceKernel
from kvfold.methods import LayerSpec, get
from unpacked_case import CALLS, FORMATS, LENGTHS, LIMIT, SIZED

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STORED = ["commvq", "qjl", "gear-rope", "residual"]
"""Formats that calls are made on, too."""
NAMES = (
    [f"unpack/{n}" for n in FORMATS]
    + [f"call/{n}" for n in CALLS if "filled" not in n]
    + [f"stored/{n}" for n in STORED]
)
NAMES += [f"{kind}/{n}" for kind in ("sized", "huge") for n in SIZED]
NAMES += [f"lengths/{n}" for n in LENGTHS] + [
    "cut/fold",
    "cut/none",
    "cut/padding and sinks",
    "cut/sharp",
    "cut/sharp without sinks",
    "cut/sharp on recent ones",
    "cut/few in the windows",
    "cut/statistics of sequences",
    "cut/few sinks",
    *(f"few/{sinks}" for sinks in ("1", "8", "32")),
    "late/flash",
    "late/cut",
    *(f"ragged/{n}" for n in LENGTHS),
    "tables/commvq",
    "tables/qjl",
]


@pytest.mark.parametrize("first", range(0, len(NAMES), 30))
def test_interpreted(first):
    """The interpreter is chosen when kernels are defined, so it needs a process of its own."""
    here = Path(__file__).parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (here, *sys.path)))}
    command = [sys.executable, str(here / "unpacked_case.py"), *NAMES[first : first + 30]]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", LIMIT, ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_unpacks_on_a_gpu(name, dtype):
    assert unpacked_case.unpacking_error(name, "cuda", dtype) < LIMIT[dtype]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", LIMIT, ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_on_a_gpu(name, dtype):
    assert unpacked_case.attention_error(name, "cuda", dtype) < LIMIT[dtype]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", STORED)
def test_calls_on_readers_formats_on_a_gpu(name):
    assert unpacked_case.stored_call_error(name, "cuda", torch.float16) < LIMIT[torch.float16]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", LENGTHS)
def test_sequences_of_different_length_on_a_gpu(name):
    assert unpacked_case.lengths_error(name, "cuda", torch.float16) < LIMIT[torch.float16]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [40, 520])  # few rows go to flash attention, many to cuDNN's
@pytest.mark.parametrize("stay", [None, 4], ids=["", "windows beside attention"])
@pytest.mark.parametrize("sinks", [32, 0], ids=["", "windows elsewhere"])
@pytest.mark.parametrize("carries", [False, True], ids=["", "queries carry statistics"])
def test_launches_aside_are_captured_and_follow_the_streams_that_call(carries, sinks, stay, tokens, monkeypatch):
    """Eager calls on streams that take turns, and a replay, give the same numbers: nothing is read before it is there."""
    monkeypatch.setattr(unpacked, "_stay", lambda *given: stay)
    heads = {"heads": 32, "kv_heads": 8, "slots": (sinks, 64)}
    project = unpacked_case.shifted("cuda", 2, 8, 128) if carries else None
    given = unpacked_case.call(torch.device("cuda"), tokens=tokens, packed=(3200,), dim=128, project=project, **heads)
    want = unpacked.attend_unpacked(given)
    main = torch.cuda.current_stream()
    for stream in [torch.cuda.Stream() for _ in range(2)] * 4:
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            got = unpacked.attend_unpacked(given)
        main.wait_stream(stream)
        assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = unpacked.attend_unpacked(given)
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
    error = (want.float() - ReferenceKernel().attend(given).float()).norm() / want.float().norm()
    assert error < LIMIT[torch.float16]


# ---- compiled ahead --------------------------------------------------------------------------------------------------

SPILLS = {"commvq": 150, "kvquant": 100, "vqllm": 100}
"""Where keys are rotated, those of a cosine of a large angle."""


@pytest.mark.parametrize(
    "method",
    [
        *("fold", "fold:bits=2,codebook=true", "kivi", "innerq"),
        *("turboquant:bits=3", "qjl", "gear", "zipcache", "kvquant", "commvq", "vqllm", "kvarn"),
    ],
)
def test_compiles_without_spills(method):
    if method.startswith(("fold", "kivi", "innerq")):
        layer = LayerSpec(0, 1, 8, 32, 128)
        forms, turn = (plain(get(method).key_format(layer)), get(method).value_format(layer)), None
    else:
        *forms, turn = storage.formats(method, 8, 128, torch.device("cpu"))
    for i, form in enumerate(forms):
        rotary = 128 if i == 0 and method in SPILLS else 0
        report = aot.compile_unpack(form, rotary, i == 1 and turn is not None)
        assert report.spills_in_loop <= (SPILLS[method] if rotary else 0) and report.shared <= 160 * 1024


# ---- which calls it serves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"uniform": False}, {"softcap": 30.0}, {"dtype": torch.float32}], ids=str)
def test_what_it_leaves_to_other_kernels(how):
    assert not unpacked.serves(unpacked_case.call(torch.device("cpu"), tokens=2, packed=(32,), **how))


LEAST = {"gluon": 65, "pages": 1, "fragments": 1, "dense": 64}
"""Query tokens from which on calls are unpacked; of other kernels 17."""


@pytest.mark.parametrize("kernel", [k for k in REGISTRY.values() if isinstance(k, GPUKernel)], ids=lambda k: k.name)
def test_one_place_decides_which_calls_are_unpacked(kernel, monkeypatch):
    assert type(kernel).attend is GPUKernel.attend
    monkeypatch.setattr(unpacked, "attend_unpacked", lambda call: "unpacked")
    monkeypatch.setattr(type(kernel), "read_packed", lambda self, call: "as it is")
    least = LEAST.get(kernel.name, 17)
    given = {n: unpacked_case.call(torch.device("cpu"), tokens=n, packed=(32,)) for n in (max(least - 1, 1), least)}
    assert kernel.attend(given[least]) == "unpacked"
    assert least == 1 or kernel.attend(given[least - 1]) == "as it is"
    for changed in ({"new": None}, {"softcap": 30.0}):
        assert kernel.attend(replace(given[least], **changed)) == "as it is"


def test_reports_say_which_calls_are_unpacked():
    layer = LayerSpec(0, 1, 2, 4, 128)
    fold, kivi = ((plain(get(m).key_format(layer)), get(m).value_format(layer)) for m in ("fold", "kivi"))
    unpacks = "are unpacked to 16 bits in bounded pieces for flash attention"
    assert REGISTRY["pages"].many_tokens(*fold, False) == f"calls of more than 16 tokens, or with padding, {unpacks}"
    assert REGISTRY["gluon"].many_tokens(*kivi, False) == f"calls of more than 64 tokens {unpacks}"
    not_unpacked = REGISTRY["blocks"].many_tokens(*of_method("gear:outliers=0.01"), False)
    assert "not unpacked for flash attention (keys: low rank beside outliers; allowed: affine)" in not_unpacked
    assert not_unpacked.endswith("this kernel reads them as they are")
    assert REGISTRY["reference"].many_tokens(*fold, False) is None


@pytest.mark.parametrize("method", ["fold", "kivi", "squat", "innerq", "none", "turboquant", "qjl", "gear", "zipcache"])
def test_defaults_are_served(method):
    layer = LayerSpec(0, 1, 2, 4, 128, fragments=method in ("fold", "kivi", "squat"))
    forms = plain(get(method).key_format(layer)), get(method).value_format(layer)
    assert unpacked.why_not(*forms, False) is None


@pytest.mark.parametrize(
    "method, reason",
    [
        ("gear:paper=true", "keys: statistics of all tokens; allowed: 128"),
        ("turboquant:residual=true", "keys: sketched residual storage"),
        ("gear:outliers=0.01", "keys: low rank beside outliers; allowed: affine"),
    ],
)
def test_what_is_refused(method, reason):
    assert reason in unpacked.why_not(*of_method(method), False)


def test_refused_in_the_order_of_tensor_cores():
    layer = LayerSpec(0, 1, 2, 4, 128)
    forms = get("innerq:mode=sym,group=64,paper=true").key_format(layer), get("kivi").value_format(layer)
    assert unpacked.why_not(plain(forms[0]), forms[1], False) == "keys: group=64 in mode sym; allowed: 32"


def test_a_piece_begins_a_page():
    (form, _), fields = of_method("turboquant"), {}
    with pytest.raises(ValueError, match="first=32: allowed: multiples of 128"):
        unpack.unpack(form, fields, 0, 32, 32, torch.float16)


@pytest.mark.parametrize("count", [1, 100, 256, 257, 2048, 2052, 5000, 100000])
def test_cudnn_meets_few_numbers_of_rows(count):
    rows = torch.ones(1, 2, count, 8)
    wide = unpacked._widened(rows)
    assert torch.equal(wide[:, :, :count], rows) and not wide[:, :, count:].any()
    assert wide.shape[2] % 256 == 0 and wide.shape[2] - count <= max(255, count // 8)
    seen = {unpacked._widened(torch.empty(0, 1, n, 1)).shape[2] for n in range(2048, 4097)}
    assert len(seen) == 9


@pytest.mark.parametrize(
    "tokens, parts, once",
    [
        (31, [31], False),
        (1024, [1024], False),
        (8160, [7168, 992], True),
        (20000, [8192, 8192, 3072, 544], False),
        (20000, [18432, 1024, 544], True),
        (45000, [32768, 11264, 968], True),
    ],
)
def test_cudnn_meets_few_numbers_of_keys(tokens, parts, once, monkeypatch):
    """A function of the same arguments takes cuDNN's place on a CPU."""
    monkeypatch.setattr(unpacked, "at_once", lambda rows: once)
    seen = []
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def cudnn(query, keys, values, bias, wants_total, dropout, causal, debug, scale):
        seen.append(keys.shape[2])
        out, total = flash(query, keys, values, 0.0, False, scale=scale)
        return out, total.unsqueeze(-1)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    rows = torch.randn(1, 1, 5, 8, generator=torch.Generator().manual_seed(0))
    keys, values = torch.randn(2, 1, 1, tokens, 8, generator=torch.Generator().manual_seed(1))
    found = list(unpacked._attend(rows, unpacked._widened(rows), keys, values, 1.0))
    assert seen == [n for n in parts if n % 1024 == 0] and len(found) == len(parts)
    weights = torch.stack([total for _, total in found]).softmax(0).unsqueeze(-1)
    out = sum(w * part[:, :, :5] for w, (part, _) in zip(weights, found, strict=True))
    want = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, scale=1.0)
    assert (out - want).abs().max() < 1e-5


def test_windows_stay_beside_attention_where_it_leaves_multiprocessors_long_enough(monkeypatch):
    monkeypatch.setattr(unpacked, "device_info", multiprocessors(132))

    def stay(tokens, keys, batch=1, windows=0):
        pieces = [unpacked.Piece(0, {}, {}, 0, keys // 2, keys // 2)] * 2
        wide = unpacked._widened(torch.empty(batch, 8, 4 * tokens, 1))
        return unpacked._stay(wide, tokens // 2 + windows, pieces)

    assert stay(512, 32768) == stay(512, 32768, windows=32) == 4 and stay(256, 32768, 2) == 4
    assert stay(480, 65536) == 4 and stay(400, 32768) == 20  # of rows as cuDNN is given them
    assert stay(512, 26624) is None and stay(512, 32768, 2) is None and stay(2048, 131072) is None
    assert stay(512, 32768, windows=512) is None


def test_pieces_are_bounded():
    for heads in (1, 8, 64, 1024):
        step = unpacked._piece(heads * 128)
        assert step % 128 == 0 and (2 * step * heads * 128 <= unpacked.PIECE or step == 256)


def test_an_empty_cache_is_no_span():
    given = unpacked_case.call(torch.device("cpu"), packed=())
    rows = given.grouped(given.query)
    part = unpacked.Part(slice(0, 2), given.query, rows, lambda: None, given.windows, given.new)
    assert isinstance(given, AttentionCall) and unpacked._cut(given, part, None, None) == []
