"""The whole router in one process, as the server runs it, before scripted engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
import uvloop

from cachemap import hash_blocks, read_prompt
from router.app import Router, build
from router.config import Config, parse, validate
from scheduler import PROFILES
from tests.fakes import ScriptedEngine
from tests.router.clusters import CALL, STREAM, decodes, prefills
from tests.router.wire import HOT, Response, read_response, request, until

JSON = dict[str, Any]


def config_of(prefill: str, decode: str, **more: Any) -> Config:
    text: JSON = {
        "models": [
            {
                "name": "full-name",
                "aliases": ["short"],
                "pools": [
                    {"name": "p", "role": "prefill", "workers": [{"url": prefill}]},
                    {"name": "d", "role": "decode", "workers": [{"url": decode}]},
                ],
            }
        ],
        "log": {"access": False, "level": "info"},
        **more,
    }
    return validate(text)


@dataclass(slots=True)
class Served:
    router: Router
    port: int
    prefill: ScriptedEngine
    decode: ScriptedEngine

    async def ask(self, data: bytes) -> Response:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            return await read_response(reader)
        finally:
            writer.close()

    async def get(self, path: bytes, headers: bytes = b"") -> Response:
        return await self.ask(request(b"", path, method=b"GET", headers=headers))

    async def post(self, body: JSON | bytes, headers: bytes = b"", path: bytes = HOT) -> Response:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask(request(raw, path, headers=headers))


@asynccontextmanager
async def served(**more: Any) -> AsyncIterator[Served]:
    prefill, decode = (ScriptedEngine("full-name", each) for each in (prefills, decodes))
    for engine in (prefill, decode):
        await engine.start()
    router = build(config_of(prefill.url, decode.url, **more))
    server = uvicorn.Server(
        uvicorn.Config(
            router.app,
            port=0,
            http=router.protocol,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
        )
    )
    running = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        await until(lambda: all(worker.up for worker in router.workers))
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Served(router, port, prefill, decode)
    finally:
        server.should_exit = True
        await running
        for engine in (prefill, decode):
            await engine.stop()


def played(play: Callable[[Served], Any], **more: Any) -> None:
    async def scenario() -> None:
        async with served(**more) as made:
            await play(made)

    uvloop.run(scenario())


def test_calls_and_cold_pages_on_one_port():
    async def play(made: Served) -> None:
        response = await made.post(CALL | {"stream": True})
        assert (response.status, response.body) == (200, b"".join(STREAM))
        assert response.headers["date"]
        assert "server" not in response.headers
        assert (await made.post(CALL)).status == 200
        assert (await made.get(b"/health/ready")).status == 200
        models = json.loads((await made.get(b"/v1/models")).body)["data"]
        assert [model["id"] for model in models] == ["full-name", "short"]
        metrics = (await made.get(b"/metrics")).body.decode()
        counted = 'pdrouter_requests_total{model="full-name",queue="default",plan="pd",code="200"}'
        assert f"{counted} 2" in metrics
        assert "pdrouter_leases 0" in metrics

    played(play)


def test_what_is_found_of_workers_is_known_to_the_fleet():
    async def play(made: Served) -> None:
        for worker in made.router.workers:
            assert worker.capacity_tokens == 1_000_000
        assert made.router.fleets[0].max_model_len == 100_000
        # The map takes in as much of a prompt as the worker's cache does, in bytes.
        prompt = hash_blocks(read_prompt({"prompt": "x" * 5_000_000}, "full-name"))
        for worker in made.router.workers:
            made.router.cachemap.store(worker.id, prompt)
        held = made.router.cachemap.match(prompt)
        assert len(held) == 2
        assert all(3_990_000 < size <= 4_000_000 for size in held.values())

    played(play)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [(b"/nowhere", b"GET", 404), (b"/v1/nowhere", b"POST", 404), (HOT, b"GET", 404)],
)
def test_errors_of_cold_paths_have_openais_shape(path, method, status):
    async def play(made: Served) -> None:
        response = await made.ask(request(b"", path, method=method))
        assert response.status in (status, 405)
        error = json.loads(response.body)["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]

    played(play)


def test_keys_guard_calls_and_cold_pages(monkeypatch):
    monkeypatch.setenv("KEYS_OF_THE_TEST", "one,two")

    async def play(made: Served) -> None:
        right = b"authorization: Bearer two\r\n"
        assert (await made.post(CALL)).status == 401
        assert (await made.post(CALL, right)).status == 200
        refused = await made.get(b"/v1/models")
        assert refused.status == 401
        assert json.loads(refused.body)["error"]["code"] == "invalid_api_key"
        assert (await made.get(b"/v1/models", right)).status == 200
        assert (await made.get(b"/health/live")).status == 200

    played(play, auth={"keys_env": "KEYS_OF_THE_TEST"})


def test_a_body_too_large_is_refused():
    async def play(made: Served) -> None:
        response = await made.post(b"x" * 2000)
        assert response.status == 413
        assert json.loads(response.body)["error"]["type"] == "invalid_request_error"

    played(play, limits={"max_body_bytes": 1000})


def test_a_body_too_large_is_a_call_too():
    """It has an id and is counted."""

    async def play(made: Served) -> None:
        response = await made.post(b"x" * 2000, b"x-request-id: call\r\n")
        assert response.headers["x-request-id"] == "call"
        assert b"2000 bytes; limits.max_body_bytes" in response.body
        metrics = (await made.get(b"/metrics")).body.decode()
        assert 'pdrouter_rejected_total{reason="body_too_large"} 1' in metrics
        counted = 'pdrouter_requests_total{model="unknown",queue="default",plan="none",code="413"}'
        assert f"{counted} 1" in metrics

    played(play, limits={"max_body_bytes": 1000})


def test_a_slow_client_makes_the_engine_wait():
    """The engine sends 64 MB at once; the router holds little of it."""

    async def floods(req: Any, answer: Any) -> None:
        answer.open_stream()
        for piece in STREAM[:2]:
            answer.send(piece)
        while answer._transport.get_write_buffer_size() < 1 << 20:
            answer.send(b": " + b"x" * 65_000 + b"\n\n")
            sent[0] += 65_000
            await asyncio.sleep(0)
        stuck.set()
        await answer.gone.wait()

    sent = [0]
    stuck = asyncio.Event()

    async def play(made: Served) -> None:
        made.decode.behaviour = floods
        _, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(request(json.dumps(CALL | {"stream": True}).encode()))
        async with asyncio.timeout(20):
            await stuck.wait()
        assert sent[0] < 64 << 20
        writer.transport.abort()
        await until(lambda: not made.decode.active)
        await until(lambda: not made.router.fleets[0].scheduler.leases)

    played(play)


def test_prices_come_from_a_profile_or_the_configuration():
    text = """
models:
  - name: one
    prices: h200-llama8b
    pools: [{name: a, role: both, workers: [{url: http://a:1}]}]
  - name: two
    prices:
      prefill:
        {base_ms: 1, per_token_ms: 2, per_token_context_ms: 3, per_cached_token_ms: 4}
      decode_step: {base_ms: 5, per_sequence_ms: 6, per_sequence_context_ms: 7}
      transfer: {base_ms: 8, per_token_ms: 9}
    pools: [{name: b, role: both, workers: [{url: http://b:1}]}]
log: {access: false}
"""
    router = build(parse(text))
    one, two = (fleet.scheduler._prices for fleet in router.fleets)
    assert one is PROFILES["h200-llama8b"]
    assert two.prefill(1, 1) == 1 + 2 + 3 * 1.5 + 4
    assert two.decode_step(1, 1) == 5 + 6 + 7
    assert two.transfer(1) == 8 + 9
    router.access_log.close()
