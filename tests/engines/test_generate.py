"""generate(): under full precision the same tokens as with Transformers' own cache, in every mode; folded ones agree
with themselves however they are called."""

from contextlib import nullcontext

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import kvfold
from helpers import dynamic, left_padding, llama, logits, prompt, relative
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.errors import CacheStateError, KVFoldWarning
from targets import current

pytestmark = [pytest.mark.targets, pytest.mark.takes_turns]

NEW = 48


@pytest.fixture(scope="module")
def model(target):
    return llama(eos_token_id=None)


@pytest.fixture(autouse=True)
def unfolded(model):
    kvfold.unfold(model)
    yield
    kvfold.unfold(model)


def fold(model, method: str) -> FoldedCache:
    return kvfold.fold(model, method, max_length=current().max_length)


def generate(model, cache, ids, seed: int = 0, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, past_key_values=cache, **options)


def assert_same_tokens(model, method: str | None, got: torch.Tensor, expected: torch.Tensor, start: int) -> None:
    """One sequence, int64 [n], twice; ``method`` None: by the model's own cache.

    Where rounding depends on the shape of a batch, two runs may part, but only where the two tokens score the same.
    """
    if torch.equal(got, expected):
        return
    assert got.shape == expected.shape and not current().is_exact
    at = int((got != expected).nonzero()[0])
    assert at >= start
    kvfold.unfold(model)
    cache = dynamic(model) if method is None else fold(model, method)
    scores = logits(model, cache, expected[None, :at], [start, *[1] * (at - start)])[0, -1].float()
    parted = f"token {at}: {int(got[at])} instead of {int(expected[at])}"
    assert abs(scores[got[at]] - scores[expected[at]]) < current().scores * scores.std(), parted


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3},
    "beam-sampling": {"num_beams": 3, "do_sample": True},
    "return-sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams-returned": {"num_beams": 4, "num_return_sequences": 2},
}


@pytest.mark.float32("full precision is compared to the last token, whatever the mode draws from the scores")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [1, 2])
def test_full_precision_generates_the_same(model, mode, batch):
    ids = prompt(batch, 70)
    expected = generate(model, dynamic(model), ids, **MODES[mode])
    cache = kvfold.fold(model, "none")
    assert torch.equal(generate(model, cache, ids, **MODES[mode]), expected)
    assert max(cache.layers[0].packed) >= 96


@pytest.mark.parametrize(
    "method",
    ["none", "kivi:sink=0,recent=0", "squat_pre:sink=0,recent=0", "innerq:sink=0,recent=0", "fold:sink=0,recent=0"],
)
def test_a_left_padded_batch_generates_what_its_sequences_do(model, method):
    lengths = [90, 33, 61]
    (_, mask), ids = left_padding(lengths, 90), prompt(3, 90)
    batch = generate(model, fold(model, method), ids.masked_fill(~mask, 0), attention_mask=mask.long())
    for row, length in enumerate(lengths):
        alone = generate(model, fold(model, method), ids[row : row + 1, -length:])
        assert_same_tokens(model, method, batch[row, -length - NEW :], alone[0], length)


@pytest.mark.parametrize(
    "method",
    ["none", "kivi:sink=0,recent=0", "innerq:sink=0,recent=0", "squat:sink=0,recent=0", "fold:sink=0,recent=0"],
)
def test_prompt_lookup_generates_what_greedy_does(model, method):
    ids = prompt(1, 20).repeat(1, 4)
    expected = generate(model, fold(model, method), ids)
    cache = fold(model, method)
    got = generate(model, cache, ids, prompt_lookup_num_tokens=6)
    if method == "none":
        assert_same_tokens(model, method, got[0], expected[0], 80)
    else:  # packing lags by a call while tokens may be taken back, so a quantized cache may part from its greedy twin
        assert torch.equal(got[:, :81], expected[:, :81])
    assert cache.folded[0].packed[0] >= 32


@pytest.mark.parametrize("assistant", ["itself", "another"])
def test_an_assistant_model_leaves_greedy_unchanged(model, assistant):
    ids = prompt(1, 70)
    expected = generate(model, dynamic(model), ids)
    helper = llama(eos_token_id=None, **({} if assistant == "itself" else {"num_hidden_layers": 1}))
    cache = fold(model, "none")
    assert_same_tokens(model, None, generate(model, cache, ids, assistant_model=helper)[0], expected[0], 70)
    assert cache.folded[0].lens[0] >= 70 + NEW - 1


@pytest.mark.parametrize("method", ["none", "kivi:sink=0,recent=0", "innerq:sink=0,recent=0", "fold:sink=0,recent=0"])
def test_chat_turns_on_one_cache(model, method):
    """A second turn continues on the cache of the first, and equals feeding the same tokens by hand."""
    cache, ids = fold(model, method), prompt(1, 50)
    first = generate(model, cache, ids)
    turn = torch.cat([first, prompt(1, 23, seed=5)], 1)
    second = generate(model, cache, turn)
    assert torch.equal(second[:, : turn.shape[1]], turn)
    by_hand = fold(model, method)
    cuts = [50, *[1] * (NEW - 1), 24, *[1] * (NEW - 1)]
    scores = logits(model, by_hand, second[:, :-1], cuts)[0, turn.shape[1] - 1 :].float()
    chosen = scores.gather(-1, second[0, turn.shape[1] :, None]).squeeze(-1)
    assert (chosen >= scores.amax(-1) - current().scores * scores.std()).all()
    assert by_hand.folded[0].lens == cache.folded[0].lens and by_hand.folded[0].packed == cache.folded[0].packed
    if method == "none":
        kvfold.unfold(model)
        expected = generate(model, dynamic(model), turn)
        assert_same_tokens(model, None, second[0], expected[0], turn.shape[1])


def test_chunked_prefill(model, target):
    ids = prompt(1, 90)
    expected = generate(model, dynamic(model), ids)
    got = generate(model, fold(model, "none"), ids, prefill_chunk_size=32)
    assert_same_tokens(model, None, got[0], expected[0], 90)
    whole, pieces = fold(model, "kivi:sink=0,recent=0"), fold(model, "kivi:sink=0,recent=0")
    generate(model, whole, ids, max_new_tokens=1)
    generate(model, pieces, ids, max_new_tokens=1, prefill_chunk_size=32)
    assert pieces.folded[0].packed == whole.folded[0].packed == [64]
    first, again = (c.folded[0].decoded(0) for c in (whole, pieces))
    for a, b in zip(first, again, strict=True):
        # the first layer's keys do not depend on attention; rounded otherwise, a few of them take the next code
        assert relative(a, b) < (1e-5 if target.is_exact else 0.1)


def test_stopping_criteria_end_generation(model):
    class AfterTen(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 60, device=input_ids.device)

    cache = fold(model, "kivi")
    out = generate(model, cache, prompt(1, 50), stopping_criteria=StoppingCriteriaList([AfterTen()]))
    assert out.shape[1] == 60 and cache.get_seq_length() == 59


@pytest.mark.float32("where a sequence ends is compared to the token")
def test_an_end_token_ends_a_sequence_of_a_batch(model):
    ids = prompt(2, 50)
    free = generate(model, dynamic(model), ids)
    end = int(free[0, 60])
    expected = generate(model, dynamic(model), ids, eos_token_id=end)
    assert torch.equal(generate(model, fold(model, "none"), ids, eos_token_id=end), expected)


@pytest.mark.parametrize("method", kvfold.DEFAULT)
def test_every_method_generates_deterministically_and_again_after_reset(model, method):
    joint = "," if ":" in method else ":"
    small = joint + "recent=0,sink=4"
    cache, ids = fold(model, method + small), prompt(2, 70)
    once = generate(model, cache, ids)
    size = cache.nbytes()
    assert once.shape == (2, 70 + NEW)
    for of in cache.folded:
        due = (70 + NEW - 1 - of.method.sink) // of.block * of.block
        assert of.packed == [due, due]
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, cache, ids), once)
    assert cache.nbytes() == size
    assert torch.equal(generate(model, fold(model, method + small), ids), once)


def test_beams_on_a_folded_cache_score_what_their_sequences_do(model, target):
    """Reordered content is each beam's own: the best beam's scores are those of its sequence fed alone."""
    ids = prompt(1, 70)
    cache = fold(model, "kivi:sink=0,recent=0")
    out = generate(model, cache, ids, num_beams=3, return_dict_in_generate=True, output_scores=True, length_penalty=0.0)
    alone = fold(model, "kivi:sink=0,recent=0")
    scores = logits(model, alone, out.sequences[:, :-1], [70, *[1] * (NEW - 1)])[0, 69:].float().log_softmax(-1)
    total = float(scores.gather(-1, out.sequences[0, 70:, None]).sum())
    off = max(1e-3, target.scores * NEW**0.5 * float(scores.std()))
    assert total == pytest.approx(float(out.sequences_scores[0]), abs=off)


@pytest.mark.float32("what is generated again is compared to the token")
@pytest.mark.parametrize("place", ["streamer", "layer"])
@pytest.mark.parametrize("tokens_before", [1, 20])
def test_a_generation_that_is_interrupted_goes_on_with_the_same_cache(model, tokens_before, place):
    ids, method = prompt(1, 70), "fold:sink=4,recent=8"
    expected = generate(model, fold(model, method), ids)
    seen: list[int] = []

    class Streamer(BaseStreamer):
        def put(self, value):
            seen.extend(value.flatten().tolist())
            if place == "streamer" and len(seen) == 70 + tokens_before:
                raise KeyboardInterrupt

        def end(self):
            pass

    def die(*_):
        if len(seen) == 70 + tokens_before:
            raise KeyboardInterrupt

    cache = fold(model, method)
    hook = model.model.layers[1].register_forward_pre_hook(die) if place == "layer" else None
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache, ids, streamer=Streamer())
    if hook is not None:
        hook.remove()
    assert len(seen) == 70 + tokens_before and cache.get_seq_length() == len(seen) - 1
    with pytest.warns(KVFoldWarning, match="taken back") if place == "layer" else nullcontext():
        again = generate(model, cache, torch.tensor([seen], device=ids.device), max_new_tokens=NEW - tokens_before)
    assert torch.equal(again, expected)


@pytest.mark.slow
@pytest.mark.cpu_only("compiles the model's own code for the CPU")
def test_a_compiled_model_reads_its_folded_cache():
    one, ids, cuts = llama(num_hidden_layers=1), prompt(1, 83), [80, 1, 1, 1]
    want = logits(one, fold(one, "fold:sink=4,recent=8"), ids, cuts)
    cache = fold(one, "fold:sink=4,recent=8")
    got = logits(torch.compile(one, backend="eager"), cache, ids, cuts)
    assert relative(got, want) < 1e-5 and cache.folded[0].lens == [83]


# ---- drafts on a cache that holds an earlier turn --------------------------------------------------------------------

DRAFTS = {
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 4},
    "an assistant": lambda: {"assistant_model": helper()},
}


def helper():
    return llama(eos_token_id=None, num_hidden_layers=1)


@pytest.mark.parametrize("turn", [3, 20, 150])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("method", ["none", "kivi:bits=8,group=16", "squat_pre:bits=8"])
def test_a_draft_goes_on_from_an_earlier_turn(model, method, draft, turn):
    """Transformers passes the whole prompt once more, from its first position on; what the cache holds is not stored twice."""
    ids, more = prompt(1, 90), prompt(1, turn, seed=5)
    cache, plain = (kvfold.fold(model, method) for _ in range(2))
    options = {"max_new_tokens": 12, "do_sample": False}
    for of in (cache, plain):
        first = model.generate(ids, past_key_values=of, **options)
    two = torch.cat((first, more), 1)
    want = model.generate(two, past_key_values=plain, **options)
    held = [of.decoded(0) for of in cache.folded]
    got = model.generate(two, past_key_values=cache, **options, **DRAFTS[draft]())
    assert got.shape == want.shape and cache.get_seq_length() <= got.shape[1]
    if method == "none":
        assert_same_tokens(model, None, got[0], want[0], two.shape[1])
    else:  # packing lags by a call while tokens may be taken back
        assert torch.equal(got[:, : two.shape[1] + 1], want[:, : two.shape[1] + 1])
    for of, (keys, values) in zip(cache.folded, held, strict=True):
        now = of.decoded(0)
        assert of.lens == [cache.get_seq_length()]
        for old, new in ((keys, now[0]), (values, now[1])):
            assert relative(new[:, :100], old[:, :100]) < 0.05


@pytest.mark.cpu_only("a model of both kinds of layers")
def test_a_draft_is_refused_where_layers_that_are_not_folded_hold_an_earlier_turn():
    model, ids = llama(eos_token_id=None, num_hidden_layers=3), prompt(1, 90)
    cache = kvfold.fold(model, "kivi+keep=1")
    first = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    two = torch.cat((first, prompt(1, 20, seed=5)), 1)
    with pytest.raises(CacheStateError, match=r"assisted generation reads the whole prompt again, .* not folded \(1\)"):
        model.generate(two, past_key_values=cache, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=4)
