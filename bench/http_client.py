"""A small HTTP/1.1 client on asyncio protocols, cheap enough that the load it makes is not the
thing that is measured, and exact about when bytes arrived.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

clock_s = time.perf_counter


class Listener(Protocol):
    """Receives one reply as it comes; exactly one of `ended` and `failed` closes it."""

    def started(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def body(self, data: bytes) -> None: ...

    def ended(self) -> None: ...

    def failed(self, reason: str) -> None: ...


class Connection(asyncio.Protocol):
    """One keep-alive connection; one exchange at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._listener: Listener | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: dict[bytes, bytes] = {}
        self._keep_alive = False
        self.transport: asyncio.Transport | None = None

    def send(self, head: bytes, body: bytes, listener: Listener) -> None:
        assert self.transport is not None
        self._listener = listener
        self._headers = {}
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(head + body)

    def abort(self) -> None:
        """Reset the connection; the reply, if any is pending, fails."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._listener is None:
            self.abort()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"bad HTTP: {type(error).__name__}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._fail("connection lost" if exc is None else type(exc).__name__)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._listener is not None:
            self._listener.started(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        if self._listener is not None:
            self._listener.body(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        keep = self._parser.should_keep_alive()
        listener, self._listener, self._parser = self._listener, None, None
        if listener is not None:
            listener.ended()
        if keep:
            self._pool.put(self)
        elif self.transport is not None:
            self.transport.close()

    def _fail(self, reason: str) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.failed(reason)


class Pool:
    """Connections to one host; opens a new one when none is idle."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 80
        self.prefix = parts.path.rstrip("/")
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()

    def head(self, path: str, length: int, headers: Iterable[tuple[str, str]] = ()) -> bytes:
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers)
        return (
            f"POST {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nAccept: */*\r\n{extra}"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()

    def idle(self) -> Connection | None:
        """A connection that is open already, if one is free."""
        return self._idle.pop() if self._idle else None

    async def take(self) -> Connection:
        connection = self.idle()
        if connection is not None:
            return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self), self.host, self.port)
        self._all.add(connection)
        return connection

    async def warm(self, connections: int) -> None:
        """Have that many connections open and idle."""
        for connection in [await self.take() for _ in range(connections)]:
            self.put(connection)

    def put(self, connection: Connection) -> None:
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in list(self._all):
            connection.abort()
