"""Kernels that read the newest tokens from the windows: written first, attended to, packed afterwards."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvfold
from helpers import assert_same_content, feed, layer, tokens
from kvfold import kernels
from kvfold.kernels.reference import ReferenceKernel


class InPlaceReference(ReferenceKernel):
    """Takes calls of few tokens from the windows."""

    name = "in_place_reference"
    in_place_tokens = 16
    calls = 0

    def attend(self, call):
        type(self).calls += call.new is None
        return super().attend(call)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=97,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    "method",
    [
        "kivi:recent=16",
        "squat",
        "innerq:sink=8,recent=24",
        "innerq:paper=true,sink=8,recent=24",
        "fold",
        "qjl",
        "kivi:recent=0",
    ],
)
def test_writing_before_attending_gives_the_same_cache_and_logits(model, method, monkeypatch):
    in_place = InPlaceReference()
    monkeypatch.setitem(kernels.REGISTRY, in_place.name, in_place)
    ids = torch.randint(0, 97, (2, 420), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :45] = 0
    cuts = [300, *[1] * 40, 5, 16, 16, 3, 40]  # ragged prompt, decode, several tokens, more than fit in place
    runs, before = [], InPlaceReference.calls
    for kernel in (None, in_place.name):
        cache = kvfold.fold(model, method, kernel=kernel, max_length=500)
        at, logits = 0, []
        with torch.no_grad():
            for cut in cuts:
                positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, at : at + cut]
                out = model(
                    ids[:, at : at + cut],
                    attention_mask=mask[:, : at + cut],
                    position_ids=positions,
                    past_key_values=cache,
                )
                logits.append(out.logits)
                at += cut
        runs.append((torch.cat(logits, 1), cache))
    assert InPlaceReference.calls - before >= 2 * 40  # all but the first few calls and the last
    (expected, plain), (got, in_place) = runs
    real = mask[:, :at].bool()
    assert torch.allclose(got[real], expected[real], rtol=1e-4, atol=1e-4)
    for a, b in zip(plain.folded, in_place.folded, strict=True):
        assert a.lens == b.lens and a.packed == b.packed
        for row in range(2):
            for x, y in zip(a.decoded(row), b.decoded(row), strict=True):
                assert (x - y).norm() < 2e-2 * x.norm()  # inputs differ by rounding, so single codes may
    kvfold.unfold(model)


@pytest.mark.targets
@pytest.mark.parametrize(
    "method",
    [
        "innerq:sink=8,recent=24",
        "innerq:paper=true,sink=8,recent=24",
        "kivi:recent=16",
        "squat",
        "squat:recent=16",
        "fold",
    ],
)
def test_content_written_first_is_bit_identical_to_content_appended_after(method):
    k, v, q = new = tokens(2, 400, seed=3)
    after, first = (feed(layer(method), tuple(t[:, :, :200] for t in new)) for _ in range(2))
    at = 200
    for count in (1, 1, 16, 7, 1, 30, 16, 1, 16, 16, 90):
        part = slice(at, at + count)
        after.append(k[:, :, part], v[:, :, part], q[:, :, part], None)
        first.append(k[:, :, part], v[:, :, part], q[:, :, part], None, pack=False)
        first.pack_due()
        at += count
        for row in range(2):
            assert_same_content(after, first, row, row)
