import asyncio
import json

import pytest

from bench.http_client import Pool

BODY = json.dumps({"messages": [], "max_tokens": 3}).encode()


class Recorder:
    def __init__(self):
        self.done = asyncio.get_running_loop().create_future()
        self.status = 0
        self.data = b""

    def started(self, status, headers):
        self.status = status
        self.content_type = headers[b"content-type"]

    def body(self, data):
        self.data += data

    def ended(self):
        self.done.set_result("ended")

    def failed(self, reason):
        self.done.set_result(reason)


async def ask(pool, path="/v1/chat/completions"):
    connection = await pool.take()
    recorder = Recorder()
    connection.send(pool.head(path, len(BODY), [("x-a", "b")]), BODY, recorder)
    return connection, recorder, await asyncio.wait_for(recorder.done, 5)


def test_a_connection_is_used_again(engine):
    async def run():
        pool = Pool(f"http://127.0.0.1:{engine.regular}")
        first, recorder, how = await ask(pool)
        second, _, _ = await ask(pool)
        pool.close()
        return first is second, recorder, how

    same, recorder, how = asyncio.run(run())
    assert same
    assert how == "ended"
    assert recorder.status == 200
    assert recorder.content_type == b"application/json"
    assert json.loads(recorder.data)["choices"][0]["finish_reason"] == "length"


def test_warm_connections_are_idle(engine):
    async def run():
        pool = Pool(f"http://127.0.0.1:{engine.regular}")
        await pool.warm(3)
        taken = [await pool.take() for _ in range(3)]
        pool.close()
        return len(set(map(id, taken)))

    assert asyncio.run(run()) == 3


@pytest.mark.parametrize(
    ("reply", "reason"),
    [(b"", "connection lost"), (b"nonsense\r\n\r\n", "bad HTTP: HttpParserInvalidStatusError")],
)
def test_a_broken_reply_fails_once(reply, reason):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        _, _, how = await ask(pool)
        pool.close()
        server.close()
        return how

    how = asyncio.run(run())
    assert how == reason or (how.startswith("bad HTTP") and reason.startswith("bad HTTP"))


def test_a_prefix_in_the_url_is_kept():
    assert Pool("http://h:81/base/").head("/v1/x", 3).startswith(b"POST /base/v1/x HTTP/1.1")
