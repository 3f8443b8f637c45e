"""The access log: one JSON line per ended call, never any text of a prompt or an answer.

Lines are collected and written together. A reader that stops reading must not stop the router,
so a full pipe is left alone until it can take more, and lines beyond a bound are dropped and
counted.
"""

from __future__ import annotations

import asyncio
import os
import select
from typing import TYPE_CHECKING

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
        self._buffer += orjson.dumps(outcome, option=orjson.OPT_APPEND_NEWLINE)
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
