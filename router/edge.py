"""The client's connection for the hot endpoints: an HTTP protocol class for uvicorn.

uvicorn's own protocol parses every request and serves all paths but the hot ones, which it hands to
the ASGI application. A POST to a hot path becomes an `Exchange` instead: the body is collected, a
task runs the handler, and what the handler writes goes to the socket without a message in between
(docs/adr/0004-hot-endpoints-below-asgi.md has the measurements). The exchange owns the request:
when the client goes, at whatever moment, the task is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import RouterError, error_event

logger = logging.getLogger("pdrouter")

Handler = Callable[["Exchange"], Awaitable[None]]

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}
# The head of a chunk of each size that an event or two have: formatting one costs as much as
# the rest of sending it.
_CHUNK_HEADS_KNOWN = 2048
_CHUNK_HEADS = [b"%x\r\n" % size for size in range(_CHUNK_HEADS_KNOWN)]
# Requests of one connection that are taken in while an earlier one runs.
_PIPELINED = 16
_STREAM_HEADERS = (
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
)


class Source(Protocol):
    """What feeds a stream, and can be told to wait while the client is slow."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class _NoEvent:
    """Stands where uvicorn keeps the event that wakes an ASGI application."""

    def set(self) -> None: ...


class Exchange:
    """One request of a client and the answer to it.

    The handler reads `path`, `headers`, `body` and `body_is_too_large`, and then either calls
    `respond` once, or `start_stream`, `write` and `end` (or `break_off`). `extra_headers` (whole
    lines) are sent with either. Nothing raises when the client is gone; the handler is cancelled.
    """

    # uvicorn's protocol reads these of whatever it runs.
    message_event = _NoEvent()
    disconnected = False

    def __init__(self, edge: EdgeProtocol, path: bytes, handler: Handler, keep_alive: bool) -> None:
        self.path = path
        self.headers = dict(edge.headers)  # by lower-case name; of equal ones the last
        self.body = b""
        self.body_bytes = 0
        self.body_is_too_large = False  # and so was not kept
        self.extra_headers = b""
        self.source: Source | None = None
        self.keep_alive = keep_alive
        self.chunked = edge.parser.get_http_version() == "1.1"
        self.response_started = False
        self.response_complete = False
        self._edge = edge
        self._transport = edge.transport
        self._handler = handler
        self._pieces: list[bytes] = []
        self._received = False
        self._has_turn = False
        self._task: asyncio.Task[None] | None = None

    # From the protocol

    def feed(self, data: bytes) -> None:
        self.body_bytes += len(data)
        if self.body_bytes <= self._edge.max_body_bytes:
            self._pieces.append(data)
        else:
            self.body_is_too_large = True
            self._pieces.clear()

    def received(self) -> None:
        self.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        self._received = True
        self._start()

    def take_turn(self) -> None:
        self._has_turn = True
        self._edge.running = self
        if not self._received and self.headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._start()

    def gone(self) -> None:
        """The client has left."""
        self.disconnected = True
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        if not (self._received and self._has_turn) or self.disconnected:
            return
        edge = self._edge
        self._task = edge.loop.create_task(self._run())
        edge.tasks.add(self._task)
        self._task.add_done_callback(edge.tasks.discard)

    async def _run(self) -> None:
        try:
            await self._handler(self)
        except RouterError as error:
            self.refuse(error)
        except Exception:
            logger.exception("unexpected failure")
            self.refuse(RouterError("The router failed unexpectedly."))
        finally:
            # A cancelled task keeps its traceback, and that this exchange: a circle with all that
            # the call had in memory.
            self._task = None

    # From the handler

    def refuse(self, error: RouterError) -> None:
        """Say that the call failed: as a response, or inside the stream that has begun."""
        if self.response_started:
            self.break_off(error)
            return
        if error.retry_after_s is not None:
            self.extra_headers += b"retry-after: %d\r\n" % error.retry_after_s
        self.respond(error.status, error.body())

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """Send a whole response."""
        if self.response_started or self.disconnected:
            return
        head = b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body))
        self._transport.write(self._head(status, head) + body)
        self._finish()

    def start_stream(self, data: bytes) -> None:
        """Send the head of an event stream and its first piece."""
        if self.response_started or self.disconnected:
            return
        framing = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        self.keep_alive = self.keep_alive and self.chunked
        head = self._head(200, _STREAM_HEADERS + framing)
        self._transport.write(head + self._framed(data))

    def write(self, data: bytes) -> None:
        """Send a piece of the stream, at once."""
        if not self.disconnected:
            self._transport.write(self._framed(data))

    def end(self) -> None:
        """End the stream well."""
        if self.chunked and not self.disconnected:
            self._transport.write(b"0\r\n\r\n")
        self._finish()

    def break_off(self, error: RouterError) -> None:
        """End the stream with an error event, and the connection with it."""
        self.keep_alive = False
        self.write(error_event(error))
        self.end()

    def _framed(self, data: bytes) -> bytes:
        if not self.chunked:
            return data
        size = len(data)
        head = _CHUNK_HEADS[size] if size < _CHUNK_HEADS_KNOWN else b"%x\r\n" % size
        return b"%b%b\r\n" % (head, data)

    def _head(self, status: int, headers: bytes) -> bytes:
        self.response_started = True
        close = b"" if self.keep_alive else b"connection: close\r\n"
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        default = self._edge.default_headers()
        return b"".join((line, default, headers, self.extra_headers, close, b"\r\n"))

    def _finish(self) -> None:
        if self.response_complete:
            return
        self.response_complete = True
        self.source = None
        self.body = b""  # the connection may idle for long, and holds its last exchange
        if self.disconnected:
            return
        if not self.keep_alive:
            self._transport.close()
        self._edge.on_response_complete()


class EdgeProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the hot paths taken out. Bind the first three in a subclass."""

    hot: Mapping[bytes, Handler] = {}
    max_body_bytes = 0
    client_stall_s = 0.0

    running: Exchange | None = None  # the hot request whose turn it is
    stalled: asyncio.TimerHandle | None = None  # ends a client that does not read

    cycle: Any  # of uvicorn's own kind, or an Exchange
    pipeline: Any

    def default_headers(self) -> bytes:
        """Headers that uvicorn puts before every response (the date), as lines."""
        return b"".join([b"%b: %b\r\n" % header for header in self.server_state.default_headers])

    def on_message_begin(self) -> None:
        # uvicorn also makes the scope of an ASGI request here, which hot requests do not need.
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        path = self.url.partition(b"?")[0]
        handler = self.hot.get(path)
        waits = self.cycle is not None and not self.cycle.response_complete
        if handler is None or self.parser.get_method() != b"POST":
            url, headers = self.url, self.headers
            super().on_message_begin()
            self.url = url
            for header in headers:
                super().on_header(*header)
            super().on_headers_complete()
        else:
            self.cycle = Exchange(self, path, handler, bool(self.parser.should_keep_alive()))
            if waits:
                self.pipeline.appendleft((self.cycle, None))
            else:
                self.cycle.take_turn()
        if waits:
            # A client that leaves is noticed by reading, so some requests are taken in ahead.
            if len(self.pipeline) > _PIPELINED:
                self.flow.pause_reading()
            else:
                self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if isinstance(self.cycle, Exchange):
            self.cycle.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if isinstance(self.cycle, Exchange):
            self.cycle.received()
        else:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, Exchange):
            cycle.take_turn()
        else:
            super()._start_asgi_task(cycle, app)

    def eof_received(self) -> None:
        # A client that has closed its half has left, as far as an API client goes; without this,
        # one that stopped reading would be noticed only when its last bytes were taken.
        self._tell_gone()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tell_gone()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled = self.loop.call_later(self.client_stall_s, self.transport.abort)
        if self.running is not None and self.running.source is not None:
            self.running.source.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stalled is not None:
            self.stalled.cancel()
        if self.running is not None and self.running.source is not None:
            self.running.source.resume_reading()

    def _tell_gone(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
        for exchange in (self.running, self.cycle, *(queued for queued, _ in self.pipeline)):
            if isinstance(exchange, Exchange) and not exchange.response_complete:
                exchange.gone()
