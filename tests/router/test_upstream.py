"""The client of workers, against a small server whose every byte is scripted."""

from __future__ import annotations

import asyncio
import socket
import struct
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from router.errors import (
    ConnectFailed,
    Disconnected,
    StaleConnection,
    TimedOut,
    WorkerFailure,
)
from router.upstream import Collected, Connection, Upstream, Upstreams

Script = Callable[[Reader, Writer], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


def says(*pieces: bytes, close: bool = False) -> Script:
    """Write the pieces; then, perhaps, close."""

    async def script(reader: Reader, writer: Writer) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if close:
            writer.close()

    return script


async def says_nothing(reader: Reader, writer: Writer) -> None:
    """Leave the request without an answer."""


async def hangs_up(reader: Reader, writer: Writer) -> None:
    writer.close()


async def resets(reader: Reader, writer: Writer) -> None:
    writer.transport.abort()


@dataclass(slots=True)
class Server:
    """Runs the next of `scripts` for each request, the last one over and over."""

    scripts: list[Script]
    connections: int = 0
    closed: int = 0
    requests: list[bytes] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def serve(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await self.note(head + await reader.readexactly(size))
                script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
                await script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.closed += 1
            await self.note(None)

    async def note(self, request: bytes | None) -> None:
        if request is not None:
            self.requests.append(request)
        async with self.changed:
            self.changed.notify_all()

    async def until(self, happened: Callable[[], bool]) -> None:
        async with self.changed, asyncio.timeout(5):
            await self.changed.wait_for(happened)


@dataclass(frozen=True, slots=True)
class Line:
    """A server and the client's view of it."""

    server: Server
    worker: Upstream
    owner: Upstreams

    async def post(self, receiver: Any = None) -> tuple[Connection, Collected]:
        reply = Collected() if receiver is None else receiver
        connection = await self.worker.open()
        connection.post(b"/v1/completions", b"x-request-id: r\r\n", b"{}", reply)
        return connection, reply

    async def ask(self) -> Collected:
        _, reply = await self.post()
        async with asyncio.timeout(5):
            return await reply.whole


@asynccontextmanager
async def line_to(*scripts: Script, host: str = "127.0.0.1", path: str = "") -> AsyncIterator[Line]:
    server = Server(list(scripts))
    listening = await asyncio.start_server(server.serve, host, 0)
    port = listening.sockets[0].getsockname()[1]
    owner = Upstreams(connect_s=2.0, first_byte_s=30.0, idle_s=10.0)
    netloc = f"[{host}]" if ":" in host else host
    try:
        yield Line(server, owner.worker(f"http://{netloc}:{port}{path}"), owner)
    finally:
        owner.close()
        listening.close()
        await server.until(lambda: server.closed == server.connections)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request) -> Callable[[Any], Any]:
    return request.param  # type: ignore[no-any-return]


def failure_of(run: Any, *scripts: Script, good: int = 0) -> WorkerFailure:
    """The failure of a request, after `good` ones on the same line."""

    async def scenario() -> WorkerFailure:
        async with line_to(*scripts) as line:
            for _ in range(good):
                await line.ask()
            with pytest.raises(WorkerFailure) as caught:
                await line.ask()
            assert not line.owner.active
            return caught.value

    return run(scenario())  # type: ignore[no-any-return]


def reply_of(run: Any, *scripts: Script) -> Collected:
    async def scenario() -> Collected:
        async with line_to(*scripts) as line:
            return await line.ask()

    return run(scenario())  # type: ignore[no-any-return]


async def until_closed(connection: Connection) -> None:
    """Let the loop run until the connection has noticed."""
    async with asyncio.timeout(5):
        for _ in range(1_000_000):
            if not connection.usable:
                return
            await asyncio.sleep(0)


@contextmanager
def crowded_address() -> Iterator[str]:
    """An address that accepts no connection: its backlog is full."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# Requests


def test_a_request_to_the_byte(run):
    async def scenario() -> bytes:
        async with line_to(says(OK), path="/base/") as line:
            await line.ask()
            return line.server.requests[0]

    head, _, body = run(scenario()).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v1/completions HTTP/1.1"
    assert lines[1].startswith(b"host: 127.0.0.1:")
    assert sorted(lines[2:]) == [
        b"content-length: 2",
        b"content-type: application/json",
        b"x-request-id: r",
    ]
    assert body == b"{}"


def test_a_worker_on_ipv6(run):
    async def scenario() -> bytes:
        async with line_to(says(OK), host="::1") as line:
            await line.ask()
            return line.server.requests[0]

    assert b"host: [::1]:" in run(scenario())


@pytest.mark.parametrize("url", ["https://host:1", "host:1", "ftp://host", "http://"])
def test_other_addresses_are_refused(url):
    with pytest.raises(ValueError, match="http://"):
        Upstreams(1, 1, 1).worker(url)


def test_one_pool_per_address():
    owner = Upstreams(1, 1, 1)
    assert owner.worker("http://a:1") is owner.worker("http://a:1")
    assert owner.worker("http://a:1") is not owner.worker("http://a:2")


def test_a_large_body_arrives_whole(run):
    async def scenario() -> int:
        async with line_to(says(OK)) as line:
            reply = Collected()
            connection = await line.worker.open()
            connection.post(b"/", b"", b"x" * 5_000_000, reply)
            async with asyncio.timeout(10):
                await reply.whole
            return len(line.server.requests[0])

    assert run(scenario()) > 5_000_000


# Replies


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([OK], b"ok"),
        ([HEAD + b"content-length: 0\r\n\r\n"], b""),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
        ([HEAD + b"content-length: 4\r\n\r\n", b"ab", b"cd"], b"abcd"),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n"], b"abcd"),
        (
            [
                HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
                b"4;ext=1\r",
                b"\nab",
                b"cd\r\n0\r\n\r\n",
            ],
            b"abcd",
        ),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], b"ok"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + OK], b"ok"),
        ([b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK], b"ok"),
    ],
)
def test_framings(run, pieces, body):
    reply = reply_of(run, says(*pieces))
    assert reply.body == body
    assert reply.status in (200, 204)
    assert not [name for name, _ in reply.headers if name == b"link"]


def test_a_reply_that_ends_with_its_connection(run):
    reply = reply_of(run, says(HEAD + b"\r\n", b"all ", b"of it", close=True))
    assert reply.body == b"all of it"


def test_headers_are_handed_on(run):
    reply = reply_of(run, says(b"HTTP/1.1 400 Bad\r\nX-Thing: A b\r\nContent-Length: 0\r\n\r\n"))
    assert reply.status == 400
    assert (b"x-thing", b"A b") in [(name.lower(), value) for name, value in reply.headers]


def test_a_chunked_reply_cut_at_every_byte(run):
    async def scenario() -> None:
        whole = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        async with line_to(says(OK)) as line:
            for place in range(1, len(whole)):
                line.server.scripts[:] = [says(whole[:place], whole[place:])]
                assert (await line.ask()).body == b"abc"
            assert line.server.connections == 1

    run(scenario())


# Connections


def test_a_connection_is_used_again(run):
    async def scenario() -> None:
        async with line_to(says(OK)) as line:
            for _ in range(5):
                assert (await line.ask()).body == b"ok"
            assert line.server.connections == 1
            assert not line.owner.active

    run(scenario())


def test_requests_at_once_have_connections_of_their_own(run):
    async def scenario() -> None:
        async with line_to(says(OK)) as line:
            await asyncio.gather(*(line.ask() for _ in range(8)))
            assert 1 < line.server.connections <= 8
            before = line.server.connections
            await asyncio.gather(*(line.ask() for _ in range(before)))
            assert line.server.connections == before

    run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    ],
)
def test_a_connection_that_will_close_is_not_used_again(run, answer):
    async def scenario() -> None:
        async with line_to(says(answer)) as line:
            for _ in range(2):
                assert (await line.ask()).body == b"ok"
            assert line.server.connections == 2

    run(scenario())


def test_a_connection_closed_while_idle_is_replaced_unnoticed(run):
    async def scenario() -> None:
        async with line_to(says(OK, close=True)) as line:
            connection, reply = await line.post()
            await reply.whole
            await until_closed(connection)
            assert (await line.ask()).body == b"ok"
            assert line.server.connections == 2

    run(scenario())


def test_a_pooled_connection_that_proves_dead_is_stale(run):
    for dead in (hangs_up, resets):
        failure = failure_of(run, says(OK), dead, good=1)
        assert isinstance(failure, StaleConnection)


def test_after_a_stale_connection_the_next_request_has_a_fresh_one(run):
    async def scenario() -> None:
        async with line_to(says(OK), hangs_up, says(OK)) as line:
            await line.ask()
            with pytest.raises(StaleConnection):
                await line.ask()
            assert (await line.ask()).body == b"ok"
            assert line.server.connections == 2

    run(scenario())


def test_unasked_words_on_an_idle_connection_end_it(run):
    async def scenario() -> None:
        spoken = asyncio.Event()

        async def speaks_up(reader: Reader, writer: Writer) -> None:
            writer.write(OK)
            await spoken.wait()
            writer.write(OK)

        async with line_to(speaks_up, says(OK)) as line:
            connection, reply = await line.post()
            await reply.whole
            spoken.set()
            await until_closed(connection)
            assert (await line.ask()).body == b"ok"
            assert line.server.connections == 2

    run(scenario())


# Failures


def test_a_refused_connection(run):
    async def scenario() -> None:
        listening = await asyncio.start_server(says(OK), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        listening.close()
        await listening.wait_closed()
        with pytest.raises(ConnectFailed):
            await Upstreams(2, 2, 2).worker(f"http://127.0.0.1:{port}").open()

    run(scenario())


def test_a_connection_that_nobody_accepts(run):
    async def scenario() -> None:
        with crowded_address() as url:
            with pytest.raises(TimedOut, match="connect_timeout"):
                await Upstreams(0.1, 2, 2).worker(url).open()

    run(scenario())


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (hangs_up, "disconnected"),
        (resets, "disconnected"),
        (says(b"HTTP/1.1 200", close=True), "disconnected"),
        (says(HEAD + b"content-length: 10\r\n\r\nhalf", close=True), "disconnected"),
        (says(HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nab", close=True), "disconnected"),
        (says(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n", close=True), "disconnected"),
        (says(b"this is not HTTP\r\n\r\n"), "bad_http"),
        (says(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"), "bad_http"),
        (says(HEAD + b"content-length: x\r\n\r\n"), "bad_http"),
    ],
)
def test_broken_replies(run, script, reason):
    failure = failure_of(run, script)
    assert isinstance(failure, Disconnected)
    assert not isinstance(failure, StaleConnection)
    assert failure.reason == reason


def test_an_end_that_is_a_reset_is_no_end(run):
    """Of a reply that lasts as long as its connection."""

    async def scenario() -> None:
        seen = asyncio.Event()

        async def cut_short(reader: Reader, writer: Writer) -> None:
            writer.write(HEAD + b"\r\nhalf")
            await seen.wait()
            linger = struct.pack("ii", 1, 0)  # a close with this is a reset
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

        async with line_to(cut_short) as line:
            reply = Seen()
            await line.post(reply)
            await reply.until(lambda: reply.data == b"half")
            seen.set()
            with pytest.raises(Disconnected):
                async with asyncio.timeout(5):
                    await reply.whole

    run(scenario())


def test_silence_before_the_first_byte_times_out(run):
    async def scenario() -> None:
        async with line_to(says_nothing) as line:
            line.owner.first_byte_ticks = 1
            with pytest.raises(TimedOut, match="first_byte_timeout"):
                await line.ask()
            await line.server.until(lambda: line.server.closed == 1)

    run(scenario())


@dataclass(slots=True)
class Seen(Collected):
    """A receiver that can be waited for."""

    data: bytes = b""
    ended: bool = False
    pauses: Callable[[], None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        Collected.__init__(self)

    def on_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        Collected.on_head(self, status, headers)
        self.changed.set()

    def on_data(self, data: bytes) -> None:
        self.data += data
        self.changed.set()
        if self.pauses is not None:
            self.pauses()

    def on_end(self) -> None:
        self.ended = True
        Collected.on_end(self)

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not happened():
                self.changed.clear()
                await self.changed.wait()


def test_silence_within_a_reply_times_out(run):
    """Ticks are counted from the last byte."""

    async def scenario() -> None:
        more = asyncio.Event()

        async def in_two(reader: Reader, writer: Writer) -> None:
            writer.write(HEAD + b"content-length: 9\r\n\r\nab")
            await more.wait()
            writer.write(b"cd")

        async with line_to(in_two) as line:
            reply = Seen()
            line.owner.idle_ticks, line.owner.first_byte_ticks = 50, 5
            connection, _ = await line.post(reply)
            await reply.until(lambda: reply.data == b"ab")
            for _ in range(45):
                connection.tick()
            more.set()
            await reply.until(lambda: reply.data == b"abcd")
            for _ in range(45):
                connection.tick()
            assert not reply.whole.done()
            for _ in range(6):
                connection.tick()
            with pytest.raises(TimedOut, match="idle_timeout"):
                await reply.whole

    run(scenario())


def test_the_clock_stops_when_nothing_runs(run):
    async def scenario() -> None:
        async with line_to(says(OK)) as line:
            await line.ask()
            assert not line.owner.active

    run(scenario())


# Leaving


def test_after_abort_the_receiver_hears_nothing(run):
    async def scenario() -> None:
        async with line_to(says_nothing) as line:
            connection, reply = await line.post()
            await line.server.until(lambda: len(line.server.requests) == 1)
            connection.abort()
            await line.server.until(lambda: line.server.closed == 1)
            assert not reply.whole.done()
            assert not line.owner.active
            connection.abort()  # twice is once
            connection.pause_reading()
            connection.resume_reading()

    run(scenario())


def test_cancelled_without_grace_is_aborted(run):
    async def scenario() -> None:
        async with line_to(says_nothing) as line:
            connection, reply = await line.post()
            connection.cancel(reply)
            assert not connection.usable
            assert not reply.whole.done()

    run(scenario())


def test_grace_leaves_an_engine_time_to_come_to_the_call(run):
    async def scenario() -> None:
        async with line_to(says_nothing) as line:
            connection, reply = await line.post()
            connection.cancel(reply, 0.05)
            assert connection.usable
            assert not line.owner.active
            await line.server.until(lambda: len(line.server.requests) == 1)
            await line.server.until(lambda: line.server.closed == 1)
            assert not connection.usable
            assert not reply.whole.done()

    run(scenario())


def test_the_engines_first_word_ends_the_grace(run):
    async def scenario() -> None:
        word = asyncio.Event()

        async def waits(reader: Reader, writer: Writer) -> None:
            await word.wait()
            writer.write(HEAD + b"\r\n")
            await writer.drain()

        async with line_to(waits) as line:
            connection, reply = await line.post()
            await line.server.until(lambda: len(line.server.requests) == 1)
            connection.cancel(reply, 60.0)
            word.set()
            await line.server.until(lambda: line.server.closed == 1)
            assert reply.status == 0
            assert not reply.whole.done()

    run(scenario())


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_cancelling_what_has_ended_leaves_the_connection_to_others(run, grace_s):
    async def scenario() -> None:
        async with line_to(says(OK)) as line:
            connection, reply = await line.post()
            await reply.whole
            connection.cancel(reply, grace_s)
            again, second = await line.post()
            assert again is connection
            connection.cancel(reply, grace_s)
            assert (await second.whole).body == b"ok"
            assert line.server.connections == 1

    run(scenario())


def test_closing_drops_every_connection(run):
    async def scenario() -> None:
        async with line_to(says(OK), says_nothing) as line:
            await line.ask()
            connection, _ = await line.post()
            other, _ = await line.post()
            line.owner.close()
            assert not connection.usable
            assert not other.usable
            assert not line.owner.active

    run(scenario())


# Backpressure


def test_a_paused_reply_waits_and_loses_nothing(run):
    size = 16 << 20

    async def scenario() -> None:
        async with line_to(says(HEAD + b"content-length: %d\r\n\r\n" % size, b"x" * size)) as line:
            reply = Seen()
            connection, _ = await line.post(reply)
            await reply.until(lambda: bool(reply.data))
            connection.pause_reading()
            stopped_at = len(reply.data)
            for _ in range(200):
                await asyncio.sleep(0)
            # uvloop may still hand over what it had read.
            assert len(reply.data) <= stopped_at + (1 << 20)
            connection.resume_reading()
            async with asyncio.timeout(10):
                await reply.whole
            assert len(reply.data) == size

    run(scenario())


def test_a_connection_paused_by_its_last_packet_reads_the_next_reply(run):
    """The packet that fills a slow client's buffer may be the reply's last."""

    async def scenario() -> None:
        async with line_to(says(OK)) as line:
            reply = Seen()
            connection = None

            def pause() -> None:
                assert connection is not None
                connection.pause_reading()

            reply.pauses = pause
            connection, _ = await line.post(reply)
            async with asyncio.timeout(5):
                await reply.whole
            async with asyncio.timeout(1):
                _, second = await line.post()
                assert (await second.whole).body == b"ok"

    run(scenario())


def test_a_paused_reply_does_not_time_out(run):
    """It is the client that is slow, not the worker."""

    async def scenario() -> None:
        async with line_to(says(HEAD + b"content-length: 9\r\n\r\nab")) as line:
            reply = Seen()
            connection, _ = await line.post(reply)
            await reply.until(lambda: reply.data == b"ab")
            connection.pause_reading()
            for _ in range(line.owner.idle_ticks + 2):
                connection.tick()
            assert not reply.whole.done()

    run(scenario())


# Receivers


def test_a_collected_reply_ends_once():
    async def scenario() -> None:
        reply = Collected()
        reply.on_head(200, ())
        reply.on_data(b"a")
        reply.on_data(b"b")
        reply.on_end()
        reply.on_failure(Disconnected("late"))
        reply.on_end()
        assert (await reply.whole) is reply
        assert reply.body == b"ab"
        failed = Collected()
        failed.on_failure(Disconnected("gone"))
        failed.on_end()
        with pytest.raises(Disconnected):
            await failed.whole

    asyncio.run(scenario())


def test_a_cancelled_wait_for_a_reply_can_be_taken_up_again():
    async def scenario() -> None:
        reply = Collected()
        reply.on_head(200, ())
        reply.whole.cancel()
        reply.listen_again()
        reply.on_data(b"ab")
        reply.on_end()
        assert (await reply.whole).body == b"ab"
        reply.listen_again()  # it has ended: nothing more is awaited
        assert (await reply.whole) is reply
        failed = Collected()
        failed.on_failure(Disconnected("gone"))
        failed.listen_again()
        with pytest.raises(Disconnected):
            await failed.whole

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", [None, Disconnected("gone")])
def test_a_reply_that_ends_between_two_waits_is_kept(failure):
    """The wait is cancelled in the turn of the loop in which the reply ends."""

    async def scenario() -> None:
        reply = Collected()
        reply.whole.cancel()
        if failure is None:
            reply.on_end()
        else:
            reply.on_failure(failure)
        reply.listen_again()
        assert reply.whole.done()
        reply.whole.exception()

    asyncio.run(scenario())
