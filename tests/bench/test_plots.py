from xml.etree import ElementTree

import pytest

from bench import plots
from bench.plots import Axis


def test_steps_are_round_numbers():
    assert [plots.nice_step(x) for x in (0.3, 1.0, 1.2, 3.0, 70.0)] == [0.5, 1, 2, 5, 100]
    assert plots.nice_step(0) == 1


def test_axes_map_their_limits_to_pixels():
    assert [Axis(0, 10, 100, 200).px(v) for v in (0, 5, 10)] == [100, 150, 200]
    assert Axis(1, 100, 0, 10, log=True).px(10) == 5
    assert Axis(1, 1000, 0, 1, log=True).ticks() == [1, 10, 100, 1000]


@pytest.mark.parametrize(
    "chart",
    [
        plots.lines("a <b>", {"x": [(0, 1), (2, 3)], "y": []}, "s", "n"),
        plots.lines("empty", {}, "s", "n", log_x=True),
        plots.lines("log", {"x": [(0, 1), (0.1, 1), (10, 2)]}, "s", "n", log_x=True),
        plots.bars("bars", {"p0": 3.0, "p1": 4500000.0}, "tokens"),
        plots.bars("none", {}, "tokens"),
    ],
)
def test_charts_are_well_formed(chart):
    assert ElementTree.fromstring(chart).tag.endswith("svg")


def test_a_distribution_ends_at_one():
    curve = plots.distribution([3.0, 1.0, 2.0])
    assert curve == [(1.0, 1 / 3), (2.0, 2 / 3), (3.0, 1.0)]
    assert len(plots.distribution([float(i) for i in range(10000)])) <= 200
    assert plots.distribution([]) == []
