"""The decode kernel over pages of affine groups and of signs against float32 attention over the decoded cache.

``pytest -m gpu``.
"""

import pytest
import torch

pytest.importorskip("triton")

from kvfold.kernels.affine.decode import Plan
from kvfold.kernels.device import STATIC_SHARED
from kvfold.kernels.fragments import decode as fragments
from pages_case import LIMIT, Case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def case(method, **how):
    return Case(method, kernel=fragments, **how)


@pytest.mark.parametrize("dtype", LIMIT, ids=["fp16", "bf16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("method", [
    "innerq", "innerq:mode=asym", "innerq:mode=sym", "innerq:normalize=false", "innerq:bits=4", "innerq:mode=asym,bits=3",
    "qjl", "qjl:normalize=false", "qjl:v_bits=4", "qjl:k_bits=1", "k=qjl+v=kivi",
])  # fmt: skip
def test_every_form_equals_the_reference(method, dim, dtype):
    assert case(method, dim=dim, dtype=dtype).error() < LIMIT[dtype]


@pytest.mark.parametrize(
    "heads, kv_heads, tokens", [(2, 2, 1), (32, 8, 1), (16, 2, 1), (24, 1, 1), (8, 2, 5), (32, 2, 16)]
)
@pytest.mark.parametrize("method", ["innerq", "qjl"])
def test_query_rows_of_every_number(method, heads, kv_heads, tokens):
    assert case(method, heads=heads, kv_heads=kv_heads, tokens=tokens).error() < LIMIT[torch.float16]


@pytest.mark.parametrize("lens", [(0,), (32,), (96, 128), (160,), (4096, 64), (20000 // 32 * 32,)])
@pytest.mark.parametrize("method", ["innerq", "qjl"])
def test_sequences_of_every_length(method, lens):
    assert case(method, lens=lens).error() < LIMIT[torch.float16]


@pytest.mark.parametrize("split", [4, 12, 28])
@pytest.mark.parametrize("method", ["innerq", "qjl"])
def test_storage_in_two_slabs(method, split):
    assert case(method, split=split).error() < LIMIT[torch.float16]


@pytest.mark.parametrize("method", ["innerq", "qjl"])
@pytest.mark.parametrize(
    "how",
    [{"size": 1e-3}, {"size": 300.0}, {"mean": 30.0}, {"query": 8.0}, {"query": 1e-3}, {"size": 1e-3, "query": 8.0}],
    ids=str,
)  # fmt: skip
def test_numbers_of_every_size(method, how):
    assert case(method, lens=(2048, 96), **how).error() < LIMIT[torch.float16]


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("method", ["innerq", "qjl"])
def test_launches_of_every_shape(method, warps):
    made = case(method, lens=(3000 // 32 * 32, 512))
    for splits in (1, 3, 7, 64):
        for pair in {1, fragments.pairs(made.formats[0], 4)}:
            for blocks in (2, 4):
                if fragments.program_bytes(*made.formats, pair, warps, blocks) <= STATIC_SHARED:
                    plan = Plan(warps, blocks, pair, 1, splits, 2)
                    assert made.error(plan) < LIMIT[torch.float16]
