"""The merge of kernels that overlap, its lanes run on a CPU."""

import pytest
import torch

pytest.importorskip("triton")

import lanes
from kvfold.kernels.common._merge import merge_rows_kernel
from kvfold.kernels.common.partials import merge_shape

SINKS = torch.tensor([0.5, -3.0, 20.0, -1e4], dtype=torch.bfloat16)
HEADS, ROWS, TOKENS = 4, 6, 3  # two sequences of two KV heads, two query heads each


def merged(out, top, total, sinks, shape):
    heads, splits, rows, dim = out.shape
    got = torch.full((heads, rows, dim), float("nan"))
    grid = (heads * rows, dim // shape.part, 1) if shape.flat else (heads, dim // shape.part, rows)
    arguments = (out, top, total, got, total if sinks is None else sinks, rows, splits, 2, TOKENS)
    constants = {"D": dim, "PART": shape.part, "HAS_SINKS": sinks is not None, "SOON": False, "FLAT": shape.flat}
    lanes.run(merge_rows_kernel, grid, arguments, constants, shape.warps, 0)
    return got


def expected(out, top, total, sinks):
    if sinks is not None:  # a part more
        more = (sinks.float() / 0.6931471805599453).view(1, 2, 2, 1).expand(2, 2, 2, TOKENS).reshape(HEADS, 1, ROWS)
        out, top = torch.cat((out, torch.zeros_like(out[:, :1])), 1), torch.cat((top, more), 1)
        total = torch.cat((total, torch.ones_like(more)), 1)
    weight = torch.exp2(top - top.amax(1, keepdim=True))
    return (weight.unsqueeze(-1) * out).sum(1) / (weight * total).sum(1).clamp_min(1e-30).unsqueeze(-1)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize(("dim", "splits"), [(128, 2), (128, 33), (80, 70), (256, 9), (64, 70)])
@pytest.mark.parametrize("many", [32, 512, 4096])
def test_parts_are_merged(many, dim, splits, sinks):
    torch.manual_seed(splits)
    out = torch.randn(HEADS, splits, ROWS, dim)
    top = torch.randn(HEADS, splits, ROWS) * 20
    total = torch.rand(HEADS, splits, ROWS) + 0.5
    top[:, 1], total[:, 1], out[:, 1] = -1e30, 0.0, 0.0  # a split without tokens
    top[1, :, 2], total[1, :, 2], out[1, :, 2] = -1e30, 0.0, 0.0  # a row that sees nothing
    shape = merge_shape(many, splits, dim)
    got = merged(out, top, total, sinks, shape)
    want = expected(out, top, total, sinks)
    want[1, 2] = 0
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda said: f"{shape}: {said}")
