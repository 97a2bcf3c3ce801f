"""Plain-Triton kernels, run by Triton's interpreter, against PyTorch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

MERGE = """
import torch
from interpreter import quicken
from kvfold.kernels.common.partials import merge_kernel

quicken()
torch.manual_seed(0)
SINKS = torch.tensor([0.5, -3.0, 20.0, -1e4], dtype=torch.bfloat16)


def merged(splits, sinks=None, flat=True, part=32):
    heads, rows, dim, tokens = 4, 6, 64, 3  # two sequences of two KV heads, two query heads each
    out = torch.randn(heads, splits, rows, dim)
    top = torch.randn(heads, splits, rows) * 20
    total = torch.rand(heads, splits, rows) + 0.5
    top[:, 1], total[:, 1], out[:, 1] = -1e30, 0.0, 0.0  # a split without tokens
    top[1, :, 2], total[1, :, 2], out[1, :, 2] = -1e30, 0.0, 0.0  # a row that sees nothing
    got = torch.full((heads, rows, dim), float("nan"))
    merge_kernel[(heads * rows, dim // part) if flat else (heads, dim // part, rows)](
        out, top, total, got, total if sinks is None else sinks, rows, splits, 2, tokens,
        D=dim, PART=part, N=64, HAS_SINKS=sinks is not None, FLAT=flat,
    )
    if sinks is not None:  # a part more
        more = (sinks.float() / 0.6931471805599453).view(1, 2, 2, 1).expand(2, 2, 2, tokens).reshape(heads, 1, rows)
        out, top = torch.cat((out, torch.zeros_like(out[:, :1])), 1), torch.cat((top, more), 1)
        total = torch.cat((total, torch.ones_like(more)), 1)
    weight = torch.exp2(top - top.amax(1, keepdim=True))
    want = (weight.unsqueeze(-1) * out).sum(1) / (weight * total).sum(1).clamp_min(1e-30).unsqueeze(-1)
    want[1, 2] = 0
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda said: f"{splits} splits: {said}")


for splits in (2, 64, 65, 130):
    merged(splits)
for splits in (2, 130):
    merged(splits, SINKS)
    merged(splits, SINKS, False, 8)
merged(33, None, False, 8)
"""


def test_merge_of_splits():
    # the interpreter is chosen when kernels are defined, so it needs a process of its own
    places = map(str, (Path(__file__).parents[1], *sys.path))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, "-c", MERGE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
