"""One simulated worker: an engine with a clock, a port and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from time import time
from typing import TYPE_CHECKING, Any, Literal

import orjson

from simulator import metrics
from simulator.control import Received
from simulator.engine import Engine, EngineDeadError, Heartbeat, Pull, Release, Request
from simulator.engine import Sequence as EngineSequence
from simulator.faults import Faults
from simulator.frontend import Frontend
from simulator.generation import Generation
from simulator.http_server import Connection, Exchange
from simulator.peers import Peers
from simulator.profile import Profile
from simulator.transfers import KvTransfers
from simulator.vllm import errors, requests

if TYPE_CHECKING:
    from simulator.kv_publisher import KvPublisher

JSON = dict[str, Any]
Role = Literal["prefill", "decode", "both"]

# The loop's timers count milliseconds; waking more often gains nothing.
_MIN_TICK_S = 0.001
# A port given up for a while may have become the near end of somebody's connection.
_PORT_RETRY_S = 0.05
_PORT_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is, fixed at its start."""

    name: str
    role: Role
    port: int
    profile: Profile
    names: tuple[str, ...]
    host: str = "127.0.0.1"
    speed: float = 1.0
    block_tokens: int = 16
    lease_s: float = 30.0
    recompute_failed_loads: bool = False
    stream_interval: int = 1
    api_key: str | None = None
    kv_events: bool = False
    kv_push: bool = False
    "Prefill workers send KV; decode workers do not fetch it."


class Worker:
    """Serves one engine. `start`, `stop` and everything between happen on one event loop."""

    def __init__(self, config: WorkerConfig, peers: Peers) -> None:
        self.config = config
        self.peers = peers
        self.port = config.port
        self.faults = Faults()
        self.connections: set[Connection] = set()
        self.received = Received()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._fault_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumping = False
        self._calls: dict[str, Generation] = {}
        self._frontend = Frontend(self)
        self._publisher: KvPublisher | None = None
        self._boot()

    def _boot(self) -> None:
        """A fresh engine under a fresh id, as a started process has."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        config = self.config
        self.engine = Engine(
            config.profile,
            engine_id=f"{config.name}-{token_hex(4)}",
            block_tokens=config.block_tokens,
            lease_s=config.lease_s,
            recompute_failed_loads=config.recompute_failed_loads,
            record_kv_events=config.kv_events,
        )
        if self._publisher is not None:
            self._publisher.restart()
        self.engine.pace = self.faults.pace
        self.observed = metrics.Observations()
        self.started_at_s = time()
        self._epoch_s = self._loop.time()
        self.served = requests.Served(
            config.names, self.engine.max_model_len, config.stream_interval, config.kv_push
        )
        self.transfers = KvTransfers(self)
        self.peers.register(self.engine.engine_id, self.transfers)

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self.port}"

    @property
    def now_s(self) -> float:
        """The engine's clock."""
        return (self._loop.time() - self._epoch_s) * self.config.speed

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._listen()
        if self.config.kv_events:
            self._publisher = _kv_publisher(self.config)

    async def _listen(self, attempts: int = 1) -> None:
        """Open the port. Raises OSError if it is taken, at the last of `attempts`."""
        while self._server is None:
            try:
                self._server = await self._loop.create_server(
                    lambda: Connection(self._frontend.handle, self.connections),
                    self.config.host,
                    self.port,
                    backlog=4096,
                )
            except OSError:
                attempts -= 1
                if not attempts:
                    raise
                await asyncio.sleep(_PORT_RETRY_S)
        self.port = self._server.sockets[0].getsockname()[1]

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def stop(self) -> None:
        for timer in (self._timer, self._fault_timer):
            if timer is not None:
                timer.cancel()
        self.peers.unregister(self.engine.engine_id)
        self._stop_listening()
        if self._publisher is not None:
            await self._publisher.close()
        for connection in list(self.connections):
            connection.abort()

    def _die(self, spare: Connection | None = None) -> None:
        """What a killed process leaves: closed connections and a port that refuses."""
        self._stop_listening()
        self.peers.unregister(self.engine.engine_id)
        self._calls.clear()
        self.engine.kill()
        for connection in list(self.connections):
            if connection is not spare:
                connection.abort()

    async def restart(self, exchange: Exchange | None = None) -> None:
        """A new process on the same port: new engine id, empty cache, no faults."""
        self._die(exchange.connection if exchange is not None else None)
        self.faults = Faults()
        self._boot()
        await self._listen(_PORT_ATTEMPTS)
        if exchange is not None:
            self._last_words(exchange, b"{}")

    async def set_faults(self, faults: Faults, exchange: Exchange | None = None) -> None:
        """Replace the faults. `exchange` asked for it and is answered once they hold."""
        before, self.faults = self.faults, faults
        self.engine.pace = faults.pace
        if self._fault_timer is not None:
            self._fault_timer.cancel()
            self._fault_timer = None
        if faults.for_s is not None:
            self._fault_timer = self._loop.call_later(faults.for_s, self._end_faults)
        if before.die and not faults.die:
            self._boot()
        if faults.die:
            self._die(exchange.connection if exchange is not None else None)
        elif faults.refuse:
            self._stop_listening()
        else:
            await self._listen(_PORT_ATTEMPTS)
        if exchange is not None and faults.die:
            self._last_words(exchange, orjson.dumps(faults.as_json()))
        elif exchange is not None:
            exchange.reply(200, orjson.dumps(faults.as_json()))
        self.pump()

    def _last_words(self, exchange: Exchange, body: bytes) -> None:
        """Answer; a connection of this worker then goes the way of the others."""
        if exchange.connection in self.connections:
            exchange.close_after()
        exchange.reply(200, body)

    def _end_faults(self) -> None:
        self.background(self.set_faults(Faults()))

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that awaits, on behalf of a caller that cannot."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- time -----------------------------------------------------------------------------------

    def pump(self) -> None:
        """Let the engine catch up with the clock, and pass on what comes of it."""
        if self._pumping:
            return
        self._pumping = True
        engine = self.engine
        while True:
            progress = engine.advance(self.now_s)
            for action in progress.actions:
                self._act(action)
            for sequence in progress.sequences:
                self._deliver(sequence)
            if not engine.has_news:
                break
        if self._publisher is not None and (events := engine.contents.take_events()):
            self._publisher.publish(events, time())
        self._pumping = False
        self._arm()

    def _act(self, action: Pull | Release | Heartbeat) -> None:
        if isinstance(action, Pull):
            self.transfers.pull(action)
        elif isinstance(action, Release):
            self.peers.notify("release", action.remote)
        else:
            self.peers.notify("heartbeat", action.remote)

    def _deliver(self, sequence: EngineSequence) -> None:
        finished = sequence.reason is not None
        if finished:
            self.observed.observe(sequence)
            if self.config.kv_push and sequence.request.keep_kv:
                self.transfers.push(sequence)
        call = self._calls.get(sequence.request.id)
        if call is None:
            return
        if finished:
            del self._calls[sequence.request.id]
        call.progress(sequence)

    def _arm(self) -> None:
        due_s = self.engine.next_event_s()
        if due_s is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        if self._timer is not None:
            if self._timer_s == due_s:
                return
            self._timer.cancel()
        delay_s = (due_s - self.now_s) / self.config.speed
        self._timer_s = due_s
        self._timer = self._loop.call_later(max(_MIN_TICK_S, delay_s), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.pump()

    # -- calls ----------------------------------------------------------------------------------

    @property
    def open_calls(self) -> int:
        return len(set(self._calls.values()))

    def submit(self, call: requests.Call) -> list[EngineSequence]:
        """Queue what a call asks for. Raises ApiError if the engine is dead."""
        now_s = self.now_s
        tag = token_hex(4)
        sequences = []
        for at, prompt in enumerate(call.prompts):
            base = call.id if call.endpoint == "chat" else f"{call.id}-{at}"
            for choice in range(call.n):
                remote = call.remote
                if remote is not None and self.config.kv_push and remote.engine_id:
                    remote = replace(remote, request_id=base, push=True)
                request = Request(
                    id=f"{base}-{tag}" if call.n == 1 else f"{choice}_{base}-{tag}",
                    tokens=prompt,
                    max_tokens=call.max_tokens,
                    min_tokens=call.min_tokens,
                    salt=call.salt,
                    choice=choice,
                    keep_kv=call.keep_kv,
                    remote=remote,
                )
                sequences.append(self._submit_one(request, now_s))
        return sequences

    def _submit_one(self, request: Request, now_s: float) -> EngineSequence:
        try:
            return self.engine.submit(request, now_s)
        except EngineDeadError:
            raise errors.INTERNAL_ERROR from None

    def own(self, call: Generation, sequence: EngineSequence) -> None:
        """`call` is told of `sequence`'s progress."""
        self._calls[sequence.request.id] = call

    def abandon(self, sequences: Sequence[EngineSequence]) -> None:
        """The client has gone, or an answer failed: nothing of it runs on."""
        for sequence in sequences:
            if self._calls.pop(sequence.request.id, None) is not None:
                self.engine.abort(sequence.request.id, self.now_s)
        self.pump()

    def reset(self) -> bool:
        """Counters and cache as new, the engine id kept. False while anything runs."""
        engine = self.engine
        engine.advance_quietly(self.now_s)
        if engine.running or engine.waiting:
            return False
        engine.drop_pins()
        engine.reset_cache(self.now_s)
        engine.totals = type(engine.totals)()
        self.observed = metrics.Observations()
        return True

    def kv_event_source(self) -> JSON | None:
        """Where cache events are published, if they are."""
        return self._publisher.source() if self._publisher is not None else None


def _kv_publisher(config: WorkerConfig) -> KvPublisher:
    # Here, so that workers without events need no ZeroMQ.
    from simulator.kv_publisher import KvPublisher

    topic = f"kv@{config.name}@{config.names[0]}"
    return KvPublisher(config.host, topic, config.block_tokens)
