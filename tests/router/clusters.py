"""A fleet of scripted engines behind the dispatcher, and the edge before it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cachemap import InMemoryCacheMap
from router.config import ModelConfig
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.outcome import Outcome
from router.upstream import Upstreams
from router.worker_monitor import WorkerReport
from scheduler import PROFILES, WorkerState
from tests.fakes import (
    DONE,
    ROLE,
    Answer,
    Behaviour,
    Received,
    ScriptedEngine,
    chunk,
    completion,
    event,
    prefilled,
    whole,
)
from tests.router.wire import HOT, Edge, Response, listening, request, until

JSON = dict[str, Any]
UP = WorkerReport(up=True, ready=True)
USAGE = event({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 2}})
STREAM = (ROLE, chunk({"content": "Hel"}), chunk({"content": "lo"}, "stop"), USAGE, DONE)
CALL: JSON = {"model": "short", "messages": [{"role": "user", "content": "Hello " * 40}]}


async def prefills(request: Received, answer: Answer) -> None:
    answer.reply(200, json.dumps(prefilled()).encode())


async def decodes(request: Received, answer: Answer) -> None:
    """Answer as a stream or whole, as asked."""
    if not request.json.get("stream"):
        await whole(200, completion())(request, answer)
        return
    answer.open_stream()
    for piece in STREAM:
        answer.send(piece)
    answer.end()


def model_config(prefill: Sequence[str], decode: Sequence[str], **more: Any) -> ModelConfig:
    pools = []
    for name, urls in (("prefill", prefill), ("decode", decode)):
        if urls:
            pools.append({"name": name, "role": name, "workers": [{"url": url} for url in urls]})
    return ModelConfig.model_validate({"name": "full-name", "pools": pools, **more})


def fleet_of(config: ModelConfig, upstreams: Any, **more: Any) -> Fleet:
    limits: JSON = {
        "max_waiting": 10,
        "max_waiting_bytes": 1 << 20,
        "queue_timeout_s": 5.0,
        "default_capacity_tokens": 100_000,
        "io_ratio_prior": 4.0,
        **more,
    }
    return Fleet(config, InMemoryCacheMap(1 << 26), upstreams, PROFILES["b300-tp4"], **limits)


@dataclass(slots=True)
class Cluster:
    """Engines by name (p0, d0, ...), what stands before them, and what became of each call."""

    engines: dict[str, ScriptedEngine]
    fleet: Fleet
    dispatcher: Dispatcher
    edge: Edge
    outcomes: list[Outcome]
    suspects: list[str] = field(default_factory=list)

    def worker(self, name: str) -> WorkerState:
        return self.fleet.scheduler.workers[self.engines[name].url.removeprefix("http://")]

    def received(self, name: str) -> list[Received]:
        return self.engines[name].received

    def bodies(self, role: str) -> list[JSON]:
        """What the engines of a role were sent, all together."""
        named = [engine for name, engine in self.engines.items() if name[0] == role]
        return [each.json for engine in named for each in engine.received]

    async def ask(
        self, body: JSON | bytes = CALL, headers: bytes = b"", path: bytes = HOT
    ) -> Response:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.edge.ask(request(raw, path, headers=headers))

    async def outcome(self, count: int = 1) -> Outcome:
        """The last of `count` outcomes, once they are there."""
        await until(lambda: len(self.outcomes) >= count)
        return self.outcomes[-1]

    async def at_rest(self) -> None:
        """Nothing runs any more: no call, no lease, no charge, no work of an engine."""
        await until(lambda: not self.edge.state.tasks)
        assert not self.fleet.scheduler.leases
        assert self.fleet.scheduler.depth == 0
        for worker in self.fleet.workers:
            charged = (worker.running, worker.prefill_work_tokens, worker.decode_work_tokens)
            assert charged == (0, 0, 0)
        await until(lambda: not any(engine.active for engine in self.engines.values()))


@asynccontextmanager
async def cluster(
    prefill: Sequence[Behaviour] = (prefills, prefills),
    decode: Sequence[Behaviour] = (decodes, decodes),
    *,
    keys: frozenset[str] = frozenset(),
    max_attempts: int = 3,
    handoff_gap_s: float = 20.0,
    capacity_tokens: int | None = None,
    backlog: int = 4096,
    **limits: Any,
) -> AsyncIterator[Cluster]:
    outcomes: list[Outcome] = []
    suspects: list[str] = []
    async with AsyncExitStack() as stack:
        engines = {}
        for letter, behaviours in (("p", prefill), ("d", decode)):
            for i, behaviour in enumerate(behaviours):
                engine = ScriptedEngine("full-name", behaviour, backlog=backlog)
                await engine.start()
                stack.push_async_callback(engine.stop)
                engines[f"{letter}{i}"] = engine
        upstreams = Upstreams(connect_s=2.0, first_byte_s=10.0, idle_s=10.0)
        stack.callback(upstreams.close)
        urls = [[e.url for name, e in engines.items() if name[0] == letter] for letter in "pd"]
        fleet = fleet_of(model_config(urls[0], urls[1], prices="h200-llama8b"), upstreams, **limits)
        dispatcher = Dispatcher(
            {"full-name": fleet, "short": fleet},
            keys=keys,
            max_attempts=max_attempts,
            handoff_gap_s=handoff_gap_s,
            observe=outcomes.append,
            suspect=suspects.append,
        )
        report = WorkerReport(up=True, ready=True, capacity_tokens=capacity_tokens)
        for worker in fleet.workers:
            fleet.apply(worker.id, report)
        edge = await stack.enter_async_context(listening(dispatcher.serve))
        found = Cluster(engines, fleet, dispatcher, edge, outcomes, suspects)
        yield found
        await found.at_rest()
        await asyncio.gather(*dispatcher._background)
