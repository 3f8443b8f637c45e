"""A process full of workers: their ports, the side channel, and a port to control them all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from simulator.control import control
from simulator.http_server import Connection, Exchange
from simulator.peers import Peers
from simulator.worker import Worker, WorkerConfig

JSON = dict[str, Any]


class Fleet:
    """Workers that share an event loop. Also a context manager: started inside, stopped after."""

    def __init__(self, configs: Sequence[WorkerConfig], *, admin_port: int = 0) -> None:
        self._configs = configs
        self._admin_port = admin_port
        self._admin: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self.peers = Peers(configs[0].host)
        self.workers: dict[str, Worker] = {}

    async def start(self) -> None:
        await self.peers.start()
        for config in self._configs:
            worker = Worker(config, self.peers)
            await worker.start()
            self.workers[config.name] = worker
        loop = asyncio.get_running_loop()
        self._admin = await loop.create_server(
            lambda: Connection(self._handle, self._connections),
            self.peers.host,
            self._admin_port,
        )
        self._admin_port = self._admin.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        for worker in self.workers.values():
            await worker.stop()
        if self._admin is not None:
            self._admin.close()
        for connection in list(self._connections):
            connection.abort()
        await self.peers.stop()

    async def __aenter__(self) -> Fleet:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def admin_url(self) -> str:
        return f"http://{self.peers.host}:{self._admin_port}"

    def describe(self) -> JSON:
        """What is served where."""
        workers = [
            {"name": worker.config.name, "role": worker.config.role, "url": worker.url}
            for worker in self.workers.values()
        ]
        return {"workers": workers, "admin": self.admin_url}

    def _handle(self, exchange: Exchange) -> None:
        """`/sim/workers` lists; `/sim/workers/NAME/...` is `/sim/...` of that worker."""
        parts = exchange.path.partition("?")[0].strip("/").split("/")
        if parts[:2] != ["sim", "workers"]:
            exchange.reply(404, b'{"detail":"Not Found"}')
        elif len(parts) == 2:
            exchange.reply(200, orjson.dumps(self.describe()))
        elif parts[2] not in self.workers:
            exchange.reply(404, orjson.dumps({"detail": f"no worker {parts[2]!r}"}))
        else:
            control(self.workers[parts[2]], exchange, "/".join(parts[3:]))
