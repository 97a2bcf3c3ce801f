"""How a method learns: one layer after the other, with what it takes to go on after a kill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from kvfold.calibration.collect import Collector, LayerSample, layer_specs
from kvfold.calibration.state import Fit, State
from kvfold.methods.base import LayerSpec


class Learner(ABC):
    """Learns a method's tables layer by layer.

    Parameters
    ----------
    model : PreTrainedModel
        On the device that is to compute.
    windows : Tensor, int64 [num_windows, length]
        Token ids of the calibration text.
    held : Tensor, bool [num_windows * length]
        Tokens to measure errors on instead of learning from them.
    seed : int
    """

    window = 512
    """Tokens of a calibration window."""
    positions: int | None = None
    """Positions that keys were taken to lie at, where that matters; written into the artefact."""

    def __init__(self, model: PreTrainedModel, windows: torch.Tensor, held: torch.Tensor, seed: int) -> None:
        self.model, self.windows, self.held, self.seed = model, windows, held, seed
        self.specs: list[LayerSpec | None] = layer_specs(model)

    @abstractmethod
    def start(self, state: State, on_window: Callable[[int, int], None] | None) -> int:
        """Prepare, or go on from what :class:`State` holds; returns the number of finished layers.

        ``on_window`` is called with windows done and in all while something is computed for all layers.
        """

    @abstractmethod
    def learn(self, layer: int, state: State) -> Fit:
        """The next layer; nothing in it where kvfold keeps the layer in full precision."""

    def keep(self, layer: int, state: State) -> None:  # noqa: B027  (most have nothing to keep)
        """Save what the next layer needs, after ``layer`` was saved."""

    def generator(self, layer: int) -> torch.Generator:
        """One per layer: a resumed run draws what an uninterrupted one would have drawn."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + layer) % (1 << 63))


class LayerwiseLearner(Learner):
    """Sees one layer's keys and values at a time; keeps the hidden states that enter the next one."""

    batch = 4
    """Windows that pass a layer at once."""

    def start(self, state: State, on_window: Callable[[int, int], None] | None) -> int:
        self.collector = Collector(self.model, self.windows, self.batch)
        about = state.about("hidden")
        done = about["done"] if about is not None else 0
        if 0 < done <= state.done():
            self.collector.start(state.load("hidden")["hidden"], done)
        else:
            self.collector.start()
        return self.collector.done

    def learn(self, layer: int, state: State) -> Fit:
        sample = self.collector.step()
        if sample is None:
            return Fit({}, {})
        with torch.no_grad():
            return self.fit(sample, self.generator(layer))

    @abstractmethod
    def fit(self, sample: LayerSample, generator: torch.Generator) -> Fit:
        """Learn one layer from what it shows of the text."""

    def keep(self, layer: int, state: State) -> None:
        assert self.collector.hidden is not None
        state.save("hidden", {"hidden": self.collector.hidden}, {"done": layer + 1})
