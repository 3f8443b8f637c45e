"""As much of ZeroMQ's wire protocol (ZMTP 3.0, NULL mechanism) as publishing events takes.

Two kinds of socket: one that publishes to whoever subscribes, and one that answers requests with
any number of messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import cast

Frames = list[bytes]

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
# A subscriber that is this far behind loses messages, as beyond a high-water mark.
_MAX_BEHIND_BYTES = 64 << 20
_MAX_FRAME_BYTES = 1 << 20


def frame(data: bytes, flags: int = 0) -> bytes:
    if len(data) < 256:
        return bytes((flags, len(data))) + data
    return bytes((flags | _LONG,)) + len(data).to_bytes(8, "big") + data


def message(frames: Sequence[bytes]) -> bytes:
    last = len(frames) - 1
    return b"".join(frame(data, _MORE if i < last else 0) for i, data in enumerate(frames))


def _ready(socket_type: str) -> bytes:
    name, value = b"Socket-Type", socket_type.encode()
    body = b"\x05READY" + bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
    return frame(body, _COMMAND)


class _Connection(asyncio.Protocol):
    """One peer: greets, then hands over whole messages."""

    def __init__(self, socket: _Socket) -> None:
        self._socket = socket
        self._buffer = b""
        self._greeted = False
        self._frames: Frames = []
        self.ready = False
        self.topics: list[bytes] = []
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(_GREETING)
        self._socket.peers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._socket.peers.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._greeted:
            if len(self._buffer) < len(_GREETING):
                return
            self._greet()
        while self.transport is not None and (taken := self._take_frame()) is not None:
            self._on_frame(*taken)

    def _greet(self) -> None:
        assert self.transport is not None
        greeting, self._buffer = self._buffer[:64], self._buffer[64:]
        self._greeted = True
        if greeting[0] != 0xFF or greeting[10] < 3 or not greeting[12:].startswith(b"NULL\0"):
            self.transport.close()
            return
        self.transport.write(_ready(self._socket.kind))

    def _take_frame(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        flags, head = buffer[0], 2
        size = buffer[1]
        if flags & _LONG:
            head = 9
            if len(buffer) < head:
                return None
            size = int.from_bytes(buffer[1:9], "big")
        if size > _MAX_FRAME_BYTES:
            assert self.transport is not None
            self.transport.abort()
            return None
        if len(buffer) < head + size:
            return None
        self._buffer = buffer[head + size :]
        return flags, buffer[head : head + size]

    def _on_frame(self, flags: int, data: bytes) -> None:
        if flags & _COMMAND:
            self._on_command(data)
            return
        self._frames.append(data)
        if not flags & _MORE:
            frames, self._frames = self._frames, []
            self._socket.on_message(self, frames)

    def _on_command(self, data: bytes) -> None:
        name, rest = data[1 : 1 + data[0]], data[1 + data[0] :]
        if name == b"READY":
            self.ready = True
        elif name == b"SUBSCRIBE":
            self._socket.on_message(self, [b"\x01" + rest])
        elif name == b"CANCEL":
            self._socket.on_message(self, [b"\x00" + rest])
        elif name == b"PING" and self.transport is not None:
            self.transport.write(frame(b"\x04PONG" + rest[2:], _COMMAND))


class _Socket:
    """A listening port of one kind of socket."""

    kind = ""

    def __init__(self) -> None:
        self.peers: set[_Connection] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for peer in list(self.peers):
            if peer.transport is not None:
                peer.transport.abort()

    def on_message(self, peer: _Connection, frames: Frames) -> None:
        """A whole message of a peer."""


class Publisher(_Socket):
    """A PUB socket. Subscribers get what is published after they subscribed."""

    kind = "PUB"

    def on_message(self, peer: _Connection, frames: Frames) -> None:
        verb, topic = frames[0][:1], frames[0][1:]
        if verb == b"\x01":
            peer.topics.append(topic)
        elif verb == b"\x00" and topic in peer.topics:
            peer.topics.remove(topic)

    def publish(self, frames: Sequence[bytes]) -> None:
        """Send to all whose subscription the first frame starts with."""
        data = message(frames)
        for peer in self.peers:
            transport = peer.transport
            if transport is None or not any(frames[0].startswith(t) for t in peer.topics):
                continue
            if transport.get_write_buffer_size() <= _MAX_BEHIND_BYTES:
                transport.write(data)


class Replier(_Socket):
    """A ROUTER socket that answers each request with messages to the one who asked."""

    kind = "ROUTER"

    def __init__(self, answer: Callable[[Frames], Iterable[Sequence[bytes]]]) -> None:
        super().__init__()
        self._answer = answer

    def on_message(self, peer: _Connection, frames: Frames) -> None:
        if peer.transport is not None:
            peer.transport.write(b"".join(message(reply) for reply in self._answer(frames)))
