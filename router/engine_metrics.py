"""Reads the few figures the router needs from a vLLM server's Prometheus text.

Such a text is some 65 KB and comes from every worker every few seconds, so the wanted lines are
searched for and the rest is never parsed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_STARTED = b"process_start_time_seconds"
_RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"
# The second name is that of older versions.
_KV_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
_CACHE_CONFIG = b"vllm:cache_config_info"
# Other labels end in the same words (mamba_block_size), so the one before must be closed.
_CACHE_LABEL = re.compile(rb'[{,](block_size|num_gpu_blocks|kv_cache_size_tokens)="(\d+)"')


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What one worker says of itself; None is not said.

    Counts and capacity are sums over the engines (data-parallel ranks) behind the address, the
    KV usage, 0 to 1, is their mean. `started_at` is the Unix time of the server's start.
    """

    started_at: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    block_tokens: int | None = None
    capacity_tokens: int | None = None


def read_figures(text: bytes) -> EngineFigures:
    """Never raises: a line that cannot be read is as good as absent."""
    started = _values(text, _STARTED)
    usage = _values(text, _KV_USAGE[0]) or _values(text, _KV_USAGE[1])
    block_tokens, capacity_tokens = _cache_size(text)
    return EngineFigures(
        started_at=started[0] if started else None,
        running=_total(_values(text, _RUNNING)),
        waiting=_total(_values(text, _WAITING)),
        kv_usage=min(1.0, max(0.0, sum(usage) / len(usage))) if usage else None,
        block_tokens=block_tokens,
        capacity_tokens=capacity_tokens,
    )


def _cache_size(text: bytes) -> tuple[int | None, int | None]:
    block_tokens: int | None = None
    capacity_tokens: int | None = None
    for labels, _ in _series(text, _CACHE_CONFIG):
        found = {name: int(value) for name, value in _CACHE_LABEL.findall(labels)}
        block_tokens = found.get(b"block_size", block_tokens)
        # The engine's own sum is right for hybrid models too, where blocks are not all alike.
        tokens = found.get(b"kv_cache_size_tokens") or (
            found.get(b"num_gpu_blocks", 0) * found.get(b"block_size", 0)
        )
        if tokens:
            capacity_tokens = (capacity_tokens or 0) + tokens
    return block_tokens or None, capacity_tokens


def _total(values: list[float]) -> int | None:
    return round(sum(values)) if values else None


def _values(text: bytes, name: bytes) -> list[float]:
    return [value for _, value in _series(text, name)]


def _series(text: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Labels (as written, in braces) and value of every finite sample of exactly this name."""
    at = 0 if text.startswith(name) else _next_line(text, name, 0)
    while at >= 0:
        end = text.find(b"\n", at)
        labels, value = _sample(text[at + len(name) : end if end >= 0 else None])
        if value is not None:
            yield labels, value
        at = _next_line(text, name, end) if end >= 0 else -1


def _next_line(text: bytes, name: bytes, start: int) -> int:
    """Where the next line that begins with `name` begins, or -1."""
    found = text.find(b"\n" + name, start)
    return found + 1 if found >= 0 else -1


def _sample(line: bytes) -> tuple[bytes, float | None]:
    """Parse what follows a name; the value is None if the name was a longer one or it is bad."""
    if line[:1] not in (b"{", b" "):
        return b"", None
    split = line.rfind(b"}") + 1
    try:
        value = float(line[split:].split()[0])
    except (ValueError, IndexError):
        return b"", None
    return line[:split], value if math.isfinite(value) else None
