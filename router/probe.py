"""Small GET requests to a worker over one kept connection.

A fleet is probed several times a second on the core that also carries the calls. A general HTTP
client costs about a millisecond of CPU per probe; this one costs a tenth of that.
"""

from __future__ import annotations

import asyncio
import errno
import re
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

# vLLM's metrics take 65 KB, and some ten times that with many LoRA adapters and ranks.
MAX_BODY_BYTES = 16 * 1024 * 1024


class ProbeError(Exception):
    """No usable answer. The text is a short reason; `refused` means that nothing listens there."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    reconnected: bool  # the answer came over a connection made for it


class HttpProbe:
    """GETs to one worker, one at a time. `url` is `http://HOST[:PORT]`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or 80
        self._authority = parts.netloc.encode()
        self._connection: _Connection | None = None

    async def get(self, path: str, *, timeout_s: float) -> Reply:
        """Raises ProbeError; the connection is closed then, so that no late answer is mistaken."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._get(path)
        except TimeoutError:
            self.close()
            raise ProbeError(f"no answer within {timeout_s:g} s") from None
        except OSError as error:
            self.close()
            if _refused(error):
                raise ProbeError("connection refused", refused=True) from None
            raise ProbeError(error.strerror or type(error).__name__) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _get(self, path: str) -> Reply:
        request = (
            b"GET " + path.encode() + b" HTTP/1.1\r\nhost: " + self._authority + b"\r\n"
            b"user-agent: pdrouter-probe\r\naccept: */*\r\naccept-encoding: identity\r\n\r\n"
        )
        kept = self._connection
        if kept is not None and kept.reusable:
            try:
                return Reply(*await kept.ask(request), reconnected=False)
            except ConnectionError:
                # The worker closed it between two probes, as servers do with idle connections.
                self.close()
        loop = asyncio.get_running_loop()
        _, fresh = await loop.create_connection(_Connection, self._host, self._port)
        self._connection = fresh
        return Reply(*await fresh.ask(request), reconnected=True)


class _Connection(asyncio.Protocol):
    """One connection; gathers one answer at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body. ConnectionError if the connection ends first."""
        if self._transport is None or not self.reusable:
            raise ConnectionResetError(errno.ECONNRESET, "closed before the answer")
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body.clear()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop transports have its methods without being of its class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(ProbeError("the answer is not HTTP"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(ConnectionResetError(errno.ECONNRESET, "closed before the answer"))

    def on_body(self, body: bytes) -> None:
        if len(self._body) + len(body) > MAX_BODY_BYTES:
            self._fail(ProbeError(f"the answer is longer than {MAX_BODY_BYTES} bytes"))
            return
        self._body += body

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), bytes(self._body)))

    def _fail(self, error: Exception) -> None:
        self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _refused(error: OSError) -> bool:
    """True if every address of the host refused (they are tried one after another)."""
    if error.errno is not None:
        return error.errno == errno.ECONNREFUSED
    # asyncio joins the errors of several addresses into one text.
    return set(re.findall(r"\[Errno (\d+)\]", str(error))) == {str(errno.ECONNREFUSED)}
