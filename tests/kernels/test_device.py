"""On which device kernels start, and what waits for them."""

from contextlib import nullcontext

import pytest
import torch

import kvfold
from helpers import llama
from kvfold import plan
from kvfold.engines.transformers import layer
from kvfold.kernels import device
from kvfold.kernels.device import Aside, launching


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
        def on(where: torch.device):
            entered.append((name, str(where)))
            return launching(where)

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


class Stream:
    """A stand-in for a stream of a GPU."""

    device = torch.device("cuda")

    def __init__(self):
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: "Stream"):
        self.waited_for.append(other)


def test_several_streams_may_wait_for_what_is_aside(monkeypatch: pytest.MonkeyPatch):
    """Each that meets it waits; after the block's own has waited nobody has to."""
    streams = own, other, beside = Stream(), Stream(), Stream()
    current = [own]
    monkeypatch.setattr(device, "_stream", lambda *_: beside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    with Aside(torch.device("cuda")) as aside:
        aside.meet()
        assert not any(stream.waited_for for stream in streams)  # nothing was launched
        with aside.launches():
            pass
        assert beside.waited_for == [own]
        for stream in (other, own):
            current.append(stream)
            aside.meet()
            assert stream.waited_for == [beside]
        aside.wait()
        assert own.waited_for == [beside, beside]
    assert own.waited_for == [beside, beside]
