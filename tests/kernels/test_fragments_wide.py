"""Attention over pages whose queries go through a sketch's matrix by products of warpgroups: the whole kernel run on a CPU, and
on a GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import lanes
from kvfold.bench import attention
from kvfold.kernels.common.partials import Partials
from kvfold.kernels.fragments import _decode as _fragments_gluon
from kvfold.kernels.fragments import decode as fragments
from kvfold.kernels.fragments.decode import wide_plan


class Emulated:
    """The kernel, whose launches PyTorch runs."""

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            run = _fragments_gluon.fragments_kernel
            lanes.run(run, grid, arguments, constants, num_warps, 227 << 10, 1 << 25)

        return launch


def shaped(splits, window_heads):
    plan = wide_plan(4, 8, 1024, 132)
    return replace(plan, splits=splits, dense_splits=min(window_heads, 1), window_heads=window_heads)


def error(work, plan, dtype, device):
    given, forms = attention.make_inputs(work, dtype, device), work.formats
    want = torch.stack([attention.reference(work, given, b) for b in range(work.batch)])
    if device.type == "cuda":
        got = fragments.decode_attention(given.q, *forms, [given.span], given.windows, 128**-0.5, plan=plan).float()
        return float((got - want).norm() / want.norm())
    rows = work.num_heads // work.num_kv_heads * work.query_tokens
    partials = Partials.empty(work.batch * work.num_kv_heads, fragments.parts(plan), rows, 128, device)
    for x in (partials.out, partials.top, partials.total):
        x.fill_(float("nan"))
    fragments._launch(given.q, *forms, given.span, given.windows, 128**-0.5, partials, 0, plan, False)
    weight = torch.exp2(partials.top - partials.top.amax(1, True))
    got = (partials.out * weight.unsqueeze(-1)).sum(1) / (partials.total * weight).sum(1).unsqueeze(-1)
    return float((got.view(want.shape) - want).norm() / want.norm())


@pytest.mark.parametrize(
    "how, splits, window_heads",
    [
        ({"context": 160 + 33 * 128, "num_heads": 12, "num_kv_heads": 3}, 1, 2),
        ({"context": 160 + 7 * 32, "num_heads": 6, "num_kv_heads": 2, "batch": 2}, 2, 4),
        ({"context": 160 + 19 * 32, "num_heads": 6, "num_kv_heads": 2, "batch": 2}, 1, 0),
        ({"context": 160 + 33 * 32, "num_heads": 4, "num_kv_heads": 1}, 3, 0),
        ({"context": 160 + 9 * 32, "num_heads": 4, "num_kv_heads": 2, "query_tokens": 2}, 1, 0),
    ],
    ids=str,
)
def test_the_kernel_equals_the_reference(how, splits, window_heads, monkeypatch):
    work = attention.Work(**{"method": "qjl", "bits": 0, "batch": 1} | how)
    monkeypatch.setattr(fragments, "fragments_kernel", Emulated())
    plan = shaped(splits, window_heads)
    assert error(work, plan, torch.float16, torch.device("cpu")) < 2e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, limit", [(torch.float16, 2e-3), (torch.bfloat16, 6e-3)], ids=["fp16", "bf16"])
@pytest.mark.parametrize("context", [160, 192, 5000, 65536])
@pytest.mark.parametrize(
    "batch, splits, window_heads",
    [(1, 16, 2), (2, 8, 4), (3, 1, 24), (1, 3, 1), (1, 16, 0), (3, 1, 0), (2, 5, 0)],
)
def test_numbers_on_a_gpu(batch, splits, window_heads, context, dtype, limit):
    work, device = attention.Work("qjl", 0, batch, context), torch.device("cuda")
    if not fragments.device_info(device).has_wgmma:
        pytest.skip("needs warpgroups that multiply")
    plan = shaped(splits, window_heads)
    assert error(work, plan, dtype, device) < limit
