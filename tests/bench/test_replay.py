import argparse
import json

import pytest

from bench import replay, traces
from bench.__main__ import main
from bench.pace import Demand, Pace


def options(*arguments):
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    return parser.parse_args(list(arguments))


def write_trace(tmp_path, count=40):
    lines = [
        {
            "arrival_ms": 100 * i,
            "session": f"s{i % 4}",
            "tenant": None,
            "input_tokens": 16 * (20 + i // 4) + 3,
            "output_tokens": 6,
            "block_size": 16,
            "blocks": [[1000 * (i % 4), 20 + i // 4]],
        }
        for i in range(count)
    ]
    path = tmp_path / "tiny.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_factors_are_auto_or_as_asked():
    rows = [traces.Row(4000.0 * i, None, None, 100, 1, None, None) for i in range(101)]

    def chosen(*arguments):
        return replay._pace(options(*arguments), rows, Demand(1.0, 0.1, 1.4), 2)

    assert chosen("--speed", "3", "--load", "2") == Pace(3.0, 2.0)
    assert chosen().load == 1.0
    assert chosen("--load", "2").arrivals == pytest.approx(400 / 60)
    assert chosen("--speed", "5").arrivals == pytest.approx(400 / 60)
    assert chosen("--url", "u", "--speed", "7") == Pace(7.0, 1.0)


def test_long_rows_are_dropped_and_counted(tmp_path):
    trace = traces.read(write_trace(tmp_path))
    plan = replay._plan(options("--window", "400"), trace, 2)
    assert plan.dropped == 40 - len(plan.rows) > 0
    with pytest.raises(replay.ReplayError, match="no row fits"):
        replay._plan(options("--window", "40"), trace, 2)


def test_a_missing_trace_is_a_clear_error(tmp_path, capsys):
    assert main(["replay", "nothing", "--shared", str(tmp_path)]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not last["ok"]
    assert "nothing" in last["error"]


def test_all_without_traces_is_a_clear_error(tmp_path, capsys):
    assert main(["replay", "--all", "--shared", str(tmp_path)]) == 1
    assert "no traces" in capsys.readouterr().out


def test_a_router_that_is_not_there_is_a_clear_error(tmp_path, capsys):
    path = write_trace(tmp_path)
    assert main(["replay", str(path), "--url", "http://127.0.0.1:1"]) == 1
    assert "no metrics from http://127.0.0.1:1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_small_trace_end_to_end(tmp_path, capsys):
    path = write_trace(tmp_path)
    out = tmp_path / "out"
    status = main(["replay", str(path), "--workers", "2", "--speed", "4", "--out", str(out)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    (found,) = last["runs"]
    assert found["errors"] == {}
    assert found["prompt_tokens"] == pytest.approx(found["trace_prompt_tokens"], rel=0.01)
    assert found["hit_ratio"] > 0.8
    assert set(found["computed_tokens"]) == {"p0", "p1"}
    assert status == (0 if last["ok"] else 1)
    assert json.loads((out / "replay.json").read_text())["runs"][0]["trace"] == "tiny"
    assert (out / "replay.html").read_text().count("<svg") == 6
