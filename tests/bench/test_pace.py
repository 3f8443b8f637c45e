import pytest

from bench import pace
from bench.pace import Demand, Pace
from bench.traces import Row
from scheduler import PROFILES


def row(input_tokens=10000, output_tokens=100, arrival_ms=0.0):
    return Row(arrival_ms, None, None, input_tokens, output_tokens, None, None)


def test_a_light_trace_runs_in_real_time():
    chosen = pace.choose(600.0, 60.0, Demand(1.0, 1.0), workers=2)
    assert chosen == Pace(1.0, 10.0)


def test_a_heavy_trace_is_thinned_to_what_the_fleet_bears():
    chosen = pace.choose(1000.0, 100.0, Demand(4000.0, 10.0), workers=2)
    assert chosen.arrivals == pytest.approx(10.0)
    used = pace.utilisation(chosen, 1000.0, 4000.0, workers=2)
    assert used == pytest.approx(pace.TARGET_UTILISATION)


def test_decode_can_be_what_is_short():
    chosen = pace.choose(1000.0, 100.0, Demand(10.0, 4000.0), workers=2)
    assert pace.utilisation(chosen, 1000.0, 4000.0, 2) == pytest.approx(pace.TARGET_UTILISATION)


def test_a_short_trace_is_not_slowed_down():
    assert pace.choose(12.0, 40.0, Demand(1.0, 1.0), 2).arrivals == 1.0


def test_demand_counts_what_is_not_cached():
    shared = Row(0.0, None, None, 10000, 1, 100, ((0, 100),))
    prices = PROFILES["b300-tp4"]
    once = pace.demand([shared], prices, 2, 1 << 20).prefill_s
    twice = pace.demand([shared, shared], prices, 2, 1 << 20).prefill_s
    assert once < twice < 1.25 * once


def test_wall_time_is_bounded():
    assert pace.wall_s([row()]) == pace.SHORTEST_S
    assert pace.wall_s([row()] * 100000) == pace.LONGEST_S


def test_events_are_thinned_to_a_rate():
    assert pace.stream_interval([row(output_tokens=10)], 10.0) == 1
    rows = [row(output_tokens=1000)] * 100
    events = 100000 / pace.stream_interval(rows, 10.0)
    assert events <= 10 * pace.EVENTS_PER_SECOND
