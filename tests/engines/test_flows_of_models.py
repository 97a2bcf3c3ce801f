"""Random programs on tiny models of other kinds than Llama's: whatever is done with a cache, the model goes on as without one.

Sliding windows, recurrent states beside attention, RoPE of some channels or of some layers, none at all, capped scores, learned
sinks; calls, padding, crops, past recording, reordered, repeated and selected sequences, copies, saving and loading. Where
nothing is rounded (`none`, or windows that nothing leaves) the logits are those of the model without a cache. Else they are
those of a fresh cache that one sequence went through alone, in the same calls.

``make fuzz`` runs one of these cases for twenty of test_flows.py (``KVFOLD_FUZZ``, ``KVFOLD_FUZZ_SEED``).
"""

import copy
import inspect
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvfold
from families import VOCABULARY, configuration, model_of
from helpers import relative
from kvfold.errors import CacheStateError, KVFoldWarning


def changed(family: str, **options: Any) -> Callable[[], PreTrainedModel]:
    """A family's tiny model with other options."""

    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        config = type(configuration(family)).from_dict(configuration(family).to_dict() | options)
        return AutoModelForCausalLM.from_config(config).eval()

    return make


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: model_of("llama"),
    "gemma2": lambda: model_of("gemma2"),  # capped scores, sliding windows
    "gemma3": lambda: model_of("gemma3_text"),  # sliding windows, two rotations
    "ministral": lambda: model_of("ministral"),  # sliding windows
    "gpt_oss": lambda: model_of("gpt_oss"),  # learned sinks, sliding windows
    "gpt_neox": lambda: model_of("gpt_neox"),  # RoPE of a quarter of the channels
    "glm": lambda: model_of("glm"),  # RoPE of half of them, in pairs of neighbours
    "gpt2": lambda: model_of("gpt2"),  # learned positions
    "smollm3": changed("smollm3", no_rope_layers=[1, 0, 1, 0]),  # RoPE in some layers
    "granite": lambda: model_of("granitemoehybrid"),  # recurrent layers, no RoPE
    "lfm2": lambda: model_of("lfm2"),  # convolutions
    "falcon_h1": lambda: model_of("falcon_h1"),  # attention and a recurrent state in each layer
}
EXACT = ("none:sink=0,recent=0", "none:sink=3,recent=5", "kivi:sink=8,recent=512")
"""Nothing is rounded: full precision in blocks and pages, and windows that nothing leaves."""
PACKED = ("kivi:bits=4,sink=0,recent=0", "fold:bits=4,sink=3,recent=5", "squat_pre:bits=4,sink=1,recent=20")
BEFORE_ROPE = ("llama", "gpt_oss", "gpt_neox")
"""Models that methods fold which store keys before RoPE."""
CASES = int(os.environ.get("KVFOLD_FUZZ", "1000"))
EACH = 20
"""Cases of test_flows.py for one of these, which takes a model's calls."""
MOST = 200
CLOSE = 1e-4
ALIKE = 2e-2
"""Rounding differs between a batch and a sequence alone, so some numbers get the code beside theirs."""
RECURRENT = ("granite", "lfm2", "falcon_h1")
_models: dict[str, PreTrainedModel] = {}


def model_named(name: str) -> PreTrainedModel:
    if name not in _models:
        _models[name] = MODELS[name]()
    return _models[name]


class Program:
    """A folded model, its cache, and what each of its sequences went through."""

    def __init__(self, name: str, method: str, batch: int, folder: Any) -> None:
        self.model, self.method, self.folder = model_named(name), method, folder
        self.pads = name not in RECURRENT
        self.takes = inspect.signature(self.model.forward).parameters
        self.exact = method in EXACT
        self.cache = kvfold.fold(self.model, method)
        self.past: list[list[tuple[str, Any]]] = [[] for _ in range(batch)]
        self.shown = torch.zeros(batch, 0, dtype=torch.bool)
        self.dice = random.Random(0)

    def forward(
        self, cache: Any, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        given = {"position_ids": positions} if "position_ids" in self.takes else {}
        return self.model(ids, past_key_values=cache, use_cache=True, attention_mask=mask, **given).logits

    def tokens(self, row: int) -> list[int]:
        """What is left of a sequence."""
        found: list[int] = []
        for kind, what in self.past[row]:
            if kind == "call":
                found += what
            elif kind == "crop":
                del found[len(found) - what :]
        return found

    # ---- operations --------------------------------------------------------------------------------------------------

    def call(self, count: int, padded: bool) -> torch.Tensor:
        """A call of some tokens; the logits of its last column [batch, vocabulary]."""
        batch, before = self.shown.shape
        real = torch.ones(batch, count, dtype=torch.bool)
        if (
            padded and not before and self.pads
        ):  # later columns of padding would be within a model's own sliding windows
            for row in range(1, batch):
                real[row, : self.dice.randrange(count)] = False
        ids = torch.tensor([[self.dice.randrange(3, VOCABULARY) for _ in range(count)] for _ in range(batch)])
        lens = self.shown.sum(1, keepdim=True)
        positions = (lens + real.long().cumsum(-1) - 1).clamp_min(0)
        self.shown = torch.cat((self.shown, real), 1)
        mask = None if bool(self.shown.all()) else self.shown.long()
        logits = self.forward(self.cache, ids, positions, mask)[:, -1]
        for row in range(batch):
            self.past[row].append(("call", ids[row][real[row]].tolist()))
        return logits

    def crop(self, count: int) -> None:
        """Every sequence keeps a token. A refusal changes nothing."""
        count = min(count, int(self.shown.sum(1).min()) - 1)
        if count <= 0:
            return
        try:
            self.cache.crop(-count)
        except CacheStateError as error:
            assert any(what in str(error) for what in ("recurrent states", "sliding windows", "convolutions"))
            return
        for row, past in enumerate(self.past):
            past.append(("crop", int(self.shown[row, -count:].sum())))
        self.shown = self.shown[:, :-count]

    def pick(self, rows: list[int]) -> None:
        self.past = [list(self.past[row]) for row in rows]
        self.shown = self.shown[rows]

    def do(self, kind: str, number: int) -> None:
        batch, columns = self.shown.shape
        self.dice = random.Random(number)
        size = {"step": 1, "few": 1 + number % 5, "turn": 1 + number % 60, "prompt": 1 + number % 120, "last": 3}.get(
            kind, 0
        )
        if size := min(size, MOST - columns):
            logits = self.call(size, padded=number % 2 == 0)
            if number % 4 == 3 or kind == "last":
                self.check(logits)
        elif kind == "crop":
            self.crop(1 + number % 50)
        elif kind == "record":
            self.cache.activate_past_recording()
            for past in self.past:
                past.append(("record", None))
        elif kind == "reorder" and columns:
            rows = [self.dice.randrange(batch) for _ in range(batch)]
            self.cache.reorder_cache(torch.tensor(rows))
            self.pick(rows)
        elif kind == "repeat" and batch < 3 and columns:
            self.cache.batch_repeat_interleave(2)
            self.pick([row for row in range(batch) for _ in range(2)])
        elif kind == "select" and columns:
            rows = self.dice.sample(range(batch), self.dice.randint(1, batch))
            self.cache.batch_select_indices(torch.tensor(rows))
            self.pick(rows)
        elif kind == "copy":
            old, self.cache = self.cache, copy.deepcopy(self.cache)
            if columns and columns < MOST:  # what becomes of the one is nothing to the other
                ids = torch.full((batch, 1), 5)
                mask = torch.cat((self.shown, torch.ones(batch, 1, dtype=torch.bool)), 1)
                self.forward(old, ids, self.shown.sum(1, keepdim=True), None if bool(mask.all()) else mask.long())
        elif kind == "reset" and number % 3 == 0:
            batch = 1 + number % 2
            self.cache.reset()
            self.past, self.shown = [[] for _ in range(batch)], torch.zeros(batch, 0, dtype=torch.bool)
        elif kind == "save" and columns:
            path = self.folder / "cache.safetensors"
            self.cache.save(path)
            self.cache = kvfold.load_cache(path, self.model)

    # ---- what it must be ---------------------------------------------------------------------------------------------

    def check(self, logits: torch.Tensor) -> None:
        """The last logits of each sequence."""
        for row in range(len(self.past)):
            assert relative(logits[row], self.without(row) if self.exact else self.alone(row)) < (
                CLOSE if self.exact else ALIKE
            )

    def without(self, row: int) -> torch.Tensor:
        """By the model alone, without a cache."""
        ids = torch.tensor([self.tokens(row)])
        given = {"position_ids": torch.arange(ids.shape[1])[None]} if "position_ids" in self.takes else {}
        return self.model(ids, use_cache=False, **given).logits[0, -1]

    def alone(self, row: int) -> torch.Tensor:
        """By a fresh cache in the same calls."""
        cache, at, logits = kvfold.fold(self.model, self.method), 0, torch.empty(0)
        for kind, what in self.past[row]:
            if kind == "record":
                cache.activate_past_recording()
            elif kind == "crop":
                cache.crop(-what)
                at -= what
            else:
                positions = torch.arange(at, at + len(what))[None]
                logits = self.forward(cache, torch.tensor([what]), positions, None)[0, -1]
                at += len(what)
        return logits


KINDS = (
    *("step", "step", "few", "turn", "prompt", "crop", "crop", "record"),
    *("reorder", "repeat", "select", "copy", "save", "reset"),
)


def methods_of(name: str) -> list[str]:
    return [method for method in (*EXACT, *PACKED) if name in BEFORE_ROPE or not method.startswith("squat_pre")]


@torch.no_grad()
def programs(name: str, method: str, batch: int, program: list[tuple[str, int]], folder: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVFoldWarning)
        of = Program(name, method, batch, folder)
        try:
            for kind, number in program:
                of.do(kind, number)
            of.do("last", 0)
        finally:
            kvfold.unfold(of.model)


@pytest.mark.parametrize("case", range(-(-CASES // (EACH * len(MODELS)))))
@pytest.mark.parametrize("name", MODELS)
def test_programs(name, case, tmp_path):
    """Programs of full length from the first case on: what is slow to run is slow to shorten, too."""
    dice = random.Random(f"{os.environ.get('KVFOLD_FUZZ_SEED', '0')} {name} {case}")
    method, batch = dice.choice(methods_of(name)), dice.randint(1, 3)
    kinds = [dice.choice(("prompt", "turn")), *dice.choices(KINDS, k=dice.randint(4, 10))]
    program = [(kind, dice.randrange(5040)) for kind in kinds]
    print(f"programs({name!r}, {method!r}, {batch}, {program}, tmp_path)")  # shown where it fails
    programs(name, method, batch, program, tmp_path)
