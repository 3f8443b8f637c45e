"""HTTP/1.1 on a socket: requests in, responses and event streams out, at little cost.

A connection keeps reading while it answers, so that a client that leaves, closed or half closed,
is noticed at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from time import time
from typing import cast

import httptools

Handler = Callable[["Exchange"], None]

MAX_BODY_BYTES = 256 << 20
# Requests that a client may send ahead of the answers to earlier ones.
_MAX_PIPELINED = 64

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_STREAM_HEAD = (
    b"content-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class _Clock:
    """The two headers that every response has, rendered once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._lines = b""

    def lines(self) -> bytes:
        second = int(time())
        if second != self._second:
            self._second = second
            date = formatdate(second, usegmt=True)
            self._lines = f"date: {date}\r\nserver: uvicorn\r\n".encode()
        return self._lines


_clock = _Clock()


class Exchange:
    """One request and its response."""

    __slots__ = (
        "_connection",
        "_last",
        "body",
        "done",
        "headers",
        "method",
        "on_gone",
        "on_writable",
        "path",
        "streaming",
    )

    def __init__(
        self,
        connection: Connection,
        method: str,
        path: str,
        headers: dict[bytes, bytes],
        body: bytes,
        last: bool,
    ) -> None:
        self._connection = connection
        self._last = last
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.streaming = False
        self.done = False
        self.on_gone: Callable[[], None] | None = None
        "Called once if the client leaves before the response is complete."
        self.on_writable: Callable[[], None] | None = None
        "Called when a client that reads slowly has caught up."

    def header(self, name: bytes) -> str | None:
        """A request header by its lower-case name."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def writable(self) -> bool:
        """The client keeps up with what is sent."""
        return self._connection.writable

    def reply(
        self,
        status: int,
        body: bytes = b"",
        content_type: str | None = "application/json",
        extra: bytes = b"",
    ) -> None:
        """The whole response."""
        head = [_STATUS_LINES[status], _clock.lines(), extra]
        head.append(b"content-length: %d\r\n" % len(body))
        if content_type and body:
            head.append(b"content-type: %b\r\n" % content_type.encode())
        if self._last:
            head.append(b"connection: close\r\n")
        head.append(b"vary: Origin\r\n\r\n")
        head.append(body)
        self._connection.write(b"".join(head))
        self._finish()

    def open_stream(self) -> None:
        """Status 200 and the headers of an event stream."""
        self.streaming = True
        close = b"connection: close\r\n" if self._last else b""
        self._connection.write(b"".join((_STATUS_LINES[200], _clock.lines(), close, _STREAM_HEAD)))

    def send(self, events: list[bytes], *, last: bool = False) -> None:
        """Events of a stream, each a chunk of its own, in one write."""
        parts = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
        if last:
            parts.append(b"0\r\n\r\n")
        self._connection.write(b"".join(parts))
        if last:
            self._finish()

    def close_after(self) -> None:
        """The connection ends with this response, and the response says so."""
        self._last = True

    def cut(self) -> None:
        """Drop the connection where it is."""
        self.done = True
        self._connection.abort()

    def _finish(self) -> None:
        self.done = True
        self.on_gone = self.on_writable = None
        self._connection.finished(self, close=self._last)


class Connection(asyncio.Protocol):
    """One client connection. `connections` lists all that are open, for the server's use."""

    def __init__(self, handle: Handler, connections: set[Connection]) -> None:
        self._handle = handle
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._current: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self.writable = True

    # -- transport ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(426)
        except httptools.HttpParserError:
            self._refuse(400)

    def eof_received(self) -> bool | None:
        return None  # a client that half closes has gone: asyncio closes the transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None
        current, self._current = self._current, None
        self._queue.clear()
        if current is not None and not current.done:
            current.done = True
            if current.on_gone is not None:
                current.on_gone()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self._current is not None and self._current.on_writable is not None:
            self._current.on_writable()

    # -- what an exchange uses ------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close after what is written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def finished(self, exchange: Exchange, *, close: bool) -> None:
        self._current = None
        if close:
            self.close()
        elif self._queue:
            self._current = self._queue.popleft()
            self._handle(self._current)

    def _refuse(self, status: int) -> None:
        self.write(_STATUS_LINES[status] + b"connection: close\r\ncontent-length: 0\r\n\r\n")
        self.close()

    # -- parser ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._refuse(413)
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        exchange = Exchange(
            self,
            self._parser.get_method().decode(),
            self._url.decode("latin-1"),
            self._headers,
            b"".join(self._body) if len(self._body) != 1 else self._body[0],
            not self._parser.should_keep_alive(),
        )
        self._body = []
        if self._current is None:
            self._current = exchange
            self._handle(exchange)
        elif len(self._queue) < _MAX_PIPELINED:
            self._queue.append(exchange)
        else:
            self._refuse(400)
