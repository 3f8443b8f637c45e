import asyncio
import json
from typing import Any

import orjson

from bench import open_loop, traces
from bench.observation import Call
from bench.open_loop import BodyBuilder, Job
from bench.tokenisation import Tokenisation
from bench.traces import Row, Trace


def job(**changes):
    fields: dict[str, Any] = {
        "url": "http://127.0.0.1:1",
        "model": "mock",
        "trace": "",
        "output": "",
        "arrivals": 100.0,
        "tokenisation": Tokenisation(2, 2),
    }
    return Job(**fields | changes)


def rows(count):
    return [
        {
            "arrival_ms": 10 * i,
            "session": None,
            "tenant": None,
            "input_tokens": 40,
            "output_tokens": 3,
            "block_size": 16,
            "blocks": [[0, 2]],
        }
        for i in range(count)
    ]


def test_a_job_survives_its_file(tmp_path):
    written = job(seed="x", max_rows=3)
    written.dump(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == written


def test_kept_rows_fit_come_first_and_are_spread():
    ticks = tuple(Row(3000.0 * (i // 8), None, None, 10, 1, None, None) for i in range(32))
    kept = open_loop.kept_rows(Trace("t", ticks), None, 9)
    assert [row.arrival_ms for row in kept[:2]] == [0, 375]
    assert len(kept) == 9
    assert open_loop.kept_rows(Trace("t", ticks), 10, None) == ()


def test_bodies_ask_for_the_rows_output():
    row = Row(0.0, None, None, 40, 500, 16, ((0, 2),))
    whole = BodyBuilder(job(stream_interval=8), [row])
    body = orjson.loads(whole.build(row, 0))
    assert body["max_tokens"] == 500
    assert body["ignore_eos"]
    assert body["stream_interval"] == 8
    assert body["stream_options"] == {"include_usage": True}
    capped = BodyBuilder(job(max_output_tokens=7), [row])
    assert orjson.loads(capped.build(row, 0))["max_tokens"] == 7


def test_every_row_is_sent_and_written(engine, tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows(20))))
    found = job(
        url=f"http://127.0.0.1:{engine.regular}",
        trace=str(trace),
        output=str(tmp_path / "calls.jsonl"),
        connections=2,
    )
    found.dump(tmp_path / "job.json")
    assert open_loop.main([str(tmp_path / "job.json")]) == 0
    calls = [Call(**orjson.loads(x)) for x in (tmp_path / "calls.jsonl").read_bytes().splitlines()]
    assert [call.number for call in calls] == list(range(20))
    # The mock engine sends no usage, which is no error of the stream.
    assert {call.error for call in calls} == {""}
    assert all(call.sent_s >= call.due_s for call in calls)
    assert all((call.ttft_s or 0) > 0 and (call.e2e_s or 0) >= (call.ttft_s or 0) for call in calls)
    assert json.loads(capsys.readouterr().out.splitlines()[0])["of"] == 20


def test_an_unreachable_router_is_an_error_of_each_call(tmp_path):
    trace = traces.read(_write(tmp_path, rows(2)))
    loop = open_loop.OpenLoop(job(connections=0), trace.rows)
    calls = asyncio.run(loop.run())
    assert [call.error for call in calls] == ["ConnectionRefusedError"] * 2


def _write(tmp_path, items):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, items)))
    return path
