import asyncio
import random
from collections import Counter

import openai
import pytest

from bench import departures
from bench.departures import SdkLeaver, SocketLeaver

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


async def leave(way):
    """How the server sees one departure: `eof`, `reset` or `nothing`."""
    seen = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        await reader.readuntil(b"}")
        try:
            while await reader.read(1000):
                pass
            seen.set_result("eof")
        except ConnectionResetError:
            seen.set_result("reset")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    leaver = SdkLeaver(client, BODY) if way == "sdk" else SocketLeaver(url, BODY, way)
    await leaver.start()
    await asyncio.sleep(0.2)
    await leaver.leave()
    try:
        return await asyncio.wait_for(seen, 5)
    finally:
        await leaver.clean_up()
        await client.close()
        server.close()


@pytest.mark.parametrize(
    ("way", "seen"),
    [("close", "eof"), ("half-close", "eof"), ("reset", "reset"), ("sdk", "eof")],
)
def test_the_other_side_sees_the_departure(way, seen):
    assert asyncio.run(leave(way)) == seen


def test_cuts_are_of_every_way_and_within_their_time():
    dice = random.Random(1)
    cuts = [departures.cut(dice, i, "m", 0.4, heavy=False) for i in range(200)]
    assert set(Counter(one.way for one in cuts)) == set(departures.WAYS)
    assert all(0 <= one.delay_s <= 0.4 for one in cuts)
    assert len({one.body["messages"][0]["content"] for one in cuts}) == 200
    assert departures.cut(dice, 0, "m", 0.4, heavy=True).body["max_tokens"] == 2000
