"""How engines reach each other's KV: inside this process directly, between processes over TCP.

Every process listens on one side channel; a handoff names it by host and port, and an engine
behind it by id. A message is one line of JSON; reads are answered by a line, notices are not.
Reads are one-sided, as a remote memory read is: they find whatever lies in the blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import orjson

from simulator.engine import RemoteKv

JSON = dict[str, Any]
# What a read found; None and whether the other side answered at all, if it found nothing.
OnRead = Callable[[Sequence[int] | None, bool], None]

_LINE_LIMIT = 64 << 20


class KvSource(Protocol):
    """An engine of this process, as others see it."""

    def serve_read(self, request_id: str, blocks: Sequence[int] | None, done: OnRead) -> None:
        """Tell `done` what lies in `blocks`; None: in the request's own, once it has finished."""

    def kv_notice(self, kind: str, request_id: str) -> None: ...


class _Peer:
    """A connection to another process, opened at first use and again after it broke."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._lock = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[JSON]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._next = 0

    async def send(self, message: JSON) -> asyncio.Future[JSON] | None:
        """Send a message; the future of its answer if it is a read."""
        async with self._lock:
            if self._writer is None or self._writer.is_closing():
                reader, self._writer = await asyncio.open_connection(
                    *self._address, limit=_LINE_LIMIT
                )
                self._reading = asyncio.create_task(self._receive(reader))
        answer = None
        if message["op"] == "read":
            self._next += 1
            message["n"] = self._next
            answer = asyncio.get_running_loop().create_future()
            self._answers[self._next] = answer
        self._writer.write(orjson.dumps(message) + b"\n")
        return answer

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = orjson.loads(line)
                answer = self._answers.pop(message["n"], None)
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except (OSError, ValueError):
            pass
        finally:
            lost, self._answers = self._answers, {}
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            for answer in lost.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the other process has gone"))

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()


class Peers:
    """The engines of this process by id, and the way to those of others."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.port = 0
        self._local: dict[str, KvSource] = {}
        self._remote: dict[tuple[str, int], _Peer] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, 0, limit=_LINE_LIMIT)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for peer in self._remote.values():
            peer.close()
        for writer in list(self._writers):
            writer.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def register(self, engine_id: str, source: KvSource) -> None:
        self._local[engine_id] = source

    def unregister(self, engine_id: str) -> None:
        self._local.pop(engine_id, None)

    # -- asking ---------------------------------------------------------------------------------

    def read(self, remote: RemoteKv, done: OnRead) -> None:
        """Read `remote` blocks. `done` is called once, at once or later, or never (a hang)."""
        source = self._local.get(remote.engine_id or "")
        if source is not None:
            source.serve_read(remote.request_id, None if remote.push else remote.blocks, done)
        elif (remote.host, remote.port) == (self.host, self.port):
            done(None, False)
        else:
            self._spawn(self._read_remote(remote, done))

    def notify(self, kind: str, remote: RemoteKv) -> None:
        """Tell the owner of `remote` blocks: "release" or "heartbeat"."""
        source = self._local.get(remote.engine_id or "")
        if source is not None:
            source.kv_notice(kind, remote.request_id)
        elif (remote.host, remote.port) != (self.host, self.port):
            self._spawn(self._notify_remote(kind, remote))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _peer(self, remote: RemoteKv) -> _Peer:
        address = (remote.host, remote.port)
        return self._remote.setdefault(address, _Peer(*address))

    async def _read_remote(self, remote: RemoteKv, done: OnRead) -> None:
        message = {
            "op": "read",
            "engine": remote.engine_id,
            "request": remote.request_id,
            "blocks": None if remote.push else remote.blocks,
        }
        try:
            answer = await self._peer(remote).send(message)
            assert answer is not None
            found = await answer
        except (OSError, OverflowError):
            done(None, False)
            return
        done(found.get("contents"), bool(found.get("reached")))

    async def _notify_remote(self, kind: str, remote: RemoteKv) -> None:
        message = {"op": kind, "engine": remote.engine_id, "request": remote.request_id}
        try:
            await self._peer(remote).send(message)
        except (OSError, OverflowError):
            return  # nobody there to be told

    # -- answering ------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                self._answer(orjson.loads(line), writer)
        except (OSError, ValueError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _answer(self, message: JSON, writer: asyncio.StreamWriter) -> None:
        source = self._local.get(message.get("engine", ""))
        if message["op"] != "read":
            if source is not None:
                source.kv_notice(message["op"], message["request"])
            return

        def done(contents: Sequence[int] | None, reached: bool) -> None:
            answer = {"n": message["n"], "contents": contents, "reached": reached}
            if not writer.is_closing():
                writer.write(orjson.dumps(answer) + b"\n")

        if source is None:
            done(None, False)
        else:
            source.serve_read(message["request"], message["blocks"], done)
