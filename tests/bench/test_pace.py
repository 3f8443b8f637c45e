import pytest

from bench import pace
from bench.pace import Demand
from bench.traces import Row
from scheduler import PROFILES


def row(input_tokens=10000, output_tokens=100, arrival_ms=0.0):
    return Row(arrival_ms, None, None, input_tokens, output_tokens, None, None)


def rows(count=100, every_s=10.0, **changes):
    return [row(arrival_ms=1000 * every_s * i, **changes) for i in range(count)]


def test_a_light_trace_runs_in_real_time_and_close_together():
    chosen = pace.choose(rows(), Demand(0.001, 0.001, 0.002), 2, longest_s=600.0)
    assert chosen.speed == 1.0
    assert chosen.load == pytest.approx(990 / pace.SHORTEST_S)


def test_a_heavy_trace_is_thinned_to_what_the_fleet_bears_at_its_busiest():
    needed = Demand(3.0, 0.1, 6.0)
    chosen = pace.choose(rows(), needed, 2, longest_s=600.0)
    assert pace.utilisation(chosen, needed.busiest, 2) == pytest.approx(pace.TARGET_UTILISATION)
    assert chosen.arrivals == pytest.approx(990 / pace.SHORTEST_S)


def test_a_short_trace_is_not_slowed_down():
    assert pace.choose(rows(2), Demand(0.1, 0.1, 0.1), 2, 600.0).arrivals == 1.0


def test_a_run_is_as_long_as_calls_and_simulation_need():
    calls = rows(10000, every_s=1.0, input_tokens=10)
    assert 9999 / pace.choose(calls, Demand(0, 0, 0.001), 2, 600.0).arrivals == pytest.approx(
        150, rel=0.01
    )
    slow = pace.choose(calls, Demand(5, 5, 10.0), 2, 600.0)
    assert 9999 / slow.arrivals == pytest.approx(2 * 9999 / slow.load * 0.0036)
    assert 9999 / pace.choose(calls, Demand(5, 5, 10.0), 2, 60.0).arrivals == pytest.approx(
        60, rel=0.01
    )


def test_the_busiest_window_is_found():
    spread = [1.0] * 50 + [4.0] * 5 + [1.0] * 45
    found = pace.busiest_rate(rows(every_s=1.0), spread)
    assert found == pytest.approx(20 / 4950, rel=0.01)


def test_demand_counts_what_is_not_cached():
    shared = Row(0.0, None, None, 10000, 1, 100, ((0, 100),))
    prices = PROFILES["b300-tp4"]
    once = pace.demand([shared], prices, 2, 1 << 20).prefill
    twice = pace.demand([shared, shared], prices, 2, 1 << 20).prefill
    assert once < twice < 1.25 * once


def test_events_are_thinned_to_a_rate():
    assert pace.stream_interval([row(output_tokens=10)], 10.0) == 1
    many = [row(output_tokens=1000)] * 100
    events = 100000 / pace.stream_interval(many, 10.0)
    assert events <= 10 * pace.EVENTS_PER_SECOND
