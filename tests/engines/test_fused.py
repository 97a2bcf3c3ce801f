"""Which of a model's operations a captured step runs by kernels of kvfold, and that its results stay.

Without a GPU the kernels run in Triton's interpreter, in float16, which it rounds as a GPU does.
"""

import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

pytest.importorskip("triton")

import kvfold
from helpers import build, interpreted_module, prompt
from kvfold.engines.transformers import fused

FP16 = torch.float16
KINDS = [  # norms of two layers and of the end, each model's rounding, layers that rotate halves in 16 bits, gates of SiLU
    (LlamaForCausalLM, LlamaConfig, 5, "normed", 2, 2),
    (Qwen2ForCausalLM, Qwen2Config, 5, "normed", 2, 2),
    (Qwen3ForCausalLM, Qwen3Config, 9, "normed", 2, 2),
    (Phi3ForCausalLM, Phi3Config, 5, "normed", 2, 0),
    (GemmaForCausalLM, GemmaConfig, 5, "above one", 2, 0),
    (Olmo2ForCausalLM, Olmo2Config, 9, "whole", 0, 2),
    (GlmForCausalLM, GlmConfig, 5, "normed", None, 0),
]


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_module("kvfold.engines.transformers.ops.small")


@pytest.fixture
def kernels(interpreted, monkeypatch):
    """In place of those of a GPU; counted."""
    called = []

    def counting(name):
        own = getattr(interpreted, name)

        def call(*args):
            called.append(name)
            return own(*args)

        return call

    for name in ("rms_norm", "rotate", "gated"):
        monkeypatch.setattr(fused.small, name, counting(name))
    monkeypatch.setattr(fused, "serves", lambda *tensors: all(getattr(t, "dtype", None) == FP16 for t in tensors))
    monkeypatch.setattr(fused, "_known", {})
    return called


@pytest.mark.parametrize(
    ("model", "config", "norms", "rounding", "turns", "gates"), KINDS, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_models_small_operations_are_found_and_its_steps_stay(model, config, norms, rounding, turns, gates, kernels):
    model, ids = build(model, config).to(FP16), prompt(2, 12)
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if "norm" in name):
            parameter.copy_(1 + 0.2 * torch.randn(parameter.shape))  # fresh weights are all one
        caches = [kvfold.fold(model, "none") for _ in range(2)]
        for cache in caches:
            model(ids[:, :11], past_key_values=cache)
        want = model(ids[:, 11:], past_key_values=caches[0]).logits
        with fused.small_operations(model) as found:
            got = model(ids[:, 11:], past_key_values=caches[1]).logits
    styles = [style for module in model.modules() if (style := fused.norm_style(module))]
    assert {how for how, _ in styles} == {rounding} and len(styles) == norms
    assert found == norms + gates + (turns is not None)
    assert kernels.count("rms_norm") == norms and kernels.count("rotate") == (turns or 0)
    assert kernels.count("gated") == gates
    assert (got - want).norm() < 2e-3 * want.norm()


def test_everything_is_given_back(kernels):
    model = build(LlamaForCausalLM, LlamaConfig).to(FP16)
    kvfold.fold(model, "none")
    place = fused.sys.modules[type(model).__module__]
    own = place.apply_rotary_pos_emb
    with pytest.raises(KeyboardInterrupt), fused.small_operations(model), fused.small_operations(model):
        assert place.apply_rotary_pos_emb is not own
        raise KeyboardInterrupt
    assert place.apply_rotary_pos_emb is own
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_is_something_else_stays(kernels):
    """A forward of somebody else, a hook, another formula, another dtype."""
    model = build(LlamaForCausalLM, LlamaConfig).to(FP16)
    kind = type(model.model.norm)
    norms = [module for module in model.modules() if isinstance(module, kind)]
    norms[0].forward = lambda x: 2 * x
    norms[1].register_forward_hook(lambda module, given, out: 2 * out)
    norms[2].float()

    class OtherNorm(kind):
        def forward(self, x):
            return super().forward(x) + 1

    model.model.norm = OtherNorm(norms[3].weight.shape[0]).to(FP16)
    assert [fused.norm_style(module) is None for module in norms[:4]] == [True, True, True, False]
    assert fused.norm_style(model.model.norm) is None and fused.norm_style(nn.LayerNorm(8).to(FP16)) is None
    assert not fused.is_rotation(lambda q, k, cos, sin: (q * cos, k * cos), torch.device("cpu"), FP16)
    assert not fused.is_rotation(lambda q: q, torch.device("cpu"), FP16)


ERRORS = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
    (RuntimeError("The size of tensor a (64) must match the size of tensor b (32)"), False),
    (TypeError("missing 1 required positional argument"), False),
]


@pytest.mark.parametrize(("error", "passes"), ERRORS, ids=lambda x: str(x)[:20])
def test_an_error_of_the_device_is_not_taken_for_something_else(error, passes, kernels):
    """Shapes that do not fit say that a function is another one. Memory that does not suffice says nothing about it."""

    def failing(*given):
        raise error

    model = build(LlamaForCausalLM, LlamaConfig).to(FP16)
    mlp = model.model.layers[0].mlp
    mlp.act_fn.forward = failing
    tried = [lambda: fused.is_rotation(failing, torch.device("cpu"), FP16), lambda: fused.is_gated(mlp)]
    for attempt in tried:
        if passes:
            with pytest.raises(type(error)) as raised:
                attempt()
            assert raised.value is error
        else:
            assert attempt() is False


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        (LlamaForCausalLM, LlamaConfig, "5 of 5 norms, 2 of 2 gates, 1 of 1 rotations (functions) by one kernel each"),
        (GlmForCausalLM, GlmConfig, "5 of 5 norms, 0 of 1 rotations (functions) by one kernel each"),
    ],
)
def test_what_is_served_is_said(model, config, said, kernels):
    built = build(model, config).to(FP16)
    assert said in fused.described(built)
    built.float()  # no kernel takes it
    assert fused.described(built).startswith("a decode graph runs the model's own operations (0 of ")


def test_calls_that_the_kernel_does_not_take_are_the_models_own(kernels):
    model = build(LlamaForCausalLM, LlamaConfig).to(FP16)
    kvfold.fold(model, "none")
    place = fused.sys.modules[type(model).__module__]
    q, k, cos, sin = (torch.randn(2, n, 4, 64, dtype=FP16) for n in (4, 2, 1, 1))
    cos, sin = cos[:, 0], sin[:, 0]
    want = place.apply_rotary_pos_emb(q, k, cos, sin)
    with fused.small_operations(model):
        got = place.apply_rotary_pos_emb(q, k, cos, sin)
        assert model.model.norm(torch.ones(1, 2, model.config.hidden_size)).dtype == torch.float32
    assert not kernels and all(map(torch.equal, got, want))


@pytest.mark.parametrize("how", ["the forward", "in place", "a copy"])
def test_what_somebody_compiled_stays(how, kernels):
    model = build(LlamaForCausalLM, LlamaConfig).to(FP16)
    kvfold.fold(model, "none")
    if how == "the forward":
        model.forward = torch.compile(model.forward)
    elif how == "in place":
        model.compile()
    else:
        model = torch.compile(model)
    with fused.small_operations(model) as found:
        assert found == 0 and not any(
            "forward" in vars(norm) for norm in model.modules() if "Norm" in type(norm).__name__
        )
