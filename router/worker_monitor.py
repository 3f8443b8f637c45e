"""Watches every worker: is it up, does it serve the model, what load and cache does it report.

Each worker has a task and a connection of its own, so that one that stalls delays no other.
What is found is handed to `report`; what follows from it is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from router.engine_metrics import EngineFigures, read_figures
from router.probe import HttpProbe, ProbeError, Reply

# Between two probes of a worker that is suspected over and over.
MIN_GAP_S = 0.05


class WatchedWorker(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def model(self) -> str: ...


class Probe(Protocol):
    """Asks one worker. `get` raises ProbeError when there is no answer."""

    async def get(self, path: str, *, timeout_s: float) -> Reply: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What is known of a worker after a probe; None means that the engine does not say.

    `started_at` names the epoch: when it changes, the engine was started anew and holds nothing
    of what it held before. It is the engine's own start time, or else the time it came up.
    """

    up: bool
    ready: bool  # up, and serves the model it is configured for
    reason: str = ""  # why it is not ready
    started_at: float | None = None
    version: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    block_tokens: int | None = None
    capacity_tokens: int | None = None
    engine_running: int | None = None
    engine_waiting: int | None = None
    kv_usage: float | None = None


class WorkerMonitor:
    """Probes `workers` until `run` is cancelled, and calls `report(worker_id, WorkerReport)`.

    A worker counts as up after `pass_after` good probes in a row, as down after `fail_after`
    failed ones or one refused connection.
    """

    def __init__(
        self,
        workers: Sequence[WatchedWorker],
        report: Callable[[str, WorkerReport], None],
        *,
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
        scrape_s: float = 2.0,
        fail_after: int = 2,
        pass_after: int = 1,
        connect: Callable[[str], Probe] = HttpProbe,
    ) -> None:
        timing = _Timing(interval_s, timeout_s, scrape_s, fail_after, pass_after)
        self._watches = {
            worker.id: _Watch(worker, connect(worker.url), report, timing) for worker in workers
        }

    async def run(self) -> None:
        """Watch until cancelled."""
        count = len(self._watches)
        async with asyncio.TaskGroup() as tasks:
            for index, watch in enumerate(self._watches.values()):
                # The first round is at once for all, the later ones are spread over the interval.
                tasks.create_task(watch.run(phase=(index + 1) / count))

    def suspect(self, worker_id: str) -> None:
        """Probe this worker at once: a call has just failed to reach it."""
        watch = self._watches.get(worker_id)
        if watch is not None:
            watch.suspect()

    @property
    def unprobed(self) -> frozenset[str]:
        """Ids of the workers whose first probe has not ended."""
        return frozenset(name for name, watch in self._watches.items() if not watch.probed)


@dataclass(frozen=True, slots=True)
class _Timing:
    interval_s: float
    timeout_s: float
    scrape_s: float
    fail_after: int
    pass_after: int


@dataclass(frozen=True, slots=True)
class _Identity:
    """What holds for an epoch. With a problem the worker is not ready and is asked again."""

    started_at: float | None = None
    version: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    problem: str = "its model list has not been read"


class _Watch:
    """What is known of one worker, and the loop that learns it."""

    def __init__(
        self,
        worker: WatchedWorker,
        probe: Probe,
        report: Callable[[str, WorkerReport], None],
        timing: _Timing,
    ) -> None:
        self.probed = False
        self._worker = worker
        self._probe = probe
        self._tell = report
        self._timing = timing
        self._passed = 0
        self._failed = 0
        self._up = False
        self._why_down = "not probed yet"
        self._figures = EngineFigures()
        self._identity = _Identity()
        self._scrape_due_s = 0.0
        self._suspected = False
        self._wake: asyncio.Future[None] | None = None

    async def run(self, phase: float) -> None:
        loop = asyncio.get_running_loop()
        interval_s = self._timing.interval_s
        began = loop.time()
        next_s = began + phase * interval_s
        try:
            while True:
                self._suspected = False
                await self._look()
                self.probed = True
                self._tell(self._worker.id, self._report())
                next_s = max(next_s, loop.time())
                await self._pause(until_s=next_s)
                if loop.time() >= next_s:
                    next_s += interval_s
        finally:
            self._probe.close()

    def suspect(self) -> None:
        self._suspected = True
        self._scrape_due_s = 0.0
        self._end_pause()

    async def _pause(self, until_s: float) -> None:
        """Until the given loop time, or until the worker is suspected."""
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        timer = loop.call_at(until_s, self._end_pause)
        try:
            if not self._suspected:
                await self._wake
        finally:
            timer.cancel()
            self._wake = None
        if self._suspected:
            await asyncio.sleep(MIN_GAP_S)

    def _end_pause(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _look(self) -> None:
        try:
            health = await self._get("/health")
            if health.status != 200:
                raise ProbeError(f"/health answered {health.status}")
        except ProbeError as error:
            self._fail(str(error), at_once=error.refused)
            return
        now_s = asyncio.get_running_loop().time()
        # A connection that had to be made anew may lead to an engine that was started anew.
        if not self._up or health.reconnected or now_s >= self._scrape_due_s:
            self._scrape_due_s = now_s + self._timing.scrape_s
            await self._scrape()
        if self._identity.problem:
            await self._identify()
        self._pass()

    def _fail(self, reason: str, *, at_once: bool) -> None:
        self._passed = 0
        self._failed += 1
        if at_once or not self._up or self._failed >= self._timing.fail_after:
            self._up = False
            self._why_down = reason

    def _pass(self) -> None:
        self._failed = 0
        self._passed += 1
        if self._passed >= self._timing.pass_after:
            self._up = True
        else:
            self._why_down = f"{self._passed} of {self._timing.pass_after} good probes"

    async def _scrape(self) -> None:
        """Read load and cache; a change of the start time begins a new epoch."""
        try:
            reply = await self._get("/metrics")
        except ProbeError:
            reply = Reply(0, b"", reconnected=False)
        before = self._figures
        self._figures = read_figures(reply.body) if reply.status == 200 else _lasting(before)
        started_at = self._figures.started_at
        if started_at is None:
            # An engine that does not say: what comes up after having been down may be new.
            started_at = self._identity.started_at if self._up else time.time()
        if started_at != self._identity.started_at:
            self._identity = _Identity(started_at)

    async def _identify(self) -> None:
        """Models and version of this epoch."""
        identity = _Identity(self._identity.started_at)
        try:
            models = await self._get("/v1/models")
            version = await self._get("/version")
        except ProbeError as error:
            self._identity = replace(identity, problem=f"its model list could not be read: {error}")
            return
        served = _models(models.body) if models.status == 200 else {}
        self._identity = replace(
            identity,
            version=_version(version.body),
            models=tuple(served),
            max_model_len=served.get(self._worker.model),
            problem=_mismatch(self._worker.model, models.status, served),
        )

    async def _get(self, path: str) -> Reply:
        return await self._probe.get(path, timeout_s=self._timing.timeout_s)

    def _report(self) -> WorkerReport:
        figures, identity = self._figures, self._identity
        if not self._up:
            figures = _lasting(figures)
        return WorkerReport(
            up=self._up,
            ready=self._up and not identity.problem,
            reason=identity.problem if self._up else self._why_down,
            started_at=identity.started_at,
            version=identity.version,
            models=identity.models,
            max_model_len=identity.max_model_len,
            block_tokens=figures.block_tokens,
            capacity_tokens=figures.capacity_tokens,
            engine_running=figures.running,
            engine_waiting=figures.waiting,
            kv_usage=figures.kv_usage,
        )


def _lasting(figures: EngineFigures) -> EngineFigures:
    """The figures that stay true while the worker does not answer."""
    return EngineFigures(block_tokens=figures.block_tokens, capacity_tokens=figures.capacity_tokens)


def _mismatch(model: str, status: int, served: Mapping[str, int | None]) -> str:
    """Why a worker that gave this model list is not to be used for `model`, or nothing."""
    # Whoever hides the list may still serve the model (vLLM with an API key does).
    if status != 200 and status < 500:
        return ""
    if status != 200:
        return f"/v1/models answered {status}"
    return "" if model in served else f"it serves {', '.join(served) or 'no model'}, not {model}"


def _models(body: bytes) -> dict[str, int | None]:
    """Name and longest sequence of every model listed in an answer of /v1/models."""
    entries = _json_object(body).get("data")
    if not isinstance(entries, list):
        return {}
    listed = [entry for entry in entries if isinstance(entry, dict) and "id" in entry]
    lengths = [entry.get("max_model_len") for entry in listed]
    return {
        str(entry["id"]): length if isinstance(length, int) else None
        for entry, length in zip(listed, lengths, strict=True)
    }


def _version(body: bytes) -> str | None:
    version = _json_object(body).get("version")
    return version if isinstance(version, str) else None


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
