"""Codebooks in steps, of which kernels keep a byte a number."""

import pytest
import torch

from kvfold.formats.codebook import KeyCodebook, KeySteps, largest, sharing
from kvfold.formats.residual import Codebook, choose, in_steps


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(stages):
    """Codes of channels of different size; the first stage's of one lie far from zero, another's are all zero."""
    codes = draw(stages, 256, 32) * 0.8 ** torch.arange(stages).view(-1, 1, 1) * torch.exp(draw(32, seed=1))
    codes[0, :, 3] += 5.0
    codes[0, :, 4] -= 7.0
    codes[:, :, 5] = 0.0
    return codes


@pytest.mark.parametrize("stages", [1, 4, 8])
def test_codes_are_within_half_a_step(stages):
    codes = uneven(stages)
    steps = in_steps(codes)
    assert int(steps.numbers.max()) <= 127
    assert bool((steps.shift % 32 == 0).all()) and float(steps.shift.abs().max()) <= 480
    assert float(((steps.codes - codes).abs() / steps.step).max()) <= 0.5001
    mantissa, _ = torch.frexp(steps.step)
    assert torch.equal(mantissa * 32, (mantissa * 32).round())
    # no channel's are longer than five bits and half of the range's place make them
    reach = torch.maximum(
        (codes[0].amax(0) - codes[0].amin(0)) / 2, codes[1:].abs().amax((0, 1)) if stages > 1 else codes[0, 0] * 0
    )
    assert float((steps.step[reach > 0] / reach[reach > 0]).max()) < 1 / 40
    # what kernels add to sums of numbers under 1024's exponent is an fp16 number
    extra = (steps.shift - 64 * stages - 1024) * steps.step
    if stages in (4, 8):
        assert torch.equal(extra.half().float(), extra)


def test_rounding_codes_costs_next_to_nothing():
    codes = uneven(8)
    codes[0] = codes[0] + 0  # as learned ones: each stage for what the ones before left over
    x = draw(500, 32, seed=2) * codes.square().mean((0, 1)).sqrt()
    errors = []
    for book in (Codebook(codes), Codebook.rounded(codes)):
        held = book.codes.float()
        chosen = choose(x, held)
        errors.append(float((sum(held[s][chosen[:, s]] for s in range(8)) - x).square().sum()))
    assert errors[1] < 1.02 * errors[0]


def test_a_rounded_codebook_moves_whole():
    book = Codebook.rounded(uneven(4))
    assert book.codes.dtype == torch.float16 and book.on(torch.device("cpu")) is book
    other = book.on(torch.device("meta"))
    assert other.steps is not None and other.steps.numbers.device.type == "meta"


@pytest.mark.parametrize("stages", range(1, 23))
def test_stages_that_share_steps(stages):
    groups = sharing(stages)
    assert sum(groups) == stages and groups[0] == 1 and max(groups) <= 4
    assert all(group == 4 for group in groups[2:])
    for together in groups:
        assert 2 * together * largest(together) <= 255  # differences with a bias, and sums, are bytes


@pytest.mark.parametrize("stages", [1, 2, 4, 11, 21])
def test_centres_are_within_half_a_step(stages):
    z = draw(2, stages, 64, 128) * 0.8 ** torch.arange(stages).view(-1, 1, 1)
    z[:, 0, :, 7] += 9.0
    z[:, -1, 0, 9] = 20.0  # a later group's step may be the longer one
    steps = KeySteps.of(z)
    groups = sharing(stages)
    assert steps.ratio.shape == (2, len(groups) - 1, 64) and steps.ratio.dtype == torch.float16
    for numbers, together in zip(steps.numbers.split(groups, 1), groups, strict=True):
        assert int(numbers.max()) <= largest(together)
    assert float(steps.shift.abs().max()) <= 256 and torch.equal(steps.shift, steps.shift.round())
    both = torch.cat((steps.step.unsqueeze(1), steps.ratio.float() * steps.step.unsqueeze(1)), 1)
    each = torch.cat((both, both), -1).repeat_interleave(torch.tensor(groups), 1).unsqueeze(2)
    missed = (steps.centres - z) / each
    assert float(missed.abs().max()) <= 0.502
    assert float(missed.square().mean().sqrt()) < 0.3
    # what kernels add to a token's sums is an fp16 number
    real, imaginary = steps.shift.chunk(2, -1)
    for x in (real - imaginary, real + imaginary):
        assert torch.equal(x.half().float(), x)


def test_steps_move_whole():
    steps = KeySteps.of(draw(1, 5, 4, 16)).to(torch.device("meta"))
    assert all(x.device.type == "meta" for x in (steps.numbers, steps.step, steps.ratio, steps.shift))


def test_small_centres_of_late_stages_keep_their_size():
    """With one step for all stages the last ones would be rounded to nothing."""
    z = draw(1, 21, 64, 128) * 0.7 ** torch.arange(21).view(-1, 1, 1)
    missed = (KeySteps.of(z).centres - z).square().mean((0, 2, 3)) / z.square().mean((0, 2, 3))
    assert float(missed.max()) < 0.04


def test_centres_that_are_rotated_in_part_stay():
    z, metric = draw(1, 3, 16, 64), torch.eye(64).unsqueeze(0)
    assert KeyCodebook.rounded(z, metric, 32).steps is None
    whole = KeyCodebook.rounded(z, metric, 64)
    assert whole.steps is not None and float((whole.centres - z).abs().max()) < 0.07
