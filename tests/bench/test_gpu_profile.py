"""A decode step on a GPU waits for nothing, and does not do more because the context is long."""

import pytest
import torch

import kvfold
from kvfold.bench import profile
from kvfold.bench.decode import filled
from kvfold.engines.transformers.graph import DecodeGraph
from tiny_model import tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ENV = dict.fromkeys(("gpu", "driver", "torch", "triton", "commit"), "")


@pytest.fixture
def model():
    model = tiny_llama(max_position_embeddings=1 << 17).to("cuda", torch.bfloat16)
    yield model
    kvfold.unfold(model)


@pytest.fixture
def no_waiting():
    """Any operation of Torch's that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def steps(model, cache, count):
    ids = torch.zeros(2, 1, dtype=torch.long, device="cuda")
    with torch.no_grad():
        for _ in range(count):
            model(input_ids=ids, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("method", ["none", "fold", "kivi", "kivi:bits=4", "squat", "innerq:mode=asym,paper=true"])
def test_a_whole_cycle_of_steps_waits_for_nothing(model, method, request):
    cache = filled(model, method, 2, 1000, 200)
    steps(model, cache, 40)
    packed = cache.folded[0].packed[0]
    request.getfixturevalue("no_waiting")
    steps(model, cache, 32)
    assert cache.folded[0].packed[0] == packed + 32


@pytest.mark.parametrize(
    "method",
    ["none", "kivi", "squat", "innerq:mode=asym,paper=true", "innerq:paper=true", "innerq:mode=sym,paper=true"],
)
def test_a_replayed_step_neither_waits_nor_allocates(model, method, request):
    cache = filled(model, method, 2, 1000, 200)
    graph = DecodeGraph(model, cache, room=64)
    ids = torch.zeros(2, 1, dtype=torch.long, device="cuda")
    graph(ids)
    request.getfixturevalue("no_waiting")
    renewed = 0
    for _ in range(40):
        made = [list(layer.following.made) for layer in cache.folded]
        before = profile.allocator_counts()
        graph(ids)
        if made == [layer.following.made for layer in cache.folded]:
            assert profile.allocator_counts() == before
        else:  # from the queries before 1,024 tokens, outside of the graph
            renewed += 1
    assert renewed == (method == "squat")


@pytest.mark.parametrize("method", ["none", "fold", "kivi", "innerq:mode=asym,paper=true", "innerq:paper=true"])
def test_counts_do_not_depend_on_the_context(model, method):
    contexts = (1072, 30_000)  # as far into a page of 128 tokens: one block of it brings statistics
    rows = [row for context in contexts for row in profile.measure(model, "tiny", method, 2, context, ENV)]
    assert profile.grows(rows) == []
    assert [row.waits for row in rows if not row.closes or row.mode == "graph"] == [0] * 4
    for row in rows:
        assert row.kernels > 0 and row.to_host == 0
        if row.mode == "graph":
            assert (row.launches, row.allocations, row.to_device) == (1, 0, 0)
