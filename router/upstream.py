"""Connections to workers: a small pooled HTTP/1.1 client on httptools.

It is the request path's only sight of sockets towards engines, and the only place that turns their
faults into `WorkerFailure`. A reply is pushed into a `Receiver` as it arrives; there is no task
and no copy per chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from router.errors import (
    ConnectFailed,
    Disconnected,
    StaleConnection,
    TimedOut,
    WorkerFailure,
)

_TICK_S = 0.5
_IDLE_PER_WORKER = 1024
# More attempts at a time than this overflow a listening socket's backlog, and wait for a second or
# three until the kernel tries again.
_CONNECTING_PER_WORKER = 128


class Receiver(Protocol):
    """Takes one reply; names of headers come as they were sent.

    After `on_end` or `on_failure` nothing more comes.
    """

    def on_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_failure(self, failure: WorkerFailure) -> None: ...


class Upstreams:
    """All connections of this process to workers, and the clock that times them out."""

    def __init__(self, connect_s: float, first_byte_s: float, idle_s: float) -> None:
        self.connect_s = connect_s
        self.first_byte_ticks = _ticks(first_byte_s)
        self.idle_ticks = _ticks(idle_s)
        self.active: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._workers: dict[str, Upstream] = {}

    def worker(self, url: str) -> Upstream:
        """The pool of connections to the worker at `url`."""
        if url not in self._workers:
            self._workers[url] = Upstream(url, self)
        return self._workers[url]

    def watch(self, connection: Connection) -> None:
        self.active.add(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def close(self) -> None:
        """Drop every connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self.active):
            connection.abort()
        for worker in self._workers.values():
            worker.discard_idle()

    def _tick(self) -> None:
        # One walk over the active connections instead of a timer for each chunk of each stream.
        self._timer = None
        for connection in list(self.active):
            connection.tick()
        if self.active:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)


class Upstream:
    """One worker's address and its idle connections, most recently used first."""

    def __init__(self, url: str, owner: Upstreams) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"not an http:// URL: {url}")
        self._address = (parts.hostname, parts.port or 80)
        self.path = parts.path.rstrip("/").encode()
        self.fixed_headers = (
            b" HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n" % parts.netloc.encode()
        )
        self._owner = owner
        self._idle: list[Connection] = []
        self._connecting = asyncio.Semaphore(_CONNECTING_PER_WORKER)
        self._connect_timeouts = 0

    async def open(self) -> Connection:
        """A connection to send one request on, pooled or fresh.

        Raises `ConnectFailed` or `TimedOut`. A pooled one that turns out to be dead fails its
        receiver with `StaleConnection`.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return await self.connect()

    def give_back(self, connection: Connection) -> None:
        if len(self._idle) < _IDLE_PER_WORKER:
            self._idle.append(connection)
        else:
            connection.abort()

    def discard_idle(self) -> None:
        """Close the idle connections: one of them was found dead, and they are of an age."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()

    async def connect(self) -> Connection:
        """A fresh connection. Raises `ConnectFailed` or `TimedOut`."""
        loop = asyncio.get_running_loop()
        timeouts = self._connect_timeouts
        async with self._connecting:
            if timeouts != self._connect_timeouts:  # somebody before us has waited in vain
                raise TimedOut("connect_timeout")
            try:
                async with asyncio.timeout(self._owner.connect_s):
                    _, connection = await loop.create_connection(
                        lambda: Connection(self, self._owner), *self._address
                    )
            except TimeoutError:
                self._connect_timeouts += 1
                raise TimedOut("connect_timeout") from None
            except OSError:
                raise ConnectFailed("connect") from None
        return connection


class Connection(asyncio.Protocol):
    """One connection to a worker, carrying one reply at a time."""

    __slots__ = (
        "_complete", "_headers", "_hung_up", "_keep_alive", "_limit", "_owner", "_parser",
        "_paused", "_pieces", "_pool", "_quiet", "_receiver", "_replies", "_status", "_transport",
    )  # fmt: skip

    def __init__(self, pool: Upstream, owner: Upstreams) -> None:
        self._pool = pool
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._replies = 0
        self._paused = False
        self._hung_up = False
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._complete = False
        self._keep_alive = False
        self._quiet = 0
        self._limit = self._owner.first_byte_ticks

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def post(self, path: bytes, headers: bytes, body: bytes, receiver: Receiver) -> None:
        """Send a request; the reply goes to `receiver`. `headers` are lines, each with CR LF."""
        assert self._transport is not None
        pool = self._pool
        start = b"POST %b%b%b" % (pool.path, path, pool.fixed_headers)
        head = b"%bcontent-length: %d\r\n%b\r\n" % (start, len(body), headers)
        self._reset()
        self._receiver = receiver
        self._owner.watch(self)
        self._transport.writelines((head, body))

    def cancel(self, receiver: Receiver, grace_s: float = 0.0) -> None:
        """End `receiver`'s request by closing, which is how an engine is told; it hears no more.

        With `grace_s` the engine is left that long to come to the request; its first word ends
        the wait. A connection that has moved on to another request is left alone.
        """
        if self._receiver is not receiver:
            return
        if grace_s <= 0:
            self.abort()
            return
        self._receiver = None
        self._owner.active.discard(self)
        asyncio.get_running_loop().call_later(grace_s, self.abort)

    def hang_up(self, receiver: Receiver) -> None:
        """Close our half, if `receiver`'s request is under way: it still gets what comes."""
        if self._receiver is receiver and self.usable:
            self._hung_up = True
            cast(asyncio.Transport, self._transport).write_eof()

    def abort(self) -> None:
        """Close now."""
        self._receiver = None
        self._owner.active.discard(self)
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        if self.usable and not self._paused:
            self._paused = True
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._quiet = 0
            if self.usable:
                cast(asyncio.Transport, self._transport).resume_reading()

    def tick(self) -> None:
        if self._paused:  # it is the client that takes its time
            return
        self._quiet += 1
        if self._quiet > self._limit:
            phase = "idle" if self._status else "first_byte"
            self._fail(TimedOut(f"{phase}_timeout"))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:  # nobody asked: the connection is not to be trusted
            self.abort()
            return
        self._quiet = 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(Disconnected("bad_http"))
            return
        pieces = self._pieces
        if pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._receiver.on_data(body)
        if self._complete:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._receiver is None:
            return
        if exc is None and self._status and not self._has_length():
            self._finish()  # a reply that ends where its connection ends
        elif self._replies and not self._status:
            self._pool.discard_idle()
            self._fail(StaleConnection("stale_connection"))
        else:
            self._fail(Disconnected("disconnected"))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = []
            return
        self._status = status
        self._limit = self._owner.idle_ticks
        if self._receiver is not None:
            self._receiver.on_head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._status:
            self._complete = True
            self._keep_alive = bool(self._parser.should_keep_alive())

    def _has_length(self) -> bool:
        names = {name.lower() for name, _ in self._headers}
        return b"content-length" in names or b"transfer-encoding" in names

    def _finish(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._owner.active.discard(self)
        self._replies += 1
        if self._paused:
            self.resume_reading()
        transport = self._transport
        reusable = self._keep_alive and not self._hung_up
        if transport is not None and reusable and not transport.is_closing():
            self._pool.give_back(self)
        elif transport is not None:
            transport.close()
        if receiver is not None:
            receiver.on_end()

    def _fail(self, failure: WorkerFailure) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.on_failure(failure)


class Collected:
    """Receiver of a reply that is needed whole: await `whole`, then read `status` and `body`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self._pieces: list[bytes] = []
        self.whole: asyncio.Future[Collected] = asyncio.get_running_loop().create_future()

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    def listen_again(self) -> None:
        """Make `whole` awaitable anew, after a wait for it was cancelled."""
        if self.whole.cancelled():
            self.whole = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, headers

    def on_data(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_end(self) -> None:
        self.listen_again()
        if not self.whole.done():
            self.whole.set_result(self)

    def on_failure(self, failure: WorkerFailure) -> None:
        self.listen_again()
        if not self.whole.done():
            self.whole.set_exception(failure)


def _ticks(seconds: float) -> int:
    return max(1, round(seconds / _TICK_S))
