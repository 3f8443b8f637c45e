"""Small real objects that stand in for what a test wants to hold in its hand."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httptools
import httpx

JSON = dict[str, Any]
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# Headers of one connection only, and the length of a body that is framed anew.
_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "transfer-encoding"})


class LoopThread:
    """An event loop in a thread of its own, so that plain tests can have servers beside them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
        """Run a coroutine there and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        self.run(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    async def _cancel_all(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came in."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> JSON:
        return dict(json.loads(self.body))


class Answer:
    """The engine's side of one request. `gone` is set when the other side has closed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.gone = asyncio.Event()
        self.whole = False
        self._transport = transport

    def reply(
        self, status: int, body: bytes, content_type: str = "application/json", extra: str = ""
    ) -> None:
        """A whole response."""
        head = (
            f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\n"
            f"content-length: {len(body)}\r\n{extra}\r\n"
        )
        self.whole = True
        self._transport.write(head.encode() + body)

    def open_stream(self) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    def send(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.whole = True
        self._transport.write(b"0\r\n\r\n")

    def raw(self, data: bytes) -> None:
        """Bytes as they are, HTTP or not."""
        self._transport.write(data)

    def cut(self) -> None:
        """Break the connection off."""
        self._transport.abort()

    def close(self) -> None:
        """End the connection well."""
        self._transport.close()


Behaviour = Callable[[Received, Answer], Awaitable[None]]


@dataclass(slots=True)
class ScriptedEngine:
    """An engine whose answers to calls a test scripts, by setting `behaviour`.

    Probes are answered as a healthy vLLM does. `received` holds the calls, `active` the number of
    behaviours that run. With `probes_through`, probes are those of the engine behind it.
    """

    model: str
    behaviour: Behaviour
    capacity_tokens: int = 1_000_000
    probes_through: str = ""
    received: list[Received] = field(default_factory=list)
    active: int = 0
    backlog: int = 4096
    url: str = ""
    _listener: socket.socket | None = None
    _accepting: asyncio.Task[None] | None = None
    _connections: set[_Connection] = field(default_factory=set)

    async def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=self.backlog)
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        await self.accept()

    async def accept(self) -> None:
        """Take connections, after `pause`."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def pause(self) -> None:
        """Take no more connections: they wait in the backlog, and beyond it for a reaction."""
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            await loop.connect_accepted_socket(lambda: _Connection(self), sock)

    async def stop(self) -> None:
        await self.pause()
        assert self._listener is not None
        self._listener.close()
        for connection in list(self._connections):
            connection.abort()

    def hang_up(self) -> None:
        """Break off all that runs."""
        for connection in list(self._connections):
            connection.abort_soon()

    async def handle(self, request: Received, answer: Answer) -> None:
        if request.path.startswith("/v1/") and request.method == "POST":
            self.received.append(request)
            self.active += 1
            try:
                await self.behaviour(request, answer)
            finally:
                self.active -= 1
        elif self.probes_through:
            async with httpx.AsyncClient(trust_env=False, verify=False) as client:
                found = await client.get(self.probes_through + request.path)
            kind = found.headers.get("content-type", "text/plain")
            answer.reply(found.status_code, found.content, kind)
        else:
            answer.reply(200, self._probe(request.path))

    def _probe(self, path: str) -> bytes:
        pages = {
            "/v1/models": json.dumps(
                {"object": "list", "data": [{"id": self.model, "max_model_len": 100_000}]}
            ),
            "/version": '{"version":"0.33.0"}',
            "/metrics": (
                f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="'
                f'{self.capacity_tokens // 16}",kv_cache_size_tokens="{self.capacity_tokens}"}} 1\n'
                f"process_start_time_seconds 1000\n"
            ),
        }
        return pages.get(path, "").encode()


class _Connection(asyncio.Protocol):
    """Serves one request after the other; each runs as a task that ends with the connection."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []

    def abort_soon(self) -> None:
        """`abort`, from any thread."""
        if self._task is not None and not self._task.done():
            self._loop.call_soon_threadsafe(self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._engine._connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine._connections.discard(self)
        if self._answer is not None:
            self._answer.gone.set()
        if self._task is not None:
            self._task.cancel()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        assert self._transport is not None
        method = self._parser.get_method().decode()
        request = Received(method, self._path.decode(), self._headers, b"".join(self._pieces))
        self._begin()
        self._answer = Answer(self._transport)
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._engine.handle(request, self._answer))


# Behaviours. Each is, or makes, a function of the request and the answer.


def whole(status: int, body: JSON | bytes) -> Behaviour:
    """Answer with one body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def behave(request: Received, answer: Answer) -> None:
        answer.reply(status, data)

    return behave


def events(*pieces: bytes, then: str = "end", apart_s: float = 0.0) -> Behaviour:
    """Stream the pieces; then `end` well, `cut` the connection, `close` it or stay `silent`."""

    async def behave(request: Received, answer: Answer) -> None:
        answer.open_stream()
        for piece in pieces:
            answer.send(piece)
            await asyncio.sleep(apart_s)
        if then == "end":
            answer.end()
        elif then == "cut":
            # What was sent is on its way before the reset overtakes it.
            await asyncio.sleep(0.05)
            answer.cut()
        elif then == "close":
            answer.close()
        else:
            await answer.gone.wait()

    return behave


async def silent(request: Received, answer: Answer) -> None:
    """Accept and never answer."""
    await answer.gone.wait()


async def hang_up(request: Received, answer: Answer) -> None:
    """Read the request, then break the connection off without a word."""
    answer.cut()


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """The first request gets the first behaviour, and so on; the last one is for all others."""
    left = list(behaviours)

    async def behave(request: Received, answer: Answer) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(request, answer)

    return behave


def forward(
    url: str,
    *,
    after_reply: Callable[[], Awaitable[None]] | None = None,
    after_all: Callable[[], Awaitable[None]] | None = None,
) -> Behaviour:
    """Hand the request to the engine at `url` and its answer back, whole or as it streams.

    `after_reply` runs between the last byte of the engine's whole answer and the first that goes
    back, `after_all` behind that.
    """

    async def behave(request: Received, answer: Answer) -> None:
        headers = {k: v for k, v in request.headers.items() if k not in _HOP_BY_HOP}
        async with (
            httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as client,
            client.stream(
                "POST", url + request.path, content=request.body, headers=headers
            ) as found,
        ):
            kind = found.headers["content-type"]
            if not kind.startswith("text/event-stream"):
                body = await found.aread()
                if after_reply is not None:
                    await after_reply()
                answer.reply(found.status_code, body, kind)
                if after_all is not None:
                    await after_all()
                return
            answer.open_stream()
            async for piece in found.aiter_raw():
                answer.send(piece)
            answer.end()

    return behave


# What engines say.


def event(body: JSON) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def chunk(delta: JSON, finish: str | None = None) -> bytes:
    """One event of a streamed chat completion."""
    return event(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
    )


ROLE = chunk({"role": "assistant", "content": ""})
ERROR = event(
    {
        "error": {
            "message": "Internal server error",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }
)


def completion(text: str = "yes", **more: Any) -> JSON:
    """A whole chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
        **more,
    }


def handoff_params(number: int = 1, **more: Any) -> JSON:
    """What a prefill engine says of the KV it keeps."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[number, number + 1]],
        "remote_engine_id": "scripted",
        "remote_request_id": f"chatcmpl-{number}",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        **more,
    }


def prefilled(number: int = 1, **more: Any) -> JSON:
    """The answer to a prefill leg."""
    return completion("x", kv_transfer_params=handoff_params(number, **more))
