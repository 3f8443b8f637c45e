"""The block manager: nothing is leaked, freed twice, or evicted out of turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.blocks import BlockManager


def hold(manager, fresh, matched=()):
    """Blocks that are now held; there has to be room."""
    blocks = manager.take(matched, fresh)
    assert blocks is not None
    return blocks


def filled(manager, hashes):
    """Hold, publish and release blocks for `hashes`; returns them."""
    matched = manager.match(hashes, len(hashes))
    blocks = hold(manager, len(hashes) - len(matched), matched)
    manager.publish(blocks, hashes)
    manager.release(blocks)
    return blocks


def test_released_blocks_are_found_by_hash():
    manager = BlockManager(8)
    blocks = filled(manager, [11, 12, 13])
    assert manager.match([11, 12, 13, 14], 4) == blocks
    assert manager.match([11, 12, 13], 2) == blocks[:2]
    assert manager.match([12, 13], 2) == blocks[1:]
    assert manager.match([99, 11], 2) == []


def test_least_recent_chain_goes_first_and_its_tail_before_its_head():
    manager = BlockManager(6)
    filled(manager, [1, 2, 3])
    filled(manager, [4, 5, 6])
    filled(manager, [1, 2, 3])
    manager.take((), 2)
    assert manager.match([4, 5, 6], 3) == manager.match([4], 1) != []
    assert len(manager.match([1, 2, 3], 3)) == 3
    manager.take((), 2)
    assert manager.match([4], 1) == []
    assert len(manager.match([1, 2, 3], 3)) == 2


def test_blocks_without_a_hash_go_before_cached_ones():
    manager = BlockManager(4)
    filled(manager, [1, 2])
    anonymous = hold(manager, 2)
    manager.release(anonymous)
    manager.take((), 2)
    assert len(manager.match([1, 2], 2)) == 2


def test_taking_more_than_there_is_changes_nothing():
    manager = BlockManager(4)
    filled(manager, [1, 2])
    held = hold(manager, 1)
    before = manager.free
    assert manager.take(manager.match([1, 2], 2), 2) is None
    assert manager.free == before
    manager.check([held])


def test_matched_idle_blocks_are_not_counted_as_room():
    manager = BlockManager(3)
    filled(manager, [1, 2])
    assert manager.take(manager.match([1, 2], 2), 2) is None
    assert manager.take(manager.match([1, 2], 2), 1) is not None


def test_releasing_twice_is_an_error():
    manager = BlockManager(2)
    blocks = hold(manager, 1)
    manager.release(blocks)
    with pytest.raises(RuntimeError, match="released twice"):
        manager.release(blocks)


def test_a_hash_keeps_its_first_block():
    manager = BlockManager(4)
    first, second = hold(manager, 1), hold(manager, 1)
    manager.publish(first, [7])
    manager.publish(second, [7])
    assert manager.match([7], 1) == first
    manager.check([first, second])


def test_content_outlives_the_release():
    manager = BlockManager(2)
    blocks = hold(manager, 2)
    manager.write(blocks, [5, 6])
    manager.release(blocks)
    assert [manager.content[block] for block in blocks] == [5, 6]


def test_the_cache_is_cleared_only_when_nothing_is_held():
    manager = BlockManager(4)
    filled(manager, [1, 2])
    held = hold(manager, 1)
    assert not manager.clear_cache()
    manager.release(held)
    assert manager.clear_cache()
    assert manager.match([1, 2], 2) == []
    assert manager.known == 0


@settings(max_examples=200)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_books_balance_under_any_order_of_operations(capacity, steps):
    manager = BlockManager(capacity)
    held: list[list[int]] = []
    for action, size in steps:
        chain = [100 * (size % 3) + i for i in range(size)]
        if action <= 1:
            matched = manager.match(chain, size)
            blocks = manager.take(matched, size - len(matched))
            if blocks is not None:
                assert blocks[: len(matched)] == matched
                assert len(set(blocks)) == len(blocks) == size
                manager.publish(blocks, chain)
                held.append(blocks)
        elif held:
            manager.release(held.pop(size % len(held)))
        manager.check(held)
        assert manager.free + manager.held == capacity
    for blocks in held:
        manager.release(blocks)
    manager.check([])
    assert manager.free == capacity
