"""The decode reply on its way to the client.

An engine may answer 200, announce a role, and only then find that it could not have the KV. So what
it sends is held until the first content: until then the call can still be served elsewhere and the
client has seen nothing. From the first content on, bytes pass as they come.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import orjson

from router.errors import Disconnected, EngineFailed, WorkerFailure

# The last events of a stream hold its usage and [DONE].
_TAIL_PIECES = 4
# An engine that sends this much without content is relayed as it is.
_HELD_BYTES = 1 << 20
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_DONE = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
_ERROR_START = b'{"error"'
_ERROR = re.compile(rb'^data: ?\{"error": ?[^n ]', re.MULTILINE)


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
        self._judged = 0  # bytes of what is held that were seen to be without content
        self._tail: deque[bytes] = deque(maxlen=_TAIL_PIECES)
        self._event_end = b"\n\n"

    @property
    def body(self) -> bytes:
        return self._held

    @property
    def usage(self) -> Any:
        """The usage that the engine put at the stream's end, or None."""
        tail = b"".join(self._tail)
        at = tail.rfind(b'"usage":{')
        if at < 0:
            return None
        start, end = tail.rfind(b"\n", 0, at) + 1, tail.find(b"\n", at)
        try:
            return orjson.loads(tail[start:end].removeprefix(b"data:")).get("usage")
        except (orjson.JSONDecodeError, AttributeError):
            return None

    def on_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, headers
        self._streams = status == 200 and any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in headers
        )

    def on_data(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
            self._held = b""
        if self._flowing:
            self._flow(data, self._client.write)
        elif self._streams:
            self._look_for_content(data)
        else:
            self._held = data

    def on_end(self) -> None:
        if self.finished.done():
            return
        if self._flowing:
            if _DONE.search(self._held):  # whole but for its last line ends
                self._client.write(self._held)
                self._tail.append(self._held)
            if not _DONE.search(b"".join(self._tail)):
                self._end(Disconnected("unfinished_stream"))
                return
            self.last_content_s = time.perf_counter()
        elif self._streams:
            self._end(EngineFailed("empty_stream"))
            return
        self._end(None)

    def on_failure(self, failure: WorkerFailure) -> None:
        self._end(failure)

    def _look_for_content(self, data: bytes) -> None:
        content, self._judged = has_content(data, self._judged)
        if isinstance(content, EngineFailed):
            self._end(content)
        elif content or len(data) > _HELD_BYTES:
            self._flowing = True
            if b"\r\n\r\n" in data:
                self._event_end = b"\r\n\r\n"
            self.first_content_s = time.perf_counter()
            self.started.set_result(True)
            self._flow(data, self._client.start_stream)
        else:
            self._held = data

    def _flow(self, data: bytes, write: Callable[[bytes], None]) -> None:
        """Pass on the whole events in `data`; the piece of one behind them waits for its rest."""
        end = self._event_end
        if not data.endswith(end) and len(data) < _HELD_BYTES:
            whole = data.rfind(end) + len(end) if end in data else 0
            self._held, data = data[whole:], data[:whole]
        if _ERROR_START in data and (failed := _ERROR.search(data)):
            # What the engine sends behind its error is [DONE], which would say that all is well.
            data = data[: failed.start()]
            self._flowing = self._streams = False
        if data:
            write(data)
            self.events += data.count(end)
            self._tail.append(data)
        if not self._flowing:
            self._end(EngineFailed("engine_error_event"))

    def _end(self, failure: WorkerFailure | None) -> None:
        future = self.finished if self.started.done() else self.started
        if failure is not None:
            if not future.done():
                future.set_exception(failure)
            if future is self.started:
                self.finished.cancel()
            return
        if not self.started.done():
            self.started.set_result(False)
        if not self.finished.done():
            self.finished.set_result(None)


def has_content(held: bytes, position: int = 0) -> tuple[bool | EngineFailed, int]:
    """Whether the complete events behind `position` hold content, or say that the engine failed;
    and the position behind those that do neither."""
    while end := _EVENT_END.search(held, position):
        verdict = _judge(held[position : end.start()])
        if verdict:
            return verdict, position
        position = end.end()
    return False, position


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
