"""KV blocks of one engine: who holds them, what they hold, and which go first when room is short.

A block is free, cached (free, but found again by its hash until it is taken for something else)
or held. `content` says whose KV lies in a block; it outlives the block's release, as memory does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import cast


class BlockManager:
    """Fixed number of blocks with reference counts, found by hash, evicted least recent first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.content = [0] * capacity
        self.corrupt: set[int] = set()
        "Blocks whose content is not what their hash or their holder believes."
        self.on_forget: Callable[[int], None] | None = None
        "Told the hash of each block that can be found no more."
        self._refs = [0] * capacity
        self._hash_of: list[int | None] = [None] * capacity
        self._by_hash: dict[int, int] = {}
        self._empty = list(range(capacity - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def held(self) -> int:
        return self.capacity - self.free

    @property
    def known(self) -> int:
        """Blocks that can be found by hash."""
        return len(self._by_hash)

    def knows(self, key: int) -> bool:
        return key in self._by_hash

    def match(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Blocks that hold the longest known start of `hashes`, at most `limit`. Takes none."""
        found = list(map(self._by_hash.get, hashes[:limit]))
        if None in found:
            del found[found.index(None) :]
        return cast(list[int], found)

    def take(self, matched: Sequence[int], fresh: int) -> list[int] | None:
        """Hold `matched` and `fresh` more blocks; None, and nothing changed, if room is short."""
        refs, cached = self._refs, self._cached
        idle = list(map(refs.__getitem__, matched)).count(0)
        if fresh > len(self._empty) + len(cached) - idle:
            return None
        for block in matched:
            if refs[block] == 0:
                del cached[block]
            refs[block] += 1
        taken = list(matched)
        taken += self._fresh(fresh)
        return taken

    def _fresh(self, count: int) -> list[int]:
        empty, refs = self._empty, self._refs
        from_empty = min(count, len(empty))
        taken = empty[len(empty) - from_empty :]
        taken.reverse()
        del empty[len(empty) - from_empty :]
        if count > from_empty:
            taken += self._evict(count - from_empty)
        for block in taken:
            refs[block] = 1
        if self.corrupt:
            self.corrupt.difference_update(taken)
        return taken

    def _evict(self, count: int) -> list[int]:
        """The cached blocks that have lain longest, forgotten."""
        hash_of, by_hash, oldest = self._hash_of, self._by_hash, self._cached.popitem
        evicted = [oldest(False)[0] for _ in range(count)]
        keys = cast(list[int], [hash_of[block] for block in evicted])
        for block, key in zip(evicted, keys, strict=True):
            hash_of[block] = None
            del by_hash[key]
        if self.on_forget is not None:
            for key in keys:
                self.on_forget(key)
        return evicted

    def write(self, blocks: Iterable[int], contents: Iterable[int]) -> None:
        """Record what now lies in held blocks."""
        content = self.content
        for block, value in zip(blocks, contents, strict=False):
            content[block] = value

    def publish(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Make held blocks findable. A hash that is known already keeps its first block."""
        by_hash, hash_of = self._by_hash, self._hash_of
        for block, key in zip(blocks, hashes, strict=False):
            if hash_of[block] is None and by_hash.setdefault(key, block) == block:
                hash_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block, the tail of the chain becoming the first to go."""
        refs, hash_of, cached, empty = self._refs, self._hash_of, self._cached, self._empty
        for block in reversed(blocks):
            left = refs[block] - 1
            if left < 0:
                raise RuntimeError(f"block {block} released twice")
            refs[block] = left
            if left == 0:
                if hash_of[block] is None:
                    empty.append(block)
                else:
                    cached[block] = None

    def clear_cache(self) -> bool:
        """Forget all hashes. False, and nothing changed, while any block is held."""
        if self.held:
            return False
        self._by_hash.clear()
        self._hash_of = [None] * self.capacity
        self._empty += self._cached
        self._cached.clear()
        return True

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise if the books do not add up to exactly the holds of `holders`."""
        expected = [0] * self.capacity
        for blocks in holders:
            for block in blocks:
                expected[block] += 1
        if expected != self._refs:
            wrong = [b for b in range(self.capacity) if expected[b] != self._refs[b]]
            raise RuntimeError(f"reference counts of blocks {wrong[:8]} are wrong")
        free = sorted([*self._empty, *self._cached])
        if free != [b for b in range(self.capacity) if not expected[b]]:
            raise RuntimeError("free lists and reference counts disagree")
        for key, block in self._by_hash.items():
            if self._hash_of[block] != key:
                raise RuntimeError(f"block {block} is listed under a hash it does not have")
        if len(self._by_hash) != sum(key is not None for key in self._hash_of):
            raise RuntimeError("hashes and blocks disagree")
