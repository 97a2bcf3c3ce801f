"""Sums that wait for a norm: they are computed once, whoever looks at them."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton")

from helpers import build, interpreted_module, prompt
from kvfold.engines.transformers import fused, rows


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(rows, "small", interpreted_module("kvfold.engines.transformers.ops.small"))


def parts():
    torch.manual_seed(0)
    a, b = torch.randn(2, 1, 1, 64, dtype=torch.float16)
    return a, b.as_subclass(rows.Product)


LOOKS = {
    "a product": lambda x: x * 2,
    "in place": lambda x: x.add_(1),
    "a slice": lambda x: x[..., :8],
    "numbers": lambda x: torch.tensor(x.tolist()),
    "within a list": lambda x: torch.cat([x, x]),
    "where it lies": lambda x: torch.tensor(x.data_ptr() > 0),
    "a sum": lambda x: torch.add(x, x, alpha=2),
    "with a number": lambda x: x + 1,
    "of another shape": lambda x: x + torch.ones(3, 1, 1, 1, dtype=torch.float16),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("turned", [False, True])
def test_whoever_looks_at_a_sum_sees_it(look, turned):
    a, b = parts()
    total = b + a if turned else a + b
    assert type(total) is rows.Sum and total.parts is not None
    assert (total.shape, total.dtype, total.is_cuda) == (a.shape, a.dtype, False) and total.parts is not None
    got, want = look(total), look(a + rows.plain(b))
    assert torch.equal(rows.plain(got), want) and type(rows.plain(got)) is torch.Tensor


def test_sums_of_sums_are_computed_in_turn():
    a, b = parts()
    want = a + rows.plain(b)
    twice = (a + b) + (b + a)
    assert type(twice) is rows.Sum and torch.equal(rows.plain(twice), want + want)
    assert torch.equal(rows.plain(twice), want + want)  # and once


def test_what_does_not_lie_alike_is_added_at_once():
    a, b = parts()
    assert type(a.float() + b) is torch.Tensor and type(a.expand(2, 1, 64) + b) is torch.Tensor
    assert type(b.transpose(1, 2)) is torch.Tensor and type(b.unsqueeze(0)) is torch.Tensor


def test_a_norm_computes_the_sum(interpreted):
    a, b = parts()
    weight, total = torch.ones(64, dtype=torch.float16), a + b
    got = rows.norm(total, weight, 1e-5, "normed")
    assert total.parts is None and torch.equal(rows.plain(total), a + rows.plain(b))
    assert torch.equal(got, rows.small.rms_norm(a + rows.plain(b), weight, 1e-5, "normed"))
    assert torch.equal(got, rows.norm(total, weight, 1e-5, "normed"))


def test_rows_are_told_from_what_is_none():
    layer = torch.nn.Linear(64, 8, dtype=torch.float16)
    row = torch.randn(1, 1, 64, dtype=torch.float16)
    assert rows.is_row(layer, row) and not rows.serves(layer)  # no GPU
    assert not any(
        rows.is_row(layer, x) for x in (row.float(), row.expand(2, 1, 64), row[..., ::2], row.view(2, 1, 32))
    )
    assert rows.forward(layer, True, row.expand(2, 1, 64)).shape == (2, 1, 8)


@pytest.fixture
def kernels(monkeypatch):
    """Interpreted kernels in place of those of a GPU, for a whole step; counted."""
    called = []
    products = interpreted_module("kvfold.engines.transformers.ops.product", "kvfold.engines.transformers.ops._row")
    operations = interpreted_module("kvfold.engines.transformers.ops.small")

    def counting(of, name):
        def call(*args):
            called.append(name)
            return getattr(of, name)(*args)

        return call

    for name in ("row_product", "gated_row_product", "three_row_products"):
        monkeypatch.setattr(rows.product, name, counting(products, name))
    for name in ("rms_norm", "added_norm", "gated", "rotate"):
        monkeypatch.setattr(rows.small, name, counting(operations, name))
    monkeypatch.setattr(rows, "serves", lambda module: type(module) is torch.nn.Linear)
    monkeypatch.setattr(
        fused, "serves", lambda *tensors: all(getattr(t, "dtype", None) == torch.float16 for t in tensors)
    )
    monkeypatch.setattr(fused, "_known", {})
    return called


@pytest.mark.parametrize(("model", "config"), [(LlamaForCausalLM, LlamaConfig), (Gemma2ForCausalLM, Gemma2Config)])
def test_a_models_step_stays(model, config, kernels):
    """Of one sequence by rows, of two by the model's own products; logits are tensors like any other."""
    model = build(model, config).to(torch.float16)
    layers = model.config.num_hidden_layers
    for batch in (1, 2):
        ids = prompt(batch, 1)
        with torch.no_grad():
            want = model(ids).logits
            with fused.small_operations(model):
                got = model(ids).logits
        assert type(got) is torch.Tensor and (got - want).norm() < 2e-3 * want.norm()
    assert kernels.count("three_row_products") == layers
    assert kernels.count("row_product") + 2 * kernels.count("gated_row_product") == 4 * layers + 1
    if type(model) is LlamaForCausalLM:  # a sum of one sequence is computed by the norm after it, but for the first
        assert (kernels.count("added_norm"), kernels.count("gated_row_product")) == (2 * layers, layers)
    before = len(kernels)
    with torch.no_grad(), fused.small_operations(model, products=False):
        model(prompt(1, 1))
    assert not any("row" in name for name in kernels[before:])
    assert not any("forward" in vars(module) for module in model.modules())


def test_three_products_are_of_the_row_they_are_given(kernels):
    """Whatever order a module asks in, and whatever it does to the row in between."""
    owner = torch.nn.Module()
    counts = dict(zip(rows.PROJECTIONS, (32, 16, 16), strict=True))
    for name, count in counts.items():
        setattr(owner, name, torch.nn.Linear(64, count, dtype=torch.float16))
    served = set(owner.children())
    three = rows.Three.of(owner, served)
    assert rows.Three.of(owner, served - {owner.v_proj}) is None
    x = torch.randn(1, 1, 64, dtype=torch.float16)

    def check(index):
        with torch.no_grad():
            got, want = three.forward(index, x), three.modules[index](x)
        assert got.shape == want.shape and (got - want).norm() < 2e-3 * want.norm()
        return kernels.count("three_row_products")

    assert [check(i) for i in (1, 0, 2)] == [1, 1, 1] and three.row is None
    assert [check(i) for i in (0, 0, 1)] == [2, 3, 3]
    x.mul_(2)
    assert [check(2), check(0)] == [4, 4]
    x = torch.randn(2, 1, 64, dtype=torch.float16)
    assert check(0) == 4  # the module's own
