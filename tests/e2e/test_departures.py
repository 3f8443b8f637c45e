"""Clients that leave, at any phase and in any way, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.e2e.cluster import Gateway, Sim, Sims, chat, prompt, until
from tests.fakes import Answer, Received, completion, forward, silent, whole

JSON = dict[str, Any]
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, zero seconds: close() sends RST
GONE_S = 1.0
WAYS = ("close", "half-close", "reset", "sdk")
ways = pytest.mark.parametrize("way", WAYS)
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class Client:
    """A call under way that can be left."""

    def __init__(self, gateway: Gateway, body: JSON, way: str) -> None:
        self._way = way
        self._socket: socket.socket | None = None
        if way == "sdk":
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever)
            self._thread.start()
            self._call = asyncio.run_coroutine_threadsafe(_sdk_call(gateway, body), self._loop)
        else:
            self._socket = send(gateway, body)

    def leave(self) -> None:
        if self._socket is None:
            self._call.cancel()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            # What the cancellation set in motion comes to its end here.
            self._loop.run_until_complete(_rest())
            self._loop.close()
        elif self._way == "half-close":
            self._socket.shutdown(socket.SHUT_WR)
        else:
            if self._way == "reset":
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._socket.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def send(gateway: Gateway, body: JSON) -> socket.socket:
    """A plain connection with the request on it."""
    parts = urlsplit(gateway.url)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Authorization: Bearer {gateway.key}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    sock = socket.create_connection((parts.hostname, parts.port), timeout=20)
    sock.sendall(head.encode() + data)
    return sock


async def _sdk_call(gateway: Gateway, body: Any) -> None:
    transport = openai.DefaultAsyncHttpxClient(verify=False, timeout=30)
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0, http_client=transport
    ) as client:
        answer: Any = await client.chat.completions.create(**body)
        if body.get("stream"):
            async for _ in answer:
                pass


async def _rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


@contextlib.contextmanager
def calling(gateway: Gateway, body: JSON, way: str) -> Iterator[Client]:
    client = Client(gateway, body, way)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(autouse=True)
def nothing_left(sims) -> Iterator[None]:
    """What a test that failed has left on the engines is not the next one's."""
    yield
    for sim in sims.group("p0", "p1", "p2", "p3", "d0", "d1", "d2", "d3"):
        if not sim.idle:
            sim.restart()
            sim.faulty.add(sim.name)


def workers(sims: Sims) -> list[Sim]:
    return sims.group("p0", "p1", "d0", "d1")


def gone(gateway: Gateway, sims: list[Sim], seconds: float = GONE_S) -> None:
    """Engines and books are clean in time."""
    until(lambda: all(sim.idle for sim in sims), seconds, "no work left on the engines")
    until(gateway.at_rest, seconds, "no lease left")


def disconnects(gateway: Gateway) -> Counter[str]:
    return Counter(gateway.page.by("pdrouter_disconnects_total", "phase"))


def left_in(gateway: Gateway, before: Counter[str]) -> set[str]:
    """Phases in which clients have left since; an outcome follows the departure at once."""
    until(lambda: disconnects(gateway) != before, 2, "a disconnect counted")
    return set(disconnects(gateway) - before)


@both
@ways
def test_leaving_while_prefill_runs_ends_it_at_once(gateway, sims, way, stream):
    before = disconnects(gateway)
    expired = [sim.state["expired_total"] for sim in workers(sims)]
    # Two seconds of prefill.
    body = chat(prompt(f"prefill-{way}-{stream}", 14_000), stream=stream)
    with calling(gateway, body, way) as client:
        prefillers = sims.group("p0", "p1")
        until(lambda: any(sim.state["prefilling"] for sim in prefillers), 5, "prefill runs")
        client.leave()
        gone(gateway, workers(sims))
    assert left_in(gateway, before) == {"prefill"}
    assert [sim.state["expired_total"] for sim in workers(sims)] == expired


@both
@ways
def test_leaving_while_decode_runs_ends_it_at_once(gateway, sims, way, stream):
    before = disconnects(gateway)
    body = chat(prompt(f"decode-{way}-{stream}"), stream=stream, max_tokens=8000)
    with calling(gateway, body, way) as client:
        decoders = sims.group("d0", "d1")
        until(
            lambda: any(
                sim.state["output_tokens_total"] and sim.state["running"] for sim in decoders
            ),
            5,
            "decode runs",
        )
        if stream:
            until(
                lambda: gateway.page.total("pdrouter_worker_work_tokens", stage="prefill") == 0,
                2,
                "streaming",
            )
        client.leave()
        gone(gateway, workers(sims))
    assert left_in(gateway, before) <= {"decode", "transfer"}


@ways
def test_leaving_while_waiting_gives_the_place_up(strict, scripted, way):
    """The scripted decode engine has room for one call."""
    scripted.decode.behaviour = silent
    before = disconnects(strict)
    with calling(strict, chat("hello", "scripted"), "close") as first:
        until(lambda: scripted.decode.active == 1, 5, "the first call decodes")
        with calling(strict, chat("hello", "scripted"), way) as second:
            until(lambda: strict.page.total("pdrouter_queue_depth") == 1, 5, "the second waits")
            second.leave()
            until(lambda: strict.page.total("pdrouter_queue_depth") == 0, GONE_S, "waits no more")
        assert left_in(strict, before) == {"waiting"}
        assert len(scripted.decode.received) == 1
        first.leave()
        until(lambda: scripted.decode.active == 0, GONE_S, "upstream closed")


@both
@ways
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_an_engine_that_says_nothing_sees_the_connection_closed(
    gateway, scripted, stage, way, stream
):
    engine = getattr(scripted, stage)
    engine.behaviour = silent
    with calling(gateway, chat("hello", "scripted", stream=stream), way) as client:
        until(lambda: engine.active == 1, 5, "the leg is under way")
        client.leave()
        until(lambda: engine.active == 0, GONE_S, "upstream closed")
        until(gateway.at_rest, GONE_S, "no lease left")


@both
def test_leaving_between_the_legs_frees_what_prefill_keeps(strict, sims, hooked, stream):
    """The client goes as prefill's answer comes; nobody will want its KV."""
    clients: list[Client] = []

    async def leave() -> None:
        await asyncio.to_thread(clients[0].leave)

    for engine, name in zip(hooked.prefill, ("p2", "p3"), strict=True):
        engine.behaviour = forward(sims[name].url, after_all=leave)
    body = chat(prompt(f"between-{stream}"), "hooked", stream=stream)
    with calling(strict, body, "close") as client:
        clients.append(client)
        until(lambda: sum(s.state["requests_total"] for s in sims.group("p2", "p3")), 5, "prefill")
        gone(strict, sims.group("p2", "p3", "d2", "d3"))


@both
def test_leaving_before_decode_took_the_call_leaks_nothing(strict, sims, hooked, stream):
    """The decode engine has the request on its socket and never comes to it.

    As long as it might, nobody may free the KV (it would read another prompt's), so here the end of
    the prefill engine's own lease is the bound: 30 s, on engines of fourfold speed.
    """
    stuck = threading.Event()

    async def stall(request: Received, answer: Answer) -> None:
        stuck.set()
        await answer.gone.wait()

    for engine in hooked.decode:
        engine.behaviour = stall
    body = chat(prompt(f"not-taken-{stream}"), "hooked", stream=stream)
    with calling(strict, body, "close") as client:
        until(stuck.is_set, 5, "the decode leg is sent")
        assert any(sim.state["pinned_requests"] for sim in sims.group("p2", "p3"))
        for engine, name in zip(hooked.decode, ("d2", "d3"), strict=True):
            engine.behaviour = forward(sims[name].url)
        client.leave()
        until(strict.at_rest, GONE_S, "no lease left")
        gone(strict, sims.group("p2", "p3", "d2", "d3"), seconds=30 / 4 + 2)


def test_ten_long_prefills_left_do_not_delay_a_short_one(gateway, sims):
    def ttft_s(number: int) -> float:
        started_s = time.monotonic()
        with contextlib.closing(
            send(gateway, chat(prompt(f"short-{number}"), stream=True, max_tokens=1))
        ) as sock:
            data = b""
            while b"data:" not in data:
                piece = sock.recv(65536)
                assert piece, data
                data += piece
        return time.monotonic() - started_s

    idle_s = min(ttft_s(i) for i in range(3))
    longs = [send(gateway, chat(prompt(f"long-{i}", 12_000))) for i in range(10)]
    prefillers = sims.group("p0", "p1")
    until(
        lambda: (
            sum(
                s.state["requests_total"] > 0 and s.state["running"] + s.state["waiting"]
                for s in prefillers
            )
            >= 10
        ),
        10,
        "all prefill",
    )
    for sock in longs:
        sock.close()
    gone(gateway, workers(sims))
    # Uncancelled they would hold it up for some ten seconds; a step that runs is not interrupted.
    assert ttft_s(9) < idle_s + 0.5


def test_a_thousand_departures_leave_nothing(gateway, sims):  # noqa: PLR0915 # one story
    dice = random.Random(7)
    before = disconnects(gateway)
    expired = [sim.state["expired_total"] for sim in workers(sims)]

    async def depart(number: int, room: asyncio.Semaphore) -> None:
        words = dice.choice((20, 200, 1500))
        body = chat(
            prompt(f"cut-{number}", words),
            stream=dice.random() < 0.7,
            max_tokens=dice.choice((5, 500)),
        )
        data = json.dumps(body).encode()
        delay_s = dice.uniform(0, 0.4) if dice.random() < 0.5 else dice.expovariate(1 / 0.05)
        way = dice.choice(("close", "half-close", "reset"))
        async with room:
            parts = urlsplit(gateway.url)
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
                % (len(data), data)
            )
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(reader.read(-1), min(delay_s, 0.5))
            with contextlib.suppress(OSError):
                if way == "half-close":
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(-1), 2)
                elif way == "reset":
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, RESET
                    )
            writer.transport.abort() if way == "reset" else writer.close()

    async def all_of_them() -> None:
        room = asyncio.Semaphore(32)
        await asyncio.gather(*(depart(i, room) for i in range(1000)))

    asyncio.run(all_of_them())
    until(lambda: all(sim.unworked for sim in workers(sims)), GONE_S, "no work left on the engines")
    until(gateway.at_rest, GONE_S, "no lease left")
    left = disconnects(gateway) - before
    assert sum(left.values()) > 500
    # An answer that was on its way when its client left names KV that nobody hears of: only the
    # lease's end frees it.
    until(lambda: all(sim.idle for sim in workers(sims)), 12, "no KV pinned")
    stranded = sum(sim.state["expired_total"] for sim in workers(sims)) - sum(expired)
    assert stranded <= 10


def test_a_call_that_was_left_ends_in_one_outcome(gateway, scripted):
    scripted.prefill.behaviour = silent
    parts = urlsplit(gateway.url)
    data = json.dumps(chat("hello", "scripted")).encode()
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: once-only\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(data), data)
        )
        until(lambda: scripted.prefill.received, 5, "prefill under way")
    outcome = gateway.outcome("once-only")
    assert (outcome["code"], outcome["disconnect_phase"]) == (499, "prefill")


def test_a_client_that_sends_half_a_body_and_goes_is_no_call(gateway, scripted):
    scripted.decode.behaviour = whole(200, completion())
    before = gateway.page.total("pdrouter_requests_total")
    parts = urlsplit(gateway.url)
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
        )
    gateway.post(chat("hello", "scripted"))
    until(lambda: gateway.page.total("pdrouter_requests_total") == before + 1, 2, "one call")
