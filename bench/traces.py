"""Reads request traces: times, lengths and opaque block ids, one JSON object per line.

Equal block ids mean an equal block and equal everything before it, so the shared prefix of two
rows is the length of their common leading id run.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

JSON = dict[str, Any]


class TraceError(ValueError):
    """A trace that cannot be found or read; the text names the file and the line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One call. `runs`: (first id, count) pairs of consecutive block ids; None: not published."""

    arrival_ms: float
    session: str | None
    tenant: str | None
    input_tokens: int
    output_tokens: int
    block_size: int | None
    runs: tuple[tuple[int, int], ...] | None

    def block_ids(self) -> NDArray[np.int64]:
        """Block ids in prompt order, shape (number of blocks,)."""
        if not self.runs:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([np.arange(a, a + n, dtype=np.int64) for a, n in self.runs])


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    rows: tuple[Row, ...]

    @property
    def has_blocks(self) -> bool:
        return any(row.runs is not None for row in self.rows)

    @property
    def span_s(self) -> float:
        return (self.rows[-1].arrival_ms - self.rows[0].arrival_ms) / 1000 if self.rows else 0.0


def shared_dir(given: str | None = None) -> Path:
    """Folder of the traces, rig and profiles kept beside the repository; it may not exist."""
    default = Path(__file__).resolve().parent.parent.parent / "shared"
    return Path(given or os.environ.get("PDROUTER_SHARED") or default)


def find(name: str, shared: Path) -> Path:
    """A path as given, or the trace of that name in `shared`/traces."""
    candidates = [Path(name), shared / "traces" / name, shared / "traces" / f"{name}.jsonl.gz"]
    for path in candidates:
        if path.is_file():
            return path
    raise TraceError(
        f"no trace {name!r}: tried {', '.join(map(str, candidates))} "
        "(give a path, or the folder that holds traces/ with --shared)"
    )


def read(path: Path) -> Trace:
    """The whole trace, rows in order of arrival, first arrival at 0."""
    with _open(path) as lines:
        rows = sorted(_rows(path, lines), key=lambda row: row.arrival_ms)
    start = rows[0].arrival_ms if rows else 0.0
    shifted = tuple(replace(row, arrival_ms=row.arrival_ms - start) for row in rows)
    return Trace(path.name.removesuffix(".gz").removesuffix(".jsonl"), shifted)


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _rows(path: Path, lines: IO[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _row(json.loads(line))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}:{number}: not a trace row: {error!r}") from error


def _row(raw: JSON) -> Row:
    blocks = raw.get("blocks")
    row = Row(
        arrival_ms=float(raw["arrival_ms"]),
        session=raw.get("session"),
        tenant=raw.get("tenant"),
        input_tokens=int(raw["input_tokens"]),
        output_tokens=int(raw["output_tokens"]),
        block_size=raw.get("block_size"),
        runs=None if blocks is None else tuple((int(a), int(n)) for a, n in blocks),
    )
    if row.runs is not None and not row.block_size:
        raise ValueError("blocks without block_size")
    if row.input_tokens < 1:
        raise ValueError("input_tokens must be at least 1")
    return row


def within_window(trace: Trace, window_tokens: int | None) -> Trace:
    """Rows that fit a worker's window with their output; longer ones are dropped, not clipped."""
    if window_tokens is None:
        return trace
    kept = tuple(r for r in trace.rows if r.input_tokens + r.output_tokens <= window_tokens)
    return Trace(trace.name, kept)


def spread_ticks(rows: Sequence[Row], tick_ms: float) -> tuple[Row, ...]:
    """Rows that share one tick of a coarse clock, spread evenly over the tick, order unchanged.

    A clock that ticks every `tick_ms` makes bursts that are its own, not the traffic's.
    """
    out: list[Row] = []
    start = 0
    while start < len(rows):
        end = start
        while end < len(rows) and rows[end].arrival_ms == rows[start].arrival_ms:
            end += 1
        step_ms = tick_ms / (end - start)
        out.extend(
            replace(row, arrival_ms=row.arrival_ms + step_ms * i)
            for i, row in enumerate(rows[start:end])
        )
        start = end
    return tuple(out)


def coarse_tick_ms(rows: Sequence[Row]) -> float:
    """The tick of a clock too coarse to order arrivals (a second or more), else 0."""
    times = np.unique(np.asarray([row.arrival_ms for row in rows], dtype=np.float64))
    if len(times) < 3 or len(times) * 4 > len(rows):
        return 0.0
    gaps = np.diff(times)
    return float(np.median(gaps)) if gaps.min() >= 1000.0 else 0.0
