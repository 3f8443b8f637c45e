"""KV between processes: reads find what lies there, notices arrive, a peer that is gone is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from simulator.engine import RemoteKv
from simulator.peers import Peers


class Source:
    """A worker that answers at once, later, or never."""

    def __init__(self, reachable=True):
        self.reachable = reachable
        self.notices = []
        self.registered = []

    def serve_read(self, request_id, blocks, done):
        if self.reachable is None:
            return
        if blocks is None:
            self.registered.append((request_id, done))
        elif self.reachable:
            done([block * 10 for block in blocks], True)
        else:
            done(None, False)

    def kv_notice(self, kind, request_id):
        self.notices.append((kind, request_id))


async def read(peers, remote, timeout_s=2.0):
    found = asyncio.get_running_loop().create_future()
    peers.read(remote, lambda contents, reached: found.set_result((contents, reached)))
    return await asyncio.wait_for(found, timeout_s)


def with_two(test):
    async def run():
        one, other = Peers("127.0.0.1"), Peers("127.0.0.1")
        await one.start()
        await other.start()
        try:
            await test(one, other)
        finally:
            await one.stop()
            await other.stop()

    asyncio.run(run())


def claim(peers, engine="p", host="127.0.0.1"):
    return RemoteKv(engine, "r1", (1, 2, 3), host, peers.port)


def test_reads_within_a_process():
    async def test(one, _other):
        one.register("p", Source())
        assert await read(one, claim(one)) == ([10, 20, 30], True)
        one.unregister("p")
        assert await read(one, claim(one)) == (None, False)

    with_two(test)


def test_reads_and_notices_between_processes():
    async def test(one, other):
        source = Source()
        other.register("p", source)
        for _ in range(3):
            assert await read(one, claim(other)) == ([10, 20, 30], True)
        one.notify("heartbeat", claim(other))
        one.notify("release", claim(other))
        for _ in range(200):
            if len(source.notices) == 2:
                break
            await asyncio.sleep(0.005)
        assert source.notices == [("heartbeat", "r1"), ("release", "r1")]
        assert await read(one, claim(other, "unknown")) == (None, False)

    with_two(test)


def test_a_hanging_source_never_answers():
    async def test(one, other):
        one.register("here", Source(reachable=None))
        other.register("there", Source(reachable=None))
        for remote in (claim(one, "here"), claim(other, "there")):
            try:
                await read(one, remote, 0.1)
            except TimeoutError:
                continue
            raise AssertionError("answered")

    with_two(test)


def test_a_dead_source_and_a_gone_process():
    async def test(one, other):
        other.register("p", Source(reachable=False))
        assert await read(one, claim(other)) == (None, False)
        other.register("p", Source())
        assert await read(one, claim(other)) == ([10, 20, 30], True)
        gone = claim(other)
        await other.stop()
        assert await read(one, gone) == (None, False)
        assert await read(one, RemoteKv("p", "r", (1,), "127.0.0.1", 1)) == (None, False)
        one.notify("release", gone)

    with_two(test)


def test_what_is_pushed_arrives_when_it_is_sent():
    async def test(one, other):
        source = Source()
        one.register("here", source)
        other.register("there", source)
        for peers, name in ((one, "here"), (other, "there")):
            remote = replace(claim(peers, name), push=True, blocks=())
            reading = asyncio.create_task(read(one, remote))
            for _ in range(500):
                if source.registered:
                    break
                await asyncio.sleep(0.002)
            assert not reading.done()
            request_id, done = source.registered.pop()
            assert request_id == "r1"
            done([7], True)
            assert await reading == ([7], True)

    with_two(test)
