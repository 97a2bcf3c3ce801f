"""Settings around a model (autocast, default dtype, default device) do not change what is computed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvfold
from helpers import dynamic, llama, logits, prompt, relative

pytestmark = pytest.mark.cpu_only("settings of torch on the host")

CUTS = [200, 40, 1, 1, 18]


def autocast(enabled: bool = True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


FINE = ["kivi:bits=8", "fold:bits=8", "squat:bits=8", "squat_pre:bits=8", "innerq:bits=8,mode=asym"]


@pytest.mark.parametrize("method", [*kvfold.DEFAULT, *FINE])
def test_every_method_works_in_autocast_and_is_as_near_to_full_precision_as_without(method):
    model, ids = llama(), prompt(2, 260)
    mask = torch.ones_like(ids)
    mask[1, :31] = 0

    def error(enabled: bool, cache=None) -> float:
        with autocast(enabled):
            cache = kvfold.fold(model, method) if cache is None else cache
            got = logits(model, cache, ids, CUTS, mask)
        if enabled and cache is not full:
            assert all(of.packed[0] >= 64 and of.dtype == torch.bfloat16 for of in cache.folded)
        return relative(got[mask.bool()].float(), exact[mask.bool()])

    full, exact = dynamic(model), logits(model, dynamic(model), ids, CUTS, mask)
    by_itself = error(True, full)  # what autocast does to a cache that is not folded
    assert by_itself < 0.05
    assert error(True) < 1.1 * error(False) + by_itself


def test_full_precision_is_stored_as_it_comes(tmp_path):
    """In 16 bits where autocast makes keys and values in 16, in the model's 32 otherwise; a file knows which."""
    model, ids = llama(), prompt(1, 100)
    for enabled, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        cache = kvfold.fold(model, "none")
        with autocast(enabled):
            logits(model, cache, ids)
        cache.save(tmp_path / "cache.safetensors")
        for of in (*cache.folded, *kvfold.load_cache(tmp_path / "cache.safetensors", model).folded):
            assert of.slabs[0].keys["x"].dtype == of.slabs[0].values["x"].dtype == of.ring.dtype == dtype
            assert of.key_format.bits == of.value_format.bits == 8 * dtype.itemsize
        assert (
            cache.full_nbytes()
            == 2 * len(cache.folded) * 100 * of.spec.num_kv_heads * of.spec.head_dim * dtype.itemsize
        )


@pytest.mark.parametrize("first", [True, False], ids=["prefill-in-autocast", "decode-in-autocast"])
@pytest.mark.parametrize("method", ["none", *FINE])
def test_a_cache_serves_calls_with_and_without_autocast(method, first):
    model, ids = llama(), prompt(1, 260)
    expected = logits(model, dynamic(model), ids, CUTS)
    cache = kvfold.fold(model, method)
    with autocast(first):
        logits(model, cache, ids[:, :200])
    assert {of.dtype for of in cache.folded} == {torch.bfloat16 if first else torch.float32}
    with autocast(not first):
        cache.activate_past_recording()
        logits(model, cache, ids[:, 200:240])
        cache.crop(-25)
        got = logits(model, cache, ids[:, 215:], [1, 1, 43])
    assert relative(got.float(), expected[:, 215:]) < 0.1
    assert cache.get_seq_length() == 260


RUN = """
import sys
import torch

torch.set_num_threads(1)
import kvfold
from helpers import llama, logits, prompt

model, ids = llama(), prompt(2, 260)
mask = torch.ones_like(ids)
mask[1, :31] = 0
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")  # what is made there holds nothing
found = {}
for method in sys.argv[2:]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kvfold.explain(model, method)
        logits(model, kvfold.fold(model, method), ids, CUTS, mask)
    found[method] = logits(model, kvfold.fold(model, method), ids, CUTS, mask)
torch.save(found, sys.argv[1])
"""


@pytest.mark.slow
def test_tables_do_not_depend_on_default_dtype_default_device_or_autocast(tmp_path):
    """Tables are made once per process: in one of its own, the first who needs them has all of these settings."""
    methods, out = [*kvfold.DEFAULT], tmp_path / "logits.pt"
    folders = [str(Path(kvfold.__file__).parents[1]), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    program = RUN.replace("CUTS", str(CUTS))
    done = subprocess.run(
        [sys.executable, "-c", program, str(out), *methods],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    model, ids = llama(), prompt(2, 260)
    mask = torch.ones_like(ids)
    mask[1, :31] = 0
    for method, got in torch.load(out).items():
        expected = logits(model, kvfold.fold(model, method), ids, CUTS, mask)
        assert relative(got[mask.bool()], expected[mask.bool()]) < 1e-6, method


@pytest.mark.parametrize(
    "method", ["none", "fold:bits=8,sink=0,recent=8", "k=none+v=fold:bits=8", "fold:bits=8+keep=0"]
)
def test_a_model_of_64_bits_is_served_as_one_of_32(method, tmp_path):
    """Cached tokens are read in float32; what does not fit into it takes its largest value."""
    model, ids = llama(), prompt(2, 171)
    expected = logits(model, kvfold.fold(model, method), ids, [130, 40, 1])
    model.double()
    cache = kvfold.fold(model, method)
    got = logits(model, cache, ids[:, :170], [130, 40])
    cache.save(tmp_path / "cache.safetensors")
    step = logits(model, kvfold.load_cache(tmp_path / "cache.safetensors", model), ids[:, 170:])
    assert got.dtype == step.dtype == torch.float64
    assert relative(torch.cat((got, step), 1), expected) < (
        1e-5 if method == "none" else 1e-3
    )  # codes at a tie may differ
    if method == "none":
        assert relative(got, logits(model, dynamic(model), ids[:, :170])) < 1e-6
    of = cache.folded[-1]
    assert (of.dtype, cache.full_nbytes()) == (torch.float64, 2 * 2 * 170 * 2 * of.spec.num_kv_heads * 64 * 8)
