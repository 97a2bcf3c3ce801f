"""Plain-Triton kernels, run by Triton's interpreter, against PyTorch."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

MERGE = """
import torch
from kvfold.kernels.partials import merge_kernel

torch.manual_seed(0)
heads, splits, rows, dim = 2, {splits}, 3, 64
out = torch.randn(heads, splits, rows, dim)
top = torch.randn(heads, splits, rows) * 20
total = torch.rand(heads, splits, rows) + 0.5
top[:, 1], total[:, 1], out[:, 1] = -1e30, 0.0, 0.0  # a split without tokens
top[1, :, 2], total[1, :, 2], out[1, :, 2] = -1e30, 0.0, 0.0  # a row that sees nothing
got = torch.full((heads, rows, dim), float("nan"))
merge_kernel[(heads * rows, dim // 32)](out, top, total, got, rows, splits, D=dim, PART=32, N=64, EARLY=False)
weight = torch.exp2(top - top.amax(1, keepdim=True))
want = (weight.unsqueeze(-1) * out).sum(1) / (weight * total).sum(1).clamp_min(1e-30).unsqueeze(-1)
want[1, 2] = 0
torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.parametrize("splits", [2, 64, 65, 130])
def test_merge_of_splits(splits):
    # the interpreter is chosen when kernels are defined, so it needs a process of its own
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", MERGE.format(splits=splits)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
