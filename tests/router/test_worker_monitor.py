"""When a worker counts as up, what is reported of it, and that no worker waits for another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.probe import ProbeError, Reply
from router.worker_monitor import WorkerMonitor, WorkerReport

MODELS = json.dumps({"object": "list", "data": [{"id": "glm", "max_model_len": 8192}]}).encode()
Answer = tuple[int, bytes] | ProbeError
TIMED_OUT = ProbeError("no answer within 2 s")
REFUSED = ProbeError("connection refused", refused=True)


@dataclass(frozen=True)
class Worker:
    id: str
    url: str
    model: str = "glm"


def metrics(started: float | None = 1000.0, running: int = 0) -> tuple[int, bytes]:
    lines = [
        f'vllm:num_requests_running{{engine="0"}} {running}',
        'vllm:num_requests_waiting{engine="0"} 1',
        'vllm:kv_cache_usage_perc{engine="0"} 0.25',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0',
    ]
    if started is not None:
        lines.append(f"process_start_time_seconds {started}")
    return 200, "\n".join(lines).encode()


@dataclass
class ScriptedEngine:
    """A worker whose answers a test sets; it stands in for the connection too."""

    answers: dict[str, Answer] = field(
        default_factory=lambda: {
            "/health": (200, b""),
            "/metrics": metrics(),
            "/v1/models": (200, MODELS),
            "/version": (200, b'{"version": "0.33.0"}'),
        }
    )
    asked: list[str] = field(default_factory=list)
    reconnected: bool = False
    closed: bool = False

    async def get(self, path: str, *, timeout_s: float) -> Reply:
        self.asked.append(path)
        await asyncio.sleep(0)
        answer = self.answers[path]
        if isinstance(answer, ProbeError):
            raise answer
        return Reply(*answer, reconnected=self.reconnected)

    def close(self) -> None:
        self.closed = True


class Reports:
    """Collects reports; `next` waits for one that fits, so that tests need no timing."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, WorkerReport]] = asyncio.Queue()

    def __call__(self, worker_id: str, report: WorkerReport) -> None:
        self._queue.put_nowait((worker_id, report))

    async def next(
        self,
        fits: Callable[[WorkerReport], bool] = lambda report: True,
        worker: str = "w",
    ) -> WorkerReport:
        async with asyncio.timeout(10):
            while True:
                name, report = await self._queue.get()
                if name == worker and fits(report):
                    return report


@asynccontextmanager
async def watching(
    engine: ScriptedEngine, **options: float
) -> AsyncIterator[tuple[WorkerMonitor, Reports]]:
    """A running monitor of one scripted worker, and its reports."""
    reports = Reports()
    timing: dict[str, Any] = {"interval_s": 0.005, "scrape_s": 0.0001, **options}
    monitor = WorkerMonitor(
        [Worker("w", "http://w")], reports, connect=lambda url: engine, **timing
    )
    task = asyncio.create_task(monitor.run())
    try:
        yield monitor, reports
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_the_first_good_probe_reports_everything():
    async def scenario() -> WorkerReport:
        async with watching(ScriptedEngine()) as (_, reports):
            return await reports.next()

    assert asyncio.run(scenario()) == WorkerReport(
        up=True,
        ready=True,
        started_at=1000.0,
        version="0.33.0",
        models=("glm",),
        max_model_len=8192,
        block_tokens=16,
        capacity_tokens=1600,
        engine_running=0,
        engine_waiting=1,
        kv_usage=0.25,
    )


def test_version_and_models_are_asked_once_per_epoch():
    engine = ScriptedEngine()

    async def scenario() -> WorkerReport:
        async with watching(engine) as (_, reports):
            for _ in range(5):
                await reports.next()
            assert engine.asked.count("/version") == engine.asked.count("/v1/models") == 1
            engine.answers["/metrics"] = metrics(started=2000.0)
            engine.answers["/version"] = (200, b'{"version": "0.34.0"}')
            return await reports.next(lambda report: report.started_at == 2000.0)

    assert asyncio.run(scenario()).version == "0.34.0"
    assert engine.asked.count("/version") == 2


def test_one_failed_probe_does_not_take_a_worker_out_but_several_do():
    engine = ScriptedEngine()

    async def scenario() -> list[WorkerReport]:
        async with watching(engine, fail_after=3) as (_, reports):
            await reports.next(lambda report: report.up)
            engine.answers["/health"] = TIMED_OUT
            asked = engine.asked.count("/health")
            down = await reports.next(lambda report: not report.up)
            assert engine.asked.count("/health") - asked in (3, 4)
            engine.answers["/health"] = (200, b"")
            return [down, await reports.next(lambda report: report.up)]

    down, up = asyncio.run(scenario())
    assert (down.ready, down.reason) == (False, "no answer within 2 s")
    assert down.engine_running is None
    # What it was does not change by a silence: the same engine came back.
    assert down.started_at == up.started_at == 1000.0
    assert down.capacity_tokens == 1600


def test_a_refused_connection_takes_a_worker_out_at_once():
    engine = ScriptedEngine()

    async def scenario() -> WorkerReport:
        async with watching(engine, fail_after=1000) as (_, reports):
            await reports.next(lambda report: report.up)
            engine.answers["/health"] = REFUSED
            return await reports.next(lambda report: not report.up)

    assert asyncio.run(scenario()).reason == "connection refused"


def test_a_dead_engine_behind_a_live_server_is_down():
    engine = ScriptedEngine()
    engine.answers["/health"] = (503, b"")

    async def scenario() -> WorkerReport:
        async with watching(engine) as (_, reports):
            return await reports.next()

    report = asyncio.run(scenario())
    assert (report.up, report.reason) == (False, "/health answered 503")


def test_a_worker_must_pass_as_often_as_asked():
    engine = ScriptedEngine()

    async def scenario() -> list[bool]:
        async with watching(engine, pass_after=3) as (_, reports):
            return [(await reports.next()).up for _ in range(4)]

    assert asyncio.run(scenario()) == [False, False, True, True]


def test_a_suspected_worker_is_probed_without_waiting_for_its_turn():
    engine = ScriptedEngine()

    async def scenario() -> WorkerReport:
        async with watching(engine, interval_s=3600.0) as (monitor, reports):
            await reports.next(lambda report: report.up)
            engine.answers["/health"] = REFUSED
            monitor.suspect("w")
            monitor.suspect("not ours")
            return await reports.next()

    assert not asyncio.run(scenario()).up


def test_many_suspicions_at_once_are_one_probe():
    engine = ScriptedEngine()

    async def scenario() -> int:
        async with watching(engine, interval_s=3600.0) as (monitor, reports):
            await reports.next()
            before = engine.asked.count("/health")
            for _ in range(100):
                monitor.suspect("w")
            await reports.next()
            return engine.asked.count("/health") - before

    assert asyncio.run(scenario()) == 1


def test_a_new_connection_makes_it_look_for_a_new_epoch():
    engine = ScriptedEngine()

    async def scenario() -> None:
        async with watching(engine, scrape_s=3600.0) as (_, reports):
            await reports.next()
            engine.answers["/metrics"] = metrics(started=2000.0)
            assert (await reports.next()).started_at == 1000.0
            engine.reconnected = True
            await reports.next(lambda report: report.started_at == 2000.0)

    asyncio.run(scenario())


def test_an_engine_without_a_start_time_gets_a_new_epoch_whenever_it_comes_up():
    engine = ScriptedEngine()
    engine.answers["/metrics"] = metrics(started=None)

    async def scenario() -> list[WorkerReport]:
        async with watching(engine) as (_, reports):
            first = await reports.next(lambda report: report.up)
            same = await reports.next()
            engine.answers["/health"] = REFUSED
            await reports.next(lambda report: not report.up)
            engine.answers["/health"] = (200, b"")
            return [first, same, await reports.next(lambda report: report.up)]

    first, same, later = asyncio.run(scenario())
    assert first.started_at is not None
    assert first.started_at == same.started_at
    assert first.started_at != later.started_at


@pytest.mark.parametrize("failing", [(404, b""), (500, b"oops"), TIMED_OUT])
def test_without_metrics_a_worker_is_up_and_its_load_unknown(failing):
    engine = ScriptedEngine()

    async def scenario() -> WorkerReport:
        async with watching(engine) as (_, reports):
            await reports.next(lambda report: report.up)
            engine.answers["/metrics"] = failing
            return await reports.next(lambda report: report.engine_running is None)

    report = asyncio.run(scenario())
    assert report.up
    assert report.ready
    assert report.started_at == 1000.0
    assert (report.block_tokens, report.capacity_tokens) == (16, 1600)


def test_a_worker_that_serves_another_model_is_up_but_not_ready_until_it_does():
    engine = ScriptedEngine()
    engine.answers["/v1/models"] = (200, MODELS.replace(b"glm", b"llama"))

    async def scenario() -> list[WorkerReport]:
        async with watching(engine) as (_, reports):
            first = await reports.next()
            engine.answers["/v1/models"] = (200, MODELS)
            return [first, await reports.next(lambda report: report.ready)]

    first, later = asyncio.run(scenario())
    assert (first.up, first.ready) == (True, False)
    assert first.reason == "it serves llama, not glm"
    assert later.reason == ""


@pytest.mark.parametrize(
    ("answer", "ready", "reason"),
    [
        ((401, b'{"error":"Unauthorized"}'), True, ""),
        ((404, b""), True, ""),
        ((500, b""), False, "/v1/models answered 500"),
        ((200, b"not json"), False, "it serves no model, not glm"),
        ((200, b"[]"), False, "it serves no model, not glm"),
        ((200, b'{"data": {}}'), False, "it serves no model, not glm"),
        ((200, b'{"data": [1, {"id": "glm"}]}'), True, ""),
        (TIMED_OUT, False, "its model list could not be read: no answer within 2 s"),
    ],
)
def test_model_lists_of_any_shape_are_survived(answer, ready, reason):
    engine = ScriptedEngine()
    engine.answers["/v1/models"] = answer

    async def scenario() -> WorkerReport:
        async with watching(engine) as (_, reports):
            return await reports.next()

    report = asyncio.run(scenario())
    assert (report.up, report.ready, report.reason) == (True, ready, reason)


def test_stopping_closes_the_connections():
    engine = ScriptedEngine()

    async def scenario() -> None:
        async with watching(engine) as (_, reports):
            await reports.next()

    asyncio.run(scenario())
    assert engine.closed


@asynccontextmanager
async def serving(handler):
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _stall(reader, writer) -> None:
    await reader.read()
    writer.close()


async def _answer(reader, writer) -> None:
    bodies = {b"/health": b"", b"/metrics": metrics()[1], b"/v1/models": MODELS, b"/version": b"{}"}
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            body = bodies[request.split()[1]]
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    writer.close()


def test_over_sockets_a_stalled_worker_delays_no_other_and_a_dead_one_is_found():
    async def scenario() -> None:
        async with serving(_answer) as well, serving(_stall) as stalled:
            async with serving(_answer) as dead:
                pass
            workers = [Worker("stalled", stalled), Worker("dead", dead), Worker("well", well)]
            reports = Reports()
            monitor = WorkerMonitor(workers, reports, interval_s=0.005, timeout_s=5.0)
            assert monitor.unprobed == {"stalled", "dead", "well"}
            task = asyncio.create_task(monitor.run())
            for _ in range(20):
                assert (await reports.next(worker="well")).ready
            assert monitor.unprobed == {"stalled"}
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(scenario())


def test_over_sockets_a_stalled_worker_is_taken_out_in_time():
    async def scenario() -> WorkerReport:
        async with serving(_stall) as stalled:
            reports = Reports()
            monitor = WorkerMonitor([Worker("w", stalled)], reports, timeout_s=0.05)
            task = asyncio.create_task(monitor.run())
            report = await reports.next()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return report

    report = asyncio.run(scenario())
    assert (report.up, report.reason) == (False, "no answer within 0.05 s")
