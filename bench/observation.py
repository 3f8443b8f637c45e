"""What a client sees of one streamed reply: its first content, how it ended, its usage."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from bench.http_client import clock_s

JSON = dict[str, Any]
_CONTENT = (b'"content":"', b'"text":"', b'"content": "', b'"text": "')
_TAIL_BYTES = 4096


@dataclass(slots=True)
class Call:
    """One call as its client saw it. Times are clock_s() readings; None: did not happen."""

    number: int
    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    events: int = 0
    prefill: str = ""
    decode: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    def as_json(self) -> JSON:
        return asdict(self)


def has_content(events: bytes) -> bool:
    """Whether any of the SSE events carries text that is not empty."""
    for key in _CONTENT:
        at = events.find(key)
        while at >= 0:
            at += len(key)
            if at < len(events) and events[at : at + 1] != b'"':
                return True
            at = events.find(key, at)
    return False


class StreamObserver:
    """A Listener that fills a Call. Looks inside events up to the first content and at the end."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.done: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        self._head = b""
        self._tail = b""

    def started(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.call.status = status
        self.call.prefill = headers.get(b"x-pdrouter-prefill", b"").decode()
        self.call.decode = headers.get(b"x-pdrouter-decode", b"").decode()

    def body(self, data: bytes) -> None:
        call = self.call
        now = clock_s()
        if call.first_s is None:
            self._head += data
            if has_content(self._head):
                call.first_s, self._head = now, b""
            else:
                self._head = self._head[-_TAIL_BYTES:]
        if b'"choices":[{' in data or b'"choices": [{' in data:
            call.last_s = now
        call.events += data.count(b"data: ")
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def ended(self) -> None:
        self.call.end_s = clock_s()
        self._read_tail()
        self._finish()

    def failed(self, reason: str) -> None:
        self.call.error = self.call.error or reason
        self._finish()

    def _read_tail(self) -> None:
        call = self.call
        if call.status != 200:
            call.error = f"HTTP {call.status} {_error_type(self._tail)}"
            return
        if not self._tail.rstrip().endswith(b"data: [DONE]"):
            call.error = "stream ended without [DONE]"
        for event in self._tail.split(b"\n\n"):
            payload = event.removeprefix(b"data: ")
            if b'"error"' in payload[:12]:
                call.error = f"error event {_error_type(payload)}"
            elif b'"usage"' in payload and event.startswith(b"data: "):
                self._read_usage(payload)
        if not call.error and call.first_s is None and call.output_tokens:
            call.error = "no content"

    def _read_usage(self, payload: bytes) -> None:
        try:
            usage = orjson.loads(payload).get("usage") or {}
        except orjson.JSONDecodeError:
            return
        if usage:
            self.call.prompt_tokens = usage.get("prompt_tokens", 0)
            self.call.output_tokens = usage.get("completion_tokens", 0)
            details = usage.get("prompt_tokens_details") or {}
            self.call.cached_tokens = details.get("cached_tokens") or 0

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(self.call)


def _error_type(body: bytes) -> str:
    """The error's type and code: enough to group by, and never prompt text."""
    try:
        error = orjson.loads(body.removeprefix(b"data: ").strip())["error"]
        return f"{error.get('type')}/{error.get('code')}"
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return ""
