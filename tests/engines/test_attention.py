"""Attention over a folded layer equals a plain softmax over what the layer says it holds."""

import copy

import pytest
import torch

import kvfold
from helpers import dividing, dynamic, feed, layer, left_padding, llama, logits, prompt, relative, spec, tokens
from kvfold import kernels
from kvfold.engines.transformers import attention, originals
from kvfold.engines.transformers.attention import attention_forward
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.errors import CacheStateError, KVFoldError, MethodError, UnsupportedModelError
from kvfold.kernels import Partial
from kvfold.kernels.reference import ReferenceKernel
from kvfold.rope import Rope
from targets import current

pytestmark = [pytest.mark.targets, pytest.mark.takes_turns]

MODULE = torch.nn.Module().eval()
MODULE.num_key_value_groups = 2
MODULE.is_causal = True


def attend(of, new, valid=None, start=0, offset=None, **options):
    """One call as a model makes it: [batch, heads, tokens, head_dim]."""
    keys, values, queries = new
    count = keys.shape[-2]
    positions = torch.arange(start, start + count, device=keys.device).expand(keys.shape[0], -1)
    positions = positions if offset is None else positions - offset.unsqueeze(-1)
    mask = None
    if valid is not None:
        past = [valid.new_ones(keys.shape[0], n) if kept is None else kept for n, kept in of.columns.calls]
        mask = torch.cat([*past, valid], -1)
    k, v = of.update(keys.clone(), values.clone())
    out, weights = attention_forward(MODULE, queries, k, v, mask, position_ids=positions, **options)
    assert weights is None
    return out.transpose(1, 2)


def plain(past, new, row: int, valid=None, scale=None) -> torch.Tensor:
    """softmax over [past | new, causal], in doubles on the CPU; ``past`` are keys and values [kv_heads, n, d]."""
    past, valid = [t.cpu().double() for t in past], None if valid is None else valid.cpu()
    keys, values, queries = (t[row].cpu().double() for t in new)
    count, n = keys.shape[-2], past[0].shape[-2]
    keys, values = torch.cat((past[0], keys), -2), torch.cat((past[1], values), -2)
    per_kv = queries.shape[0] // keys.shape[0]
    out = torch.empty_like(queries)
    for head, query in enumerate(queries):
        for at in range(count):
            seen = torch.ones(n + at + 1, dtype=torch.bool)
            if valid is not None:
                seen[n:] = valid[row, : at + 1]
            k, v = (t[head // per_kv, : n + at + 1][seen] for t in (keys, values))
            weights = (k @ query[at] * (scale or query.shape[-1] ** -0.5)).softmax(-1)
            out[head, at] = weights @ v
    return out


def parts(of, source, row: int, start: int = 0):
    """What the layer holds of a sequence, after checking that its windows are exact."""
    decoded, length = of.decoded(row), of.lens[row]
    sink, recent = min(of.method.sink, length), length - min(of.method.sink, length) - of.packed[row]
    for side, given in zip(decoded, source, strict=False):
        given = given[row, :, start:].float()
        assert side.shape[-2] == length
        assert torch.equal(side[:, :sink], given[:, :sink])
        assert torch.equal(side[:, length - recent :], given[:, length - recent : length])
    return decoded


@pytest.fixture
def on_chip(target, monkeypatch):
    """On a GPU: a layer whose kernel is a fused one is not handed to the reference, without a word, by few new tokens."""
    attend_by_reference = ReferenceKernel.attend

    def attend(self, call):
        fused = kernels.choose(call.key_format, call.value_format, target.device, call.rope is not None).kernel
        assert not target.is_gpu or fused is self, f"{fused.name} serves this layer, but the reference was called"
        return attend_by_reference(self, call)

    monkeypatch.setattr(ReferenceKernel, "attend", attend)


@pytest.mark.parametrize("count", [1, 5, 16], ids=["decode", "5-tokens", "16-tokens"])
@pytest.mark.parametrize("method", kvfold.DEFAULT)
def test_attention_of_few_new_tokens_is_a_plain_softmax(method, count, target, on_chip):
    """Over sink, packed, recent and new tokens, with the layer's own kernel."""
    old, new = tokens(2, 340, seed=1), tokens(2, count, seed=2)
    of = feed(layer(method, max_length=512), old, [300, 40])
    assert of.packed[0] > 0
    past = [parts(of, old, row) for row in range(2)]
    out = attend(of, new, start=340)
    for row in range(2):
        assert relative(out[row], plain(past[row], new, row)) < target.attention
    assert of.lens == [340 + count] * 2


@pytest.mark.parametrize("count", [1, 40], ids=["decode", "40-tokens"])
@pytest.mark.parametrize("method", kvfold.DEFAULT)
def test_attention_over_storage_in_pieces_is_a_plain_softmax(method, count, target):
    old, new = tokens(2, 420, seed=1), tokens(2, count, seed=2)
    of = feed(layer(method), old, [300, 120])
    assert len(of.slabs) > 1
    past = [parts(of, old, row) for row in range(2)]
    out = attend(of, new, start=420)
    for row in range(2):
        assert relative(out[row], plain(past[row], new, row)) < target.attention
    assert of.lens == [420 + count] * 2


@pytest.mark.parametrize("method", kvfold.DEFAULT)
def test_attention_of_a_ragged_batch_with_padding_among_the_new_tokens(method, target):
    old, new = tokens(3, 340, seed=1), tokens(3, 6, seed=2)
    offset, real = left_padding([340, 20, 265], 340)
    of = feed(layer(method), old, None, real, offset=offset)
    assert len(set(of.packed)) > 1
    valid = torch.ones(3, 6, dtype=torch.bool, device=target.device)
    valid[1, 4:] = False
    past = [parts(of, old, row, int(offset[row])) for row in range(3)]
    for t in new:
        t[1, :, 4:] = 1e4  # whatever padding holds must not show
    out = attend(of, new, valid, 340, offset)
    for row in range(3):
        count = 4 if row == 1 else 6
        expected = plain(past[row], new, row, valid)
        assert relative(out[row, :, :count], expected[:, :count]) < target.attention
    assert out.isfinite().all()
    assert of.lens == [346, 24, 271]


GQA = [(4, 4), (4, 2), (6, 2), (4, 1), (8, 1)]


@pytest.mark.parametrize("method", ["kivi", "squat", "squat_pre", "innerq", "qjl_outliers", "turboquant", "gear"])
@pytest.mark.parametrize(("heads", "kv_heads"), GQA, ids=[f"{h}-heads-{k}-kv" for h, k in GQA])
def test_any_ratio_of_query_to_key_heads(method, heads, kv_heads, target, on_chip):
    shape = spec(64, heads, kv_heads)
    old, new = tokens(1, 320, 1, shape), tokens(1, 3, 2, shape)
    of = feed(layer(method, shape, max_length=512), old)
    past = of.decoded(0)
    assert relative(attend(of, new, start=320)[0], plain(past, new, 0)) < target.attention


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("method", kvfold.DEFAULT)
def test_any_head_dim(method, head_dim, target, on_chip):
    shape = spec(head_dim, 2, 1)
    old, new = tokens(1, 320, 1, shape), tokens(1, 2, 2, shape)
    of = feed(layer(dividing(method, head_dim), shape, max_length=512), old)
    past = parts(of, old, 0)
    assert of.packed[0] > 0
    assert relative(attend(of, new, start=320)[0], plain(past, new, 0)) < target.attention


def test_the_models_own_scale_is_used(target, on_chip):
    old, new = tokens(1, 320), tokens(1, 2, seed=2)
    of = feed(layer("kivi", max_length=512), old)
    past = of.decoded(0)
    assert relative(attend(of, new, start=320, scaling=0.03)[0], plain(past, new, 0, scale=0.03)) < target.attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["none", "kivi", "innerq", "qjl", "squat_pre"])
@pytest.mark.cpu_only("the reference's accuracy in half precision; every test above has the dtypes of a GPU's kernels")
def test_half_precision_models_get_their_own_dtype(method, dtype):
    shape = spec(dtype=dtype)
    old, new = tokens(1, 320, 1, shape, dtype), tokens(1, 3, 2, shape, dtype)
    of = feed(layer(method, shape), old)
    past = of.decoded(0)
    out = attend(of, new, start=320)
    assert out.dtype == dtype
    assert relative(out[0].float(), plain(past, new, 0)) < 2 * torch.finfo(dtype).eps


def test_the_first_call_attends_exactly(target):
    new = tokens(2, 50)
    empty = [torch.zeros(2, 0, 64)] * 2
    out = attend(layer("kivi:bits=1,sink=0,recent=0"), new)
    for row in range(2):
        assert relative(out[row], plain(empty, new, row)) < target.attention


def test_the_first_call_with_left_padding_attends_to_real_tokens_only(target):
    new, (_, valid) = tokens(2, 50), left_padding([50, 33], 50)
    out = attend(layer("kivi"), new, valid)
    alone = attend(layer("kivi"), tuple(t[1:, :, 17:] for t in new))
    assert relative(out[1, :, 17:], alone[0]) < target.attention and out.isfinite().all()


@pytest.mark.parametrize("size", [1e3, 3e4])
@pytest.mark.parametrize("method", ["kivi", "innerq", "qjl", "squat"])
def test_large_queries_and_keys_stay_finite(method, size, target):
    most = torch.finfo(target.dtype).max / 2  # a value that is read back may lie a rounding above the largest one
    old, new = (tuple((size * t).clamp(-most, most) for t in tokens(1, n, seed=n)) for n in (320, 3))
    of = feed(layer(method, max_length=512), old)
    assert attend(of, new, start=320).isfinite().all()


@pytest.mark.cpu_only("arithmetic of the reference kernel")
def test_parts_merge_to_the_whole_and_may_hold_anything_where_invalid():
    generator = torch.Generator().manual_seed(0)
    scores = 30 * torch.randn(2, 2, 3, 20, generator=generator)
    values = torch.randn(2, 2, 20, 8, generator=generator)
    valid = torch.rand(2, 1, 3, 20, generator=generator) < 0.6
    valid[:, :, :, 7:14] = False
    expected = scores.masked_fill(~valid, float("-inf")).softmax(-1) @ values
    scores[..., 7:14], values[..., 7:14, :] = float("nan"), float("nan")
    pieces = [
        Partial.of(scores[..., a:b], valid[..., a:b], values[..., a:b, :]) for a, b in ((0, 7), (7, 14), (14, 20))
    ]
    assert torch.allclose(Partial.merge(pieces), expected, atol=1e-5)


# ---- eight bits ------------------------------------------------------------------------------------------------------


def divergence(model, method: str, ids) -> float:
    """Mean KL divergence of a continuation read through the packed cache from the full-precision model's."""
    cuts = [256, *[16] * ((ids.shape[1] - 256) // 16)]
    expected = logits(model, dynamic(model), ids, cuts)[:, 256:].float().log_softmax(-1)
    got = logits(model, kvfold.fold(model, method, max_length=512), ids, cuts)[:, 256:].float().log_softmax(-1)
    kvfold.unfold(model)
    return float((expected.exp() * (expected - got)).sum(-1).mean())


@pytest.mark.parametrize("method", ["kivi", "squat", "squat_pre", "innerq"])
def test_eight_bits_without_windows_hardly_diverge(method):
    model, ids = llama(initializer_range=0.1), prompt(1, 352)
    assert divergence(model, f"{method}:bits=8,sink=0,recent=0", ids) < 1e-3
    assert divergence(model, f"{method}:bits=1,sink=0,recent=0", ids) > 1e-2


# ---- from nothing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["none", "kivi:sink=0,recent=0", "fold:sink=0,recent=0", "innerq:mode=asym,sink=0,recent=0"]
)
def test_a_prompt_of_one_token(method, target):
    """The first calls meet a cache without packed storage, and exact until the first block is packed."""
    model, ids = llama(), prompt(3, 120)
    expected = logits(model, dynamic(model), ids, [1] * 120)
    got = logits(model, kvfold.fold(model, method, max_length=512), ids, [1] * 120)
    first = 120 if method == "none" else 32
    assert got.isfinite().all() and relative(got[:, :first], expected[:, :first]) < target.logits


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 30.0}, "does not support attention with softcap"),
        ({"position_bias": torch.zeros(1)}, "does not support attention with position_bias"),
        ({"sliding_window": 16}, "does not support attention with sliding_window"),
        ({"is_causal": False}, "does not support attention with is_causal=False"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_attention_that_a_folded_layer_does_not_compute_is_refused(options, message):
    of = feed(layer("kivi"), tokens(1, 30))
    with pytest.raises(UnsupportedModelError, match=f"layer 0: .*{message}"):
        attend(of, tokens(1, 2), start=30, **options)
    assert of.lens == [30] and not of.pending
    attend(of, tokens(1, 2), start=30)


def test_dropout_is_refused_while_training():
    of, (keys, values, queries) = layer("kivi"), tokens(1, 4)
    k, v = of.update(keys, values)
    with pytest.raises(UnsupportedModelError, match="dropout"):
        attention_forward(torch.nn.Module().train(), queries, k, v, None, dropout=0.1)


def test_masks_that_do_not_fit_are_refused():
    of, new = feed(layer("kivi"), tokens(1, 30)), tokens(1, 2)
    for mask, error, message in (
        (
            torch.ones(1, 31, device=new[0].device),
            CacheStateError,
            "attention_mask: has 31 columns; the cache holds 30 and 2 are new, which needs 32",
        ),
        (torch.ones(1, 1, 2, 32, device=new[0].device), UnsupportedModelError, "attention_mask: .* not 4 dimensions"),
    ):
        k, v = of.update(new[0].clone(), new[1].clone())
        with pytest.raises(error, match=message):
            attention_forward(MODULE, new[2], k, v, mask)
    assert of.lens == [30]


@pytest.mark.float32("what a second call adds to the rounding of 16 bits is as large as what a wrong mask does")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["causal", "tree", "segments"])
def test_a_mask_of_four_dimensions_is_served_in_a_first_call(kind, implementation):
    """There the model's own attention reads the call's own keys. Later calls see all of them."""
    model, ids = llama(implementation=implementation), prompt(2, 60)
    seen = torch.ones(60, 60, dtype=torch.bool, device=ids.device).tril()
    if kind == "tree":
        seen[50:55, 45:50] = False
    if kind == "segments":
        seen[30:, :30] = False
    low = torch.finfo(model.dtype).min
    mask = torch.zeros(2, 1, 60, 60, dtype=model.dtype, device=ids.device).masked_fill(~seen, low)
    cache, plain = kvfold.fold(model, "none"), dynamic(model)
    with torch.no_grad():
        got, want = (model(ids, attention_mask=mask, past_key_values=of).logits for of in (cache, plain))
    assert relative(got, want) < (1e-3 if current().is_gpu else 1e-5)
    with pytest.raises(
        UnsupportedModelError, match=r"cache that holds tokens takes padding masks .* in the first call"
    ):
        model(ids[:, :2], attention_mask=mask[:, :, :2], past_key_values=cache)
    more = prompt(2, 5, seed=3)
    off = relative(logits(model, cache, more), logits(model, plain, more))
    assert off < (1e-3 if current().is_gpu else 1e-5) and cache.get_seq_length() == 65


def test_keys_that_two_layers_share_are_refused():
    of, (keys, values, queries) = layer("kivi"), tokens(1, 4)
    k, v = of.update(keys, values)
    attention_forward(MODULE, queries, k, v, None)
    with pytest.raises(UnsupportedModelError, match="used by a second layer"):
        attention_forward(MODULE, queries, k, v, None)


def test_an_unknown_kernel_is_refused_with_the_known_ones():
    with pytest.raises(KVFoldError, match=r"kernel: 'fast' is not known; allowed: .*reference"):
        kvfold.fold(llama(), "kivi", kernel="fast")
    cache = kvfold.fold(llama(), "kivi", kernel="reference")
    assert all(of.kernel_name == "reference" for of in cache.folded)


def test_what_several_kernels_lack_is_said_once():
    why = {"one": "needs a GPU", "two": "head_dim=80", "three": "needs a GPU"}
    assert kernels.Choice(kernels.REGISTRY["reference"], why).reason == "one, three: needs a GPU; two: head_dim=80"
    assert kernels.Choice(kernels.REGISTRY["reference"]).reason == "first choice"


def test_a_kernel_that_supports_nothing_is_passed_over_and_named(monkeypatch):
    class Picky(kernels.AttentionKernel):
        name = "picky"

        def why_not(self, *args):
            return "it is Monday"

        def attend(self, call):
            raise AssertionError

    monkeypatch.setattr(kernels, "REGISTRY", {"picky": Picky(), "reference": kernels.REGISTRY["reference"]})
    report = kvfold.explain(llama(), "kivi").layers[0]
    assert report.kernel == "reference" and "picky: it is Monday" in report.reason
    with pytest.raises(KVFoldError, match="picky does not support this layer: it is Monday"):
        kvfold.fold(llama(), "kivi", kernel="picky")


def test_a_cache_on_an_unfolded_model_says_so():
    model, ids = llama(), prompt(1, 20)
    cache = kvfold.fold(model, "kivi")
    kvfold.unfold(model)
    with pytest.raises(CacheStateError, match="did not attend through kvfold"):
        logits(model, cache, ids, [10, 10])


def test_unfold_gives_back_the_models_attention():
    for implementation in ("eager", "sdpa"):
        model, ids = llama(implementation=implementation), prompt(1, 30)
        before = logits(model, dynamic(model), ids)
        kvfold.unfold(model)  # nothing to do
        for _ in range(2):
            kvfold.fold(model, "kivi")
        assert model.config._attn_implementation.startswith("kvfold")
        kvfold.unfold(model)
        assert model.config._attn_implementation == implementation
        assert torch.equal(logits(model, dynamic(model), ids), before)


def test_folding_with_a_wrong_method_changes_nothing():
    model = llama()
    before = model.config._attn_implementation
    with pytest.raises(MethodError):
        kvfold.fold(model, "kivi:bits=5")
    assert model.config._attn_implementation == before


# ---- rotation --------------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only("the rotation's arithmetic, in float32")
@pytest.mark.parametrize("rotary", [64, 32], ids=["full", "partial"])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_unrotating_undoes_rotating_also_far_out(rotary, scaling):
    rotation = Rope(10000.0 ** (-torch.arange(0, rotary, 2).float() / rotary), scaling)
    x = torch.randn(2, 3, 40, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.arange(40), torch.arange(100_000, 100_040)]).unsqueeze(1)
    turned = rotation.rotate(x, positions)
    assert relative(rotation.unrotate(turned, positions), x) < 1e-6
    assert torch.equal(turned[..., rotary:], x[..., rotary:])
    assert turned[1, ..., :rotary].norm() == pytest.approx(scaling * float(x[1, ..., :rotary].norm()), rel=1e-5)
    a, b = rotation.rotate(x, positions), rotation.rotate(x, positions + 7)  # scores depend on distances alone
    assert relative(b @ b.transpose(-1, -2), a @ a.transpose(-1, -2)) < 5e-3


@pytest.mark.parametrize("size", [1, 20])
@pytest.mark.parametrize("prefill", [60, 260])
def test_gradients_pass_a_later_call(prefill, size):
    """Young and packed; what the cache holds is constant. In float32 it is the loss's slope; in 16 bits, where steps small
    enough for a slope are lost in rounding, it is near the same weights' gradient in float32."""
    model, ids = llama(initializer_range=0.1), prompt(1, prefill + size)
    exact = copy.deepcopy(model).float()

    def loss(of, moved=0.0):
        cache = kvfold.fold(of, "kivi:bits=8", kernel="reference")
        with torch.no_grad():
            of(ids[:, :prefill], past_key_values=cache)
        inputs = (of.get_input_embeddings()(ids[:, prefill:]).detach() + moved).requires_grad_()
        return inputs, of(inputs_embeds=inputs, past_key_values=cache).logits[:, -1].double().pow(2).sum()

    def gradient(of):
        inputs, at = loss(of)
        return torch.autograd.grad(at, inputs)[0]

    expected = gradient(exact)
    along = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(expected) * 1e-3
    with torch.no_grad():
        ahead, behind = (loss(exact, side * along)[1] for side in (1, -1))
    slope = (expected * along).sum().item()
    assert slope == pytest.approx((ahead - behind).item() / 2, rel=2e-2)
    assert relative(gradient(model), expected) < 0.05  # without what comes through the queries: more than 0.6


def test_gradients_that_a_kernel_does_not_make_are_refused(monkeypatch):
    """As kernels of accelerators do: they give what autograd knows nothing of."""
    model, ids = llama(), prompt(1, 61)
    cache = kvfold.fold(model, "kivi", kernel="reference")
    with torch.no_grad():
        model(ids[:, :60], past_key_values=cache)
    made = ReferenceKernel.attend
    monkeypatch.setattr(ReferenceKernel, "attend", lambda self, call: made(self, call).detach())
    out = model(ids[:, 60:], past_key_values=cache).logits
    with pytest.raises(UnsupportedModelError, match=r"backward: .*kernel='reference'"):
        out.sum().backward()


@pytest.mark.parametrize("method", ["none", "kivi"])
def test_gradients_that_would_leave_out_earlier_tokens_are_refused(method):
    """What autograd recorded of a call's keys ends in the cache: later calls would give a part of the gradients."""
    model, ids = llama(), prompt(1, 90)
    cache = kvfold.fold(model, method, kernel="reference")
    model(ids[:, :60], past_key_values=cache)
    out = model(ids[:, 60:], past_key_values=cache).logits
    with pytest.raises(UnsupportedModelError, match=r"backward: .* earlier call.*within torch\.no_grad"):
        out.sum().backward()
    cache.reset()
    model(ids, past_key_values=cache).logits.sum().backward()


def test_layers_kept_in_full_precision_look_at_a_mask_once(monkeypatch):
    """To look at it waits for the device."""
    model, ids = llama(num_hidden_layers=4), prompt(2, 90)
    cache = kvfold.fold(model, "kivi+keep=0,2,3")
    _, mask = left_padding([90, 70], 90)
    looked = []
    made = originals.causal_mask
    monkeypatch.setattr(originals, "causal_mask", lambda *args: looked.append(args[-1]) or made(*args))
    with torch.no_grad():
        for start, stop in ((0, 60), (60, 61), (61, 89), (89, 90)):
            model(ids[:, start:stop], past_key_values=cache, attention_mask=mask[:, :stop])
    assert looked == [60, 61, 89, 90]


@pytest.mark.cpu_only("devices are stood for by a record of which was made current")
def test_kernels_are_launched_on_the_device_of_their_layer(monkeypatch):
    """Triton launches on the current device, and a model that is split over devices leaves that as it is."""
    current, seen = [], []

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *_):
            current.pop()

    def watched(name):
        own = getattr(FoldedLayer, name)

        def call(layer, *args, **kwargs):
            seen.append((name, layer.device, current[-1:]))
            return own(layer, *args, **kwargs)

        monkeypatch.setattr(FoldedLayer, name, call)

    monkeypatch.setattr(attention, "launching", On)
    watched("append")
    watched("finish")
    model, ids = llama(), prompt(1, 60)
    cache = kvfold.fold(model, "kivi:sink=0,recent=16")
    with torch.no_grad():
        model(ids[:, :50], past_key_values=cache)
        model(ids[:, 50:51], past_key_values=cache)
    assert [name for name, *_ in seen] == 2 * 2 * ["append", "finish"] and not current
    assert all(at == [device] for _, device, at in seen)
