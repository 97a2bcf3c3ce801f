"""The CPU kernel on calls over every format that kernels read, and with every method, against the float32 reference."""

import pytest
import torch

pytest.importorskip("numba")

import kvfold
from blocks_case import CASES, Case
from books_case import artefact
from helpers import llama, logits, prompt, relative
from kvfold.kernels.cpu import CPUKernel
from kvfold.methods import METHODS

CALLS = {name: case for name, case in CASES.items() if not case.get("in_place")}
FAR = 2e-3
"""The second sequence begins at position 70,000, where the reference's angles have four digits."""


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    case = Case(**CALLS[name])
    call = case.call
    why_not = CPUKernel().why_not(call.key_format, call.value_format, torch.device("cpu"), call.rope is not None)
    assert why_not is None
    got, expected = CPUKernel().attend(call), case.expected()
    if case.padded:  # what a padding query gets has no meaning
        got, expected = got[:, :, 1:], expected[:, :, 1:]
    assert got.isfinite().all()
    assert relative(got[:1], expected[:1]) < 2e-6
    if len(got) > 1:
        assert relative(got[1:], expected[1:]) < (FAR if call.rope is not None else 2e-6)


LEARNED = ("tasq", "tasq:bits=2", "vqllm", "gsrq:bits=1", "commvq", "commvq:bits=1")
PLAIN = sorted({method.name for method in METHODS} - {name.partition(":")[0] for name in LEARNED} - {"kvquant", "nova"})
OTHERS = (
    "fold:codebook=true",
    "fold:bits=4",
    "fold:rotation=1",
    "qjl:paper=true",
    "qjl:normalize=false,outliers=8",
    "turboquant:bits=3,residual=true",
    "turboquant:paper=true",
    "gear:outliers=0.01",
    "gear:paper=true",
    "zipcache:bits=3",
    "squat_pre:bits=3",
    "kivi:bits=3,group=64",
    "k=fold:bits=3+v=kivi:bits=2",
)


@pytest.mark.parametrize("method", [*PLAIN, *OTHERS, *LEARNED])
def test_every_method_decodes_alike(method, tmp_path):
    """A prompt with padding, single tokens and a chat turn, with the kernel and with the reference."""
    model, ids = llama(), prompt(2, 460, seed=1)
    if method in LEARNED:
        method = artefact(method, tmp_path / "a.safetensors", 2, 64, 2, config=model.config)
    mask = torch.ones_like(ids)
    mask[0, :70] = 0
    cuts = [390, *[1] * 6, 64]
    fast, slow = (kvfold.fold(model, method, kernel=name) for name in (None, "reference"))
    got, expected = (logits(model, cache, ids, cuts, mask)[mask.bool()] for cache in (fast, slow))
    assert {layer.kernel.name for layer in fast.folded} == {"cpu"}
    assert relative(got, expected) < 1e-5


def test_explain_names_the_kernel_of_every_method():
    model = llama()
    for name in PLAIN:
        assert kvfold.explain(model, name).layers[0].kernel == "cpu"
