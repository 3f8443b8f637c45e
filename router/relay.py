"""The decode reply on its way to the client.

An engine may answer 200, announce a role, and only then find that it could not have the KV. So what
it sends is held until the first content: until then the call can still be served elsewhere and the
client has seen nothing. From the first content on, bytes pass as they come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from router.errors import Disconnected, EngineFailed, WorkerFailure

# The last events of a stream hold its usage and [DONE]; each is some hundred bytes.
_TAIL_BYTES = 4096
# An engine that sends this much without content is relayed as it is.
_HELD_BYTES = 1 << 20
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_DONE = b"data: [DONE]"


class Client(Protocol):
    """The client's side of a stream."""

    def start_stream(self, data: bytes) -> None: ...

    def write(self, data: bytes) -> None: ...


class Relay:
    """Receiver of a decode reply to a streaming call.

    Await `started`: True once content flows to the client; False where the reply is not a stream
    (`status` and `body` then hold it). Then await `finished`. Both raise `WorkerFailure`.
    """

    def __init__(self, client: Client) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[bool] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self.status = 0
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self.first_content_s = 0.0
        self.last_content_s = 0.0
        self.events = 0
        self._client = client
        self._streams = False
        self._flowing = False
        self._held = b""
        self._tail = b""

    @property
    def body(self) -> bytes:
        return self._held

    @property
    def usage(self) -> Any:
        """The usage that the engine put at the stream's end, or None."""
        start = self._tail.rfind(b'"usage":{')
        if start < 0:
            return None
        begin = self._tail.rfind(b"data:", 0, start)
        end = self._tail.find(b"\n", start)
        try:
            return orjson.loads(self._tail[begin + 5 : end]).get("usage")
        except (orjson.JSONDecodeError, AttributeError):
            return None

    @property
    def failed_inside(self) -> bool:
        """Whether the engine ended the stream with an error event."""
        return b'data: {"error"' in self._tail

    def on_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, headers
        self._streams = status == 200 and any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in headers
        )

    def on_data(self, data: bytes) -> None:
        if not self._flowing:
            self._hold(data)
            return
        self._client.write(data)
        self._note(data)

    def on_end(self) -> None:
        if self._flowing:
            if _DONE not in self._tail:
                self._end(Disconnected("unfinished_stream"))
                return
            self.last_content_s = time.perf_counter()
        elif self._streams:
            self._end(EngineFailed("empty_stream"))
            return
        self._end(None)

    def on_failure(self, failure: WorkerFailure) -> None:
        self._end(failure)

    def _hold(self, data: bytes) -> None:
        self._held += data
        if not self._streams:
            return
        content = has_content(self._held)
        if isinstance(content, EngineFailed):
            self._end(content)
        elif (content or len(self._held) > _HELD_BYTES) and not self.started.done():
            self._flowing = True
            self.first_content_s = time.perf_counter()
            self._client.start_stream(self._held)
            self._note(self._held)
            self._held = b""
            self.started.set_result(True)

    def _note(self, data: bytes) -> None:
        self.events += data.count(b"\n\n")
        self._tail = data if len(data) >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]

    def _end(self, failure: WorkerFailure | None) -> None:
        if not self.started.done():
            if failure is None:
                self.started.set_result(False)
            else:
                self.started.set_exception(failure)
                return
        if not self.finished.done():
            if failure is None:
                self.finished.set_result(None)
            else:
                self.finished.set_exception(failure)


def has_content(held: bytes) -> bool | EngineFailed:
    """Whether the complete events at the start of a stream hold content, or say that it failed."""
    position = 0
    while True:
        ends = [(at, len(mark)) for mark in _EVENT_ENDS if (at := held.find(mark, position)) >= 0]
        if not ends:
            return False
        at, length = min(ends)
        verdict = _judge(held[position:at])
        if verdict:
            return verdict
        position = at + length


def _judge(event: bytes) -> bool | EngineFailed:
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    if not lines:
        return False  # a comment that keeps the connection alive
    try:
        payload = orjson.loads(b"\n".join(lines))
    except orjson.JSONDecodeError:
        return True  # [DONE], or nothing that can be judged
    if not isinstance(payload, dict):
        return True
    if payload.get("error"):
        return EngineFailed("engine_error_event")
    choices = payload.get("choices")
    return isinstance(choices, list) and any(map(_choice_has_content, choices))


def _choice_has_content(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    if isinstance(delta, dict) and any(value for key, value in delta.items() if key != "role"):
        return True
    return bool(choice.get("text") or choice.get("finish_reason"))
