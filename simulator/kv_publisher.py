"""Publishes KV cache events over ZeroMQ as vLLM does. Needs the extra `events`.

Batches are numbered, encoded as MessagePack and published; the last ones are kept, and sent again
to a consumer that missed some and asks for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from socket import gethostbyname
from typing import Any

import zmq
import zmq.asyncio
from msgspec import msgpack

from simulator.kv_events import KvEvent

BUFFERED_BATCHES = 10_000
# Messages that a subscriber may be behind before it loses some.
_HIGH_WATER_MARK = 100_000


class KvEventLog:
    """Numbers and renders batches; remembers the last `BUFFERED_BATCHES`."""

    def __init__(self, topic: str, block_tokens: int) -> None:
        self.topic = topic.encode()
        self._block_tokens = block_tokens
        self._next = 0
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=BUFFERED_BATCHES)

    def append(self, events: Sequence[KvEvent], time_s: float) -> list[bytes]:
        """A batch as the frames of one message."""
        maps = [event.as_map(self._block_tokens) for event in events]
        payload = msgpack.encode([time_s, maps, 0])
        number, self._next = self._next, self._next + 1
        self._batches.append((number, payload))
        return self._frames(number, payload)

    def replay(self, first: int) -> Iterator[list[bytes]]:
        """The remembered batches from number `first` on, then the message that ends a replay."""
        for number, payload in list(self._batches):
            if number >= first:
                yield self._frames(number, payload)
        yield [b"", b"\xff" * 8, b""]

    def _frames(self, number: int, payload: bytes) -> list[bytes]:
        return [self.topic, number.to_bytes(8, "big"), payload]


class KvPublisher:
    """One worker's two sockets. Made, used and closed on one event loop."""

    def __init__(self, host: str, topic: str, block_tokens: int) -> None:
        """Listens on two free ports of `host`. Raises OSError if it is no address of here."""
        self._topic = topic
        self._block_tokens = block_tokens
        self.restart()
        # ZeroMQ binds to addresses, not to names.
        address = gethostbyname(host)
        # Publishing never waits: a subscriber that is too far behind loses messages.
        self._publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._replier = zmq.asyncio.Socket(zmq.Context.instance(), zmq.ROUTER)
        self._replier.setsockopt(zmq.SNDHWM, 0)
        for socket in (self._publisher, self._replier):
            socket.bind(f"tcp://{address}:0")
        self._answering = asyncio.get_running_loop().create_task(self._answer())

    def restart(self) -> None:
        """Count from 0 and forget what was published, as a new process does."""
        self._log = KvEventLog(self._topic, self._block_tokens)

    def publish(self, events: Sequence[KvEvent], time_s: float) -> None:
        self._publisher.send_multipart(self._log.append(events, time_s))

    async def close(self) -> None:
        self._answering.cancel()
        await asyncio.wait([self._answering])
        self._publisher.close(linger=0)
        self._replier.close(linger=0)

    async def _answer(self) -> None:
        """Serve requests `[b"", first]` of consumers that missed batches."""
        while True:
            peer, *request = await self._replier.recv_multipart()
            first = int.from_bytes(request[-1], "big")
            for frames in self._log.replay(first):
                await self._replier.send_multipart([peer, b"", *frames])

    def source(self) -> dict[str, Any]:
        """Where and how to subscribe, as an engine says it."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._publisher.getsockopt_string(zmq.LAST_ENDPOINT),
            "replay_endpoint": self._replier.getsockopt_string(zmq.LAST_ENDPOINT),
            "buffer_steps": BUFFERED_BATCHES,
            "hwm": _HIGH_WATER_MARK,
            "max_queue_size": _HIGH_WATER_MARK,
            "topic": self._topic,
        }
