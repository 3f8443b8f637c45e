"""KV between one worker and the others: what it reads, what it lets be read, what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulator.engine import Pull, Reason
from simulator.engine import Sequence as EngineSequence
from simulator.peers import OnRead
from simulator.vllm import replies

if TYPE_CHECKING:
    from simulator.worker import Worker


class KvTransfers:
    """The side of a worker that other workers see. One for each life of its engine."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._registered: dict[str, list[OnRead]] = {}
        "Who waits for KV to be sent, by the request it belongs to."

    @property
    def expected(self) -> int:
        """Requests whose KV somebody waits for."""
        return len(self._registered)

    def pull(self, action: Pull) -> None:
        """Read the blocks of another engine, for a decode leg that starts here."""
        request_id = action.sequence.request.id
        worker = self._worker
        faults, engine = worker.faults, worker.engine
        limit = faults.transfer_limit
        if faults.drop_transfer or (limit is not None and engine.pulling > limit):
            engine.pull_failed(request_id, worker.now_s, reached=True)
            return

        def done(contents: Sequence[int] | None, reached: bool) -> None:
            if engine.dead:
                return
            if contents is None:
                engine.pull_failed(request_id, worker.now_s, reached=reached)
            else:
                engine.pulled(request_id, contents, worker.now_s)
            worker.pump()

        worker.peers.read(action.remote, done)

    def serve_read(self, request_id: str, blocks: Sequence[int] | None, done: OnRead) -> None:
        """Another worker, or this one, wants KV from here. A worker that hangs says nothing."""
        faults, engine = self._worker.faults, self._worker.engine
        if faults.stall:
            return
        if engine.dead or faults.drop_transfer:
            done(None, not engine.dead)
            return
        engine.advance_quietly(self._worker.now_s)
        if blocks is not None:
            done(engine.contents.read(blocks), True)
            return
        pinned = self._pinned(request_id)
        if pinned is None:
            self._registered.setdefault(request_id, []).append(done)
        else:
            self._send_kv(engine.pins[pinned].blocks, [done])

    def push(self, sequence: EngineSequence) -> None:
        """A prefill leg is done: send its KV to whoever registered for it."""
        waiting = self._registered.pop(_base_id(sequence.request.id), [])
        if waiting and sequence.blocks:
            self._send_kv(sequence.blocks, waiting)

    def _send_kv(self, blocks: Sequence[int], receivers: Sequence[OnRead]) -> None:
        config, engine = self._worker.config, self._worker.engine
        size_bytes = len(blocks) * config.block_tokens * config.profile.kv_bytes_per_token
        for done in receivers:
            engine.count_transfer(size_bytes, config.profile.transfer.seconds(size_bytes))
            done(engine.contents.read(blocks), True)

    def _pinned(self, base_id: str) -> str | None:
        """The kept request that goes by `base_id`."""
        pins = self._worker.engine.pins
        return next((name for name in pins if _base_id(name) == base_id), None)

    def kv_notice(self, kind: str, request_id: str) -> None:
        """Another worker needs KV from here no more ("release"), or still does."""
        worker, engine = self._worker, self._worker.engine
        if worker.faults.stall or engine.dead:
            return
        if worker.config.kv_push:
            if kind == "release":
                self._registered.pop(request_id, None)
            request_id = self._pinned(request_id) or request_id
        if kind == "release":
            engine.release_pin(request_id, worker.now_s)
        else:
            engine.extend_pin(request_id, worker.now_s)
        worker.pump()

    def handoff(self, sequence: EngineSequence) -> replies.Handoff | None:
        """What this worker hands on of a finished prefill leg."""
        if not sequence.request.keep_kv or sequence.reason not in (Reason.LENGTH, Reason.STOP):
            return None
        worker = self._worker
        count = -(-sequence.prompt_len // worker.config.block_tokens)
        blocks = sequence.blocks[:count]
        request_id = sequence.request.id
        if worker.faults.wrong_lease:
            capacity = worker.engine.blocks.capacity
            blocks = [(block + capacity // 2) % capacity for block in blocks]
            request_id += "-wrong"
        return replies.Handoff(
            blocks=blocks,
            engine_id=worker.engine.engine_id,
            request_id=request_id,
            host=worker.peers.host,
            port=worker.peers.port,
            tokens=sequence.prompt_len,
            cached_tokens=sequence.cached_tokens or 0,
            push=worker.config.kv_push,
        )


def _base_id(request_id: str) -> str:
    """A request's id as both legs know it, without its random end."""
    return request_id.rpartition("-")[0]
