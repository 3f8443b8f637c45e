"""One simulated worker: an engine with a clock, a port and faults."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from time import time
from typing import Any, Literal
from urllib.parse import urlsplit

import orjson

from simulator import metrics
from simulator.engine import Engine, EngineDeadError, Heartbeat, Pull, Reason, Release, Request
from simulator.engine import Sequence as EngineSequence
from simulator.faults import FaultError, Faults
from simulator.faults import parse as parse_faults
from simulator.generation import Generation
from simulator.http_server import Connection, Exchange
from simulator.kv_events import BUFFERED_BATCHES, KvEventLog
from simulator.peers import OnRead, Peers
from simulator.profile import Profile
from simulator.vllm import endpoints, errors, replies, requests
from simulator.zmtp import Publisher, Replier

JSON = dict[str, Any]
Role = Literal["prefill", "decode", "both"]

_NOT_FOUND = b'{"detail":"Not Found"}'
_NOT_ALLOWED = b'{"detail":"Method Not Allowed"}'
_UNAUTHORIZED = b'{"error":"Unauthorized"}'
# The loop's timers count milliseconds; waking more often gains nothing.
_MIN_TICK_S = 0.001


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


@dataclass(slots=True)
class _Received:
    """The last requests, if somebody wants to see them."""

    limit: int = 0
    items: deque[JSON] = field(default_factory=deque)

    def note(self, exchange: Exchange) -> None:
        if not self.limit:
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in exchange.headers.items()}
        body = exchange.body.decode("utf-8", "replace")
        self.items.append(
            {"method": exchange.method, "path": exchange.path, "headers": headers, "body": body}
        )
        while len(self.items) > self.limit:
            self.items.popleft()


class Worker:
    """Serves one engine. `start`, `stop` and everything between happen on one event loop."""

    def __init__(self, config: WorkerConfig, peers: Peers) -> None:
        self.config = config
        self.peers = peers
        self.port = config.port
        self.faults = Faults()
        self.connections: set[Connection] = set()
        self.received = _Received()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._fault_timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self._error_share = 0.0
        self._calls: dict[str, Generation] = {}
        self._publisher = Publisher()
        self._replier = Replier(self._replay)
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
        self._event_log = KvEventLog(f"kv@{config.name}@{config.names[0]}", config.block_tokens)
        self.engine.pace = self.faults.pace
        self.observed = metrics.Observations()
        self.started_at_s = time()
        self._epoch_s = self._loop.time()
        self.served = requests.Served(
            config.names, self.engine.max_model_len, config.stream_interval, config.kv_push
        )
        self._registered: dict[str, list[OnRead]] = {}
        self.peers.register(self.engine.engine_id, self)

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
            await self._publisher.listen(self.config.host)
            await self._replier.listen(self.config.host)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await self._loop.create_server(
                lambda: Connection(self.handle, self.connections),
                self.config.host,
                self.port,
                backlog=4096,
            )
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
        self._publisher.close()
        self._replier.close()
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
        await self._listen()
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
            await self._listen()
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
        self._background(self.set_faults(Faults()))

    def _background(self, work: Any) -> None:
        task = self._loop.create_task(work)
        task.add_done_callback(lambda done: done.exception())

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
        if engine.kv_events:
            self._publish_kv_events()
        self._pumping = False
        self._arm()

    def _publish_kv_events(self) -> None:
        events, self.engine.kv_events = self.engine.kv_events, []
        self._publisher.publish(self._event_log.append(events or [], time()))

    def _replay(self, request: list[bytes]) -> list[list[bytes]]:
        """Answer `[b"", first]`, a consumer that missed batches."""
        first = int.from_bytes(request[-1], "big")
        return [[b"", *frames] for frames in self._event_log.replay(first)]

    def _act(self, action: Pull | Release | Heartbeat) -> None:
        if isinstance(action, Pull):
            self._pull(action)
        elif isinstance(action, Release):
            self.peers.notify("release", action.remote)
        else:
            self.peers.notify("heartbeat", action.remote)

    def _deliver(self, sequence: EngineSequence) -> None:
        finished = sequence.reason is not None
        if finished:
            self.observed.observe(sequence)
            if self.config.kv_push and sequence.request.keep_kv:
                self._push(sequence)
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

    # -- KV between workers ---------------------------------------------------------------------

    def _pull(self, action: Pull) -> None:
        request_id = action.sequence.request.id
        faults, engine = self.faults, self.engine
        limit = faults.transfer_limit
        if faults.drop_transfer or (limit is not None and engine.pulling > limit):
            engine.pull_failed(request_id, self.now_s, reached=True)
            return

        def done(contents: Sequence[int] | None, reached: bool) -> None:
            if engine.dead:
                return
            if contents is None:
                engine.pull_failed(request_id, self.now_s, reached=reached)
            else:
                engine.pulled(request_id, contents, self.now_s)
            self._loop.call_soon(self.pump)

        self.peers.read(action.remote, done)

    def serve_read(self, request_id: str, blocks: Sequence[int] | None, done: OnRead) -> None:
        """Another worker, or this one, wants KV from here. A worker that hangs says nothing."""
        faults, engine = self.faults, self.engine
        if faults.stall:
            return
        if engine.dead or faults.drop_transfer:
            done(None, not engine.dead)
            return
        engine.advance_quietly(self.now_s)
        if blocks is not None:
            done(engine.read_blocks(blocks), True)
            return
        pinned = self._pinned(request_id)
        if pinned is None:
            self._registered.setdefault(request_id, []).append(done)
        else:
            self._send_kv(engine.pins[pinned].blocks, [done])

    def _push(self, sequence: EngineSequence) -> None:
        """A prefill leg is done: send its KV to whoever registered for it."""
        waiting = self._registered.pop(_base_id(sequence.request.id), [])
        if waiting and sequence.blocks:
            self._send_kv(sequence.blocks, waiting)

    def _send_kv(self, blocks: Sequence[int], receivers: Sequence[OnRead]) -> None:
        config = self.config
        size_bytes = len(blocks) * config.block_tokens * config.profile.kv_bytes_per_token
        for done in receivers:
            self.engine.count_transfer(size_bytes, config.profile.transfer.seconds(size_bytes))
            done(self.engine.read_blocks(blocks), True)

    def _pinned(self, base_id: str) -> str | None:
        """The kept request that goes by `base_id`, the id without its random end."""
        return next((name for name in self.engine.pins if _base_id(name) == base_id), None)

    def kv_notice(self, kind: str, request_id: str) -> None:
        if self.faults.stall or self.engine.dead:
            return
        if self.config.kv_push:
            if kind == "release":
                self._registered.pop(request_id, None)
            request_id = self._pinned(request_id) or request_id
        if kind == "release":
            self.engine.release_pin(request_id, self.now_s)
        else:
            self.engine.extend_pin(request_id, self.now_s)
        self._loop.call_soon(self.pump)

    def handoff(self, sequence: EngineSequence) -> replies.Handoff | None:
        """What this worker hands on of a finished prefill leg."""
        if not sequence.request.keep_kv or sequence.reason not in (Reason.LENGTH, Reason.STOP):
            return None
        count = -(-sequence.prompt_len // self.config.block_tokens)
        blocks = sequence.blocks[:count]
        request_id = sequence.request.id
        if self.faults.wrong_lease:
            capacity = self.engine.blocks.capacity
            blocks = [(block + capacity // 2) % capacity for block in blocks]
            request_id += "-wrong"
        return replies.Handoff(
            blocks=blocks,
            engine_id=self.engine.engine_id,
            request_id=request_id,
            host=self.peers.host,
            port=self.peers.port,
            tokens=sequence.prompt_len,
            cached_tokens=sequence.cached_tokens or 0,
            push=self.config.kv_push,
        )

    # -- HTTP -----------------------------------------------------------------------------------

    def handle(self, exchange: Exchange) -> None:
        """One request. Every reply of this worker starts here."""
        path = exchange.path.partition("?")[0]
        if path.startswith("/sim/"):
            self._control(exchange, path)
            return
        if self.faults.stall == "all":
            return
        try:
            self._route(exchange, path)
        except errors.ApiError as error:
            exchange.reply(error.status, error.body())

    def _route(self, exchange: Exchange, path: str) -> None:
        if path.startswith("/v1/") or path in _POST_ROUTES:
            self.received.note(exchange)
            if self.faults.stall or not self._authorized(exchange, path):
                return
        if path in _GENERATE:
            if exchange.method == "POST":
                self._generate(exchange, _GENERATE[path])
            else:
                exchange.reply(405, _NOT_ALLOWED, extra=b"allow: POST\r\n")
            return
        allowed = ("GET", "HEAD") if path in _GET_ROUTES else ("POST",)
        route = _GET_ROUTES.get(path) or _POST_ROUTES.get(path)
        if route is None:
            exchange.reply(404, _NOT_FOUND)
        elif exchange.method not in allowed:
            exchange.reply(405, _NOT_ALLOWED, extra=b"allow: %b\r\n" % allowed[0].encode())
        else:
            route(self, exchange)

    def _authorized(self, exchange: Exchange, path: str) -> bool:
        key = self.config.api_key if path.startswith("/v1/") else None
        if key is not None and exchange.header(b"authorization") != f"Bearer {key}":
            exchange.reply(401, _UNAUTHORIZED)
            return False
        if self.faults.host_check and exchange.header(b"host") != urlsplit(self.url).netloc:
            exchange.reply(421, b'{"detail":"Misdirected Request"}')
            return False
        return True

    def _server_error(self, exchange: Exchange) -> bool:
        """Answer with a server error if it is this request's turn to fail."""
        self._error_share += self.faults.error_5xx
        if self._error_share < 1:
            return False
        self._error_share -= 1
        kind = (
            "ServiceUnavailableError" if self.faults.error_status == 503 else "InternalServerError"
        )
        error = errors.ApiError(self.faults.error_status, "Injected failure", kind)
        exchange.reply(error.status, error.body())
        return True

    def _generate(self, exchange: Exchange, endpoint: requests.Endpoint) -> None:
        if self.faults.error_5xx and self._server_error(exchange):
            return
        if self.engine.dead:
            raise errors.INTERNAL_ERROR
        body = requests.load_body(exchange.body)
        given = exchange.header(b"x-request-id") or body.get("request_id")
        base = str(given) if given else token_hex(8)
        try:
            call = requests.parse_call(endpoint, body, self.served, base)
        except errors.ApiError:
            self._free_rejected(body)
            raise
        Generation(self, exchange, call, self._submit(call)).begin()
        self.pump()

    def _free_rejected(self, body: JSON) -> None:
        """A refused decode leg still tells the prefill worker that nobody will come."""
        try:
            remote, _ = requests.parse_kv_transfer_params(body.get("kv_transfer_params"))
        except errors.ApiError:
            return
        if remote is not None and remote.engine_id is not None:
            self.peers.notify("release", remote)

    def _submit(self, call: requests.Call) -> list[EngineSequence]:
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
        self._loop.call_soon(self.pump)

    # -- plain endpoints ------------------------------------------------------------------------

    def _health(self, exchange: Exchange) -> None:
        exchange.reply(503 if self.engine.dead else 200)

    def _version(self, exchange: Exchange) -> None:
        exchange.reply(200, orjson.dumps({"version": replies.VERSION}))

    def _models(self, exchange: Exchange) -> None:
        exchange.reply(200, endpoints.models(self.served, int(time())))

    def _load(self, exchange: Exchange) -> None:
        exchange.reply(200, orjson.dumps({"server_load": len(set(self._calls.values()))}))

    def _metrics(self, exchange: Exchange) -> None:
        self.pump()
        page = metrics.render(self.engine, self.observed, self.config.names[0], self.started_at_s)
        exchange.reply(200, page, "text/plain; version=0.0.4; charset=utf-8")

    def _kv_event_sources(self, exchange: Exchange) -> None:
        sources = {}
        if self.config.kv_events:
            sources["0"] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://{self.config.host}:{self._publisher.port}",
                "replay_endpoint": f"tcp://{self.config.host}:{self._replier.port}",
                "buffer_steps": BUFFERED_BATCHES,
                "hwm": 100000,
                "max_queue_size": 100000,
                "topic": self._event_log.topic.decode(),
            }
        exchange.reply(200, orjson.dumps(sources))

    def _tokenize(self, exchange: Exchange) -> None:
        exchange.reply(200, endpoints.tokenize(requests.load_body(exchange.body), self.served))

    def _detokenize(self, exchange: Exchange) -> None:
        exchange.reply(200, endpoints.detokenize(requests.load_body(exchange.body)))

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        done = self.engine.reset_cache(self.now_s)
        exchange.reply(200, orjson.dumps({"success": done}))

    # -- control --------------------------------------------------------------------------------

    def state(self) -> JSON:
        """What the worker is doing and has done since its engine started."""
        engine, totals = self.engine, self.engine.totals
        tokens = engine.block_tokens
        return {
            "name": self.config.name,
            "role": self.config.role,
            "url": self.url,
            "engine_id": engine.engine_id,
            "started_at_s": self.started_at_s,
            "dead": engine.dead,
            "running": engine.running,
            "waiting": engine.waiting,
            "prefilling": engine.prefilling,
            "pulling": engine.pulling,
            "pinned_requests": len(engine.pins),
            "kv_used_tokens": engine.blocks.held * tokens,
            "kv_capacity_tokens": engine.blocks.capacity * tokens,
            "kv_cached_tokens": engine.blocks.known * tokens,
            "cached_tokens_total": totals.cached,
            "computed_tokens_total": totals.computed,
            "external_tokens_total": totals.external,
            "prompt_tokens_total": totals.prompt,
            "output_tokens_total": totals.output,
            "requests_total": totals.requests,
            "aborted_total": totals.aborted,
            "expired_total": totals.expired,
            "preemptions_total": totals.preemptions,
            "transfers_total": totals.transfers,
            "transfer_failures_total": totals.transfer_failures,
            "late_releases_total": totals.late_releases,
            "busy_s": totals.busy_s,
            "open_connections": len(self.connections),
            "faults": self.faults.as_json(),
            "received": list(self.received.items),
        }

    def _control(self, exchange: Exchange, path: str) -> None:
        self.control(exchange, path.removeprefix("/sim/"))

    def control(self, exchange: Exchange, what: str) -> None:
        """The simulator's own endpoints, on the worker's port or through the process's."""
        route = _CONTROL.get((exchange.method, what))
        if route is None:
            exchange.reply(404, _NOT_FOUND)
        else:
            route(self, exchange)

    def _get_state(self, exchange: Exchange) -> None:
        self.pump()
        exchange.reply(200, orjson.dumps(self.state()))

    def _get_faults(self, exchange: Exchange) -> None:
        exchange.reply(200, orjson.dumps(self.faults.as_json()))

    def _post_restart(self, exchange: Exchange) -> None:
        self._background(self.restart(exchange))

    def _put_faults(self, exchange: Exchange) -> None:
        try:
            faults = parse_faults(orjson.loads(exchange.body or b"{}"))
        except (FaultError, orjson.JSONDecodeError) as error:
            exchange.reply(400, orjson.dumps({"detail": str(error)}))
            return
        self._background(self.set_faults(faults, exchange))

    def _put_record(self, exchange: Exchange) -> None:
        """`{"last": n}`: keep the last n requests for /sim/state; 0 keeps none."""
        try:
            limit = int(orjson.loads(exchange.body)["last"])
        except (KeyError, TypeError, ValueError):
            exchange.reply(400, b'{"detail":"want {\\"last\\": n}"}')
            return
        self.received = _Received(limit)
        exchange.reply(200, orjson.dumps({"last": limit}))

    def _post_reset(self, exchange: Exchange) -> None:
        """Counters and cache as new, the engine id kept. 409 while anything runs."""
        self.engine.advance_quietly(self.now_s)
        engine = self.engine
        if engine.running or engine.waiting:
            exchange.reply(409, b'{"detail":"requests are running"}')
            return
        engine.drop_pins()
        engine.reset_cache(self.now_s)
        engine.totals = type(engine.totals)()
        self.observed = metrics.Observations()
        self.received = _Received()
        exchange.reply(200, b"{}")


def _base_id(request_id: str) -> str:
    return request_id.rpartition("-")[0]


_Route = Callable[[Worker, Exchange], None]
_GENERATE: dict[str, requests.Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}
_GET_ROUTES: dict[str, _Route] = {
    "/health": Worker._health,
    "/ping": Worker._health,
    "/version": Worker._version,
    "/v1/models": Worker._models,
    "/load": Worker._load,
    "/metrics": Worker._metrics,
    "/kv_event_sources": Worker._kv_event_sources,
}
_POST_ROUTES: dict[str, _Route] = {
    "/tokenize": Worker._tokenize,
    "/detokenize": Worker._detokenize,
    "/reset_prefix_cache": Worker._reset_prefix_cache,
}
_CONTROL: dict[tuple[str, str], _Route] = {
    ("GET", "state"): Worker._get_state,
    ("GET", "faults"): Worker._get_faults,
    ("PUT", "faults"): Worker._put_faults,
    ("PUT", "record"): Worker._put_record,
    ("POST", "restart"): Worker._post_restart,
    ("POST", "reset"): Worker._post_reset,
}
