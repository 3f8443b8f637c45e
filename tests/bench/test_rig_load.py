import asyncio
import json

import httpx

from bench import rig_load


def run(*arguments):
    return asyncio.run(rig_load.Load(rig_load.parse(list(map(str, arguments)))).run())


def test_exactly_n_calls(engine, capsys):
    found = run("--port", engine.regular, "--n", 10, "--conc", 3)
    assert (found["done"], found["bad"], found["started"]) == (10, 0, 10)
    assert capsys.readouterr().out == "W\n"


def test_streams_count_events_and_first_bytes(engine):
    found = run("--port", engine.regular, "--n", 4, "--stream", "--max-tokens", 6)
    assert found["done"] == 4
    assert found["events"] == 4 * 9  # role, six tokens, finish, [DONE]
    assert 0 < found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"]


def test_a_window_counts_what_ends_inside(engine):
    found = run("--port", engine.regular, "--secs", 0.3, "--warmup", 0.1, "--conc", 2)
    assert found["done"] > 0
    assert found["bad"] == 0


def test_prompts_have_their_size_and_are_unique():
    async def bodies():
        load = rig_load.Load(rig_load.parse(["--port", "1", "--prompt", "5000"]))
        return [json.loads(load._body()) for _ in range(2)]

    first, second = (body["messages"][1]["content"] for body in asyncio.run(bodies()))
    assert len(first) == len(second) == 5000
    assert first[:2500] == second[:2500]
    assert first != second


def test_failed_calls_say_why():
    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Busy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def measure():
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        found = await rig_load.Load(rig_load.parse(["--port", str(port), "--n", "3"])).run()
        server.close()
        return found

    found = asyncio.run(measure())
    assert (found["done"], found["bad"]) == (0, 3)
    assert found["faults"] == {"HTTP 503": 3}


def test_a_stream_that_spans_the_opening_of_the_window_is_whole(engine):
    async def measure():
        url = f"http://127.0.0.1:{engine.regular}/_ctl?itl_us=50000"
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.get(url)
        arguments = ["--port", str(engine.regular), "--stream", "--max-tokens", "6"]
        options = rig_load.parse([*arguments, "--warmup", "0.15", "--secs", "0.6", "--conc", "2"])
        return await rig_load.Load(options).run()

    found = asyncio.run(measure())
    assert found["done"] > 0
    assert found["bad"] == 0
    assert found["events"] > 0
