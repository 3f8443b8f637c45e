"""KV events: the recorded shape, and an index built from them knows what the engine knows."""

from __future__ import annotations

import numpy as np
import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simulator.engine import Engine, Request
from simulator.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksStored,
    KvEvent,
)
from simulator.profile import load, resized

BLOCK = 16
PROFILE = resized(load("h200-llama8b"), capacity_tokens=640, max_model_len=600)


def test_events_have_the_recorded_members(shared):
    path = shared("fixtures/vllm/kv_events.jsonl")
    recorded: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        row = orjson.loads(line)
        if row["kind"] == "frames":
            batch = row["decoded"]
            assert len(batch) == 3
            recorded |= {event["type"]: list(event) for event in batch[1]}
    ours: list[KvEvent] = [
        BlocksStored([1, 2], None, np.arange(32, dtype=np.uint32), None),
        BlockRemoved(1),
        AllBlocksCleared(),
    ]
    assert {event.as_map(BLOCK)["type"]: list(event.as_map(BLOCK)) for event in ours} == recorded


def test_a_salt_is_said_with_the_first_block_of_a_chain():
    tokens = np.arange(32, dtype=np.uint32)
    first = BlocksStored([1, 2], None, tokens, "s").as_map(BLOCK)
    later = BlocksStored([3, 4], 2, tokens, "s").as_map(BLOCK)
    assert first["extra_keys"] == [["s"], None]
    assert later["extra_keys"] == [None, None]


class Index:
    """What a consumer knows: hashes, each with the tokens of its chain."""

    def __init__(self):
        self.chains = {}

    def apply(self, event):
        told = event.as_map(BLOCK)
        if told["type"] == "AllBlocksCleared":
            self.chains.clear()
        elif told["type"] == "BlockRemoved":
            for key in told["block_hashes"]:
                del self.chains[key]
        else:
            parent, tokens = told["parent_block_hash"], told["token_ids"]
            salt = told["extra_keys"][0][0] if told["extra_keys"][0] else None
            chain = (salt,) if parent is None else self.chains[parent]
            assert len(tokens) == len(told["block_hashes"]) * BLOCK
            for i, key in enumerate(told["block_hashes"]):
                chain = (*chain, *tokens[i * BLOCK : (i + 1) * BLOCK])
                self.chains[key] = chain

    def held(self, tokens, salt):
        """Leading tokens that are cached, the last one never."""
        known = set(self.chains.values())
        count = 0
        while count + BLOCK < len(tokens) and (salt, *tokens[: count + BLOCK]) in known:
            count += BLOCK
        return count


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 400), st.integers(0, 2), st.integers(1, 60), st.sampled_from([None, "s"])
        ),
        max_size=20,
    )
)
# The last call computes a cached block again, and the first one of that hash is evicted meanwhile.
@example([(96, 1, 1, "s"), (69, 0, 60, None), (293, 0, 60, "s"), (96, 1, 50, "s")])
def test_an_index_of_the_events_predicts_the_next_hit(calls):
    engine = Engine(PROFILE, record_kv_events=True)
    index = Index()
    for i, (length, kind, output, salt) in enumerate(calls):
        tokens = np.arange(length, dtype=np.uint32) + np.uint32(kind * 1000)
        expected = index.held(tokens.tolist(), salt)
        request = Request(f"r{i}", tokens, max_tokens=output, salt=salt)
        sequence = engine.submit(request, engine.now_s)
        engine.advance(engine.now_s + 1e6)
        assert sequence.cached_tokens == expected
        for event in engine.contents.take_events():
            index.apply(event)
    assert engine.blocks.known == len(index.chains)
    assert engine.reset_cache(engine.now_s)
    for event in engine.contents.take_events():
        index.apply(event)
    assert not index.chains
