"""A mock engine for measuring a router's own cost: answers at once, or streams on a common tick.

    python -m bench.rig_engine 9101 9201:prefill 9301:decode

One port is one worker. `GET /_ctl?itl_us=N&reset=1` sets the time between streamed events;
`GET /_stats` counts requests and handoff legs by port. An engine compiled to machine code costs
less; this one needs nothing but Python.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import httptools
import orjson

JSON = dict[str, Any]
_DATE = "date: Mon, 01 Jan 2035 00:00:00 GMT\r\nserver: rig\r\n"
_STREAM_HEAD = (
    f"HTTP/1.1 200 OK\r\n{_DATE}content-type: text/event-stream; charset=utf-8\r\n"
    "transfer-encoding: chunked\r\n\r\n"
).encode()
_USAGE = {"prompt_tokens": 256, "completion_tokens": 4, "total_tokens": 260}


@dataclass(slots=True)
class Counts:
    role: str
    reqs: int = 0
    nixl_prefill: int = 0
    nixl_decode_ok: int = 0


class Engine:
    """State that all ports share: the tick, and who streams on it."""

    def __init__(self) -> None:
        self.itl_s = 0.0
        self.counts: dict[int, Counts] = {}
        self._streams: set[Stream] = set()
        self._ticking = False

    def add(self, stream: Stream) -> None:
        self._streams.add(stream)
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(self.itl_s, self._tick)

    def drop(self, stream: Stream) -> None:
        self._streams.discard(stream)

    def _tick(self) -> None:
        for stream in list(self._streams):
            stream.emit()
        self._ticking = bool(self._streams)
        if self._ticking:
            asyncio.get_running_loop().call_later(self.itl_s, self._tick)

    def control(self, query: str) -> None:
        settings = parse_qs(query)
        if "itl_us" in settings:
            self.itl_s = int(settings["itl_us"][0]) / 1e6
        if "reset" in settings:
            for counts in self.counts.values():
                counts.reqs = counts.nixl_prefill = counts.nixl_decode_ok = 0


def _event(delta: JSON, finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    payload = orjson.dumps(
        {
            "id": "chatcmpl-rig",
            "object": "chat.completion.chunk",
            "created": 1767225600,
            "model": "mock",
            "choices": [choice],
        }
    )
    return _chunk(b"data: " + payload + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_FIRST = _event({"role": "assistant", "content": ""}, None)
_MIDDLE = _event({"content": " token"}, None)
_LAST = _event({}, "length")
_DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Stream:
    """One streamed answer of `tokens` events."""

    def __init__(self, engine: Engine, transport: asyncio.Transport, tokens: int) -> None:
        self._engine = engine
        self._transport = transport
        self._left = tokens
        transport.write(_STREAM_HEAD + _FIRST)
        if engine.itl_s > 0:
            engine.add(self)
            return
        while self._left:
            self.emit()

    def emit(self) -> None:
        self._left -= 1
        if self._left > 0:
            self._transport.write(_MIDDLE)
            return
        self._transport.write(_MIDDLE + _LAST + _DONE)
        self._engine.drop(self)


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine, port: int) -> None:
        self._engine = engine
        self._port = port
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._engine.drop(self._stream)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        url = urlsplit(self._url.decode())
        if url.path.endswith("/completions"):
            self._complete(orjson.loads(b"".join(self._body)))
        elif url.path == "/_ctl":
            self._engine.control(url.query)
            self._reply({})
        elif url.path == "/_stats":
            self._reply({str(port): asdict(c) for port, c in self._engine.counts.items()})
        elif url.path == "/v1/models":
            model = {"id": "mock", "object": "model", "owned_by": "vllm", "max_model_len": 1 << 20}
            self._reply({"object": "list", "data": [model]})
        elif url.path == "/version":
            self._reply({"version": "0.33.0"})
        else:
            self._reply({})

    def _complete(self, body: JSON) -> None:
        counts = self._engine.counts[self._port]
        counts.reqs += 1
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            counts.nixl_prefill += 1
            self._reply(_whole(1) | {"kv_transfer_params": _handoff(self._port)})
            return
        counts.nixl_decode_ok += bool(params.get("remote_engine_id"))
        tokens = body.get("max_tokens") or 16
        if body.get("stream"):
            self._stream = Stream(self._engine, self._transport, tokens)
        else:
            self._reply(_whole(tokens))

    def _reply(self, document: JSON) -> None:
        body = orjson.dumps(document)
        head = f"HTTP/1.1 200 OK\r\n{_DATE}content-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def _whole(tokens: int) -> JSON:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " token" * tokens},
        "finish_reason": "length",
    }
    return {
        "id": "chatcmpl-rig",
        "object": "chat.completion",
        "created": 1767225600,
        "model": "mock",
        "choices": [choice],
        "usage": _USAGE,
    }


def _handoff(port: int) -> JSON:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[11, 12, 13, 14]],
        "remote_engine_id": f"engine-{port}",
        "remote_request_id": "chatcmpl-rig-1",
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "tp_size": 1,
        "remote_num_tokens": 256,
    }


async def serve(ports: Sequence[tuple[int, str]]) -> None:
    engine = Engine()
    loop = asyncio.get_running_loop()
    for port, role in ports:
        engine.counts[port] = Counts(role)
        await loop.create_server(lambda p=port: Connection(engine, p), "127.0.0.1", port)  # type: ignore[misc]  # mypy infers no type for the default
    await asyncio.Event().wait()


def main(arguments: Sequence[str]) -> None:
    import uvloop

    split = (argument.partition(":") for argument in arguments)
    uvloop.run(serve([(int(port), role or "regular") for port, _, role in split]))


if __name__ == "__main__":
    main(sys.argv[1:])
