import gzip
import json

import pytest

from bench import traces
from bench.traces import Row, Trace


def row(arrival_ms=0.0, input_tokens=32, output_tokens=4, runs=((0, 2),), block_size=16):
    return Row(arrival_ms, None, None, input_tokens, output_tokens, block_size, runs)


def raw(**changes):
    return {
        "arrival_ms": 5,
        "session": "s",
        "tenant": None,
        "input_tokens": 40,
        "output_tokens": 7,
        "block_size": 16,
        "blocks": [[3, 2], [9, 1]],
    } | changes


def write(path, rows):
    data = "\n".join(json.dumps(item) for item in rows) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data.encode()))
    else:
        path.write_text(data)
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_reads_rows_in_order_of_arrival_from_zero(tmp_path, name):
    path = write(tmp_path / name, [raw(arrival_ms=9), raw(arrival_ms=5, session=None)])
    trace = traces.read(path)
    assert trace.name == "t"
    assert [r.arrival_ms for r in trace.rows] == [0, 4]
    assert trace.rows[1].session == "s"
    assert trace.rows[0].block_ids().tolist() == [3, 4, 9]


def test_rows_without_blocks_have_no_ids(tmp_path):
    trace = traces.read(write(tmp_path / "t.jsonl", [raw(blocks=None, block_size=None)]))
    assert trace.rows[0].runs is None
    assert not trace.has_blocks
    assert trace.rows[0].block_ids().tolist() == []


@pytest.mark.parametrize(
    "bad", [{"arrival_ms": "x"}, {"block_size": None}, {"input_tokens": 0}, {"blocks": [[1]]}]
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, bad):
    path = write(tmp_path / "t.jsonl", [raw(), raw(**bad)])
    with pytest.raises(traces.TraceError, match=r"t\.jsonl:2"):
        traces.read(path)


def test_a_missing_trace_says_where_it_was_sought(tmp_path):
    with pytest.raises(traces.TraceError, match="--shared"):
        traces.find("nothing", tmp_path)


def test_finds_a_trace_by_name(tmp_path):
    (tmp_path / "traces").mkdir()
    path = write(tmp_path / "traces" / "a.jsonl.gz", [raw()])
    assert traces.find("a", tmp_path) == path


def test_rows_over_the_window_are_dropped_with_their_output():
    trace = Trace("t", (row(input_tokens=90), row(input_tokens=90, output_tokens=11)))
    assert len(traces.within_window(trace, 100).rows) == 1
    assert traces.within_window(trace, None) is trace


def test_a_coarse_clock_is_found_and_spread():
    rows = [row(arrival_ms=3000.0 * (i // 8)) for i in range(32)]
    tick_ms = traces.coarse_tick_ms(rows)
    assert tick_ms == 3000
    spread = [r.arrival_ms for r in traces.spread_ticks(rows, tick_ms)]
    assert spread[:9] == [0, 375, 750, 1125, 1500, 1875, 2250, 2625, 3000]


def test_a_fine_clock_is_left_alone():
    assert traces.coarse_tick_ms([row(arrival_ms=7.0 * i) for i in range(32)]) == 0
    assert traces.coarse_tick_ms([row(), row()]) == 0
