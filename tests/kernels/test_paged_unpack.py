"""Unpacking pages to 16 bits by a kernel: interpreted, and (``-m gpu``) on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kvfold import methods
from kvfold.kernels.paged import unpacking
from kvfold.methods import LayerSpec
from paged_unpack_case import CASES, unpacking_case


def test_interpreted():
    """The interpreter is chosen when kernels are defined, so it needs a process of its own."""
    here = Path(__file__).parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (here, *sys.path)))}
    done = subprocess.run(
        [sys.executable, str(here / "paged_unpack_case.py"), *CASES], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    assert unpacking_case(*CASES[name], device="cuda") < 5e-4


@pytest.mark.parametrize(
    ("spec", "fragments", "why"),
    [
        ("kivi", True, "affine storage"),
        ("fold:rotation=1", True, "basis; allowed: hadamard"),
        ("fold", False, "operand=plain"),
        ("turboquant", True, "lookup storage|uniform levels"),
    ],
)
def test_others_are_decoded_by_the_reference(spec, fragments, why):
    form = methods.get(spec).key_format(LayerSpec(0, 1, 4, 2, 64, torch.float16, fragments=fragments))
    found = unpacking.unsupported(form)
    assert found is not None and any(part in found for part in why.split("|"))
