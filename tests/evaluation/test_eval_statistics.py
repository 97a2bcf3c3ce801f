import itertools
import math
import random

import pytest

from kvfold.evaluation.statistics import bootstrap, estimate, flips, paired, wilson


def test_an_estimate_of_zeros_and_ones_has_wilsons_interval():
    # Wilson (1927) for 8 of 10, as in textbooks
    low, high = wilson(0.8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4) and high == pytest.approx(0.9433, abs=1e-4)
    perfect = estimate([1.0] * 20)
    assert perfect.mean == 1 and 0.8 < perfect.low < 0.9 and perfect.high == 1


def test_an_estimate_of_numbers_is_bootstrapped_and_always_the_same():
    values = [random.Random(0).gauss(5, 2) for _ in range(1)] + [random.Random(i).gauss(5, 2) for i in range(99)]
    found = estimate(values)
    assert found.mean == pytest.approx(math.fsum(values) / 100)
    deviation = math.sqrt(sum((v - found.mean) ** 2 for v in values) / 99) / 10
    assert found.low == pytest.approx(found.mean - 1.96 * deviation, abs=0.15)
    assert found.high == pytest.approx(found.mean + 1.96 * deviation, abs=0.15)
    assert estimate(values) == found and bootstrap(values) == (found.low, found.high)


def test_one_item_has_no_interval_and_none_no_estimate():
    assert (estimate([3.0]).low, estimate([3.0]).high) == (None, None)
    with pytest.raises(ValueError, match="none"):
        estimate([])


@pytest.mark.parametrize("count", [1, 5, 8, 11])
def test_sign_flips_are_counted_exactly(count):
    differences = [random.Random(i).gauss(0.3, 1) for i in range(count)]
    seen = abs(sum(differences))
    signs = itertools.product((-1, 1), repeat=count)
    sums = [abs(sum(s * d for s, d in zip(some, differences, strict=True))) for some in signs]
    assert flips(differences) == pytest.approx(sum(s >= seen - 1e-12 for s in sums) / len(sums))


def test_sign_flips_of_zeros_and_ones_are_mcnemars_exact_test():
    # 6 problems lost and none won: 2 / 2^6
    assert flips([-1.0] * 6 + [0.0] * 50) == 2 / 64
    assert flips([0.0] * 9) == 1
    assert flips([-1.0] * 3 + [1.0] * 3) == 1


def test_flips_of_many_are_drawn_and_near_the_normal_tail():
    differences = [random.Random(i).gauss(0.2, 1) for i in range(200)]
    z = abs(sum(differences)) / math.sqrt(sum(d * d for d in differences))
    assert flips(differences) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.015)


def test_a_difference_is_said_only_where_it_is_shown():
    base = [float(i % 2) for i in range(40)]
    assert paired(base, base, True).verdict == "no difference shown"
    worse = [0.0 if i < 20 else v for i, v in enumerate(base)]
    found = paired(worse, base, True)
    assert (found.verdict, found.mean, found.items) == ("worse", -0.25, 40) and found.high < 0
    assert paired(base, worse, True).verdict == "better"
    assert paired(worse, base, False).verdict == "better"


def test_five_lost_problems_are_not_enough_whatever_the_bootstrap_says():
    base, lost = [1.0] * 40, [0.0] * 5 + [1.0] * 35
    found = paired(lost, base, True)
    assert found.high < 0 and found.p > 0.05 and found.verdict == "no difference shown"
    assert paired([0.0] * 6 + [1.0] * 34, base, True).verdict == "worse"


def test_few_items_show_nothing():
    assert paired([2.0] * 5, [1.0] * 5, True).verdict == "too few items"
    assert paired([2.0], [1.0], True).low is None
    with pytest.raises(ValueError, match="item by item"):
        paired([1.0], [1.0, 2.0], True)


def test_of_methods_that_are_alike_few_are_called_different():
    """2 in 100 comparisons of noise are beyond 95% on each side; the rule must not say so much more often."""
    called = 0
    for trial in range(120):
        draw = random.Random(trial)
        a, b = ([float(draw.random() < 0.6) for _ in range(30)] for _ in range(2))
        called += paired(a, b, True).verdict in ("better", "worse")
    assert called <= 10


@pytest.mark.parametrize(("items", "least", "most"), [(24, 0.80, 0.92), (100, 0.90, 0.97)])
def test_intervals_of_few_skewed_values_are_too_narrow_and_docs_say_so(items, least, most):
    """Of 95% intervals of lognormal values (sigma 1), as many hold the mean as docs/evaluation.md says."""
    held, mean = 0, math.exp(0.5)
    for trial in range(200):
        draw = random.Random(trial)
        low, high = bootstrap([draw.lognormvariate(0, 1) for _ in range(items)])
        held += low <= mean <= high
    assert least <= held / 200 <= most


def test_skewed_differences_without_a_mean_are_called_different_more_often_than_the_level_says():
    called, mean = 0, math.exp(0.5)
    for trial in range(100):
        draw = random.Random(trial)
        called += paired([draw.lognormvariate(0, 1) - mean for _ in range(24)], [0.0] * 24, True).verdict in (
            "better",
            "worse",
        )
    assert 8 <= called <= 25  # as docs/evaluation.md says
