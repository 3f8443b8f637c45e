"""Who holds which prefix, in this process: an inverted index with one LRU per worker.

A prefix is a chain of blocks (`cachemap.hashing`). For every block the map keeps the set of workers
that hold it, as bits of one integer, so that a match walks the prompt once, whatever the number of
workers. Each worker's blocks are evicted as its engine does: least recently used first, and within
a prompt the tail first, so eviction never leaves a block without the blocks before it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import accumulate, filterfalse, repeat
from operator import and_, sub

from cachemap.hashing import Blocks

# Bytes of memory that one block held by one worker costs, all structures together. Measured with
# tracemalloc: 184 on average, up to twice that right after a hash table has doubled; beside it one
# bit of the block's holders for each worker there is.
ENTRY_BYTES = 320
_WORKERS_PER_BYTE = 8


@dataclass(slots=True)
class _Holdings:
    """Blocks of one worker, least recently used first; a value is the block's prompt bytes."""

    bit: int
    capacity_bytes: int
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict)
    held_bytes: int = 0


class InMemoryCacheMap:
    """Prefixes held per worker, bounded by each worker's capacity and by memory.

    `max_bytes` bounds the memory of the whole map: each worker gets an equal share of the blocks
    that fit. Both bounds hold at the return of every method.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._holders: dict[int, int] = {}
        self._workers: dict[str, _Holdings] = {}
        self._share = 0  # entries that one worker may have

    def add_worker(self, worker: str, capacity_bytes: int) -> None:
        """Know `worker`, with room for `capacity_bytes` of prompt. Known before: resized only."""
        known = self._workers.get(worker)
        if known is not None:
            known.capacity_bytes = capacity_bytes
            self._evict(known)
            return
        used = 0
        for holdings in self._workers.values():
            used |= holdings.bit
        bit = ~used & (used + 1)  # the lowest bit nobody has
        self._workers[worker] = _Holdings(bit, capacity_bytes)
        self._share_out()

    def remove_worker(self, worker: str) -> None:
        self.clear(worker)
        if self._workers.pop(worker, None) is not None:
            self._share_out()

    def match(self, blocks: Blocks) -> dict[str, int]:
        """Leading bytes of the prompt that each worker holds; workers that hold none are absent."""
        # Whole prompts pass through C here: of each block its holders, of each prefix the workers
        # that hold all its blocks, and of each such set how deep it reaches.
        holders = map(self._holders.get, blocks.hashes, repeat(0))
        depths = dict(zip(accumulate(holders, and_), blocks.ends, strict=True))
        depths.pop(0, None)
        if not depths:
            return {}
        workers = self._workers.items()
        # Deeper sets come later, and a worker's deepest one is what it holds.
        return {w: depth for bits, depth in depths.items() for w, h in workers if bits & h.bit}

    def store(self, worker: str, blocks: Blocks) -> None:
        """`worker` holds all of `blocks`, just used. An unknown worker is ignored."""
        holdings = self._workers.get(worker)
        if holdings is None:
            return
        lru, holders = holdings.blocks, self._holders
        known = list(filter(lru.__contains__, blocks.hashes))
        if len(known) < len(blocks.hashes):
            sizes = dict(zip(blocks.hashes, map(sub, blocks.ends, (0, *blocks.ends)), strict=False))
            new = list(filterfalse(lru.__contains__, reversed(blocks.hashes)))
            lru.update(zip(new, map(sizes.__getitem__, new), strict=True))
            holdings.held_bytes += sum(map(sizes.__getitem__, new))
            held = map(holdings.bit.__or__, map(holders.get, new, repeat(0)))
            holders.update(zip(new, held, strict=True))
        # From the tail to the head: the head ends up as the most recent, so the tail goes first.
        deque(map(lru.move_to_end, reversed(known)), maxlen=0)
        if holdings.held_bytes > holdings.capacity_bytes or len(lru) > self._share:
            self._evict(holdings)

    def forget(self, worker: str, blocks: Blocks, held_bytes: int) -> None:
        """`worker` turned out to hold only the first `held_bytes`: drop the blocks behind them.

        What other prompts stored behind a dropped block is matched again once that block is back.
        """
        holdings = self._workers.get(worker)
        if holdings is None:
            return
        for block, end in zip(reversed(blocks.hashes), reversed(blocks.ends), strict=True):
            if end <= held_bytes:
                return
            self._drop(holdings, block)

    def clear(self, worker: str) -> None:
        """`worker` holds nothing: it restarted or emptied its cache."""
        holdings = self._workers.get(worker)
        if holdings is not None:
            for block in list(holdings.blocks):
                self._drop(holdings, block)

    def blocks_held(self) -> dict[str, int]:
        """Number of blocks known per worker."""
        return {worker: len(holdings.blocks) for worker, holdings in self._workers.items()}

    def memory_bytes(self) -> int:
        """Estimate of the memory that the map occupies."""
        entries = sum(len(holdings.blocks) for holdings in self._workers.values())
        return self._entry_bytes() * entries

    def _share_out(self) -> None:
        self._share = self._max_bytes // self._entry_bytes() // max(len(self._workers), 1)
        for holdings in self._workers.values():
            if len(holdings.blocks) > self._share:
                self._evict(holdings)

    def _entry_bytes(self) -> int:
        return ENTRY_BYTES + len(self._workers) // _WORKERS_PER_BYTE

    def _evict(self, holdings: _Holdings) -> None:
        lru, capacity_bytes, share = holdings.blocks, holdings.capacity_bytes, self._share
        while lru and (holdings.held_bytes > capacity_bytes or len(lru) > share):
            block, size = lru.popitem(last=False)
            self._released(holdings, block, size)

    def _drop(self, holdings: _Holdings, block: int) -> None:
        size = holdings.blocks.pop(block, None)
        if size is not None:
            self._released(holdings, block, size)

    def _released(self, holdings: _Holdings, block: int, size: int) -> None:
        holdings.held_bytes -= size
        rest = self._holders[block] & ~holdings.bit
        if rest:
            self._holders[block] = rest
        else:
            del self._holders[block]
