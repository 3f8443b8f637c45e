"""Simulated workers on free ports of this machine, for tests that speak HTTP."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvloop

from simulator.profile import load, resized
from simulator.server import Fleet
from simulator.worker import WorkerConfig


class Served:
    """A fleet on a thread of its own, and a client for it."""

    def __init__(
        self, *roles: str, profile: Any = None, limits: Any = None, **options: Any
    ) -> None:
        chosen = profile or resized(load("h200-llama8b"), **(limits or {}))
        config = WorkerConfig(
            name="", role="both", port=0, profile=chosen, names=("tiny",), speed=100.0
        )
        self.configs = [
            replace(config, name=f"{role[0]}{i}", role=role, **options)  # type: ignore[arg-type]
            for i, role in enumerate(roles)
        ]
        self.client = httpx.Client(timeout=20)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with Fleet(self.configs) as self.fleet:
            self.workers = list(self.fleet.workers.values())
            self._ready.set()
            await self._stop.wait()

    def close(self) -> None:
        self.client.close()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def url(self, at: int = 0) -> str:
        return self.workers[at].url

    def post(self, path: str, body: Any, at: int = 0, **options: Any) -> httpx.Response:
        if isinstance(body, str | bytes):
            return self.client.post(self.url(at) + path, content=body, **options)
        return self.client.post(self.url(at) + path, json=body, **options)

    def get(self, path: str, at: int = 0) -> httpx.Response:
        return self.client.get(self.url(at) + path)

    def state(self, at: int = 0) -> Any:
        return self.get("/sim/state", at).json()

    def faults(self, at: int = 0, **faults: Any) -> None:
        name = self.configs[at].name
        url = f"{self.fleet.admin_url}/sim/workers/{name}/faults"
        reply = self.client.put(url, json=faults)
        assert reply.status_code == 200, reply.text


@pytest.fixture
def serve():
    """Start fleets: `serve("prefill", "decode", speed=10)`."""
    started: list[Served] = []

    def start(*roles: str, **options: Any) -> Served:
        served = Served(*roles, **options)
        started.append(served)
        return served

    yield start
    for served in started:
        served.close()
