"""KV events: the recorded shape, and an index built from them knows what the engine knows."""

from __future__ import annotations

import struct

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import Engine, Request
from simulator.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksStored,
    KvEvent,
    KvEventLog,
    encode,
)
from simulator.profile import load, resized
from tests.simulator import recordings

BLOCK = 16
PROFILE = resized(load("h200-llama8b"), capacity_tokens=640, max_model_len=600)


def unpack(data, at=0):
    """A MessagePack value and where it ends. Written for these tests, apart from the encoder."""
    first = data[at]
    if first < 0x80:
        return first, at + 1
    simple = {0xC0: None, 0xC2: False, 0xC3: True}
    if first in simple:
        return simple[first], at + 1
    numbers = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
    if first in numbers:
        (value,) = struct.unpack_from(numbers[first], data, at + 1)
        return value, at + 1 + struct.calcsize(numbers[first])
    return unpack_sized(data, at, first)


def unpack_sized(data, at, first):
    short = ((0x80, 0x8F, "map"), (0x90, 0x9F, "list"), (0xA0, 0xBF, "text"))
    long = {0xD9: ("text", 1), 0xDA: ("text", 2), 0xDB: ("text", 4), 0xDC: ("list", 2)}
    long |= {0xDD: ("list", 4), 0xDE: ("map", 2), 0xDF: ("map", 4)}
    for low, high, kind in short:
        if low <= first <= high:
            return unpack_items(data, at + 1, kind, first - low)
    kind, width = long[first]
    size = int.from_bytes(data[at + 1 : at + 1 + width], "big")
    return unpack_items(data, at + 1 + width, kind, size)


def unpack_items(data, at, kind, size):
    if kind == "text":
        return data[at : at + size].decode(), at + size
    items = []
    for _ in range(size * (2 if kind == "map" else 1)):
        item, at = unpack(data, at)
        items.append(item)
    if kind == "map":
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return items, at


values = st.recursive(
    st.none() | st.integers(0, 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=30,
)


@given(values)
def test_message_pack_round_trips(value):
    data = encode(value)
    assert unpack(data) == (value, len(data))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 65535, 65536])
def test_ids_are_packed_as_lists_of_numbers(size):
    ids = np.arange(size, dtype=np.uint32) * 3
    assert unpack(encode(ids))[0] == ids.tolist()


@pytest.mark.parametrize("value", [-1, 2**64, b"x", object()])
def test_what_cannot_be_packed_is_refused(value):
    with pytest.raises((TypeError, ValueError)):
        encode(value)


def test_events_have_the_recorded_members():
    path = recordings.shared_dir() / "fixtures" / "vllm" / "kv_events.jsonl"
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


def test_batches_are_numbered_and_replayed():
    log = KvEventLog("kv@p0@tiny", BLOCK)
    sent = [log.append([BlockRemoved(i)], 1.5) for i in range(3)]
    assert [int.from_bytes(frames[1], "big") for frames in sent] == [0, 1, 2]
    assert unpack(sent[2][2])[0] == [1.5, [BlockRemoved(2).as_map(BLOCK)], 0]
    assert list(log.replay(1)) == [*sent[1:], [b"", b"\xff" * 8, b""]]


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
            parent, tokens = told["parent_block_hash"], told["token_ids"].tolist()
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
        for event in engine.kv_events or ():
            index.apply(event)
        engine.kv_events = []
    assert engine.blocks.known == len(index.chains)
    assert engine.reset_cache(engine.now_s)
    for event in engine.kv_events or ():
        index.apply(event)
    assert not index.chains
