"""What lies in blocks: right KV, wrong KV, and what is built on it."""

from __future__ import annotations

import numpy as np

from simulator.blocks import BlockManager
from simulator.hashing import chain_blocks, sequence_identity
from simulator.kv_contents import KvContents
from simulator.kv_events import AllBlocksCleared, BlocksStored
from simulator.sequence import Request, Sequence

BLOCK = 16


def sequence(blocks, length=40, hits=0):
    """A sequence of the ids from 0 on that holds `blocks`, the first `hits` found in the cache."""
    tokens = np.arange(length, dtype=np.uint32)
    chain = chain_blocks(tokens, BLOCK, 0)
    identity = sequence_identity(chain.total, tokens[len(chain.hashes) * BLOCK :])
    made = Sequence(Request("r", tokens), chain, identity, 100, 0.0)
    made.blocks, made.hits, made.published = blocks, hits, hits
    return made


def contents(capacity=8, **options):
    blocks = BlockManager(capacity)
    return blocks, KvContents(blocks, BLOCK, **options)


def test_computed_blocks_hold_what_they_should():
    blocks, kv = contents()
    made = sequence(blocks.take((), 3))
    kv.compute(made)
    assert kv.read(made.blocks) == [*made.chain.hashes, made.identity]
    assert kv.identity(made) == made.identity


def test_reading_beyond_the_blocks_finds_nothing():
    _blocks, kv = contents()
    assert kv.read([-1, 99]) == [0, 0]


def test_received_blocks_are_right_if_they_are_the_senders():
    blocks, kv = contents()
    made = sequence(blocks.take((), 3))
    assert kv.receive(made, [*made.chain.hashes, made.identity]) == 3
    assert kv.identity(made) == made.identity
    assert not blocks.corrupt


def test_missing_and_foreign_blocks_change_all_that_follows():
    seen = set()
    for received in ([5, 6, 7], [5, 6], []):
        blocks, kv = contents()
        made = sequence(blocks.take((), 3))
        kv.receive(made, received)
        seen.add(kv.identity(made))
        assert set(made.blocks) == blocks.corrupt
    assert len(seen) == 3
    assert made.identity not in seen


def test_what_is_computed_behind_wrong_blocks_is_wrong():
    blocks, kv = contents()
    first = sequence(blocks.take((), 3))
    kv.receive(first, [5, 6, 7])
    later = sequence([first.blocks[0], *blocks.take((), 2)], hits=1)
    kv.compute(later)
    assert kv.read(later.blocks)[1:] != [later.chain.hashes[1], later.identity]
    assert kv.identity(later) != later.identity


def test_whole_blocks_are_published_once_and_told():
    blocks, kv = contents(record_events=True)
    made = sequence(blocks.take((), 3))
    kv.publish(made, 20)
    kv.publish(made, 20)
    kv.publish(made, 40)
    first, second = kv.take_events()
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (first.parent, first.hashes) == (None, made.chain.hashes[:1])
    assert (second.parent, second.hashes) == (made.chain.hashes[0], made.chain.hashes[1:])
    assert second.tokens.tolist() == list(range(16, 32))
    assert blocks.match(made.chain.hashes, 9) == made.blocks[:2]
    assert kv.take_events() == []


def test_an_evicted_start_is_published_again_with_what_follows():
    blocks, kv = contents(capacity=5)
    cached = sequence(blocks.take((), 1), length=16)
    kv.publish(cached, 16)
    made = sequence(blocks.take((), 3))
    kv.publish(made, 16)
    blocks.release(cached.blocks)
    blocks.take((), 2)  # evicts what `cached` left
    assert not blocks.knows(made.chain.hashes[0])
    kv.publish(made, 40)
    assert blocks.match(made.chain.hashes, 9) == made.blocks[:2]


def test_answers_are_chained_and_found():
    blocks, kv = contents()
    made = sequence(blocks.take((), 4))
    kv.compute(made)
    made.computed, made.generated = 50, 11
    kv.extend_chain(made)
    assert len(made.chain.hashes) == 3
    assert kv.read(made.blocks)[:3] == made.chain.hashes


def test_the_cache_is_cleared_when_nobody_holds_it():
    blocks, kv = contents(record_events=True)
    held = blocks.take((), 1)
    assert not kv.clear_cache()
    blocks.release(held)
    assert kv.clear_cache()
    assert kv.take_events() == [AllBlocksCleared()]
