"""What one pooled prefix cache would have reused on the same rows: the yardstick for a router.

A block-level LRU cache of a given size, prompts only, no queueing. A row's blocks are touched
tail first, so that a chain loses its tail before its head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.traces import Row

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens over all rows: asked for, and held by the cache when asked for."""

    prompt_tokens: int
    hit_tokens: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class BlockLru:
    """An LRU set of block ids with room for `capacity` blocks.

    Each touch appends the ids with fresh stamps to a queue; an entry whose stamp is no longer
    the id's latest is stale and skipped when the queue is drained from its old end.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._stamp: Ids = np.full(1024, -1, dtype=np.int64)  # -1: not held
        self._queue: deque[tuple[Ids, int]] = deque()  # (ids, stamp of the first)
        self._next_stamp = 0
        self.held = 0

    def match(self, ids: Ids) -> int:
        """Length of the leading run of `ids` that is held."""
        self._grow(ids)
        missing = self._stamp[ids] < 0
        return int(missing.argmax()) if missing.any() else len(ids)

    def touch(self, ids: Ids) -> None:
        """Hold all of `ids` (no duplicates among them), then evict down to capacity."""
        if not len(ids):
            return
        self._grow(ids)
        tail_first = ids[::-1]
        self.held += int((self._stamp[tail_first] < 0).sum())
        first = self._next_stamp
        self._next_stamp += len(ids)
        self._stamp[tail_first] = np.arange(first, self._next_stamp)
        self._queue.append((tail_first, first))
        while self.held > self._capacity:
            self._evict()

    def _evict(self) -> None:
        ids, first = self._queue.popleft()
        fresh = np.flatnonzero(self._stamp[ids] == np.arange(first, first + len(ids)))
        excess = self.held - self._capacity
        gone = fresh[:excess]
        self._stamp[ids[gone]] = -1
        self.held -= len(gone)
        if len(fresh) > len(gone):
            cut = int(fresh[len(gone)])
            self._queue.appendleft((ids[cut:], first + cut))

    def _grow(self, ids: Ids) -> None:
        top = int(ids.max()) + 1 if len(ids) else 0
        if top > len(self._stamp):
            more = np.full(max(top, 2 * len(self._stamp)) - len(self._stamp), -1, dtype=np.int64)
            self._stamp = np.concatenate([self._stamp, more])


def row_hits(rows: Iterable[Row], capacity_tokens: int) -> list[int]:
    """Tokens of each row that one cache of `capacity_tokens` held on its arrival."""
    cache: BlockLru | None = None
    hits: list[int] = []
    for row in rows:
        if row.runs is None or not row.block_size:
            hits.append(0)
            continue
        cache = cache or BlockLru(capacity_tokens // row.block_size)
        ids = row.block_ids()
        hits.append(min(row.input_tokens, cache.match(ids) * row.block_size))
        cache.touch(ids)
    return hits


def pooled(rows: Iterable[Row], workers: int, capacity_tokens: int) -> Reuse:
    """One cache of `workers` x `capacity_tokens`: perfect affinity, near enough to a bound."""
    rows = list(rows)
    hits = row_hits(rows, workers * capacity_tokens)
    return Reuse(sum(row.input_tokens for row in rows), sum(hits))
