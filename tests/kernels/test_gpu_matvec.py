"""The products that the benchmark times are the products of the decoded storage."""

import pytest
import torch

from kvfold.bench import matvec
from kvfold.bench.attention import LIMIT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("context", [512, 4096, 32768])
@pytest.mark.parametrize("layout", matvec.LAYOUTS)
@pytest.mark.parametrize("side", matvec.SIDES)
@pytest.mark.parametrize("model", matvec.MODELS)
def test_a_product_agrees_with_float32(model, side, layout, context):
    operands = matvec.Operands(matvec.Product(model, side, layout, context), 2, torch.device("cuda"))
    want = operands.reference()
    for copy, call in enumerate(operands.calls()):
        got = call().float()
        assert (got - want).norm() <= LIMIT[torch.float16] * want.norm(), copy
