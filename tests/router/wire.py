"""HTTP as bytes: for tests that look at the wire itself."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from router.edge import EdgeProtocol, Handler

HOT = b"/v1/chat/completions"
ALSO_HOT = b"/v1/completions"


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes


async def read_head(reader: StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")[:-2]
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split(" ")[1]), headers


async def read_chunk(reader: StreamReader) -> bytes:
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size)
    assert await reader.readexactly(2) == b"\r\n"
    return data


async def read_response(reader: StreamReader) -> Response:
    """One response, however it is framed."""
    async with asyncio.timeout(10):
        status, headers = await read_head(reader)
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            body = b""
            while piece := await read_chunk(reader):
                body += piece
        else:
            body = await reader.read()
        return Response(status, headers, body)


def request(
    body: bytes = b"{}",
    path: bytes = HOT,
    *,
    version: bytes = b"1.1",
    method: bytes = b"POST",
    headers: bytes = b"",
) -> bytes:
    return b"%b %b HTTP/%b\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (
        method,
        path,
        version,
        headers,
        len(body),
        body,
    )


async def until(happened: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Let the loop run until something is so."""
    async with asyncio.timeout(timeout_s):
        for _ in range(10_000_000):
            if happened():
                return
            await asyncio.sleep(0)


async def cold_app(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that says what it was asked."""
    message = await receive()
    said = f"{scope['method']} {scope['path']} ".encode() + message["body"]
    length = str(len(said)).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    )
    await send({"type": "http.response.body", "body": said})


@dataclass(slots=True)
class Edge:
    """A listening edge; `protocols` are its connections, in their order."""

    port: int
    protocols: list[EdgeProtocol]
    state: ServerState

    @asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def ask(self, data: bytes) -> Response:
        async with self.client() as (reader, writer):
            writer.write(data)
            return await read_response(reader)


@asynccontextmanager
async def listening(
    handler: Handler,
    *,
    max_body_bytes: int = 1 << 20,
    client_stall_s: float = 60.0,
    app: Any = cold_app,
) -> AsyncIterator[Edge]:
    """uvicorn's side of a connection, with `handler` on the hot paths."""
    hot = {HOT: handler, ALSO_HOT: handler}
    limits = {"max_body_bytes": max_body_bytes, "client_stall_s": client_stall_s}
    bound = type("Bound", (EdgeProtocol,), {"hot": hot, **limits})
    config = uvicorn.Config(app, http=bound, lifespan="off", log_config=None, access_log=False)
    config.load()
    state = ServerState()
    state.default_headers = [(b"date", b"today")]
    protocols: list[EdgeProtocol] = []

    def connected() -> EdgeProtocol:
        protocols.append(bound(config=config, server_state=state, app_state={}))
        return protocols[-1]

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    edge = Edge(server.sockets[0].getsockname()[1], protocols, state)
    try:
        yield edge
    finally:
        server.close()
        for task in list(state.tasks):
            task.cancel()
        for connection in list(state.connections):
            connection.transport.abort()
        await until(lambda: not state.tasks and not state.connections)
        for protocol in protocols:
            protocol._unset_keepalive_if_required()
