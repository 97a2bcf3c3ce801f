"""The pictures of docs/ are what their script draws, and what they say is so."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import kvfold
from kvfold import methods
from kvfold.methods import LayerSpec
from tiny_model import tiny_llama

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import draw_pictures as drawn  # noqa: E402


def words(picture):
    return [text for *_, text in picture.texts]


@pytest.mark.parametrize("draw", drawn.PICTURES, ids=lambda draw: draw.__name__)
def test_the_committed_picture_is_what_the_script_draws(draw):
    picture = draw()
    committed = (drawn.FOLDER / f"{picture.name}.svg").read_text(encoding="utf-8")
    assert committed == picture.svg(), "run: python scripts/draw_pictures.py"
    assert ElementTree.fromstring(committed).tag.endswith("svg")


def test_every_picture_is_shown():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert {f.name for f in drawn.FOLDER.iterdir()} == {f"{draw.__name__}.svg" for draw in drawn.PICTURES}
    assert all(f"](pictures/{draw.__name__}.svg)" in page for draw in drawn.PICTURES)


def test_a_sequence_lies_as_it_is_drawn():
    """499 tokens in a call and one step: the lengths, slots and rooms of the picture."""
    model = tiny_llama(head_dim=128)
    cache = kvfold.fold(model, "fold")
    with torch.inference_mode():
        for ids in (torch.arange(499)[None] % 256, torch.tensor([[7]])):
            model(ids, past_key_values=cache)
    layer = cache.folded[0]
    said = " ".join(words(drawn.sequence(500)))
    assert f"packed: {layer.packed[0]} tokens in {layer.packed[0] // layer.block} blocks" in said
    assert f"room for {layer.slabs[0].blocks} blocks" in said
    held = layer.lens[0] - layer.sequences.sink - layer.packed[0]
    assert f"recent: {held} tokens" in said
    assert f"ring: {layer.ring.slots} slots, {layer.ring.slots - held} free" in said
    before, steps = layer.packed[0], 0
    with torch.inference_mode():
        while layer.packed[0] == before:
            model(torch.tensor([[7]]), past_key_values=cache)
            steps += 1
    assert f"{steps} tokens later block {before // layer.block} is closed" in said


@pytest.mark.parametrize("name", ["fold", "kivi"])
def test_the_bytes_of_a_page_are_those_that_are_stored(name):
    """Twice the tokens, so that two pages are allocated: half of what lies there."""
    method, spec = methods.get(name), LayerSpec(0, 1, 1, 1, 128, torch.float16)
    stored = 0
    for form in (method.key_format(spec), method.value_format(spec)):
        x = torch.randn(1, 1, 256, 128)
        allocated = form.allocate(1, 1, 256 // form.block, "cpu")
        encoded = form.encode(x)
        assert {n: t.shape for n, t in encoded.items()} == {n: t.shape for n, t in allocated.items()}
        stored += sum(t.nbytes for t in encoded.values())
    said = words(drawn.page())
    assert any(text.startswith(f"{stored // 2:,} bytes: ") for text in said)
    bits = (method.key_format(spec).bits + method.value_format(spec).bits) / 2
    assert sum(f"{bits:.2f} bits an element" in text for text in said) == 1


def test_texts_that_do_not_fit_are_refused():
    p = drawn.Picture("p", "", 100)
    p.text(10, 20, "one")
    with pytest.raises(ValueError, match="'two' lies on 'one'"):
        p.text(20, 22, "two")
    with pytest.raises(ValueError, match="does not fit"):
        p.text(900, 50, "a text that leaves the picture")
    with pytest.raises(ValueError, match="does not fit"):
        p.box(10, 40, 50, 40, ["wider than its box"])
