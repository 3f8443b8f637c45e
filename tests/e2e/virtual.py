"""A fleet in virtual time: the router's map and scheduler, and simulated engines that prefill."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np

from cachemap import InMemoryCacheMap, hash_blocks, read_prompt
from cachemap.prompt import TOKEN_ID_BYTES
from scheduler import PROFILES, Job, Lease, Scheduler, WorkerState
from simulator import profile
from simulator.engine import Engine, Request

BLOCK_TOKENS = 16


@dataclass
class Fleet:
    """`prefill` workers and as many that decode. Decoding takes a fixed time: it is not the
    question here."""

    prefill: int
    least_load: bool = False
    decode_s: float = 1.0
    capacity_tokens: int = 1_000_000
    ttft_s: list[float] = field(default_factory=list)
    placed: Counter[str] = field(default_factory=Counter)
    since_restart: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(PROFILES["b300-tp4"], 100_000)
        self.cachemap = InMemoryCacheMap(1 << 29)
        self.engines: dict[str, Engine] = {}
        shape = profile.resized(profile.load("b300-tp4"), capacity_tokens=self.capacity_tokens)
        for i in range(self.prefill):
            self._add(f"p{i}", "prefill")
            self.engines[f"p{i}"] = Engine(shape, engine_id=f"p{i}", block_tokens=BLOCK_TOKENS)
            self._add(f"d{i}", "decode")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = count()
        self._under_way: dict[str, tuple[Lease, float]] = {}
        self.now_s = 0.0

    def _add(self, name: str, role: str) -> None:
        worker = WorkerState(name, f"http://{name}", "m", role, role, up=True)  # type: ignore[arg-type]  # a role
        self.scheduler.add_worker(worker)
        if role == "prefill":
            self.cachemap.add_worker(name, self.capacity_tokens * TOKEN_ID_BYTES)

    @property
    def workers(self) -> dict[str, WorkerState]:
        return self.scheduler.workers

    def job(self, name: str, tokens: Sequence[int], output: int = 100) -> Job:
        self._blocks = hash_blocks(read_prompt({"prompt": list(tokens)}, "m"))
        held = {
            worker: size // TOKEN_ID_BYTES // BLOCK_TOKENS * BLOCK_TOKENS
            for worker, size in self.cachemap.match(self._blocks).items()
        }
        return Job(name, len(tokens), output, held)

    def place(self, job: Job) -> Lease:
        """Place the job that was made last."""
        if self.least_load:
            first = min(
                (w for w in self.workers.values() if w.can_prefill),
                key=lambda w: (w.prefill_work_tokens, w.last_placed),
            )
            others = {w.id for w in self.workers.values() if w.can_prefill} - {first.id}
            job = replace(job, excluded=frozenset(others))
        lease = self.scheduler.submit(job, self.now_s)
        assert lease is not None
        if lease.placement.prefill is not None:
            self.cachemap.store(lease.placement.prefill.id, self._blocks)
        return lease

    def arrive(self, name: str, tokens: Sequence[int]) -> None:
        lease = self.place(self.job(name, tokens))
        worker = lease.placement.prefill
        assert worker is not None
        self.placed[worker.id] += 1
        self.since_restart.append(worker.id)
        request = Request(name, np.array(tokens, dtype=np.uint32), max_tokens=1, keep_kv=True)
        self._under_way[name] = (lease, self.now_s)
        self.engines[worker.id].submit(request, self.now_s)
        self._look(worker.id)

    def restart(self, name: str) -> None:
        """A prefill engine starts anew: what the router knows of its cache is gone."""
        self.cachemap.clear(name)
        self.engines[name] = Engine(
            self.engines[name].profile, engine_id=name, block_tokens=BLOCK_TOKENS
        )
        self.workers[name].epoch += 1
        self.since_restart.clear()

    def at(self, time_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._ticket), what))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now_s, _, what = heapq.heappop(self._events)
            what()

    def _look(self, name: str) -> None:
        due_s = self.engines[name].next_event_s()
        if due_s is not None and self._under_way:
            self.at(max(due_s, self.now_s), partial(self._advance, name))

    def _advance(self, name: str) -> None:
        engine = self.engines[name]
        for sequence in engine.advance(self.now_s).sequences:
            call = sequence.request.id
            if sequence.reason is not None and call in self._under_way:
                lease, arrived_s = self._under_way.pop(call)
                self.ttft_s.append(self.now_s - arrived_s)
                engine.release_pin(call, self.now_s)
                self.scheduler.prefill_done(lease, self.now_s)
                self.at(self.now_s + self.decode_s, partial(self.scheduler.close, lease))
        self._look(name)
