"""ZMTP on the wire, byte by byte as its specification has it."""

from __future__ import annotations

import asyncio

import pytest

from simulator.zmtp import Publisher, Replier, frame, message

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03\x01" + b"NULL" + bytes(16) + b"\0" + bytes(31)


def ready(kind):
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return b"\x04" + bytes((len(body),)) + body


class Peer:
    """A peer that speaks bytes."""

    def __init__(self, port):
        self.port = port

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *exc):
        self.writer.close()
        await self.writer.wait_closed()

    async def greet(self, kind):
        self.writer.write(GREETING[:11])
        await asyncio.sleep(0)
        self.writer.write(GREETING[11:] + ready(kind))
        greeting = await self.exactly(64)
        assert greeting[:10] == b"\xff\0\0\0\0\0\0\0\0\x7f"
        assert greeting[10] == 3
        assert greeting[12:32] == b"NULL".ljust(20, b"\0")
        return await self.frame()

    async def exactly(self, size):
        return await asyncio.wait_for(self.reader.readexactly(size), 5)

    async def frame(self):
        flags = (await self.exactly(1))[0]
        size = int.from_bytes(await self.exactly(8 if flags & 2 else 1), "big")
        return flags & ~2, await self.exactly(size)

    async def message(self):
        frames = []
        while True:
            flags, data = await self.frame()
            frames.append(data)
            if not flags & 1:
                return frames


def run(test, socket):
    async def running():
        await socket.listen("127.0.0.1")
        try:
            async with Peer(socket.port) as peer:
                await test(socket, peer)
        finally:
            socket.close()
            await asyncio.sleep(0)

    asyncio.run(running())


async def subscribed(publisher):
    for _ in range(500):
        if any(peer.topics for peer in publisher.peers):
            return
        await asyncio.sleep(0.002)
    raise AssertionError("no subscription arrived")


@pytest.mark.parametrize("old", [True, False])
def test_subscribers_get_what_they_asked_for(old):
    async def test(publisher, peer):
        assert await peer.greet(b"SUB") == (4, ready(b"PUB")[2:])
        ask = b"\0\x04\x01kv@" if old else b"\x04\x0d\x09SUBSCRIBEkv@"
        peer.writer.write(ask)
        await subscribed(publisher)
        publisher.publish([b"other", b"x"])
        publisher.publish([b"kv@p0", b"1", b"y" * 300])
        publisher.publish([b"kv@p1", b"2", b""])
        assert await peer.message() == [b"kv@p0", b"1", b"y" * 300]
        assert await peer.message() == [b"kv@p1", b"2", b""]

    run(test, Publisher())


def test_a_subscription_can_be_taken_back():
    async def test(publisher, peer):
        await peer.greet(b"SUB")
        peer.writer.write(b"\0\x02\x01a\0\x02\x01b")
        await subscribed(publisher)
        peer.writer.write(b"\0\x02\x00a")
        for _ in range(500):
            if not any(b"a" in other.topics for other in publisher.peers):
                break
            await asyncio.sleep(0.002)
        publisher.publish([b"a"])
        publisher.publish([b"b"])
        assert await peer.message() == [b"b"]

    run(test, Publisher())


def test_a_request_gets_all_its_answers():
    def answer(request):
        return [[b"", request[-1], bytes((i,))] for i in range(3)]

    async def test(_replier, peer):
        assert await peer.greet(b"DEALER") == (4, ready(b"ROUTER")[2:])
        peer.writer.write(b"\x01\0\0\x08" + b"12345678")
        assert [await peer.message() for _ in range(3)] == [
            [b"", b"12345678", bytes((i,))] for i in range(3)
        ]

    run(test, Replier(answer))


def test_a_ping_is_answered():
    async def test(_publisher, peer):
        await peer.greet(b"SUB")
        peer.writer.write(b"\x04\x0a\x04PING\0\x01abc")
        assert await peer.frame() == (4, b"\x04PONGabc")

    run(test, Publisher())


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n" * 5, b"\xff" * 64])
def test_what_is_no_zmtp_is_closed(junk):
    async def test(_publisher, peer):
        peer.writer.write(junk)
        await peer.exactly(64)
        assert await asyncio.wait_for(peer.reader.read(), 5) == b""

    run(test, Publisher())


def test_a_frame_that_is_too_long_is_cut_off():
    async def test(_publisher, peer):
        await peer.greet(b"SUB")
        peer.writer.write(b"\x02" + (1 << 40).to_bytes(8, "big"))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await peer.exactly(1)

    run(test, Publisher())


def test_frames():
    assert frame(b"abc") == b"\0\x03abc"
    assert frame(b"x" * 256)[:9] == b"\x02" + (256).to_bytes(8, "big")
    assert message([b"a", b"", b"c"]) == b"\x01\x01a\x01\0\0\x01c"
