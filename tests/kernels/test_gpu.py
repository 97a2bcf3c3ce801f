"""The GPU kernels on a GPU, against plain definitions: ``pytest -m gpu``."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.kernels.device import HOPPER

pytest.importorskip("triton")

import kvfold
from decode_case import BF16, FP16, LIMIT, Case, relative
from specializations import formats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# ---- decode_attention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("method", ["kivi", "asym", "sym", "hybrid"])
def test_formats(method, bits, d):
    Case(formats(method, bits, d), group_heads=4 if method == "kivi" else 2).check()


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("method", ["kivi", "asym"])
@pytest.mark.parametrize("group", [64, 128])
def test_longer_groups(method, group, d):
    if group > d:
        pytest.skip("a group is part of a head")
    Case(formats(method, head_dim=d, group=group), packed=(384, 1152)).check()


def test_keys_and_values_of_different_bits():
    Case(formats("kivi", bits=4, value_bits=2)).check()


@pytest.mark.parametrize(
    "tokens, group_heads", [(2, 4), (4, 4), (16, 4), (16, 1), (5, 3), (3, 7), (1, 1), (1, 12), (1, 16), (16, 16)]
)
@pytest.mark.parametrize("method, dtype", [("kivi", FP16), ("asym", FP16), ("sym", BF16), ("hybrid", BF16)])
def test_query_tokens_and_heads(method, dtype, tokens, group_heads):
    Case(formats(method), tokens=tokens, group_heads=group_heads, dtype=dtype, bias=dtype is BF16).check()


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("method", ["kivi", "asym", "hybrid"])
def test_query_tokens_at_other_head_sizes(method, d):
    Case(formats(method, head_dim=d), tokens=4, group_heads=3, separate=True).check()


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("method", ["kivi", "hybrid"])
def test_packed_keys_may_meet_other_queries_and_a_bias(method, dtype):
    Case(formats(method), dtype=dtype, bias=True, separate=True).check()


@pytest.mark.parametrize(
    "method, options",
    [
        ("kivi", {"gain": 3000.0, "dtype": BF16}),
        ("kivi", {"gain": 300.0}),
        ("asym", {"gain": 200.0}),
        ("hybrid", {"gain": 200.0}),
        ("kivi", {"key_gain": 300.0, "scale_gain": 1 / 300}),
        ("hybrid", {"key_gain": 300.0, "scale_gain": 1 / 300}),
        ("asym", {"key_gain": 1e-3, "gain": 1e3}),
    ],
)
def test_norms_far_from_one(method, options):
    Case(formats(method), **options).check()


@pytest.mark.parametrize("method", ["kivi", "hybrid"])
@pytest.mark.parametrize(
    "options",
    [
        {"sink": 5, "ring": 77, "packed": (96, 992, 64), "recent": (70, 33, 1)},
        {"sink": 0},
        {"ring": 0},
        {"sink": 0, "ring": 40, "recent": (40, 1)},
        {"packed": (0, 32, 64)},
        {"packed": (0, 0)},
        {"packed": (0, 0, 320), "sink_len": (0, 3, 32), "recent": (1, 1, 9)},
        {"packed": (65536,)},
        {"packed": (32, 4096, 96, 2048, 0), "recent": (1, 128, 64, 5, 17)},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()),
)
def test_windows_and_lengths(method, options):
    Case(formats(method), **options).check()


@pytest.mark.parametrize("method", ["kivi", "hybrid"])
def test_graph_replays_with_new_lengths_and_queries(method):
    case = Case(formats(method), packed=(1024, 1024), bias=True)
    out = torch.empty_like(case.q)
    case.call(out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.call(out=out)
    for lens in (case.lens, [(32, 320, 121), (7, 32, 1)], [(0, 0, 1), (32, 1024, 128)]):
        case.relength(lens)
        case.q.copy_(torch.randn_like(case.q))
        for x in case.ring:  # other slots are in use now
            x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, case.call())
        assert relative(replayed, case.expected()) < LIMIT[FP16]


@pytest.mark.parametrize("group_heads", [1, 12])
@pytest.mark.parametrize("method", ["kivi", "asym", "hybrid"])
def test_so_many_short_sequences_that_a_warp_takes_each(method, group_heads):
    from kvfold.kernels.affine import decode

    case = Case(formats(method), packed=(64, 0, 416) * 34, heads=16, group_heads=group_heads, bias=True)
    assert decode.make_plan(*case.form, 102 * 16, group_heads, 15, 160, HOPPER).warps == 1
    case.check()


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=97,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval().to("cuda", BF16)


@pytest.fixture(autouse=True)
def _unfolded(request):
    yield
    if "model" in request.fixturenames:
        kvfold.unfold(request.getfixturevalue("model"))


METHODS = [
    "none",
    "fold",
    "fold:bits=2",
    "kivi",
    "kivi:bits=4",
    "squat",
    "innerq:mode=hybrid,paper=true",
    "innerq:mode=sym,paper=true",
    "innerq:mode=asym,paper=true",
]


def fast(method):
    """The kernel that serves it."""
    return {"fold": "pages", "none": "dense"}.get(method.partition(":")[0], "gluon")


def run(model, method, kernel, ids, mask, cuts):
    cache, at, logits = kvfold.fold(model, method, kernel=kernel, max_length=768), 0, []
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        for cut in cuts:
            part = slice(at, at + cut)
            out = model(
                ids[:, part], attention_mask=mask[:, : at + cut], position_ids=positions[:, part], past_key_values=cache
            )
            logits.append(out.logits.float())
            at += cut
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ragged", [False, True])
def test_model_agrees_with_the_reference(model, method, ragged):
    """Prompt, 100 decoded tokens, five at once, and decoding after them."""
    assert {row.kernel for row in kvfold.explain(model, method).layers} == {fast(method)}
    ids = torch.randint(0, 97, (3, 517), generator=torch.Generator().manual_seed(1)).to("cuda")
    mask = torch.ones_like(ids)
    if ragged:
        mask[1, :45] = 0
        mask[2, :200] = 0
    cuts = [400, *[1] * 100, 5, *[1] * 12]
    got, folded = run(model, method, fast(method), ids, mask, cuts)
    want, plain = run(model, method, "reference", ids, mask, cuts)
    assert all(layer.kernel.name == fast(method) and len(layer.slabs) == 1 for layer in folded.folded)
    assert [layer.packed for layer in folded.folded] == [layer.packed for layer in plain.folded]
    real = mask.bool()
    assert torch.isfinite(got[real]).all()
    exact, _ = run(model, method, "reference", ids[:, :401], mask[:, :401], [400, 1])
    assert (got[:, :400][real[:, :400]] - exact[:, :400][real[:, :400]]).norm() == 0
    # bf16 activations round differently from step to step, and codes may follow
    assert (got[real] - want[real]).norm() < 2e-2 * want[real].norm()


@pytest.mark.parametrize("method", METHODS)
def test_a_decode_step_does_not_wait_for_the_device(model, method):
    ids = torch.randint(0, 97, (2, 500), generator=torch.Generator().manual_seed(2)).to("cuda")
    cache = kvfold.fold(model, method, max_length=768)
    packing = []
    with torch.no_grad():
        model(ids[:, :400], past_key_values=cache)
        for at in range(400, 480):
            token, position = ids[:, at : at + 1], torch.full((2, 1), at, device="cuda")
            before = list(cache.folded[0].packed)
            packs = any(
                cache.folded[0].packed_length(n + 1) > p for n, p in zip(cache.folded[0].lens, before, strict=True)
            )
            if at > 402 and not packs:  # the first steps compile
                torch.cuda.set_sync_debug_mode("error")
            try:
                model(token, position_ids=position, past_key_values=cache)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            packing.append(before != cache.folded[0].packed)
    assert sum(packing) >= 2


def test_float32_models_are_left_to_the_reference():
    config = LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=97,
    )  # fmt: skip
    single = LlamaForCausalLM(config).eval().to("cuda")
    (row,) = kvfold.explain(single, "kivi").layers
    assert row.kernel == "reference" and "float32" in row.reason
    with pytest.raises(kvfold.errors.KVFoldError, match="float32"):
        kvfold.fold(single, "kivi", kernel="gluon")
    ids = torch.randint(0, 97, (1, 300), device="cuda")
    cache = kvfold.fold(single, "kivi", max_length=512)
    with torch.no_grad():
        single(ids[:, :299], past_key_values=cache)
        assert torch.isfinite(single(ids[:, 299:], past_key_values=cache).logits).all()
