"""Clients that leave: ways of walking away from a call, each as a real client does it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import openai

JSON = dict[str, Any]
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, zero seconds: close() sends RST


class Leaver(Protocol):
    """A client with a call under way. `leave` returns when the departure is on the wire."""

    async def start(self) -> None: ...

    async def leave(self) -> None: ...

    async def clean_up(self) -> None: ...


class SocketLeaver:
    """A raw connection that is closed, reset, or closed for writing only."""

    def __init__(self, url: str, body: JSON, way: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        payload = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        self._request = head.encode() + payload
        self._way = way
        self._drain: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        reader, self._writer = await asyncio.open_connection(self._host, self._port)
        self._writer.write(self._request)
        await self._writer.drain()
        self._drain = asyncio.create_task(_read_all(reader))

    async def leave(self) -> None:
        assert self._writer is not None
        if self._way == "half-close":
            self._writer.write_eof()
            return
        if self._way == "reset":
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._writer.transport.abort()
        else:
            self._writer.close()
        await asyncio.sleep(0)

    async def clean_up(self) -> None:
        assert self._writer is not None
        self._writer.transport.abort()
        if self._drain is not None:
            await asyncio.wait([self._drain], timeout=5)


class SdkLeaver:
    """The OpenAI client: its stream is closed, or the call is cancelled before there is one."""

    def __init__(self, client: openai.AsyncOpenAI, body: JSON) -> None:
        self._client = client
        self._body = dict(body)
        self._task: asyncio.Task[None] | None = None
        self._stream: Any = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._call())
        await asyncio.sleep(0)

    async def _call(self) -> None:
        self._stream = await self._client.chat.completions.create(**self._body)
        if self._body.get("stream"):
            async for _ in self._stream:
                pass

    async def leave(self) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, openai.OpenAIError):
            await self._task
        if self._body.get("stream") and self._stream is not None:
            await self._stream.close()

    async def clean_up(self) -> None:
        """Nothing is left: cancelling or closing gave the connection up."""


async def _read_all(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


WAYS = ("close", "reset", "half-close", "sdk")


@dataclass(frozen=True, slots=True)
class Cut:
    """One departure to make: what is asked, how it is left, and when."""

    way: str
    body: JSON
    delay_s: float


def cut(dice: random.Random, number: int, model: str, longest_s: float, *, heavy: bool) -> Cut:
    """A random one; prompts are unique, so that every prefill is work.

    A heavy one asks for much KV, so that a few of them fill a decode worker.
    """
    words = 6000 if heavy else dice.choice((100, 1500, 6000))
    text = f"{number} " + " ".join(f"{dice.randrange(1 << 16):04x}" for _ in range(words))
    body: JSON = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 2000 if heavy else dice.choice((50, 2000)),
        "stream": dice.random() < 0.7,
    }
    # Half of the cuts come early, where the phases before the first token are.
    delay_s = dice.uniform(0, longest_s) if dice.random() < 0.5 else dice.expovariate(1 / 0.05)
    return Cut(dice.choice(WAYS), body, min(delay_s, longest_s))
