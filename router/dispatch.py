"""The main path: one call, from the client's bytes to the engine's last byte."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from cachemap import Blocks, hash_blocks, read_prompt
from router import openai_protocol as openai
from router.edge import Exchange
from router.errors import (
    BadRequest,
    BodyTooLarge,
    CallFailed,
    ConnectFailed,
    EngineFailed,
    ModelNotFound,
    RouterError,
    StaleConnection,
    TimedOut,
    Unauthorized,
    WorkerFailure,
    WorkersFailed,
    WorkersTimedOut,
)
from router.fleet import Fleet, Held
from router.outcome import Outcome
from router.relay import Relay
from router.upstream import Collected, Connection
from scheduler import Lease, WorkerState

JSON = dict[str, Any]

CHAT = b"/v1/chat/completions"
COMPLETIONS = b"/v1/completions"

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
# Ids are unique across processes, of one length, and cheap.
_ID_PREFIX = os.urandom(10).hex()
_ID_COUNTER = itertools.count(1)
_JOB_IDS = itertools.count(1)  # clients may use one request id for two calls at once
# Headers of the client that engines get to see, beside authorization.
_FORWARDED = (b"traceparent", b"tracestate")
# An engine that has just been sent a decode leg gets this long to come to it. Closed before that,
# it would never tell the prefill worker to let go of the KV; and nobody else may, as long as this
# engine might still fetch it: what it read by then could be another prompt's.
_DECODE_GRACE_S = 0.25
# An engine that was told to stop a prefill gets this long to end the connection.
_LAST_WORD_S = 0.25
_RELEASE_TIMEOUT_S = 5.0
_CLIENT_LEFT = 499


@dataclass(slots=True)
class Call:
    """One call on its way: what the client sent, and what is known of it."""

    exchange: Exchange
    outcome: Outcome
    request_id: str
    raw: bytes
    body: JSON
    fleet: Fleet
    headers: bytes
    blocks: Blocks
    held: Held
    phase: str = "waiting"  # of the running attempt: waiting, prefill, transfer or decode
    prefilled_s: float = 0.0
    excluded: set[str] = field(default_factory=set)

    @property
    def chat(self) -> bool:
        return self.exchange.path == CHAT

    def drop_body(self) -> None:
        """Nothing is retried from here on: a long prompt need not stay for a long answer."""
        self.exchange.body = self.raw = b""
        self.body = {}


class EngineRefused(Exception):
    """The engine found fault with the call itself (4xx): its answer is the client's."""

    def __init__(self, reply: Collected | Relay) -> None:
        super().__init__(reply.status)
        self.reply = reply


class StageFailed(Exception):
    """An attempt ended on `worker`; `kv_unclaimed` holds what prefill left for nobody to fetch."""

    def __init__(
        self, stage: str, worker: WorkerState, failure: WorkerFailure, kv_unclaimed: bytes | None
    ) -> None:
        super().__init__(stage, worker.id, failure.reason)
        self.stage = stage
        self.worker = worker
        self.failure = failure
        self.kv_unclaimed = kv_unclaimed


class Dispatcher:
    """Serves the hot endpoints. `fleets` maps every name and alias of a model to its fleet."""

    def __init__(
        self,
        fleets: Mapping[str, Fleet],
        *,
        keys: frozenset[str],
        max_attempts: int,
        handoff_gap_s: float,
        observe: Callable[[Outcome], None],
        suspect: Callable[[str], None],
    ) -> None:
        self._fleets = fleets
        self._keys = frozenset(b"Bearer " + key.encode() for key in keys)
        self._max_attempts = max_attempts
        self._handoff_gap_s = handoff_gap_s
        self._observe = observe
        self._suspect = suspect
        self._background: set[asyncio.Task[None]] = set()

    async def serve(self, exchange: Exchange) -> None:
        """Serve one call; every call ends in exactly one observed outcome."""
        started_s = time.perf_counter()
        request_id = _request_id(exchange)
        exchange.extra_headers = b"x-request-id: %b\r\n" % request_id.encode()
        outcome = Outcome(request_id=request_id, endpoint=exchange.path.decode())
        try:
            await self._serve(exchange, outcome, request_id)
        except RouterError as error:
            outcome.code = error.status
            if isinstance(error, CallFailed):
                outcome.error = error.reason
            else:
                outcome.rejected = error.reason
            exchange.refuse(error)
        except asyncio.CancelledError:
            outcome.code = _CLIENT_LEFT
            raise
        except BaseException:
            outcome.code, outcome.error = 500, "internal"
            raise
        finally:
            outcome.e2e_s = time.perf_counter() - started_s
            outcome.ended_at = time.time()
            if outcome.ttft_s is not None:  # a clock reading until here
                outcome.ttft_s -= started_s
            self._observe(outcome)

    async def _serve(self, exchange: Exchange, outcome: Outcome, request_id: str) -> None:
        begun_s = time.perf_counter()
        call = self._read(exchange, outcome, request_id)
        try:
            for attempt in range(1, self._max_attempts + 1):
                lease = await self._place(call, attempt)
                if attempt == 1:
                    decided_s = time.perf_counter() - begun_s
                    outcome.decision_s = decided_s - (outcome.queue_wait_s or 0.0)
                try:
                    await self._run(call, lease, attempt)
                    return
                except EngineRefused as refused:
                    _pass_on(call, refused.reply)
                    return
                except StageFailed as failed:
                    self._note_failure(call, lease, failed)
                    if exchange.response_started or attempt == self._max_attempts:
                        raise _final_error(failed, attempt) from failed
                    outcome.retries.append((failed.stage, failed.failure.reason))
                    call.phase = "waiting"
                finally:
                    call.fleet.release(lease)
        except asyncio.CancelledError:
            outcome.disconnect_phase = call.phase
            raise

    def _read(self, exchange: Exchange, outcome: Outcome, request_id: str) -> Call:
        authorization = exchange.headers.get(b"authorization")
        if self._keys and authorization not in self._keys:
            raise Unauthorized("No valid API key was given.", code="invalid_api_key")
        if exchange.body_is_too_large:
            raise BodyTooLarge(
                f"The request body has {exchange.body_bytes} bytes; limits.max_body_bytes allows "
                "no more."
            )
        raw, body = openai.without_forbidden(exchange.body, openai.parse(exchange.body))
        fleet = self._fleet(body)
        outcome.model = fleet.name
        outcome.stream = bool(body.get("stream"))
        raw, body = openai.with_model(raw, body, fleet.name)
        prompt = read_prompt(body, fleet.name)
        blocks = hash_blocks(prompt)
        return Call(
            exchange=exchange,
            outcome=outcome,
            request_id=request_id,
            raw=raw,
            body=body,
            fleet=fleet,
            headers=_forwarded(exchange, None if self._keys else authorization),
            blocks=blocks,
            held=fleet.held(prompt, blocks),
        )

    def _fleet(self, body: JSON) -> Fleet:
        name = body.get("model")
        if not isinstance(name, str):
            raise BadRequest("`model` must be the name of a model.", param="model")
        fleet = self._fleets.get(name)
        if fleet is None:
            raise ModelNotFound(
                f"The model `{name[:128]}` does not exist.", param="model", code="model_not_found"
            )
        return fleet

    async def _place(self, call: Call, attempt: int) -> Lease:
        if attempt > 1:
            call.held = call.fleet.held_now(call.held, call.blocks)
        job = call.fleet.job(
            f"{next(_JOB_IDS)}",
            call.held,
            openai.output_limit(call.body),
            decode_only=openai.needs_one_worker(call.body),
            excluded=frozenset(call.excluded),
        )
        waited_from_s = time.perf_counter()
        lease, call.held = await call.fleet.acquire(job, call.blocks, call.held, len(call.raw))
        outcome, placement = call.outcome, lease.placement
        outcome.queue_wait_s = time.perf_counter() - waited_from_s
        outcome.plan = "pd" if placement.prefill else "decode"
        outcome.prefill_worker = placement.prefill.id if placement.prefill else ""
        outcome.decode_worker = placement.decode.id
        outcome.prompt_tokens = job.prompt_tokens
        outcome.predicted_tokens = placement.cached_tokens
        return lease

    async def _run(self, call: Call, lease: Lease, attempt: int) -> None:
        """One attempt: prefill where planned, then decode, both under one request id."""
        headers = call.headers + b"x-request-id: %b\r\n" % _attempt_id(call, attempt).encode()
        params = None
        if lease.placement.prefill is not None:
            params = await self._prefill(call, lease, lease.placement.prefill, headers)
        if call.outcome.stream:
            await self._decode_stream(call, lease, params, headers)
        else:
            await self._decode_whole(call, lease, params, headers)

    async def _prefill(
        self, call: Call, lease: Lease, worker: WorkerState, headers: bytes
    ) -> bytes | None:
        """Run the prefill leg; what the decode leg needs to fetch the KV, or None."""
        fleet, outcome = call.fleet, call.outcome
        call.phase = "prefill"
        sent_s = time.perf_counter()
        reply = Collected()
        connection: Connection | None = None
        try:
            leg = fleet.handoff.prefill(call.body, call.chat)
            connection = await fleet.upstream(worker).open()
            connection.post(call.exchange.path, headers, leg, reply)
            await reply.whole
            _check(reply)
            answer = orjson.loads(reply.body)
            params = fleet.handoff.transfer_params(answer)
        except WorkerFailure as failure:
            raise StageFailed("prefill", worker, failure, None) from failure
        except (orjson.JSONDecodeError, AttributeError):
            unreadable = EngineFailed("unreadable_reply")
            raise StageFailed("prefill", worker, unreadable, None) from None
        except asyncio.CancelledError:
            self._leave_prefill(call, lease, connection, reply)
            raise
        call.prefilled_s = time.perf_counter()
        outcome.prefill_s = call.prefilled_s - sent_s
        call.phase = "transfer"
        outcome.missing_transfer_params = params is None
        fleet.scheduler.prefill_done(lease, time.monotonic())
        _note_prompt(call, worker, answer.get("usage"))
        return params

    async def _decode_stream(
        self, call: Call, lease: Lease, params: bytes | None, headers: bytes
    ) -> None:
        exchange, outcome, worker = call.exchange, call.outcome, lease.placement.decode
        relay = Relay(_StreamHead(call))
        connection, sent_s = await self._send_decode(call, lease, params, headers, relay)
        exchange.source = connection
        try:
            if not await relay.started:
                _check(relay)
                _pass_on(call, relay)
                return
            call.phase = "decode"
            call.drop_body()
            outcome.ttft_s = relay.first_content_s
            call.fleet.scheduler.decode_started(lease, time.monotonic())
            await relay.finished
        except WorkerFailure as failure:
            connection.cancel(relay)  # where it was the relay that gave up
            raise StageFailed("decode", worker, failure, None) from failure
        except asyncio.CancelledError:
            connection.cancel(relay, 0.0 if relay.status else _grace_left(sent_s))
            raise
        exchange.end()
        outcome.code = 200
        usage = relay.usage
        # Without usage: an event for each token, but for a chat's first (the role) and [DONE].
        _note_output(call, lease, usage, relay.events - (2 if call.chat else 1))
        if outcome.output_tokens > 1:
            span_s = relay.last_content_s - relay.first_content_s
            outcome.tpot_s = span_s / (outcome.output_tokens - 1)

    async def _decode_whole(
        self, call: Call, lease: Lease, params: bytes | None, headers: bytes
    ) -> None:
        worker = lease.placement.decode
        reply = Collected()
        connection, sent_s = await self._send_decode(call, lease, params, headers, reply)
        try:
            await reply.whole
            _check(reply)
        except WorkerFailure as failure:
            raise StageFailed("decode", worker, failure, None) from failure
        except asyncio.CancelledError:
            connection.cancel(reply, _grace_left(sent_s))
            raise
        _pass_on(call, reply)
        usage = _usage_of(reply.body)
        _note_output(call, lease, usage, 0)

    async def _send_decode(
        self,
        call: Call,
        lease: Lease,
        params: bytes | None,
        headers: bytes,
        receiver: Collected | Relay,
    ) -> tuple[Connection, float]:
        """Send the decode leg: the client's own bytes, and where to fetch the KV."""
        fleet, worker = call.fleet, lease.placement.decode
        call.phase = "transfer"
        body = call.raw if params is None else fleet.handoff.decode(call.raw, params)
        try:
            connection = await fleet.upstream(worker).open()
        except WorkerFailure as failure:
            raise StageFailed("decode", worker, failure, params) from failure
        except asyncio.CancelledError:
            self._release_kv(call, worker, params)
            raise
        sent_s = time.perf_counter()
        if params is not None:
            gap_s = call.outcome.handoff_gap_s = sent_s - call.prefilled_s
            if gap_s > self._handoff_gap_s:
                # Past its lease the KV may be another prompt's; the engine would not notice.
                connection.abort()
                raise StageFailed("decode", worker, TimedOut("handoff_gap"), None)
        connection.post(call.exchange.path, headers, body, receiver)
        return connection, sent_s

    # When things go wrong

    def _note_failure(self, call: Call, lease: Lease, failed: StageFailed) -> None:
        placement = lease.placement
        call.fleet.not_arrived(placement.decode, call.blocks, call.held)
        if failed.stage == "prefill":
            call.fleet.not_arrived(failed.worker, call.blocks, call.held)
        if failed.kv_unclaimed is not None:
            self._release_elsewhere(call, failed)
        if isinstance(failed.failure, StaleConnection):
            return  # says nothing about the worker
        call.excluded.add(failed.worker.id)
        if isinstance(failed.failure, EngineFailed) and placement.prefill is not None:
            # A decode worker that fails at once mostly fails to get the KV: doubt both.
            call.excluded.add(placement.prefill.id)
        if isinstance(failed.failure, ConnectFailed):
            failed.worker.up = False
        self._suspect(failed.worker.id)

    def _release_elsewhere(self, call: Call, failed: StageFailed) -> None:
        for worker in call.fleet.workers:
            if worker.up and worker.role == "decode" and worker is not failed.worker:
                self._release_kv(call, worker, failed.kv_unclaimed)
                return

    def _leave_prefill(
        self, call: Call, lease: Lease, connection: Connection | None, reply: Collected
    ) -> None:
        prefill = lease.placement.prefill
        assert prefill is not None
        call.fleet.not_arrived(prefill, call.blocks, call.held)
        call.fleet.not_arrived(lease.placement.decode, call.blocks, call.held)
        if connection is not None:
            reply.listen_again()
            self._spawn(self._end_prefill(call, lease.placement.decode, connection, reply))

    async def _end_prefill(
        self, call: Call, decode: WorkerState, connection: Connection, reply: Collected
    ) -> None:
        """Stop a prefill that nobody waits for; if it has ended at this very moment, free its KV.

        Only our half of the connection is closed at first: an answer that was already on its way
        still arrives, and with it what it takes to free the KV.
        """
        connection.hang_up(reply)
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await reply.whole
            params = call.fleet.handoff.transfer_params(orjson.loads(reply.body))
        except TimeoutError:
            connection.cancel(reply)
        except (WorkerFailure, orjson.JSONDecodeError, AttributeError):
            pass  # nothing was left to fetch
        else:
            self._release_kv(call, decode, params)

    def _release_kv(self, call: Call, worker: WorkerState, params: bytes | None) -> None:
        """Have `worker` fetch the KV that nobody wants, so that its prefill worker is rid of it."""
        if params is None:
            return
        leg = call.fleet.handoff.release(call.body, call.chat, params)
        self._spawn(self._post_release(call, worker, leg))

    async def _post_release(self, call: Call, worker: WorkerState, leg: bytes) -> None:
        headers = call.headers + b"x-request-id: %b-release\r\n" % call.request_id.encode()
        reply = Collected()
        connection = None
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                # On a fresh connection, since a second try could fetch what is not there any more.
                connection = await call.fleet.upstream(worker).connect()
                connection.post(call.exchange.path, headers, leg, reply)
                await reply.whole
        except WorkerFailure:
            pass  # the engine's own lease ends it
        except TimeoutError:
            if connection is not None:
                connection.cancel(reply)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _StreamHead:
    """The relay's client: adds the route to the head of the stream, once it begins."""

    __slots__ = ("_call", "write")

    def __init__(self, call: Call) -> None:
        self._call = call
        self.write = call.exchange.write

    def start_stream(self, data: bytes) -> None:
        _add_route(self._call)
        self._call.exchange.start_stream(data)


def _request_id(exchange: Exchange) -> str:
    given = exchange.headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return f"{_ID_PREFIX}{next(_ID_COUNTER):012x}"


def _attempt_id(call: Call, attempt: int) -> str:
    """Engines tell calls apart by this id, and a handoff is used once: each attempt has its own."""
    return call.request_id if attempt == 1 else f"{call.request_id}-a{attempt}"


def _forwarded(exchange: Exchange, authorization: bytes | None) -> bytes:
    lines = b"" if authorization is None else b"authorization: %b\r\n" % authorization
    for name in _FORWARDED:
        if name in exchange.headers:
            lines += b"%b: %b\r\n" % (name, exchange.headers[name])
    return lines


def _check(reply: Collected | Relay) -> None:
    """Tell a server error, which another worker may not have, from a refusal of the call."""
    if reply.status >= 500 or reply.status == 429:
        raise EngineFailed(f"status_{reply.status}")
    if reply.status >= 400:
        raise EngineRefused(reply)
    if not reply.body:
        raise EngineFailed("empty_reply")


def _pass_on(call: Call, reply: Collected | Relay) -> None:
    """Answer the client with an engine's whole reply."""
    content_type = b"application/json"
    for name, value in reply.headers:
        if name.lower() == b"content-type":
            content_type = value
    _add_route(call)
    call.outcome.code = reply.status
    call.exchange.respond(reply.status, reply.body, content_type)


def _add_route(call: Call) -> None:
    outcome = call.outcome
    cached = outcome.delivered_tokens
    call.exchange.extra_headers += (
        f"x-pdrouter-prefill: {outcome.prefill_worker}\r\n"
        f"x-pdrouter-decode: {outcome.decode_worker}\r\n"
        f"x-pdrouter-queue: {outcome.queue}\r\n"
        f"x-pdrouter-cached-tokens: {outcome.predicted_tokens if cached is None else cached}\r\n"
    ).encode()


def _note_prompt(call: Call, worker: WorkerState, usage: Any) -> None:
    """Compare what was expected of `worker`'s cache with what it says, in its own count."""
    outcome, held = call.outcome, call.held
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not isinstance(counted, int):
        return
    outcome.prompt_tokens = counted
    outcome.delivered_tokens = openai.cached_tokens(usage)
    if not held.by_worker:
        outcome.predicted_tokens = 0
        return
    block, ratio = worker.block_tokens, counted / held.prompt_bytes
    outcome.captured_tokens = int(held.by_worker.get(worker.id, 0) * ratio) // block * block
    outcome.available_tokens = int(max(held.by_worker.values()) * ratio) // block * block
    last_block = (counted - 1) // block * block
    outcome.predicted_tokens = min(outcome.captured_tokens, last_block)


def _note_output(call: Call, lease: Lease, usage: Any, events: int) -> None:
    outcome = call.outcome
    if lease.placement.prefill is None:
        _note_prompt(call, lease.placement.decode, usage)
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    # An engine that was not asked for usage sends about one event for each token.
    outcome.output_tokens = counted if isinstance(counted, int) else max(events, 0)
    call.fleet.learn(call.held, outcome.prompt_tokens, outcome.output_tokens)


def _usage_of(body: bytes) -> Any:
    try:
        return orjson.loads(body).get("usage")
    except (orjson.JSONDecodeError, AttributeError):
        return None


def _grace_left(sent_s: float) -> float:
    return max(0.0, _DECODE_GRACE_S - (time.perf_counter() - sent_s))


def _final_error(failed: StageFailed, attempts: int) -> RouterError:
    kind = WorkersTimedOut if isinstance(failed.failure, TimedOut) else WorkersFailed
    return kind(
        f"The call failed {attempts} times, last in {failed.stage}: {failed.failure.reason}."
    )
