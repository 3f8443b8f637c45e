"""HTTP on the wire: keep-alive, pipelining, bad requests, clients that leave."""

from __future__ import annotations

import asyncio

import pytest

from simulator.http_server import Connection


async def talk(handle, *parts, until=b"\0never"):
    """What a server with `handle` sends back for `parts`, up to `until` or the end."""
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(handle, connections), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    received = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        while until not in received:
            data = await asyncio.wait_for(reader.read(65536), 5)
            if not data:
                break
            received += data
    finally:
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()
    return received


def echo(exchange):
    exchange.reply(200, exchange.method.encode() + b" " + exchange.path.encode() + exchange.body)


def get(path, close=False):
    connection = "close" if close else "keep-alive"
    return f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\n\r\n".encode()


def test_requests_on_one_connection_are_answered_in_order():
    received = asyncio.run(talk(echo, get("/1"), get("/2") + get("/3"), get("/4", close=True)))
    bodies = [part.split(b"\r\n\r\n")[1] for part in received.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"GET /1", b"GET /2", b"GET /3", b"GET /4"]
    assert received.count(b"connection: close") == 1


def test_a_pipelined_request_waits_for_the_answer_before_it():
    waiting = []

    def handle(exchange):
        waiting.append(exchange)
        if len(waiting) == 1:
            asyncio.get_running_loop().call_later(0.05, echo, exchange)
        else:
            assert waiting[0].done
            echo(exchange)

    received = asyncio.run(talk(handle, get("/slow") + get("/fast", close=True)))
    assert received.index(b"/slow") < received.index(b"/fast")


def test_a_body_may_come_in_parts_and_chunks():
    head = b"POST /b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    received = asyncio.run(talk(echo, head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"))
    assert received.endswith(b"POST /babcde")


def test_a_client_may_ask_before_it_sends():
    head = b"POST /b HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    received = asyncio.run(talk(echo, head, b"ok", until=b"/bok"))
    assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


@pytest.mark.parametrize("junk", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"])
def test_what_is_no_http_is_refused_and_closed(junk):
    assert asyncio.run(talk(echo, junk)).startswith(b"HTTP/1.1 400")


def test_events_are_chunks_of_their_own():
    def handle(exchange):
        exchange.open_stream()
        exchange.send([b"data: 1\n\n", b"data: 2\n\n"])
        exchange.send([b"data: [DONE]\n\n"], last=True)

    received = asyncio.run(talk(handle, get("/", close=True)))
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"text/event-stream" in head
    expected = b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    assert body == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_is_noticed_once(streaming):
    gone = []

    async def leave():
        connections: set[Connection] = set()
        seen = asyncio.Event()

        def handle(exchange):
            exchange.on_gone = lambda: gone.append(exchange)
            if streaming:
                exchange.open_stream()
            seen.set()

        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(handle, connections), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(get("/"))
        await seen.wait()
        writer.write_eof()
        for _ in range(200):
            if gone:
                break
            await asyncio.sleep(0.005)
        assert not connections
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    asyncio.run(leave())
    assert len(gone) == 1
    assert gone[0].done
