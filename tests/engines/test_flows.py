"""Random flows: whatever is done with a cache, it holds what its tokens say, and attention reads what it holds.

Sequences of calls, steps, padding, crops, drafts, reordered, repeated and selected sequences, copies, saving and loading,
resets, calls that die anywhere and are tried again (or not), masks that are refused or hide the newest tokens, inference mode
on and off. Two attention layers are driven through Transformers' interfaces, as a model does it; a token's keys, values and
queries follow from its id and position. So what a cache must hold is what a fresh one holds after one call with each
sequence's tokens alone.

``make fuzz`` runs 100,000 cases (``KVFOLD_FUZZ``: how many; ``KVFOLD_FUZZ_SEED``: others than those of the checks).
"""

import copy
import json
import os
import random
import warnings
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import kvfold
from helpers import assert_same_content, relative, rope, spec
from kvfold.arithmetic import storing
from kvfold.engines.transformers.attention import attention_forward, padding_mask
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.engines.transformers.saving import _described, _restore
from kvfold.errors import CacheStateError, KVFoldWarning
from kvfold.storage.following import SPARE

METHODS = (
    "none:sink=3,recent=5",
    "fold:sink=3,recent=5",
    "fold:bits=3,sink=0,recent=0",
    "kivi:sink=4,recent=0",
    "kivi:group=64,sink=0,recent=40",
    "innerq:sink=5,recent=7",
    "squat:sink=3,recent=9",
    "squat_pre:sink=1,recent=20",
    "zipcache:sink=0,recent=12",
    "turboquant:sink=2,recent=2",
    "qjl:sink=3,recent=5",
    "gear:sink=0,recent=30",
    "k=squat:sink=3,recent=9+v=fold:sink=3,recent=9",
)
CASES = int(os.environ.get("KVFOLD_FUZZ", "1000"))
DIM, HEADS, LAYERS, VOCABULARY, MOST = 32, 2, 2, 61, 400
WIDTH = {"qjl": 64, "turboquant": 64, "kivi": 64}  # others are as narrow as formats allow


class Stop(BaseException):
    """What ends a call in its middle; not an Exception, as an interrupt is none."""


class Model:
    """Two attention layers whose keys, values and queries are tables of (token, position)."""

    def __init__(self, method: str) -> None:
        self.method = kvfold.methods.get(method)
        self.dim = WIDTH.get(self.method.name, DIM)
        generator = torch.Generator().manual_seed(0)

        def table(heads: int, *rows: int) -> torch.Tensor:
            return torch.randn(LAYERS, *rows, heads, self.dim, generator=generator)

        self.token = [table(heads, VOCABULARY) for heads in (1, 1, HEADS)]
        self.place = [table(heads, MOST + 3) for heads in (1, 1, HEADS)]
        self.module = SimpleNamespace(training=False, is_causal=True, config=None)
        self.shapes = [
            spec(self.dim, HEADS, 1, layer_idx=i, num_layers=LAYERS, rope=rope(self.dim), fragments=False)
            for i in range(LAYERS)
        ]

    def cache(self) -> FoldedCache:
        return FoldedCache([FoldedLayer(self.method, shape) for shape in self.shapes], self.method)

    def states(self, layer: int, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Keys, values and queries [batch, heads, tokens, dim]; some channels are large, as real ones are."""
        both = zip(self.token, self.place, strict=True)
        made = [(t[layer][ids] + p[layer][positions]).transpose(1, 2) for t, p in both]
        made[0] = made[0] * torch.linspace(0.3, 4, self.dim) + torch.linspace(-2, 2, self.dim)
        return made

    def __call__(self, cache, ids, positions, mask=None, fault=None) -> list[torch.Tensor]:
        """One call; ``fault`` is called with a place's name at every place where it may die."""
        died = fault or (lambda place: None)
        count = ids.shape[1]
        columns, offset = cache.get_mask_sizes(count, 0)
        assert columns == cache.get_seq_length() + count
        shown = padding_mask(
            attention_mask=mask, q_length=count, kv_length=columns, q_offset=columns - count, kv_offset=offset
        )
        outputs = []
        for layer in range(LAYERS):
            died(f"before layer {layer}")
            key, value, query = self.states(layer, ids, positions)
            key, value = cache.update(key, value, layer)
            died(f"attention of layer {layer}")
            outputs.append(attention_forward(self.module, query, key, value, shown, position_ids=positions)[0])
        return outputs


@dataclass
class Part:
    """Tokens of a sequence, and the cut that ends them, if that left a trace."""

    tokens: list[int]
    cut: int = 0
    packed: int = 0  # tokens in packed storage after the cut


class Flow:
    """A cache, and what its sequences must be: parts, one after the other."""

    def __init__(self, model: Model, batch: int) -> None:
        self.model, self.cache = model, model.cache()
        self.history: list[list[Part]] = [[] for _ in range(batch)]
        self.most = [0] * batch  # tokens that a sequence ever had
        self.packed = [0] * batch
        self.shown = torch.zeros(batch, 0, dtype=torch.bool)
        self.dice = random.Random(0)
        self.remembered: list | None = None

    # ---- what a sequence is ------------------------------------------------------------------------------------------

    def length(self, row: int) -> int:
        return sum(len(part.tokens) - part.cut for part in self.history[row])

    def fed(self, row: int, tokens: list[int]) -> None:
        past, of, before = self.history[row], self.cache.folded[0], self.length(row)
        self.most[row] = max(self.most[row], before + len(tokens))
        stay = before if of.writer.recording else before + len(tokens)  # a draft waits to be packed
        self.packed[row] = max(self.packed[row], of.packed_length(stay))
        if past and not past[-1].cut:
            past[-1].tokens.extend(tokens)
        elif tokens:
            past.append(Part(list(tokens)))

    def cut(self, row: int, count: int) -> None:
        """The newest tokens, without which as much would be packed, leave no trace. A cut beyond them decodes, or keeps what a
        shorter sequence would not have packed, so it belongs to the history. Length alone does not tell: drafts pack later,
        and cuts leave more packed than there would be."""
        left = self.length(row) - count
        if not left:
            self.history[row], self.most[row], self.packed[row] = [], 0, 0
            return
        past, of = self.history[row], self.cache.folded[0]
        before = past[-2].packed if len(past) > 1 else 0
        if not past[-1].cut:
            packed = self.packed[row]
            needed = packed + of.method.sink + of.method.recent if packed > before else 0
            gone = max(0, min(count, len(past[-1].tokens), left + count - needed))
            del past[-1].tokens[len(past[-1].tokens) - gone :]
            count -= gone
            if not past[-1].tokens:
                past.pop()
        self.packed[row] = min(self.packed[row], max(0, left - of.method.sink) // of.block * of.block)
        if count:
            past[-1].cut += count
            past[-1].packed = self.packed[row]

    # ---- operations --------------------------------------------------------------------------------------------------

    def call(self, count: int, padded: bool = False, draft: bool = False) -> tuple:
        """Ids, positions, mask and what becomes of the sequences."""
        batch = len(self.history)
        real = torch.ones(batch, count, dtype=torch.bool)
        if padded and batch > 1:
            for row in range(1, batch):
                pad = self.dice.randrange(count)
                real[row, :pad] = False
        ids = torch.tensor([[self.dice.randrange(VOCABULARY) for _ in range(count)] for _ in range(batch)])
        lens = torch.tensor([[self.length(row)] for row in range(batch)])
        positions = (lens + real.long().cumsum(-1) - 1).clamp_min(0)
        return ids, positions, torch.cat((self.shown, real), 1)

    def held(self) -> list | None:
        """What the first layer holds of every sequence, decoded; of a call that died, nothing."""
        call = self.cache._call
        if call is None or not call.missing:
            of = self.cache.folded[0]
            self.remembered = [of.decoded(row) for row in range(len(self.history))] if of.columns.count else None
        return self.remembered

    def run(self, call: tuple, look: bool, before: list | None = None) -> None:
        """A call that lives, and what it must be: attention over what the cache held before, decoded."""
        ids, positions, shown = call
        before = before or self.held()
        outputs = self.model(self.cache, ids, positions, None if bool(shown.all()) else shown)
        real = shown[:, self.shown.shape[1] :]
        if look:
            self.compare(outputs[0], ids, positions, real, before)
        for row in range(len(self.history)):
            self.fed(row, ids[row][real[row]].tolist())
        self.shown = shown

    def compare(self, output, ids, positions, real, before) -> None:
        key, value, query = self.model.states(0, ids, positions)
        count = ids.shape[1]
        for row in range(len(self.history)):
            old = before[row] if before and self.length(row) else (key[row][:, :0], value[row][:, :0])
            keys, values = (torch.cat((o, n[row].float()), 1) for o, n in zip(old, (key, value), strict=True))
            past = old[0].shape[1]
            sees = torch.cat((torch.ones(count, past, dtype=torch.bool), real[row].expand(count, -1)), 1)
            sees &= torch.ones(count, past + count, dtype=torch.bool).tril(past)
            scores = query[row].float() @ keys.transpose(1, 2) * self.model.dim**-0.5
            weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
            expected = (weights @ values).transpose(0, 1)[real[row]]
            assert relative(output[row][real[row]], expected) < 1e-4

    def hides(self) -> None:
        """A mask that says otherwise of what is cached is refused, and nothing has changed: it hides a token before another
        one, or shows padding."""
        row = self.dice.randrange(len(self.history))
        seen = self.shown[row].nonzero().flatten().tolist()
        wrong = [column for column in range(self.shown.shape[1]) if column not in seen[-1:]]
        if not wrong:
            return
        self.held()
        ids, positions, shown = self.call(1 + self.dice.randrange(3))
        column = self.dice.choice(wrong)
        shown[row, column] = ~shown[row, column]
        with pytest.raises(CacheStateError, match="attention_mask"):
            self.model(self.cache, ids, positions, shown)

    def pads(self, size: int, most: int) -> None:
        """The next call's mask hides the newest of each sequence, up to ``most``, as padding after its end: they are gone."""
        self.cache.settle()
        before, packed = self.held(), self.packed.copy()
        self.shown = self.shown.clone()
        for row in range(len(self.history)):
            count = min(self.dice.randrange(most + 1), self.room_to_cut(row))
            columns = self.shown[row].nonzero().flatten()
            if count:
                self.shown[row, columns[len(columns) - count :]] = False
                self.cut(row, count)
        if before is not None:
            lengths = [self.length(row) for row in range(len(self.history))]
            before = [tuple(t[:, :n] for t in of) for of, n in zip(before, lengths, strict=True)]
        # a block that was cut before is what it was at that time, and not what it decodes to today
        self.run(self.call(size), look=packed == self.packed, before=before)

    def dies(self, call: tuple, places: int) -> bool:
        """A call that dies after ``places`` places, or in a layer's own work; returns whether it did."""
        ids, positions, shown = call
        left = [places]

        def fault(place: str) -> None:
            left[0] -= 1
            if not left[0]:
                raise Stop

        self.held()
        of = self.cache.folded[self.dice.randrange(LAYERS)]
        part, name = self.dice.choice(BREAKABLE).split(".")
        inside = places > 2 * LAYERS
        with self.breaking(getattr(of, part), name, fault) if inside else nullcontext():
            if inside:
                left[0] = places - 2 * LAYERS
            with suppress(Stop):
                self.model(self.cache, ids, positions, None if bool(shown.all()) else shown, None if inside else fault)
                real = shown[:, self.shown.shape[1] :]
                for row in range(len(self.history)):
                    self.fed(row, ids[row][real[row]].tolist())
                self.shown = shown
                return False
        return True

    @contextmanager
    def breaking(self, of: object, name: str, fault):
        whole = getattr(of, name)

        def broken(*args, **kwargs):
            fault(name)
            return whole(*args, **kwargs)

        setattr(of, name, broken)
        try:
            yield
        finally:
            delattr(of, name)

    def room_to_cut(self, row: int) -> int:
        """Tokens that may be taken off a sequence's end."""
        length = self.length(row)
        return min(length, SPARE - self.most[row] + length) if self.cache.folded[0].following.active else length

    def crop(self, count: int) -> None:
        """Where an encoder follows queries: no further back than those it keeps, beyond which a state is made of fewer."""
        count = min(count, self.shown.shape[1])
        if self.cache.folded[0].following.active:
            self.cache.settle()
            count = min(count, *(self.room_to_cut(row) for row in range(len(self.history))), SPARE)
        if count <= 0:
            return
        self.cache.crop(-count)
        for row in range(len(self.history)):
            lost = int(self.shown[row, self.shown.shape[1] - count :].sum())
            if lost:
                self.cut(row, lost)
        self.shown = self.shown[:, : self.shown.shape[1] - count]
        for of in self.cache.folded:
            assert of.packed == self.packed

    def pick(self, rows: list[int]) -> None:
        self.history = [copy.deepcopy(self.history[row]) for row in rows]
        self.most, self.packed = [self.most[row] for row in rows], [self.packed[row] for row in rows]
        self.shown = self.shown[rows]

    def do(self, kind: str, number: int) -> None:
        batch, room = len(self.history), MOST - 1 - self.shown.shape[1]
        self.dice = random.Random(number)
        sizes = {"step": 1, "few": 1 + number % 5, "turn": 1 + number % 90, "prompt": 1 + number % 200}
        if kind in sizes:
            size = min(sizes[kind], room)
            if size:
                self.run(self.call(size, padded=number % 3 == 0), look=number % 2 == 0)
        elif kind == "steps":
            for _ in range(min(number % 12, room)):
                self.run(self.call(1), look=False)
        elif kind in ("dies", "dies and again"):
            size = min(1 if number % 3 == 0 else 1 + number % 90, room)
            if size:
                call = self.call(size, padded=number % 4 == 0)
                died = self.dies(call, 1 + number % 11)
                if died:
                    assert self.cache.get_seq_length() == self.shown.shape[1]
                if died and kind == "dies and again":
                    self.run(call, look=True)
        elif kind == "draft":
            size = min(1 + number % 40, room)
            if size:
                self.cache.activate_past_recording()
                self.run(self.call(size), look=False)
                self.crop(number % (size + 1))
                for of in self.cache.folded:
                    of.writer.recording = False
        elif kind == "crop":
            self.crop(number % 70)
        elif kind == "hides":
            self.hides()
        elif kind == "pads":
            size = min(1 + number % 3, room)
            if size and self.shown.shape[1]:
                self.pads(size, most=number % 50)
        elif kind == "reorder":
            rows = [self.dice.randrange(batch) for _ in range(batch)]
            self.cache.reorder_cache(torch.tensor(rows))
            self.pick(rows)
        elif kind == "repeat" and batch == 1:
            self.cache.batch_repeat_interleave(2)
            self.pick([0, 0])
        elif kind == "select":
            rows = self.dice.sample(range(batch), self.dice.randint(1, batch))
            self.cache.batch_select_indices(torch.tensor(rows))
            self.pick(rows)
        elif kind == "copy":
            old, self.cache = self.cache, copy.deepcopy(self.cache)
            if room > 60:  # what becomes of the one is nothing to the other
                ids, positions, shown = self.call(60)
                self.model(old, ids, positions, None if bool(shown.all()) else shown)
        elif kind == "save":
            self.load()
        elif kind == "reset" and number % 4 == 0:
            self.cache.reset()
            self.history, self.shown = [[] for _ in range(batch)], torch.zeros(batch, 0, dtype=torch.bool)
            self.most, self.packed = [0] * batch, [0] * batch

    @storing
    def load(self) -> None:
        """As ``cache.save`` and ``kvfold.load_cache`` write and read layers, but for the file and the model's hashes."""
        self.cache.settle()
        twin, tensors = self.model.cache(), {}
        for i, (of, new) in enumerate(zip(self.cache.folded, twin.folded, strict=True)):
            told = json.loads(json.dumps(_described(of, f"{i}.", tensors)))
            own = {name: t.clone() for name, t in tensors.items()}
            _restore(new, told, f"{i}.", own, torch.device("cpu"), 0)
        self.cache = twin

    # ---- what it must be ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.run(self.call(1), look=True)  # after a draft, packing lags by a call
        assert self.cache.get_seq_length() == self.shown.shape[1]
        for row, past in enumerate(self.history):
            length = self.length(row)
            alone, at = self.model.cache(), 0
            for part in past:
                positions = torch.arange(at, at + len(part.tokens))[None]
                self.model(alone, torch.tensor([part.tokens]), positions)
                if part.cut:
                    alone.crop(-part.cut)
                    assert alone.folded[0].packed == [part.packed]
                at += len(part.tokens) - part.cut
            for of, expected in zip(self.cache.folded, alone.folded, strict=True):
                assert not self.shown.shape[1] or of.lens[row] == length
                if length:
                    assert_same_content(of, expected, row, 0)
        for of in self.cache.folded:
            assert of.running is None and not of.pending
            tensors = [t for kept in of.tensors().values() for t in kept]
            assert not any(t.is_inference() or t.requires_grad for t in tensors)


KINDS = (
    *("step", "steps", "few", "turn", "prompt", "dies", "dies and again", "draft", "crop"),
    *("hides", "pads", "reorder", "repeat", "select", "copy", "save", "reset"),
)
BREAKABLE = (
    "writer.take",
    "writer._encode",
    "ring.write",
    "columns.log",
    "ring.fit",
    "sink.fit",
    "sequences.alike",
)
"""Where a layer may die while it takes tokens in: its parts and their methods."""
MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)
operations = st.tuples(st.sampled_from(KINDS), st.integers(0, 5039), st.sampled_from(MODES))
_models: dict[str, Model] = {}


def flows(method: str, batch: int, flow: list[tuple]) -> None:
    of = Flow(_models.setdefault(method, Model(method)), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVFoldWarning)
        for kind, number, mode in flow:
            with mode():
                of.do(kind, number)
        with torch.no_grad():
            of.check()


@pytest.mark.parametrize("method", METHODS)
@seed(int(os.environ.get("KVFOLD_FUZZ_SEED", "0")))
@settings(
    max_examples=-(-CASES // len(METHODS)),
    deadline=None,
    database=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
)
@given(
    batch=st.integers(1, 3),
    first=st.tuples(st.sampled_from(("prompt", "turn", "few", "dies")), st.integers(0, 5039), st.sampled_from(MODES)),
    flow=st.lists(operations, min_size=1, max_size=7),
)
def test_flows(method, batch, first, flow):
    flows(method, batch, [first, *flow])


DRAFTS = {
    "is taken back after a cut": [
        ("prompt", 0),
        ("step", 0),
        ("step", 0),
        ("step", 0),
        ("prompt", 657),  # 62 tokens
        ("crop", 212),  # 2
        ("draft", 5038),  # 39, of which 38 go
    ],
    "goes after a cut": [("prompt", 61), ("crop", 2), ("draft", 117), ("crop", 45)],
    "is packed by the turn after it": [("prompt", 61), ("crop", 2), ("draft", 5038), ("turn", 31)],
    "goes when it stayed unpacked": [("prompt", 61), ("draft", 117), ("crop", 41)],
    "goes, and a turn is cut": [("prompt", 61), ("draft", 117), ("crop", 41), ("turn", 80), ("crop", 60)],
}
"""Where as much is packed as without the draft, but not what a sequence of that length has packed."""


STATES = {
    "waits for a draft, and a call dies": [("turn", 2845), ("draft", 89), ("dies and again", 751)],  # 56, 65, 97 tokens
    "waits for a draft, and a step dies": [("turn", 2845), ("draft", 89), ("dies", 2), ("turn", 121)],
    "is gone back to by a cut": [("turn", 939), ("turn", 809), ("crop", 32), ("steps", 105)],  # 40, 130, 98, 107
    "is gone back to when a draft goes": [("turn", 939), ("turn", 809), ("draft", 1324), ("crop", 27), ("steps", 105)],
    "waits in a young ring, and a step dies": [
        ("turn", 2641),
        ("dies and again", 3),
        ("steps", 10),
    ],  # 32, 33, 43 tokens
    "waits in a young ring, and a step dies for good": [("prompt", 0), ("turn", 1560), ("dies", 2985), ("turn", 10)],
    "is cut when a call died": [("turn", 939), ("turn", 809), ("dies", 211), ("crop", 10), ("turn", 809)],
}
"""Where what an encoder made of queries is made late, or again: from the queries that it would have been made of."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("flow", (DRAFTS | STATES).values(), ids=(DRAFTS | STATES).keys())
def test_explicit_flows(flow, method):
    flows(method, 1, [(kind, number, torch.no_grad) for kind, number in flow])
