"""Lines reach the descriptor whole, in order, soon, and never hold up the loop."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import pytest

from router import access_log
from router.access_log import AccessLog
from router.outcome import Outcome


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        os.close(fd)


def outcome(number: int = 0, **fields) -> Outcome:
    return Outcome(request_id=f"r-{number}", model="glm", endpoint="/v1/completions", **fields)


def lines(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def _read(fd: int) -> bytes:
    """The next piece that arrives at a pipe."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await asyncio.wait_for(readable.wait(), 5)
        return os.read(fd, 1 << 20)
    finally:
        loop.remove_reader(fd)


def test_a_line_is_written_soon_and_holds_the_outcome(pipe):
    read, write = pipe

    async def scenario() -> bytes:
        log = AccessLog(write)
        log.write(
            outcome(
                plan="pd",
                code=200,
                prompt_tokens=7,
                delivered_tokens=0,
                ttft_s=0.12345678,
                retries=[("prefill", "refused")],
                prefill_worker="http://a",
                ended_at=1_700_000_000.25,
            )
        )
        return await _read(read)

    (line,) = lines(asyncio.run(scenario()))
    assert line["request_id"] == "r-0"
    assert (line["plan"], line["code"], line["prompt_tokens"]) == ("pd", 200, 7)
    assert line["ttft_s"] == pytest.approx(0.12345678, abs=1e-6)
    assert line["retries"] == [["prefill", "refused"]]
    assert line["delivered_tokens"] == 0
    assert line["prefill_worker"] == "http://a"
    assert (line["tpot_s"], line["error"]) == (None, "")
    assert line["ended_at"] == 1_700_000_000.25


def test_a_full_buffer_is_written_without_waiting_for_the_timer(pipe, monkeypatch):
    read, write = pipe
    monkeypatch.setattr(access_log, "FLUSH_AT_BYTES", 1000)
    monkeypatch.setattr(access_log, "FLUSH_AFTER_S", 3600)

    async def scenario() -> bytes:
        log = AccessLog(write)
        for number in range(10):
            log.write(outcome(number))
        os.set_blocking(read, False)
        text = os.read(read, 1 << 20)  # raises where nothing was written yet
        log.write(outcome(10))
        log.close()
        return text + os.read(read, 1 << 20)

    assert [line["request_id"] for line in lines(asyncio.run(scenario()))] == [
        f"r-{number}" for number in range(11)
    ]


def test_closing_writes_the_rest(pipe):
    read, write = pipe

    async def scenario() -> None:
        log = AccessLog(write)
        log.write(outcome())
        log.close()

    asyncio.run(scenario())
    assert len(lines(os.read(read, 1 << 20))) == 1


def test_a_log_that_is_off_writes_nothing(pipe):
    read, write = pipe
    log = AccessLog(write, enabled=False)
    log.write(outcome())
    log.close()
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)


def test_a_reader_that_stops_reading_costs_lines_and_no_time(pipe, monkeypatch):
    read, write = pipe
    monkeypatch.setattr(access_log, "MAX_BUFFERED_BYTES", 256 * 1024)
    monkeypatch.setattr(access_log, "FLUSH_AFTER_S", 0.01)
    count = 3000  # about 1 MB, far more than the pipe and the buffer take

    async def scenario() -> bytes:
        log = AccessLog(write)
        slowest = 0.0
        for number in range(count):
            began = time.perf_counter()
            log.write(outcome(number))
            slowest = max(slowest, time.perf_counter() - began)
        assert slowest < 0.5
        text = b""
        while b"dropped_lines" not in text:
            text += await _read(read)
        log.write(outcome(count))
        log.close()
        return text + os.read(read, 1 << 20)

    *_, note, last = entries = lines(asyncio.run(scenario()))
    assert note["dropped_lines"] + len(entries) - 2 == count
    assert last["request_id"] == f"r-{count}"


def test_a_closed_reader_does_not_fail_calls():
    read, write = os.pipe()
    os.close(read)

    async def scenario() -> None:
        log = AccessLog(write)
        log.write(outcome())
        log.close()

    asyncio.run(scenario())
    os.close(write)


def test_a_regular_file_takes_everything(tmp_path):
    path = tmp_path / "access.log"

    async def scenario(fd: int) -> None:
        log = AccessLog(fd)
        for number in range(1000):
            log.write(outcome(number))
        log.close()

    with path.open("wb") as file:
        asyncio.run(scenario(file.fileno()))
    assert len(lines(path.read_bytes())) == 1000
