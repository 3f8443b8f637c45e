import math
from typing import Any

import pytest

from bench import prometheus, replay_figures
from bench.cpu import CpuUse
from bench.observation import Call
from bench.pace import Pace
from bench.replay_figures import Run
from bench.traces import Row

METRICS = """
pdrouter_prefix_tokens_total{model="m",kind="predicted"} 96
pdrouter_prefix_tokens_total{model="m",kind="delivered"} 100
pdrouter_ttft_seconds_sum{model="m"} 0.98
pdrouter_ttft_seconds_count{model="m"} 2
pdrouter_rejected_total{reason="queue_full"} 1
"""


def call(number, error="", prefill="p0", cached=50):
    return Call(
        number,
        due_s=1.0,
        sent_s=1.001,
        first_s=1.501,
        last_s=2.5,
        end_s=2.6,
        status=200,
        prompt_tokens=100,
        cached_tokens=cached,
        output_tokens=11,
        prefill=prefill,
        error=error,
    )


def run(**changes):
    rows = [Row(1000.0 * i, None, None, 96, 11, 16, ((0, 6),)) for i in range(2)]
    fields: dict[str, Any] = {
        "trace": "bfcl_live",
        "rows": rows,
        "dropped": 3,
        "calls": [call(0), call(1)],
        "workers": 2,
        "capacity_tokens": 1024,
        "pace": Pace(2.0, 1.5),
        "utilisation": {"prefill": 0.5, "decode": 0.1},
        "wall_s": 10.0,
        "router": prometheus.parse(METRICS),
        "computed": {"p0": 60.0, "p1": 40.0},
        "busy": {"p0": 0.5},
        "cpu": CpuUse({"router": [0.5], "client": [0.1]}, [0.4]),
        "slo_ttft_s": 5.0,
    }
    return Run(**fields | changes)


def test_figures_of_a_good_run():
    found = replay_figures.figures(run())
    assert found["hit_rate"] == 0.5
    assert found["pooled_hit_rate"] == 0.5  # the second row finds all of the first
    assert found["hit_ratio"] == 1.0
    assert found["busiest_over_mean"] == 1.2
    assert found["predicted_vs_delivered"] == pytest.approx(0.04)
    assert found["ttft_difference"] == pytest.approx(0.02)
    assert found["ttft_s"]["mean"] == pytest.approx(1.0)  # twice the wall clock
    assert found["goodput_calls_per_s"] == pytest.approx(0.1)
    assert found["plans"] == {"pd": 2}
    assert found["rejected"] == {"queue_full": 1}
    assert all(mark.ok for mark in replay_figures.marks(found))


def test_errors_fail_and_are_grouped():
    found = replay_figures.figures(run(calls=[call(0), call(1, error="HTTP 500 x")]))
    assert found["errors"] == {"HTTP 500 x": 1}
    assert [m.name for m in replay_figures.marks(found) if not m.ok] == ["errors"]


def test_only_marked_traces_have_a_mark_on_hits_and_balance():
    names = {m.name for m in replay_figures.marks(replay_figures.figures(run(trace="other")))}
    assert "hit rate over pooled" not in names
    assert "busiest over mean" not in names


def test_a_trace_without_blocks_has_no_reference():
    rows = [Row(0.0, None, None, 96, 11, None, None)] * 2
    calls = [call(i, cached=0) for i in range(2)]
    page = prometheus.parse('pdrouter_prefix_tokens_total{kind="delivered"} 0.1\n')
    found = replay_figures.figures(run(rows=rows, calls=calls, router=page))
    assert found["pooled_hit_rate"] is None
    assert found["hit_ratio"] is None
    assert found["predicted_vs_delivered"] == 0


def test_a_saturated_process_invalidates():
    found = replay_figures.figures(run(cpu=CpuUse({"client": [0.99]}, [0.95])))
    assert found["disturbed"]
    assert not all(mark.ok for mark in replay_figures.marks(found))


def test_a_router_that_saw_nothing_agrees_with_nobody():
    found = replay_figures.figures(run(router=prometheus.parse("")))
    assert found["router_ttft_ms"] is None
    assert math.isclose(found["ttft_difference"], 1.0)


def test_a_section_has_its_charts():
    observed = run()
    section = replay_figures.section(observed, replay_figures.figures(observed))
    assert section.title == "bfcl_live, 2 prefill workers"
    assert len(section.charts) == 6
    assert ("dropped_rows", 3) in section.figures


def test_calls_in_flight_with_no_calls_done():
    lost = Call(0, 1.0, sent_s=1.0, error="connection lost")
    observed = run(calls=[lost, lost])
    found = replay_figures.figures(observed)
    assert found["hit_rate"] == 0
    assert replay_figures.section(observed, found).charts
