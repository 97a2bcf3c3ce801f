"""Encoders that follow a sequence's queries (SQuat, ZipCache): what is stored depends on the tokens alone."""

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import assert_same_content, feed, layer, left_padding, tokens
from kvfold.methods import Observation, get
from kvfold.methods.base import QUERY_WINDOW, boundary
from kvfold.methods.squat import penalty_matrix, update_matrix
from kvfold.storage import following, writer

FOLLOW = ("squat", "squat_pre", "squat:rank=5", "zipcache")
WINDOWS = ("", "recent=0,sink=0", "recent=128", "recent=300", "sink=64", "sink=3,recent=17")
LENGTHS = (127, 128, 129, 160, 161, 255, 256, 257, 300, 511, 513, 1025, 2100)


def cut(new, start: int, stop: int | None = None):
    return tuple(t[:, :, start:stop] for t in new)


def with_windows(name: str, windows: str) -> str:
    return name + (("," if ":" in name else ":") + windows if windows else "")


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("name", FOLLOW)
def test_content_over_boundaries(name, windows):
    """In one call, token by token around every boundary, in calls that cross several; windows that delay packing."""
    method, count = with_windows(name, windows), 1100
    new = tokens(1, count, seed=5)
    expected = feed(layer(method), new)
    around = [100, *[1] * 70, 80, *[1] * 20, 230, *[1] * 30, 490, *[1] * 20]
    for cuts in ([1] * count, [*around, count - sum(around)], [90, 1010], [129, 3, 500, count - 632], [33] * 33 + [11]):
        assert_same_content(expected, feed(layer(method), new, cuts))
    assert expected.following.made == [1024]


@pytest.mark.parametrize("name", FOLLOW)
def test_content_of_prompts_around_boundaries_that_go_on(name):
    new = tokens(1, max(LENGTHS) + 200, seed=6)
    for length in LENGTHS:
        whole = feed(layer(name), cut(new, 0, length + 200))
        assert_same_content(whole, feed(layer(name), cut(new, 0, length + 200), [length, *[1] * 40, 160]))


@pytest.mark.parametrize("name", FOLLOW)
def test_neighbours_and_padding_do_not_matter(name):
    """Sequences that are at different boundaries in the same call."""
    lengths = [130, 161, 257, 520, 1030]
    width = max(lengths)
    new, later = tokens(5, width, seed=7), tokens(5, 150, seed=8)
    offset, valid = left_padding(lengths, width)
    for t in new:
        t.masked_fill_(~valid[:, None, :, None], float("nan"))
    batch = feed(layer(name), new, [900, width - 900], valid, offset=offset)
    feed(batch, later, [1, 1, 90, 58], start=width, offset=offset)
    for row, length in enumerate(lengths):
        alone = feed(layer(name), tuple(t[row : row + 1, :, width - length :] for t in new))
        feed(alone, tuple(t[row : row + 1] for t in later), start=length)
        assert batch.following.made[row] == alone.following.made[0] == boundary(length + 150)
        assert_same_content(batch, alone, row, 0)


@pytest.mark.parametrize("removed", [1, 7, 25, 32])
@pytest.mark.parametrize("name", FOLLOW)
def test_a_crop_back_over_a_boundary_loses_nothing(name, removed):
    """The state that was made of tokens that are gone is made anew, of the queries that the ring still holds."""
    for length in (256, 262, 512, 530):
        new, wrong = tokens(1, 700, seed=9), tokens(1, length, seed=10)
        stay = length - removed
        for t, right in zip(wrong, new, strict=True):
            t[:, :, :stay] = right[:, :, :stay]
        of = feed(layer(name), wrong)
        if of.packed[0] > of.packed_length(stay):
            continue  # into packed storage: what was encoded stays
        of.crop(-removed)
        feed(of, cut(new, stay), [1, 699 - stay], start=stay)
        assert_same_content(of, feed(layer(name), new))


@pytest.mark.parametrize("name", FOLLOW[:3])  # ZipCache's blocks are longer than such a crop
def test_a_crop_into_packed_blocks_goes_back_to_the_state_they_had(name):
    """Whether or not the boundary after it had been reached: what is packed again depends on the tokens that stay."""
    new = tokens(1, 400, seed=9)
    layers = []
    for reached in (252, 258):
        of = feed(layer(with_windows(name, "sink=3,recent=9")), cut(new, 0, reached))
        assert of.packed == [224]
        of.crop(226 - reached)
        assert of.packed == [192]
        layers.append(feed(of, cut(new, 226), [*[1] * 60, 114], start=226))
    assert_same_content(*layers)


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("name", FOLLOW)
def test_tokens_that_are_written_before_they_are_packed_leave_the_queries_of_a_state(name, size):
    """As the GPU kernels that read a call's tokens in place ask for it; the boundary lies anywhere in a call."""
    for windows in ("", "sink=3,recent=9"):
        new = tokens(1, 700, seed=9)
        for start in (200, 207):
            stop = start + (700 - start) // size * size
            of = feed(layer(with_windows(name, windows)), cut(new, 0, start))
            for at in range(start, stop, size):
                of.append(*cut(new, at, at + size), None, torch.arange(at, at + size)[None], pack=False)
                of.pack_due()
            assert_same_content(of, feed(layer(with_windows(name, windows)), cut(new, 0, stop)))


@pytest.mark.parametrize("name", FOLLOW)
def test_rearranged_and_copied_sequences_go_on_with_their_own_states(name):
    lengths, width = [300, 150, 520], 520
    new, later = tokens(3, width, seed=4), tokens(4, 120, seed=6)
    offset, valid = left_padding(lengths, width)
    of = feed(layer(name), new, [width], valid, offset=offset)
    twin = copy.deepcopy(of)
    rows = [2, 0, 1, 2]
    of.reorder_cache(torch.tensor(rows))
    feed(of, later, [1, 80, 39], start=width, offset=offset[rows])
    for at, row in enumerate(rows):
        alone = feed(layer(name), tuple(t[row : row + 1, :, width - lengths[row] :] for t in new))
        feed(alone, tuple(t[at : at + 1] for t in later), start=lengths[row])
        assert_same_content(of, alone, at, 0)
    feed(twin, tuple(t[:3] for t in later), start=width, offset=offset)
    alone = feed(layer(name), tuple(t[:1, :, width - 300 :] for t in new))
    assert_same_content(twin, feed(alone, tuple(t[:1] for t in later), start=300), 0, 0)


# ---- prompts that are too short to pack ------------------------------------------------------------------------------


def observed(name, of, queries, start: int, stop: int):
    positions = torch.arange(start, stop)[None]
    return get(name).observe(Observation(queries[:, :, start:stop], positions), of.spec)


@pytest.mark.parametrize("prompt", [1, 20, 50])
@pytest.mark.parametrize("name", FOLLOW)
def test_a_short_prompts_state_comes_from_the_queries_before_the_boundary(name, prompt):
    """Decoding token by token, the first packing has a state of 64 queries, not of the one of its step."""
    of = layer(name)
    first = of.following._packs_at
    new = tokens(1, first, seed=3)
    feed(of, new, [prompt, *[1] * (first - prompt)])
    assert of.packed == [of.block]
    at = boundary(first)
    expected = observed(name, of, new[2], at - QUERY_WINDOW, at)
    alone = observed(name, of, new[2], first - 1, first)
    assert of.following.state.keys() == expected.keys()
    for field, tensor in expected.items():
        assert torch.equal(of.following.state[field], tensor)
        assert tensor.shape != alone[field].shape or not torch.allclose(tensor, alone[field])


@pytest.mark.parametrize("prompt", [1, 20, 50])
@pytest.mark.parametrize("name", ["squat:paper=true", "squat_pre:paper=true", "zipcache:paper=true"])
def test_a_short_prompts_state_comes_from_all_queries_under_paper(name, prompt):
    of = layer(name)
    first = of.following._packs_at
    assert prompt < first == of.method.sink + of.method.recent + of.block
    new = tokens(1, first + 100, seed=3)
    feed(of, cut(new, 0, first - 1), [prompt, *[1] * (first - 1 - prompt)])
    assert of.packed == [0] and not of.following.state
    feed(of, cut(new, first - 1, first), start=first - 1)
    assert of.packed == [of.block]
    made = {n: t.clone() for n, t in of.following.state.items()}
    for field, tensor in observed(name, of, new[2], 0, first).items():
        assert torch.equal(made[field], tensor)
    feed(of, cut(new, first), start=first)  # and stays
    assert all(torch.equal(made[n], t) for n, t in of.following.state.items())
    assert of.following.ring is None


# ---- the states of a prompt ------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FOLLOW)
def test_all_states_of_a_prompt_are_made_together(name, monkeypatch):
    """And blocks are encoded with their own, as many at a time as if there were one state."""
    of, new = layer(name), tokens(1, 9000, seed=3)
    encoded, observe = [], of.method.observe
    windows = []
    encode = type(of.method).encode_keys
    monkeypatch.setattr(
        type(of.method),
        "encode_keys",
        lambda self, keys, *rest: (encoded.append(keys.shape[2]), encode(self, keys, *rest))[1],
    )
    monkeypatch.setattr(
        type(of.method),
        "observe",
        lambda self, seen, shape: (windows.append(len(seen.queries)), observe(seen, shape))[1],
    )
    with Counted() as counted:
        feed(of, new)
    assert windows == [len(of.following.segments(0, of.packed[0]))] == [11 - (of.block == 128)]
    assert encoded == [4096, 4096, of.packed[0] - 8192]
    assert counted.calls["linalg_cholesky_ex"] <= 1 and counted.calls["bmm"] <= 10


@pytest.mark.parametrize("name", FOLLOW)
def test_states_are_made_in_equal_numbers_where_libraries_choose_by_it(name, monkeypatch):
    """As on a GPU: a prompt's and a step's; what is stored is the same."""
    new = tokens(1, 2600, seed=3)
    expected = feed(layer(name), new)
    monkeypatch.setattr(following, "MATRICES", 8)
    monkeypatch.setattr(following.Following, "repeats", True)
    of = layer(name)
    seen, observe = [], of.method.observe
    monkeypatch.setattr(
        type(of.method), "observe", lambda self, what, shape: (seen.append(len(what.queries)), observe(what, shape))[1]
    )
    assert_same_content(expected, feed(of, new, [2000, 40, 300, *[1] * 20, 240]))
    assert set(seen) == {8 // of.spec.num_kv_heads}


def test_a_long_prompt_holds_no_more_states_than_it_may(monkeypatch):
    new = tokens(2, 5000, seed=3)
    expected = feed(layer("squat"), new)
    monkeypatch.setattr(writer, "STATES", 6)
    of, made = layer("squat"), []
    make = of.following.make
    monkeypatch.setattr(
        of.following,
        "make",
        lambda ids, bounds, *rest: (made.append(len(ids) * len(bounds)), make(ids, bounds, *rest))[1],
    )
    feed(of, new)
    assert len(made) == 3 and max(made) == 6
    for row in (0, 1):
        assert_same_content(expected, of, row, row)


class NoQuestions(TorchDispatchMode):
    """Fails where the host would wait for what the device found."""

    WAITS = ("_local_scalar_dense", "_linalg_check_errors", "is_nonzero", "equal", "nonzero", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.WAITS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["squat", "squat_pre", "zipcache"])
def test_a_state_is_made_without_waiting_for_the_device(name):
    """A decode graph's steps go on while it is made."""
    new = tokens(2, 256, seed=3)
    of = feed(layer(name), cut(new, 0, 255))
    of.following.remember([0, 1], slice(None), new[2][:, :, 255:], 255)
    with NoQuestions():
        for row in (0, 1):
            of.following.make([row], (256,), 256, new[2][:1, :, :0], 256, [0, 0], in_place=True)
    assert of.following.made == [256, 256]


@pytest.mark.parametrize("name", ["squat", "squat_pre", "zipcache"])
def test_the_states_of_a_prompt_are_made_without_waiting_for_the_device(name):
    of, (_, _, queries) = layer(name), tokens(2, 3100, seed=3)
    of.lazy_initialization(*tokens(2, 1)[:2])
    with NoQuestions():
        made = of.following.make([0, 1], (128, 256, 1024, 3072), 3100, queries, 0, [0, 0])
    assert of.following.made == [3072, 3072] and made
    assert all(t.shape[:3] == (2, 4, of.spec.num_kv_heads) for t in made.values())


@pytest.mark.parametrize("windows", ("", "sink=3,recent=9", "sink=3,recent=300"))
@pytest.mark.parametrize("name", FOLLOW)
def test_a_decode_graph_has_the_states_of_the_blocks_that_its_steps_close(name, windows):
    """Steps write their queries into the ring; the state is made before the step that closes a block with it."""
    name = with_windows(name, windows)
    start = layer(name).following._packs_at + 5
    new, seen = tokens(1, start + 400, seed=3), set()
    of = feed(layer(name, max_length=start + 400), cut(new, 0, start))  # as a graph takes storage
    of.following.make_room()
    held = {field: t.data_ptr() for field, t in of.following.state.items()}
    for step in range(400):
        at = start + step
        of.follow_static(step)
        if of.packed_length(at) > of.packed_length(at - 1):
            made = boundary(at)
            seen.add(made)
            for field, tensor in observed(name, of, new[2], max(made - QUERY_WINDOW, 0), made).items():
                assert torch.equal(of.following.state[field], tensor)
        of.following.ring[:, :, at % of.following.slots] = new[2][:, :, at]
    assert seen and held == {field: t.data_ptr() for field, t in of.following.state.items()}
    assert of.following.made == [max(seen)]


def test_queries_of_any_size_steer_keys_or_leave_them():
    """What has no factorization steers nothing; the other heads keep their own."""
    queries = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    queries[:, 1] *= 1e18
    queries[:, 2, 5, 7] = float("nan")
    for rank, normalize in ((0, False), (0, True), (5, False)):
        some = queries[:, :2] if rank else queries
        update = update_matrix(penalty_matrix(some, rank, 1e-3, normalize), 32)
        assert update.isfinite().all() and bool(update[:, :2].flatten(1).any())
        assert rank or not update[:, 2].any()
        assert torch.equal(update[:, :1], update_matrix(penalty_matrix(queries[:, :1], rank, 1e-3, normalize), 32))
