"""Events over ZeroMQ, as a subscriber of its own library sees them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import uvloop
import zmq
import zmq.asyncio
from msgspec import msgpack

from simulator.kv_events import BlockRemoved, BlocksStored
from simulator.kv_publisher import KvEventLog, KvPublisher

BLOCK = 16
END = [b"", b"\xff" * 8, b""]
TOPIC = b"kv@p0@tiny"
LAST_HASH = 2**64 - 1


def number(frames):
    return int.from_bytes(frames[1], "big")


def test_batches_are_numbered_and_replayed():
    log = KvEventLog(TOPIC.decode(), BLOCK)
    sent = [log.append([BlockRemoved(i)], 1.5) for i in range(3)]
    assert [number(frames) for frames in sent] == [0, 1, 2]
    assert msgpack.decode(sent[2][2]) == [1.5, [BlockRemoved(2).as_map(BLOCK)], 0]
    assert list(log.replay(1)) == [*sent[1:], END]


def test_hashes_and_token_ids_are_numbers_on_the_wire():
    stored = BlocksStored([LAST_HASH], 1 << 63, np.arange(BLOCK, dtype=np.uint32), None)
    _topic, _number, payload = KvEventLog("t", BLOCK).append([stored], 0.0)
    ((told,),) = msgpack.decode(payload)[1:2]
    assert told["block_hashes"] == [LAST_HASH]
    assert told["parent_block_hash"] == 1 << 63
    assert told["token_ids"] == list(range(BLOCK))


class Consumer:
    """Subscribed to one publisher, and connected to its replays."""

    def __init__(self, source, topic=TOPIC):
        self.live = zmq.asyncio.Socket(zmq.Context.instance(), zmq.SUB)
        self.live.subscribe(topic)
        self.live.connect(source["endpoint"])
        self.asking = zmq.asyncio.Socket(zmq.Context.instance(), zmq.DEALER)
        self.asking.connect(source["replay_endpoint"])

    async def next(self):
        return await asyncio.wait_for(self.live.recv_multipart(), 10)

    async def replayed(self, first):
        """Batches from `first` on, without the empty frame before each."""
        await self.asking.send_multipart([b"", first.to_bytes(8, "big")])
        batches: list[list[bytes]] = []
        while True:
            empty, *frames = await asyncio.wait_for(self.asking.recv_multipart(), 10)
            assert empty == b""
            if frames == END:
                return batches
            batches.append(frames)

    def close(self):
        self.live.close(linger=0)
        self.asking.close(linger=0)


@asynccontextmanager
async def published(topic=TOPIC, missed=0):
    """A publisher, and a consumer of `topic` that comes after `missed` batches."""
    publisher = KvPublisher("localhost", TOPIC.decode(), BLOCK)
    for at in range(missed):
        publisher.publish([BlockRemoved(at)], float(at))
    consumer = Consumer(publisher.source(), topic)
    try:
        yield publisher, consumer
    finally:
        consumer.close()
        await publisher.close()


async def until_subscribed(publisher, consumer):
    """Publish until a batch arrives; the first that did. What a late consumer goes through."""
    for at in range(2000):
        publisher.publish([BlockRemoved(at)], float(at))
        if await consumer.live.poll(5):
            return await consumer.next()
    raise AssertionError("nothing arrived")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_late_consumer_fills_its_gap_from_the_replay(run):
    async def test():
        async with published(missed=5) as (publisher, consumer):
            first = number(await until_subscribed(publisher, consumer))
            assert first >= 5
            publisher.publish([BlockRemoved(LAST_HASH)], 9.0)
            last = await consumer.next()
            while msgpack.decode(last[2])[0] != 9.0:
                last = await consumer.next()
            assert last[0] == TOPIC
            batches = await consumer.replayed(0)
            assert [number(frames) for frames in batches] == list(range(number(last) + 1))
            assert batches[-1] == last
            assert await consumer.replayed(number(last)) == [last]
            assert await consumer.replayed(number(last) + 1) == []

    run(test())


def test_other_topics_are_not_sent():
    async def test():
        async with published(b"kv@p1") as (publisher, consumer):
            await consumer.replayed(0)
            publisher.publish([BlockRemoved(1)], 1.0)
            assert not await consumer.live.poll(50)

    asyncio.run(test())


def test_a_long_replay_is_sent_whole_and_a_strange_request_ends_nothing():
    async def test():
        async with published(missed=3000) as (_publisher, consumer):
            await consumer.asking.send(b"no number of eight bytes at all")
            assert await asyncio.wait_for(consumer.asking.recv_multipart(), 10) == [b"", *END]
            assert len(await consumer.replayed(0)) == 3000

    asyncio.run(test())


def test_a_restart_counts_from_0():
    async def test():
        async with published() as (publisher, consumer):
            before = await until_subscribed(publisher, consumer)
            publisher.restart()
            publisher.publish([BlockRemoved(7)], 7.0)
            after = await consumer.next()
            while msgpack.decode(after[2])[0] != 7.0:
                before, after = after, await consumer.next()
            assert number(after) == 0
            assert number(before) >= 0
            assert await consumer.replayed(0) == [after]

    asyncio.run(test())


def test_a_host_that_is_no_address_of_here_is_refused():
    async def test():
        with pytest.raises(OSError, match="not known"):
            KvPublisher("no-such-host.invalid", "t", BLOCK)

    asyncio.run(test())
