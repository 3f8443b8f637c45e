"""The map beside a naive one, and its bounds."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachemap import Blocks, InMemoryCacheMap
from cachemap.in_memory import ENTRY_BYTES

# A busy machine is not a failure.
quick = settings(deadline=None, max_examples=50)

AMPLE = 1 << 30


def chain(*names: int, step: int = 100) -> Blocks:
    """A prompt of blocks of `step` bytes; equal leading names are an equal prefix."""
    hashes, chained = [], 0
    for name in names:
        chained = hash((chained, name)) & (2**64 - 1)
        hashes.append(chained)
    return Blocks(hashes, [step * (i + 1) for i in range(len(names))])


def map_of(*workers: str, capacity: int = AMPLE, max_bytes: int = AMPLE) -> InMemoryCacheMap:
    cachemap = InMemoryCacheMap(max_bytes)
    for worker in workers:
        cachemap.add_worker(worker, capacity)
    return cachemap


class NaiveMap:
    """One list of (hash, bytes) per worker, least recently used first, searched from its start."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held: dict[str, list[tuple[int, int]]] = {}
        self.capacity: dict[str, int] = {}

    def add_worker(self, worker: str, capacity: int) -> None:
        self.capacity[worker] = capacity
        self.held.setdefault(worker, [])
        for each in self.held:
            self.trim(each)

    def remove_worker(self, worker: str) -> None:
        self.held.pop(worker, None)
        self.capacity.pop(worker, None)

    def match(self, blocks: Blocks) -> dict[str, int]:
        found = {}
        for worker, held in self.held.items():
            known = {block for block, _ in held}
            for block, end in zip(blocks.hashes, blocks.ends, strict=True):
                if block not in known:
                    break
                found[worker] = end
        return found

    def store(self, worker: str, blocks: Blocks) -> None:
        if worker not in self.held:
            return
        starts = [0, *blocks.ends]
        fresh = [
            (block, end - start)
            for block, start, end in zip(blocks.hashes, starts, blocks.ends, strict=False)
        ]
        kept = [entry for entry in self.held[worker] if entry[0] not in set(blocks.hashes)]
        self.held[worker] = kept + fresh[::-1]
        self.trim(worker)

    def forget(self, worker: str, blocks: Blocks, held_bytes: int) -> None:
        lost = {b for b, end in zip(blocks.hashes, blocks.ends, strict=True) if end > held_bytes}
        if worker in self.held:
            self.held[worker] = [entry for entry in self.held[worker] if entry[0] not in lost]

    def trim(self, worker: str) -> None:
        held = self.held[worker]
        share = max(1, self.max_bytes // ENTRY_BYTES) // len(self.held)
        while held and (sum(size for _, size in held) > self.capacity[worker] or len(held) > share):
            held.pop(0)


workers = st.sampled_from(["a", "b", "c", "d"])
names = st.lists(st.integers(0, 2), max_size=6)


class AgainstTheNaiveMap(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.max_bytes = 30 * ENTRY_BYTES
        self.real = InMemoryCacheMap(self.max_bytes)
        self.naive = NaiveMap(self.max_bytes)

    @rule(worker=workers, capacity=st.integers(0, 3000))
    def add_or_resize(self, worker, capacity):
        self.real.add_worker(worker, capacity)
        self.naive.add_worker(worker, capacity)

    @rule(worker=workers)
    def remove_worker(self, worker):
        self.real.remove_worker(worker)
        self.naive.remove_worker(worker)

    @rule(worker=workers)
    def clear(self, worker):
        self.real.clear(worker)
        if worker in self.naive.held:
            self.naive.held[worker] = []

    @rule(worker=workers, names=names)
    def store(self, worker, names):
        self.real.store(worker, chain(*names))
        self.naive.store(worker, chain(*names))

    @rule(worker=workers, names=names, held=st.integers(0, 700))
    def forget(self, worker, names, held):
        self.real.forget(worker, chain(*names), held)
        self.naive.forget(worker, chain(*names), held)

    @precondition(lambda self: self.naive.held)
    @rule(names=names)
    def match(self, names):
        assert self.real.match(chain(*names)) == self.naive.match(chain(*names))

    @invariant()
    def same_answers_everywhere(self):
        assert self.real.blocks_held() == {w: len(held) for w, held in self.naive.held.items()}
        for deep in ((0, 0, 0), (1, 0, 2), (2, 2, 2, 2)):
            assert self.real.match(chain(*deep)) == self.naive.match(chain(*deep))

    @invariant()
    def within_all_bounds(self):
        assert self.real.memory_bytes() <= self.max_bytes
        for worker, held in self.naive.held.items():
            held_bytes = sum(size for _, size in held)
            assert self.real._workers[worker].held_bytes == held_bytes
            assert held_bytes <= self.naive.capacity[worker]


TestAgainstTheNaiveMap = AgainstTheNaiveMap.TestCase
TestAgainstTheNaiveMap.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def orphans(cachemap: InMemoryCacheMap, prompts: list[list[int]], worker: str) -> list[list[int]]:
    """Prompts whose end a worker holds without all that stands before it."""
    found = []
    for prompt in prompts:
        whole = chain(*prompt)
        held = cachemap.match(whole).get(worker, 0)
        for i, end in enumerate(whole.ends):
            alone = Blocks([whole.hashes[i]], [end])  # a chain that begins in the middle
            if end > held and cachemap.match(alone):
                found.append(prompt)
    return found


prompts_of_names = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=25)


@quick
@given(prompts_of_names, st.integers(0, 2500))
def test_eviction_never_leaves_a_block_without_those_before_it(prompts, capacity):
    cachemap = map_of("a", capacity=capacity)
    for prompt in prompts:
        cachemap.store("a", chain(*prompt))
        assert not orphans(cachemap, prompts, "a")
    for smaller in range(capacity, -1, -100):
        cachemap.add_worker("a", smaller)
        assert not orphans(cachemap, prompts, "a")


def test_what_stands_behind_a_forgotten_block_counts_once_that_is_back():
    """Two calls share a new prefix; one of them fails and takes it back."""
    cachemap = map_of("a")
    cachemap.store("a", chain(1, 2, 3))
    cachemap.store("a", chain(1, 2, 4))
    cachemap.forget("a", chain(1, 2, 3), 100)
    assert cachemap.match(chain(1, 2, 4)) == {"a": 100}
    cachemap.store("a", chain(1, 2))
    assert cachemap.match(chain(1, 2, 4)) == {"a": 300}
    assert cachemap.match(chain(1, 2, 3)) == {"a": 200}


def test_the_tail_of_a_prompt_goes_first():
    cachemap = map_of("a", capacity=300)
    cachemap.store("a", chain(1, 2, 3, 4, 5))
    assert cachemap.match(chain(1, 2, 3, 4, 5)) == {"a": 300}


def test_the_least_recently_used_prompt_goes_first():
    cachemap = map_of("a", capacity=400)
    cachemap.store("a", chain(1, 2))
    cachemap.store("a", chain(3, 4))
    cachemap.store("a", chain(1, 2))  # used again
    cachemap.store("a", chain(5, 6))
    assert cachemap.match(chain(1, 2)) == {"a": 200}
    assert cachemap.match(chain(3, 4)) == {}


def test_looking_does_not_count_as_using():
    cachemap = map_of("a", capacity=200)
    cachemap.store("a", chain(1))
    cachemap.store("a", chain(2))
    cachemap.match(chain(1))
    cachemap.store("a", chain(3))
    assert cachemap.match(chain(1)) == {}


def test_a_burst_of_unique_long_prompts_stays_within_the_memory():
    """Each of 10,000 prompts, and the bound holds after each."""
    max_bytes = 2000 * ENTRY_BYTES
    cachemap = map_of("a", "b", max_bytes=max_bytes)
    ends = list(range(1000, 51_000, 1000))
    for i in range(10_000):
        hashes = range(i * 50, i * 50 + 50)
        cachemap.store("ab"[i % 2], Blocks(hashes, ends))
        assert cachemap.memory_bytes() <= max_bytes
    assert cachemap.blocks_held() == {"a": 1000, "b": 1000}


def test_a_prompt_longer_than_the_memory_leaves_its_start():
    cachemap = map_of("a", max_bytes=10 * ENTRY_BYTES)
    long = Blocks(range(1000), [100 * (i + 1) for i in range(1000)])
    cachemap.store("a", long)
    assert cachemap.match(long) == {"a": 1000}


def test_the_capacity_of_each_worker_is_its_own():
    cachemap = InMemoryCacheMap(AMPLE)
    cachemap.add_worker("small", 100)
    cachemap.add_worker("large", 300)
    for worker in ("small", "large"):
        cachemap.store(worker, chain(1, 2, 3, 4))
    assert cachemap.match(chain(1, 2, 3, 4)) == {"small": 100, "large": 300}


def test_a_worker_added_anew_holds_nothing():
    cachemap = map_of("a", "b", "c")
    cachemap.store("b", chain(1, 2))
    cachemap.remove_worker("b")
    cachemap.add_worker("d", AMPLE)
    cachemap.add_worker("b", AMPLE)
    assert cachemap.match(chain(1, 2)) == {}


def used_beyond(cachemap: InMemoryCacheMap, entries: int) -> int:
    """Bytes allocated while `entries` blocks come in, spread evenly over the workers."""
    names = sorted(cachemap.blocks_held())
    share = entries // len(names)
    ends = range(64, 64 * (share + 1), 64)
    tracemalloc.start()
    try:
        for i, name in enumerate(names):
            first = (i + 1) << 40
            cachemap.store(name, Blocks(range(first, first + share), ends))
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_the_memory_bound_is_one_of_real_memory():
    entries = 24_000
    cachemap = map_of(*"abcdefgh", max_bytes=entries * ENTRY_BYTES)
    assert used_beyond(cachemap, entries) <= entries * ENTRY_BYTES
    assert 0 < cachemap.memory_bytes() <= entries * ENTRY_BYTES


MANY = 3000
MANY_ENTRIES = 8 * MANY


@pytest.fixture(scope="module")
def large_fleet() -> InMemoryCacheMap:
    return map_of(*map(str, range(MANY)), max_bytes=MANY_ENTRIES * ENTRY_BYTES)


def test_each_of_many_workers_is_told_from_the_others(large_fleet):
    for i in range(MANY):
        large_fleet.store(str(i), chain(7, i % 10, i % 1000))
    held = large_fleet.match(chain(7, 3, 13))
    assert len(held) == MANY
    assert {worker for worker, size in held.items() if size == 300} == {"13", "1013", "2013"}
    assert sum(size == 200 for size in held.values()) == 300 - 3


def test_one_of_many_workers_leaves(large_fleet):
    for i in range(MANY):
        large_fleet.store(str(i), chain(8))
    large_fleet.remove_worker("1500")
    assert set(large_fleet.match(chain(8))) == set(map(str, range(MANY))) - {"1500"}
    large_fleet.add_worker("1500", AMPLE)
    assert "1500" not in large_fleet.match(chain(8))


def test_the_memory_bound_holds_with_many_workers(large_fleet):
    for i in range(MANY):
        large_fleet.clear(str(i))
    assert used_beyond(large_fleet, MANY_ENTRIES) <= MANY_ENTRIES * ENTRY_BYTES
