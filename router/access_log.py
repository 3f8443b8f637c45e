"""The access log: one JSON line per ended call, never any text of a prompt or an answer.

Lines are collected and written together. A reader that stops reading must not stop the router,
so a full pipe is left alone until it can take more, and lines beyond a bound are dropped and
counted.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from router.outcome import Outcome

FLUSH_AFTER_S = 0.2
FLUSH_AT_BYTES = 64 * 1024
MAX_BUFFERED_BYTES = 4 * 1024 * 1024
# A pipe that polls as writable takes this much without blocking (POSIX PIPE_BUF on Linux).
CHUNK_BYTES = 4096
# How long closing waits for a reader that does not read.
CLOSE_WAIT_MS = 500


class AccessLog:
    """Writes to the file descriptor `fd`; to be used from one event loop's thread."""

    def __init__(self, fd: int, *, enabled: bool = True) -> None:
        self._fd = fd
        self._enabled = enabled
        self._buffer = bytearray()
        self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, outcome: Outcome) -> None:
        """Take one line; it is written within FLUSH_AFTER_S."""
        if not self._enabled:
            return
        if len(self._buffer) >= MAX_BUFFERED_BYTES:
            self._dropped += 1
            return
        self._buffer += orjson.dumps(_entry(outcome), option=orjson.OPT_APPEND_NEWLINE)
        if len(self._buffer) >= FLUSH_AT_BYTES and self._dropped == 0:
            self._flush(0)
        if self._buffer and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_AFTER_S, self._on_timer)

    def close(self) -> None:
        """Write what is left, as far as the reader takes it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flush(CLOSE_WAIT_MS)
        self._enabled = False

    def _on_timer(self) -> None:
        self._timer = None
        self._flush(0)
        if self._buffer:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_AFTER_S, self._on_timer)

    def _flush(self, wait_ms: int) -> None:
        """Write while the descriptor can take more, waiting at most `wait_ms` for it each time."""
        written = 0
        while written < len(self._buffer) and self._poll.poll(wait_ms):
            try:
                written += os.write(self._fd, self._buffer[written : written + CHUNK_BYTES])
            except OSError:
                # Nobody can read any more (a closed pipe, a full disk): the calls matter more.
                written = len(self._buffer)
        del self._buffer[:written]
        if self._dropped and not self._buffer:
            self._buffer += orjson.dumps({"dropped_lines": self._dropped}) + b"\n"
            self._dropped = 0


def _entry(outcome: Outcome) -> dict[str, Any]:
    """The fields of a line: those that say nothing are left out."""
    times = {
        "queue_wait_s": outcome.queue_wait_s,
        "decision_s": outcome.decision_s,
        "prefill_s": outcome.prefill_s,
        "handoff_gap_s": outcome.handoff_gap_s,
        "ttft_s": outcome.ttft_s,
        "tpot_s": outcome.tpot_s,
    }
    notes = {
        "prefill_worker": outcome.prefill_worker,
        "decode_worker": outcome.decode_worker,
        "retries": outcome.retries,
        "rejected": outcome.rejected,
        "disconnect_phase": outcome.disconnect_phase,
        "missing_transfer_params": outcome.missing_transfer_params,
        "error": outcome.error,
    }
    return {
        "time": round(time.time(), 3),
        "request_id": outcome.request_id,
        "endpoint": outcome.endpoint,
        "model": outcome.model,
        "queue": outcome.queue,
        "plan": outcome.plan,
        "code": outcome.code,
        "stream": outcome.stream,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "available_tokens": outcome.available_tokens,
        "captured_tokens": outcome.captured_tokens,
        "predicted_tokens": outcome.predicted_tokens,
        "delivered_tokens": outcome.delivered_tokens,
        **{name: _micros(value) for name, value in times.items() if value is not None},
        "e2e_s": _micros(outcome.e2e_s),
        **{name: value for name, value in notes.items() if value},
    }


def _micros(seconds: float) -> float:
    """Rounded to microseconds, at a fifth of the cost of round()."""
    return int(seconds * 1e6 + 0.5) / 1e6
