"""On which device kernels start."""

import pytest
import torch

import kvfold
from helpers import llama
from kvfold import plan
from kvfold.engines.transformers import layer
from kvfold.kernels.device import launching


def test_kernels_start_on_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch):
    with launching(torch.device("cpu")):
        assert torch.ones(2).device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert launching(torch.device("cuda:1")).idx == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about a GPU where there is none")
def test_a_gpu_that_is_not_there_may_be_asked_about():
    with launching(torch.device("cuda")):
        pass


def test_choices_cuts_and_decoding_are_on_the_layers_device(monkeypatch: pytest.MonkeyPatch):
    """A model split over several GPUs leaves the first one current."""
    entered: list[tuple[str, str]] = []

    def recorded(name: str):
        def on(device: torch.device):
            entered.append((name, str(device)))
            return launching(device)

        return on

    for module in (layer, plan):
        monkeypatch.setattr(module, "launching", recorded(module.__name__.rpartition(".")[2]))
    model = llama()
    cache = kvfold.fold(model, "fold")
    layers = len(cache.folded)
    entered.clear()
    ids = torch.randint(3, 96, (1, 200))
    model(ids, past_key_values=cache)
    model(ids[:, :1], past_key_values=cache)
    assert entered.count(("plan", "cpu")) >= layers
    cache.crop(-3)
    cache.folded[0].decoded(0)
    assert ("layer", "cpu") in entered
