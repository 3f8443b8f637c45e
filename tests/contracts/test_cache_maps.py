"""What every map of prefixes has to answer, over all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachemap import Blocks, InMemoryCacheMap, hash_blocks, read_prompt

AMPLE = 1 << 28

# Each takes the bytes of memory it may use.
CACHE_MAPS: dict[str, Callable[[int], InMemoryCacheMap]] = {"in-memory": InMemoryCacheMap}


@pytest.fixture(params=sorted(CACHE_MAPS))
def cachemap(request) -> InMemoryCacheMap:
    found = CACHE_MAPS[request.param](AMPLE)
    for worker in ("a", "b"):
        found.add_worker(worker, AMPLE)
    return found


def conversation(turns: int) -> Blocks:
    messages = [{"role": "user", "content": f"Turn {i}. " + "word " * 100} for i in range(turns)]
    return hash_blocks(read_prompt({"messages": messages}, "m"))


NOTHING = Blocks([], [])


def test_nothing_is_held_at_first(cachemap):
    assert cachemap.match(conversation(3)) == {}
    assert cachemap.blocks_held() == {"a": 0, "b": 0}


def test_what_is_stored_is_held_whole(cachemap):
    cachemap.store("a", conversation(3))
    assert cachemap.match(conversation(3)) == {"a": conversation(3).ends[-1]}


def test_a_longer_conversation_is_held_as_far_as_its_start_is(cachemap):
    cachemap.store("a", conversation(2))
    cachemap.store("b", conversation(4))
    held = cachemap.match(conversation(6))
    assert conversation(2).ends[-1] - 128 < held["a"] <= conversation(2).ends[-1]
    assert conversation(4).ends[-1] - 128 < held["b"] <= conversation(4).ends[-1]


def test_a_match_stops_at_the_first_gap(cachemap):
    whole = conversation(4)
    middle = Blocks(whole.hashes[2:], whole.ends[2:])
    cachemap.store("a", middle)
    assert cachemap.match(whole) == {}
    cachemap.store("b", Blocks(whole.hashes[:2], whole.ends[:2]))
    assert cachemap.match(whole) == {"b": whole.ends[1]}


def test_storing_twice_is_storing_once(cachemap):
    cachemap.store("a", conversation(3))
    before = (cachemap.blocks_held(), cachemap.memory_bytes())
    cachemap.store("a", conversation(3))
    assert (cachemap.blocks_held(), cachemap.memory_bytes()) == before


def test_looking_changes_nothing(cachemap):
    cachemap.store("a", conversation(3))
    for _ in range(2):
        assert cachemap.match(conversation(3)) == {"a": conversation(3).ends[-1]}


def test_clearing_forgets_one_worker(cachemap):
    for worker in ("a", "b"):
        cachemap.store(worker, conversation(3))
    cachemap.clear("a")
    assert cachemap.match(conversation(3)) == {"b": conversation(3).ends[-1]}
    assert cachemap.blocks_held()["a"] == 0
    cachemap.store("a", conversation(3))
    assert cachemap.match(conversation(3))["a"] == conversation(3).ends[-1]


def test_forgetting_keeps_what_is_still_held(cachemap):
    whole = conversation(4)
    for worker in ("a", "b"):
        cachemap.store(worker, whole)
    cachemap.forget("a", whole, whole.ends[1])
    assert cachemap.match(whole) == {"a": whole.ends[1], "b": whole.ends[-1]}
    cachemap.forget("a", whole, 0)
    assert cachemap.match(whole) == {"b": whole.ends[-1]}


def test_removed_workers_are_gone(cachemap):
    cachemap.store("a", conversation(3))
    cachemap.remove_worker("a")
    assert cachemap.match(conversation(3)) == {}
    assert set(cachemap.blocks_held()) == {"b"}
    cachemap.store("a", conversation(3))
    assert cachemap.match(conversation(3)) == {}


def test_unknown_workers_are_ignored(cachemap):
    cachemap.store("c", conversation(1))
    cachemap.forget("c", conversation(1), 0)
    cachemap.clear("c")
    cachemap.remove_worker("c")
    assert cachemap.match(conversation(1)) == {}


def test_an_empty_prompt_is_held_by_nobody(cachemap):
    cachemap.store("a", NOTHING)
    cachemap.forget("a", NOTHING, 0)
    assert cachemap.match(NOTHING) == {}


def test_a_smaller_worker_holds_less(cachemap):
    cachemap.store("a", conversation(10))
    cachemap.add_worker("a", 1000)
    assert 0 < cachemap.match(conversation(10))["a"] <= 1000
    assert cachemap.blocks_held()["a"] < len(conversation(10).hashes)


@pytest.mark.parametrize("name", sorted(CACHE_MAPS))
def test_memory_is_bounded(name):
    cachemap = CACHE_MAPS[name](100_000)
    cachemap.add_worker("a", AMPLE)
    for i in range(200):
        cachemap.store("a", hash_blocks(read_prompt({"prompt": f"{i}" * 3000}, "m")))
        assert cachemap.memory_bytes() <= 100_000
    assert cachemap.blocks_held()["a"] > 0
