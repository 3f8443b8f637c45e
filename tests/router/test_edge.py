"""The client's connection, at the level of its bytes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from router.edge import Exchange
from router.errors import NoWorkers, QueueOverflow, RouterError
from tests.router.wire import (
    HOT,
    listening,
    read_chunk,
    read_head,
    read_response,
    request,
    until,
)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request) -> Callable[[Any], Any]:
    return request.param  # type: ignore[no-any-return]


async def echo(exchange: Exchange) -> None:
    exchange.respond(200, b"got " + exchange.body)


@dataclass(slots=True)
class Gate:
    """A handler that holds every exchange until it is told to answer it."""

    begun: list[Exchange] = field(default_factory=list)
    cancelled: list[Exchange] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, exchange: Exchange) -> None:
        self.begun.append(exchange)
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled.append(exchange)
            raise
        exchange.respond(200, b"got " + exchange.body)


@dataclass(slots=True)
class Source:
    """What feeds a stream; counts how often it was told to wait and to go on."""

    paused: int = 0
    resumed: int = 0

    def pause_reading(self) -> None:
        self.paused += 1

    def resume_reading(self) -> None:
        self.resumed += 1


# Answers


def test_a_whole_response(run):
    async def handler(exchange: Exchange) -> None:
        exchange.extra_headers = b"x-request-id: 7\r\n"
        exchange.respond(201, b"done", b"text/plain")

    async def scenario() -> None:
        async with listening(handler) as edge:
            response = await edge.ask(request())
            assert (response.status, response.body) == (201, b"done")
            assert response.headers == {
                "date": "today",
                "content-type": "text/plain",
                "content-length": "4",
                "x-request-id": "7",
            }

    run(scenario())


def test_the_handler_sees_path_headers_and_body(run):
    async def handler(exchange: Exchange) -> None:
        headers = dict(exchange.headers)
        seen = [exchange.path, headers[b"x-one"], headers.get(b"x-none"), exchange.body]
        exchange.respond(200, repr(seen).encode())

    async def scenario() -> None:
        async with listening(handler) as edge:
            sent = request(b"body", HOT + b"?a=b", headers=b"X-One: 1\r\nx-one: 2\r\n")
            response = await edge.ask(sent)
            assert response.body == repr([HOT, b"2", None, b"body"]).encode()

    run(scenario())


def test_a_stream_is_sent_piece_by_piece(run):
    async def scenario() -> None:
        more = asyncio.Event()

        async def handler(exchange: Exchange) -> None:
            exchange.start_stream(b"data: 1\n\n")
            await more.wait()
            exchange.write(b"data: 2\n\n")
            exchange.end()

        async with listening(handler) as edge, edge.client() as (reader, writer):
            writer.write(request())
            status, headers = await read_head(reader)
            assert status == 200
            assert headers["content-type"].startswith("text/event-stream")
            assert headers["transfer-encoding"] == "chunked"
            assert await read_chunk(reader) == b"data: 1\n\n"
            more.set()
            assert await read_chunk(reader) == b"data: 2\n\n"
            assert await read_chunk(reader) == b""
            writer.write(request())  # the connection lives on
            assert (await read_response(reader)).status == 200

    run(scenario())


@pytest.mark.parametrize(
    "error", [NoWorkers("none"), QueueOverflow("full", retry_after_s=7), RouterError("other")]
)
def test_errors_are_rendered(run, error):
    async def handler(exchange: Exchange) -> None:
        raise error

    async def scenario() -> None:
        async with listening(handler) as edge:
            response = await edge.ask(request())
            assert response.status == error.status
            assert response.headers["content-type"] == "application/json"
            assert json.loads(response.body)["error"]["type"] == error.type
            assert response.headers.get("retry-after") == ("7" if error.retry_after_s else None)

    run(scenario())


def test_an_unexpected_failure_is_logged_and_tells_nothing(run, caplog):
    async def handler(exchange: Exchange) -> None:
        raise RuntimeError("details")

    async def scenario() -> None:
        async with listening(handler) as edge:
            response = await edge.ask(request())
            assert response.status == 500
            assert b"details" not in response.body

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "details" in caplog.text


def test_an_error_behind_the_first_byte_is_an_event_and_the_end(run):
    async def handler(exchange: Exchange) -> None:
        exchange.start_stream(b"data: 1\n\n")
        raise NoWorkers("gone")

    async def scenario() -> None:
        async with listening(handler) as edge, edge.client() as (reader, writer):
            writer.write(request())
            response = await read_response(reader)
            assert response.status == 200
            first, event, rest = response.body.split(b"\n\n")
            assert (first, rest) == (b"data: 1", b"")
            assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "gone"
            assert await reader.read() == b""  # closed

    run(scenario())


def test_only_the_first_answer_counts(run):
    async def handler(exchange: Exchange) -> None:
        exchange.respond(200, b"one")
        exchange.respond(200, b"two")
        exchange.start_stream(b"three")

    async def scenario() -> None:
        async with listening(handler) as edge, edge.client() as (reader, writer):
            writer.write(request(headers=b"connection: close\r\n"))
            assert (await read_response(reader)).body == b"one"
            assert await reader.read() == b""

    run(scenario())


# Connections


def test_a_connection_carries_one_request_after_the_other(run):
    async def scenario() -> None:
        async with listening(echo) as edge, edge.client() as (reader, writer):
            for i in range(5):
                writer.write(request(b"%d" % i))
                assert (await read_response(reader)).body == b"got %d" % i
            assert len(edge.protocols) == 1

    run(scenario())


def test_a_client_that_asks_for_it_is_closed(run):
    async def scenario() -> None:
        async with listening(echo) as edge, edge.client() as (reader, writer):
            writer.write(request(headers=b"connection: close\r\n"))
            response = await read_response(reader)
            assert response.headers["connection"] == "close"
            assert await reader.read() == b""

    run(scenario())


def test_requests_of_one_packet_are_answered_in_their_order(run):
    """Of hot and cold paths, in any mix."""

    async def scenario() -> None:
        async with listening(echo) as edge, edge.client() as (reader, writer):
            writer.write(
                request(b"1")
                + request(b"2")
                + request(b"3", b"/cold")
                + request(b"4")
                + request(b"5", b"/cold")
            )
            bodies = [(await read_response(reader)).body for _ in range(5)]
            assert bodies == [b"got 1", b"got 2", b"POST /cold 3", b"got 4", b"POST /cold 5"]

    run(scenario())


def test_a_request_waits_for_the_answer_before_it(run):
    async def scenario() -> None:
        gate = Gate()
        async with listening(gate) as edge, edge.client() as (reader, writer):
            writer.write(request(b"1") + request(b"2"))
            await until(lambda: gate.begun)
            for _ in range(50):
                await asyncio.sleep(0)
            assert [exchange.body for exchange in gate.begun] == [b"1"]
            gate.opened.set()
            assert [(await read_response(reader)).body for _ in range(2)] == [b"got 1", b"got 2"]

    run(scenario())


def test_a_large_request_behind_another_arrives_whole(run):
    async def scenario() -> None:
        large = b"x" * 500_000
        async with listening(echo) as edge, edge.client() as (reader, writer):
            writer.write(request(b"1") + request(large))
            assert (await read_response(reader)).body == b"got 1"
            assert (await read_response(reader)).body == b"got " + large

    run(scenario())


@pytest.mark.parametrize("keep", [b"", b"connection: keep-alive\r\n"])
def test_http_1_0_gets_a_stream_that_ends_with_its_connection(run, keep):
    async def handler(exchange: Exchange) -> None:
        exchange.start_stream(b"data: 1\n\n")
        exchange.write(b"data: 2\n\n")
        exchange.end()

    async def scenario() -> None:
        async with listening(handler) as edge:
            response = await edge.ask(request(version=b"1.0", headers=keep))
            assert "transfer-encoding" not in response.headers
            assert response.body == b"data: 1\n\ndata: 2\n\n"

    run(scenario())


def test_http_1_0_is_closed_after_a_whole_answer(run):
    async def scenario() -> None:
        async with listening(echo) as edge, edge.client() as (reader, writer):
            writer.write(request(b"1", version=b"1.0"))
            assert (await read_response(reader)).body == b"got 1"
            assert await reader.read() == b""

    run(scenario())


def test_a_client_that_waits_to_be_told_is_told(run):
    async def scenario() -> None:
        async with listening(echo) as edge, edge.client() as (reader, writer):
            sent = request(b"body", headers=b"expect: 100-continue\r\n")
            writer.write(sent[:-4])
            assert (await read_head(reader))[0] == 100
            writer.write(sent[-4:])
            assert (await read_response(reader)).body == b"got body"

    run(scenario())


def test_a_body_in_chunks(run):
    async def scenario() -> None:
        async with listening(echo) as edge, edge.client() as (reader, writer):
            head = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % HOT
            for piece in (head, b"3\r\nab", b"c\r\n2\r\nde\r\n", b"0\r\n\r\n"):
                writer.write(piece)
                await writer.drain()
            assert (await read_response(reader)).body == b"got abcde"

    run(scenario())


def test_what_is_no_http_is_refused(run, caplog):
    async def scenario() -> None:
        async with listening(echo) as edge, edge.client() as (reader, writer):
            writer.write(b"this is not HTTP\r\n\r\n")
            assert (await read_response(reader)).status == 400
            assert await reader.read() == b""

    run(scenario())


# Large bodies


def test_a_body_as_large_as_allowed(run):
    async def scenario() -> None:
        async with listening(echo, max_body_bytes=100_000) as edge:
            response = await edge.ask(request(b"x" * 100_000))
            assert (response.status, len(response.body)) == (200, 100_004)

    run(scenario())


@pytest.mark.parametrize("with_length", [True, False])
def test_a_larger_one_is_not_kept_and_the_handler_is_told(run, with_length):
    seen: list[tuple[bool, int, bytes]] = []

    async def measure(exchange: Exchange) -> None:
        seen.append((exchange.body_is_too_large, exchange.body_bytes, exchange.body))
        exchange.respond(200, b"seen")

    async def scenario() -> None:
        body = b"x" * 300_001
        sent = request(body)
        if not with_length:
            head = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % HOT
            sent = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        async with listening(measure, max_body_bytes=100_000) as edge:
            async with edge.client() as (reader, writer):
                for data in (sent, request(b"x" * 100_000)):
                    writer.write(data)
                    assert (await read_response(reader)).body == b"seen"
        assert seen == [(True, 300_001, b""), (False, 100_000, b"x" * 100_000)]

    run(scenario())


def test_of_one_too_large_no_piece_is_kept(run):
    """Not even while the rest of it still comes."""

    async def scenario() -> None:
        async with listening(echo, max_body_bytes=100_000) as edge:
            async with edge.client() as (_, writer):
                writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n" % HOT)
                writer.write(b"x" * 300_000)
                await until(lambda: edge.protocols and edge.protocols[0].cycle is not None)
                exchange = edge.protocols[0].cycle
                await until(lambda: exchange.body_bytes == 300_000)
                assert exchange.body_is_too_large
                assert exchange._pieces == []

    run(scenario())


# Clients that leave


async def leave_by_abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def leave_by_close(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def leave_by_half(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


LEAVING = [leave_by_abort, leave_by_close, leave_by_half]


@pytest.mark.parametrize("leave", LEAVING)
def test_a_client_that_leaves_cancels_its_call(run, leave):
    async def scenario() -> None:
        gate = Gate()
        async with listening(gate) as edge, edge.client() as (_, writer):
            writer.write(request(b"1"))
            await until(lambda: gate.begun)
            await leave(writer)
            await until(lambda: gate.cancelled)
            exchange = gate.begun[0]
            assert exchange.disconnected
            exchange.respond(200, b"to nobody")
            exchange.start_stream(b"to nobody")
            exchange.write(b"to nobody")
            exchange.end()
            await until(lambda: not edge.state.tasks)

    run(scenario())


@pytest.mark.parametrize("leave", LEAVING)
def test_a_client_that_leaves_its_stream_cancels_its_call(run, leave):
    async def scenario() -> None:
        cancelled = asyncio.Event()

        async def handler(exchange: Exchange) -> None:
            exchange.start_stream(b"data: 1\n\n")
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with listening(handler) as edge, edge.client() as (reader, writer):
            writer.write(request())
            await read_head(reader)
            await leave(writer)
            async with asyncio.timeout(5):
                await cancelled.wait()

    run(scenario())


def test_a_client_that_leaves_before_its_body_is_there_starts_nothing(run):
    async def scenario() -> None:
        gate = Gate()
        async with listening(gate) as edge:
            async with edge.client() as (_, writer):
                writer.write(request(b"x" * 1000)[:-10])
                await until(lambda: edge.protocols and edge.protocols[0].cycle)
            await until(lambda: not edge.state.connections)
            assert not gate.begun

    run(scenario())


@pytest.mark.parametrize("leave", LEAVING)
def test_all_requests_of_a_client_that_leaves_are_over(run, leave):
    """Those that wait behind another one, and the one that runs."""

    async def scenario() -> None:
        gate = Gate()
        async with listening(gate) as edge, edge.client() as (_, writer):
            writer.write(request(b"1") + request(b"2") + request(b"3"))
            await until(lambda: gate.begun)
            await leave(writer)
            await until(lambda: gate.cancelled, timeout_s=0.5)
            assert [exchange.body for exchange in gate.begun] == [b"1"]

    run(scenario())


# Slow readers


async def flood(exchange: Exchange, source: Source, limit: int = 1 << 26) -> int:
    """Write until the source is told to wait; how much that was."""
    exchange.source = source
    piece = b"x" * 65_536
    exchange.start_stream(piece)
    written = len(piece)
    while source.paused == source.resumed and written < limit:
        exchange.write(piece)
        written += len(piece)
        await asyncio.sleep(0)
    return written


def test_the_source_waits_for_a_slow_reader_and_goes_on_with_it(run):
    async def scenario() -> None:
        source = Source()
        written = []
        done = asyncio.Event()

        async def handler(exchange: Exchange) -> None:
            written.append(await flood(exchange, source))
            await done.wait()
            exchange.end()

        async with listening(handler) as edge, edge.client() as (reader, writer):
            writer.write(request())
            await until(lambda: written)
            assert written[0] < 1 << 26  # the sockets' own buffers, and little more
            assert (source.paused, source.resumed) == (1, 0)
            await read_head(reader)
            size = 0
            while size < written[0]:
                size += len(await read_chunk(reader))
            await until(lambda: source.resumed == 1)
            done.set()
            assert await read_chunk(reader) == b""

    run(scenario())


def test_the_source_waits_also_when_another_request_is_behind(run):
    async def scenario() -> None:
        source = Source()
        written = []

        async def handler(exchange: Exchange) -> None:
            written.append(await flood(exchange, source))
            await asyncio.Event().wait()

        async with listening(handler) as edge, edge.client() as (_, writer):
            writer.write(request(b"1") + request(b"2"))
            await until(lambda: written, timeout_s=20)
            assert source.paused == 1

    run(scenario())


def test_a_client_that_reads_nothing_for_too_long_is_gone(run):
    async def scenario() -> None:
        cancelled = asyncio.Event()

        async def handler(exchange: Exchange) -> None:
            await flood(exchange, Source())
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with listening(handler, client_stall_s=0.05) as edge, edge.client() as (_, writer):
            writer.write(request())
            async with asyncio.timeout(10):
                await cancelled.wait()
            await until(lambda: not edge.state.connections)

    run(scenario())


# Cold paths


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        (b"GET", b"/health", b"GET /health "),
        (b"POST", b"/other", b"POST /other body"),
        (b"GET", HOT, b"GET /v1/chat/completions "),
        (b"POST", HOT + b"/more", b"POST /v1/chat/completions/more body"),
    ],
)
def test_all_else_goes_to_the_application(run, method, path, said):
    async def scenario() -> None:
        async with listening(echo) as edge:
            body = b"body" if method == b"POST" else b""
            assert (await edge.ask(request(body, path, method=method))).body == said

    run(scenario())


def test_hot_and_cold_share_a_connection(run):
    async def scenario() -> None:
        async with listening(echo) as edge, edge.client() as (reader, writer):
            for _ in range(2):
                writer.write(request(b"", b"/health", method=b"GET"))
                assert (await read_response(reader)).body == b"GET /health "
                writer.write(request(b"1"))
                assert (await read_response(reader)).body == b"got 1"

    run(scenario())


def test_a_server_that_stops_lets_a_call_finish(run):
    async def scenario() -> None:
        gate = Gate()
        async with listening(gate) as edge, edge.client() as (reader, writer):
            writer.write(request(b"1"))
            await until(lambda: gate.begun)
            edge.protocols[0].shutdown()
            gate.opened.set()
            response = await read_response(reader)
            assert (response.status, response.headers["connection"]) == (200, "close")
            assert await reader.read() == b""

    run(scenario())


def test_a_promise_to_continue_does_not_break_into_an_answer(run):
    """A client sends the next request, which waits to be told, while it still reads a stream."""

    async def scenario() -> None:
        more = asyncio.Event()

        async def handler(exchange: Exchange) -> None:
            if exchange.body == b"2":
                exchange.respond(200, b"second")
                return
            exchange.start_stream(b"data: 1\n\n")
            await more.wait()
            exchange.write(b"data: 2\n\n")
            exchange.end()

        async with listening(handler) as edge, edge.client() as (reader, writer):
            writer.write(request(b"1"))
            await read_head(reader)
            assert await read_chunk(reader) == b"data: 1\n\n"
            writer.write(request(b"2", headers=b"expect: 100-continue\r\n"))
            await until(lambda: edge.protocols[0].pipeline)
            more.set()
            async with asyncio.timeout(5):
                assert await reader.readuntil(b"0\r\n\r\n") == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"

    run(scenario())
