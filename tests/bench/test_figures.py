import math

import pytest

from bench import figures


def test_percentiles_interpolate():
    assert figures.percentile([1, 2, 3, 4], 0.5) == 2.5
    assert figures.percentile([5], 0.99) == 5
    assert math.isnan(figures.percentile([], 0.5))


def test_summary_leaves_out_what_is_missing():
    found = figures.summary([1.0, None, 3.0], scale=10)
    assert (found["count"], found["mean"], found["max"]) == (2, 20, 30)
    assert figures.summary([None]) == {"count": 0}


def test_busiest_over_mean():
    assert figures.busiest_over_mean([1, 3]) == 1.5
    assert figures.busiest_over_mean([]) == 1.0
    assert figures.busiest_over_mean([0, 0]) == 1.0


def test_relative_difference():
    assert figures.relative_difference(95, 100) == pytest.approx(0.05)
    assert figures.relative_difference(0, 0) == 0
    assert figures.relative_difference(1, 0) == math.inf


def test_a_clear_difference_is_carried_by_the_repeats():
    found = figures.ratio_of_medians([0.5, 0.52, 0.48, 0.51], [1.0, 1.1, 0.9, 1.05])
    assert found.ratio == pytest.approx(0.505 / 1.025)
    assert found.low <= found.ratio <= found.high
    assert found.carried


def test_a_difference_within_the_spread_is_not():
    found = figures.ratio_of_medians([0.9, 1.2, 0.7, 1.1], [1.0, 0.8, 1.3, 1.05])
    assert not found.carried


def test_without_samples_there_is_no_ratio():
    assert math.isnan(figures.ratio_of_medians([], [1.0]).ratio)
    assert not figures.ratio_of_medians([], [1.0]).carried


def test_few_repeats_carry_nothing():
    found = figures.ratio_of_medians([0.5], [1.0])
    assert found.ratio == 0.5
    assert not found.carried
