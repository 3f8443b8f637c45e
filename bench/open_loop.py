"""The replay's client: a process of its own that sends each row at its time, come what may.

Run as `python -m bench.open_loop JOB`, where JOB is a JSON file (see `Job`). Prints one JSON line
of progress now and then, and writes one JSON line per call to the job's output file.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from bench import traces
from bench.http_client import Connection, Pool, clock_s
from bench.observation import Call, StreamObserver
from bench.prompts import PromptBuilder
from bench.tokenisation import Tokenisation
from bench.traces import Row

PROGRESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """What to send where. Times in the trace are divided by `arrivals`."""

    url: str
    model: str
    trace: str
    output: str
    arrivals: float
    tokenisation: Tokenisation
    window_tokens: int | None = None
    max_rows: int | None = None
    max_output_tokens: int | None = None
    stream_interval: int = 1
    seed: str = "0"
    drain_s: float = 60.0
    connections: int = 32

    def dump(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Job:
        raw = json.loads(path.read_text())
        return Job(**raw | {"tokenisation": Tokenisation(**raw["tokenisation"])})


def kept_rows(
    trace: traces.Trace, window_tokens: int | None, max_rows: int | None
) -> tuple[Row, ...]:
    """The rows that are sent: those that fit, the first `max_rows` of them, ticks spread."""
    rows = traces.within_window(trace, window_tokens).rows[:max_rows]
    tick_ms = traces.coarse_tick_ms(trace.rows)
    return traces.spread_ticks(rows, tick_ms) if tick_ms else rows


class BodyBuilder:
    """Request bodies of rows, built when they are due."""

    def __init__(self, job: Job, rows: Sequence[Row]) -> None:
        self._prompts = PromptBuilder(rows, job.tokenisation, job.seed)
        self._head = b'{"model":' + orjson.dumps(job.model) + b',"messages":'
        self._job = job

    def output_tokens(self, row: Row) -> int:
        return max(1, min(row.output_tokens, self._job.max_output_tokens or row.output_tokens))

    def build(self, row: Row, number: int) -> bytes:
        options = (
            f',"max_tokens":{self.output_tokens(row)},"ignore_eos":true,"stream":true,'
            f'"stream_interval":{self._job.stream_interval},'
            '"stream_options":{"include_usage":true}}'
        )
        return self._head + self._prompts.messages_json(row, number) + options.encode()


class OpenLoop:
    """Sends every row at its due time and collects what came back."""

    def __init__(self, job: Job, rows: Sequence[Row]) -> None:
        self._job = job
        self._rows = rows
        self._bodies = BodyBuilder(job, rows)
        self._pool = Pool(job.url)
        self._pending: set[asyncio.Future[Call]] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self.calls: list[Call] = []

    async def run(self) -> list[Call]:
        await self._pool.warm(self._job.connections)
        progress = asyncio.create_task(self._report())
        start_s = clock_s() + 0.2
        for number, row in enumerate(self._rows):
            body = self._bodies.build(row, number)
            due_s = start_s + row.arrival_ms / 1000 / self._job.arrivals
            # Also with nothing to wait for, so that replies are read between two sends.
            await asyncio.sleep(max(0.0, due_s - clock_s()))
            self._send(Call(number, due_s), body)
        if self._pending:
            await asyncio.wait(self._pending, timeout=self._job.drain_s)
        for call in self.calls:
            if call.end_s is None and not call.error:
                call.error = "unfinished when the replay ended"
        for task in (progress, *self._connecting):
            task.cancel()
        self._pool.close()
        return self.calls

    def _send(self, call: Call, body: bytes) -> None:
        """Sends at once on an idle connection; a new one must not hold up the calls behind."""
        self.calls.append(call)
        observer = StreamObserver(call)
        self._pending.add(observer.done)
        observer.done.add_done_callback(self._pending.discard)
        connection = self._pool.idle()
        if connection is not None:
            self._post(connection, observer, body)
            return
        task = asyncio.create_task(self._connect_and_post(observer, body))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect_and_post(self, observer: StreamObserver, body: bytes) -> None:
        try:
            connection = await self._pool.take()
        except OSError as error:
            observer.failed(type(error).__name__)
            return
        self._post(connection, observer, body)

    def _post(self, connection: Connection, observer: StreamObserver, body: bytes) -> None:
        head = self._pool.head("/v1/chat/completions", len(body))
        observer.call.sent_s = clock_s()
        connection.send(head, body, observer)

    async def _report(self) -> None:
        while True:
            done = len(self.calls) - len(self._pending)
            sys.stdout.write(json.dumps({"done": done, "of": len(self._rows)}) + "\n")
            sys.stdout.flush()
            await asyncio.sleep(PROGRESS_S)


def main(arguments: Sequence[str]) -> int:
    import uvloop

    job = Job.load(Path(arguments[0]))
    rows = kept_rows(traces.read(Path(job.trace)), job.window_tokens, job.max_rows)
    gc.freeze()  # the rows stay; the collector need not walk them during the run
    calls = uvloop.run(OpenLoop(job, rows).run())
    with Path(job.output).open("wb") as out:
        for call in calls:
            out.write(orjson.dumps(call.as_json()) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
