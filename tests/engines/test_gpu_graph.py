"""Decoding in a CUDA graph gives what decoding step by step gives."""

import copy
import json
from contextlib import contextmanager, nullcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvfold
from helpers import llama
from kvfold import methods
from kvfold.bench import storage
from kvfold.cli import main
from kvfold.engines.transformers import fused
from kvfold.engines.transformers.graph import DecodeGraph, decoding
from kvfold.errors import UnsupportedModelError
from kvfold.kernels import REGISTRY
from kvfold.kernels.fold import encode as encode_pages
from kvfold.methods import LayerSpec
from kvfold.methods.learned import LearnedMethod
from kvfold.plan import choose_kernel, packed_for
from kvfold.rope import Rope
from tiny_model import save

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("start", [3, 60, 400, 415])
@pytest.mark.parametrize(
    "method",
    [
        "none",
        "fold",
        "fold:bits=2",
        "kivi",
        "kivi:bits=4",
        "squat",
        "innerq",
        "qjl",
        "gear",
        "zipcache",
        "turboquant:bits=3",
        "k=qjl+v=turboquant",
        "innerq:paper=true",
        "innerq:mode=sym,paper=true",
        "innerq:mode=asym,paper=true",
    ],
)
def test_a_replayed_step_equals_a_step(method, start):
    """From 415 tokens on, the ring is full of tokens that are not packed: the second step closes a block. A young cache, of
    which nothing is packed and whose sink is not full, goes through all of that in its graph."""
    if start < 100 and ("paper" in method or method in ("squat", "zipcache")):
        pytest.skip(
            "it knows something of a whole sequence, which is not there yet: see test_generate_decodes_in_a_graph"
        )
    replays(method, start)


@pytest.mark.parametrize("start", [3, 400])
@pytest.mark.parametrize(
    "method, head_dim", [("kivi", 96), ("kivi:group=16", 80), ("squat_pre", 64), ("squat_pre", 128), ("kvarn", 64)]
)
def test_steps_over_plain_order_are_replayed(method, head_dim, start):
    """Head sizes and keys that the fused kernels refuse, and blocks that Torch encodes between steps."""
    replays(method, max(start, 200) if "squat" in method else start, head_dim)


@pytest.mark.parametrize("start", [3, 400])
@pytest.mark.parametrize("method, head_dim", [
    ("fold:bits=2,codebook=true", 128), ("fold:codebook=true", 128), ("fold:codebook=true", 64), ("fold:codebook=true", 256),
    ("tasq:bits=2,values=fold", 128), ("tasq", 128),
])  # fmt: skip
def test_steps_over_tables_are_replayed(method, head_dim, start):
    """Codes of vectors; blocks of learned keys are closed between steps, those of ``fold`` in the step."""
    made = storage.with_tables(methods.get(method), 2, head_dim, torch.device("cuda"))
    replays(made, start, head_dim)


@pytest.mark.parametrize("method", ["fold", "fold:bits=2,sink=0,recent=0", "turboquant:bits=3"])
def test_steps_that_close_several_heads_in_a_program_are_replayed(method, monkeypatch):
    """As of many sequences, whose new tokens are written by a kernel of their own."""
    asked = []
    monkeypatch.setattr(encode_pages, "heads_together", lambda *shape: asked.append(shape) or 2)
    replays(method, 400)
    assert asked


def replays(method, start, head_dim=64):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=97,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    steps = 200 if start < 100 else 100
    ids = torch.randint(0, 97, (2, start + steps), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, : min(45, start - 2)] = 0
    plain, captured = (kvfold.fold(model, method, max_length=800) for _ in range(2))
    with torch.no_grad():
        for cache in (plain, captured):
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            first = {"attention_mask": mask[:, :start], "position_ids": positions[:, :start]}
            model(ids[:, :start], past_key_values=cache, **first)
        expected = []
        for at in range(start, start + steps):
            position = mask[:, : at + 1].sum(-1, keepdim=True) - 1
            expected.append(model(ids[:, at : at + 1], position_ids=position, past_key_values=plain).logits)
    graph = DecodeGraph(model, captured, room=steps)
    got = [graph(ids[:, at : at + 1]).clone() for at in range(start, start + steps)]
    graph.finish()
    expected, got = torch.cat(expected, 1).float(), torch.cat(got, 1).float()
    assert (got - expected).norm() < 2e-2 * expected.norm()
    for a, b in zip(plain.folded, captured.folded, strict=True):
        assert (a.lens, a.packed, a.columns.count) == (b.lens, b.packed, b.columns.count)
        for row in range(2):
            for x, y in zip(a.decoded(row), b.decoded(row), strict=True):
                # inputs are rounded differently, so that one code in some hundreds falls on the other side (kivi: 0.055)
                assert (x - y).norm() < 0.1 * x.norm()
    kvfold.unfold(model)


@pytest.mark.parametrize("method", ["none", "fold", "kivi", "innerq:paper=true"])
@pytest.mark.parametrize("length", [1, 20, 400])
def test_generate_decodes_in_a_graph(method, length):
    """A prompt of which something is packed, and some of which nothing is until later: from the second token on, unless
    statistics are those of a whole sequence."""
    torch.manual_seed(0)
    model = llama(head_dim=64, max_position_embeddings=2048).to("cuda", torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 96, (2, length), device="cuda")
    options = {"max_new_tokens": 200, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    method = f"{method}{',' if ':' in method else ':'}sink=4,recent=32"
    plain = model.generate(ids, past_key_values=kvfold.fold(model, method, max_length=700), **options)
    cache = kvfold.fold(model, method)  # a graph takes the room that it needs
    with decoding(model, cache, 200) as steps:
        captured = model.generate(ids, past_key_values=cache, **options)
        assert cache.get_seq_length() == length + 199
    assert "forward" not in model.__dict__ and steps.replayed > (100 if "paper" in method else 198)
    assert cache.get_seq_length() == cache.folded[0].columns.count == length + 199
    same = int((plain.sequences == captured.sequences).all(0).long().cumprod(0).sum())  # up to the first that differs
    # the step at which they part, if they do, has seen the same tokens: what differs there is rounding, which decided a tie
    a, b = (torch.stack(x.logits[: same - length + 1]).float() for x in (plain, captured))
    assert same - length > 4 and (a - b).norm() < 5e-2 * a.norm()


def generated(model, ids, cache, graphs, tokens=60, **options):
    """What ``generate`` gives, with a decode graph or without, and the steps that the graph took."""
    torch.manual_seed(0)
    kind = {"max_new_tokens": tokens, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    with decoding(model, cache, tokens) if graphs else nullcontext() as steps:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **kind, **options)
    return found, steps.replayed if graphs else 0


def agree(plain, captured, length, least=5, limit=5e-2):
    """Equal tokens up to a tie that rounding decided: the step at which they part, if they do, has seen the same tokens."""
    width = min(plain.sequences.shape[1], captured.sequences.shape[1])
    same = (plain.sequences[:, :width] == captured.sequences[:, :width]).all(0)
    same = int(same.long().cumprod(0).sum())
    a, b = (torch.stack(x.logits[: same - length + 1]).float() for x in (plain, captured))
    assert same - length >= least and (a - b).norm() < limit * a.norm()


@pytest.mark.parametrize("method", ["fold", "kivi"])
def test_sampling_several_answers_in_a_graph(method):
    model = generating()
    ids = torch.randint(3, 96, (2, 300), device=model.device)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 3}
    plain, _ = generated(model, ids, kvfold.fold(model, method), False, **options)
    captured, replayed = generated(model, ids, kvfold.fold(model, method), True, **options)
    assert captured.sequences.shape == (6, 360) and replayed == 59
    agree(plain, captured, 300, least=1)  # sampling parts sooner than a tie


@pytest.mark.parametrize("method", ["fold", "kivi"])
def test_sequences_that_end_at_different_times_in_a_graph(method):
    """One ends early and is padded; the others go on as if it had not, until the last one ends."""
    model = generating()
    ids = torch.randint(3, 96, (3, 300), device=model.device)
    free, _ = generated(model, ids, kvfold.fold(model, method), True, do_sample=False)
    answers = free.sequences[:, 300:].tolist()
    first = {token: [row.index(token) if token in row else 99 for row in answers] for row in answers for token in row}
    end, at = max(first.items(), key=lambda item: len({n for n in item[1] if 0 < n < 60}))
    assert len({min(n, 60) for n in at}) > 1, "some sequence ends before another"
    captured, replayed = generated(model, ids, kvfold.fold(model, method), True, do_sample=False, eos_token_id=end)
    last = min(max(at) + 1, 60)
    assert captured.sequences.shape == (3, 300 + last) and replayed == last - 1
    for row, ends in enumerate(at):
        answer = captured.sequences[row, 300:].tolist()
        assert answer[: ends + 1] == answers[row][: ends + 1][:last] and set(answer[ends + 1 :]) <= {0}


@pytest.mark.parametrize("method", ["fold", "kivi", "none"])
def test_turns_grow_beyond_the_first_slab_in_graphs(method):
    """A chat on one cache: each turn's graph begins on more than it was allocated for, and goes on in it.

    What a turn packed is what steps of the same tokens pack: nearly to the last bit in the first layer, whose inputs are
    embeddings, and but for codes on the other side of a rounding in the next one. Then the turn's last step is taken again
    without a graph, over what the graph left: equal contents, so no code can differ, and logits differ by rounding alone.
    """
    model = generating()
    cache = kvfold.fold(model, method)
    ids, steps = torch.randint(3, 96, (1, 200), device=model.device), 0
    for turn in range(4):
        stepped, length = copy.deepcopy(cache), ids.shape[1]
        captured, replayed = generated(model, ids, cache, True, do_sample=False)
        assert cache.get_seq_length() == length + 59
        steps += replayed
        said, logits = captured.sequences, []
        with torch.no_grad():
            model(ids[:, stepped.get_seq_length() :], past_key_values=stepped)
            for at in range(length, length + 59):
                logits.append(model(said[:, at : at + 1], past_key_values=stepped).logits[:, 0])
            again = copy.deepcopy(cache)
            again.crop(-1)
            last = model(said[:, -2:-1], past_key_values=again).logits[:, 0]
        assert 0 < (cache.folded[0].lens[0] - 128) % 32 < 31, (
            "the last step closes nothing, so that it can be taken again"
        )
        assert apart(captured.logits[-1], last) < 1e-2
        assert apart(torch.stack(captured.logits[1:]), torch.stack(logits)) < 5e-2
        for index, (a, b) in enumerate(zip(cache.folded, stepped.folded, strict=True)):
            assert (a.lens, a.packed, a.columns.count) == (b.lens, b.packed, b.columns.count)
            for x, y in zip(a.decoded(0), b.decoded(0), strict=True):
                assert apart(x, y) < (0.1 if index else 1e-2), f"turn {turn}, layer {index}"
        ids = torch.cat((said, torch.randint(3, 96, (1, 150 * (turn + 1)), device=said.device)), 1)
    assert steps == 4 * 59 and cache.folded[0].packed[0] > 900


def apart(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def generating():
    """A tiny model that never ends by itself."""
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = llama(head_dim=64, max_position_embeddings=4096).to(device, dtype).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(("batch", "limit"), [(2, 5e-3), (1, 1e-2)])
def test_small_operations_of_a_step_are_kernels_that_round_as_the_models_own(batch, limit, monkeypatch):
    """Their results differ by the order of a norm's sum, and of one sequence by those of products: seldom, and by one step of
    bfloat16. (No codes: those would fall to the other side of a rounding.)"""
    torch.manual_seed(0)
    model = llama(head_dim=64, max_position_embeddings=2048).to("cuda", torch.bfloat16).eval()
    ids, got, found = torch.randint(3, 96, (batch, 420), device="cuda"), [], []
    layers = model.config.num_hidden_layers
    said = f"{2 * layers + 1} of {2 * layers + 1} norms, {layers} of {layers} gates, 1 of 1 rotations"
    assert any(said in note for note in kvfold.explain(model, "fold").notes)

    @contextmanager
    def counted(model, own=fused.small_operations):
        with own(model) as count:
            found.append(count)
            yield count

    for operations in (counted, nullcontext):
        monkeypatch.setattr(fused, "small_operations", operations)
        cache = kvfold.fold(model, "none", max_length=700)
        with torch.no_grad():
            model(ids[:, :400], past_key_values=cache, use_cache=True)
        graph = DecodeGraph(model, cache, 20)
        got.append(torch.cat([graph(ids[:, at : at + 1]).clone() for at in range(400, 420)], 1).float())
        graph.finish()
    assert found == [10 * layers + 3]  # norms, gates, one function that rotates, and products
    ours, own = got
    assert (ours - own).norm() < limit * own.norm()


def test_a_compiled_step_is_as_near_to_float32_as_a_step():
    """The same kernels attend; what the compiler fused between them rounds less often than the model's own operations. Codes
    move logits by more than rounding does: a fourth of their norm, in either step.

    One model for both methods: they share what is compiled, which is most of the time."""
    torch.manual_seed(0)
    model = llama(head_dim=64, max_position_embeddings=2048).to("cuda", torch.bfloat16).eval()
    exact = copy.deepcopy(model).float()
    ids = torch.randint(3, 96, (1, 445), device="cuda")
    for method, limit in (("none", 0.05), ("fold", 0.5)):
        caches = [kvfold.fold(model, method, max_length=700) for _ in range(2)]
        got = []
        for cache, compile in zip(caches, (False, True), strict=True):
            with torch.no_grad():
                model(ids[:, :415], past_key_values=cache, use_cache=True)
            graph = DecodeGraph(model, cache, 30, compile)
            got.append(torch.cat([graph(ids[:, at : at + 1]).clone() for at in range(415, 445)], 1).float())
            graph.finish()
        for a, b in zip(*(cache.folded for cache in caches), strict=True):
            assert (a.lens, a.packed, a.columns.count) == (b.lens, b.packed, b.columns.count)
        cache = kvfold.fold(exact, method, kernel="reference")
        with torch.no_grad():
            exact(ids[:, :415], past_key_values=cache, use_cache=True)
            steps = [exact(ids[:, at : at + 1], past_key_values=cache).logits for at in range(415, 445)]
        want = torch.cat(steps, 1)
        plain, fused = ((each - want).norm() / want.norm() for each in got)
        assert fused < 1.2 * plain and plain < limit, (method, plain, fused)


def test_generate_decodes_in_a_compiled_graph():
    torch.manual_seed(0)
    model = llama(head_dim=64, max_position_embeddings=2048).to("cuda", torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 96, (2, 40), device="cuda")
    for _ in range(2):
        cache = kvfold.fold(model, "fold")
        with decoding(model, cache, 80, compile=True) as steps:
            out = model.generate(ids, past_key_values=cache, max_new_tokens=80, do_sample=False)
        assert out.shape == (2, 120) and steps.replayed == 79
        assert str(steps) == "79 tokens decoded in a compiled CUDA graph"


DEFAULTS = [name for name in methods.REGISTRY if name != "gsrq"]
"""Methods as they are by default; of GSRQ's tables, random ones are not known."""


@pytest.mark.parametrize("method", DEFAULTS)
def test_every_method_has_a_fast_kernel_that_is_captured(method):
    """What explain names on a GPU; learned methods with random tables in place of an artefact's."""
    device, made = torch.device("cuda"), methods.get(method)
    if not isinstance(made, LearnedMethod):
        model = llama(head_dim=128).to(device, torch.bfloat16)
        for row in kvfold.explain(model, method).layers:
            assert row.kernel not in ("reference", "cpu") and REGISTRY[row.kernel].captures, row.reason
        return
    rope = Rope(10000.0 ** (-torch.arange(0, 128, 2, device=device).float() / 128))
    spec = LayerSpec(0, 1, 8, 2, 128, torch.bfloat16, rope)
    made = storage.with_tables(made, 2, 128, device)
    choice = choose_kernel(made, packed_for(made, spec, device, None), device)
    assert choice.kernel.name not in ("reference", "cpu") and choice.kernel.captures, choice.passed_over


@pytest.mark.parametrize("prompt", ["Hi", "one two three four five six seven eight nine ten"])
def test_the_command_decodes_its_first_answer_in_a_graph(prompt, tmp_path):
    """From the second token on: the first is the prompt's. No setting is needed for that, and nothing was folded before."""
    path = tmp_path / "answer.json"
    asked = ["generate", prompt, "--model", str(save(tmp_path / "tiny")), "--max-new-tokens", "12"]
    assert main([*asked, "--json", str(path)]) == 0
    said = json.loads(path.read_text())
    assert said["new_tokens"] > 1
    assert said["decoding"] == f"{said['new_tokens'] - 1} tokens decoded in a CUDA graph"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_two_devices_generates_step_by_step_and_says_so(tmp_path):
    """As ``device_map`` splits it: the tokens are those of the model in one place."""
    folder = save(tmp_path / "tiny")
    places = {"model.layers.1": 1, "model.norm": 1, "lm_head": 1, "model.embed_tokens": 0, "model.layers.0": 0}
    kind = {"dtype": torch.bfloat16}
    split = LlamaForCausalLM.from_pretrained(folder, device_map={**places, "model.rotary_emb": 0}, **kind).eval()
    whole = LlamaForCausalLM.from_pretrained(folder, device_map={"": 0}, **kind).eval()
    ids = torch.randint(3, 200, (2, 300), device="cuda:0")
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    want = whole.generate(ids, past_key_values=kvfold.fold(whole, "fold"), **options)
    cache = kvfold.fold(split, "fold")
    with decoding(split, cache, 20, required=False) as steps:
        got = split.generate(ids, past_key_values=cache, **options)
    assert torch.equal(got, want) and {str(layer.device) for layer in cache.folded} == {"cuda:0", "cuda:1"}
    said = "decoded step by step: decode graph: the model lies on cuda:0, cuda:1; allowed: one device"
    assert steps.replayed == 0 and str(steps).startswith(said)
    cache = kvfold.fold(split, "fold")
    with pytest.raises(UnsupportedModelError, match="lies on cuda:0, cuda:1"), decoding(split, cache, 20):
        split.generate(ids, past_key_values=cache, **options)
    got = split.generate(ids, past_key_values=kvfold.fold(split, "fold"), **options)  # nothing was left broken
    assert torch.equal(got, want)
