"""One model and its workers: what the three packages know of them, joined.

The cache map counts bytes of canonical prompt, engines count tokens; a fleet learns how many bytes
a token of its traffic has, and translates.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from cachemap import Blocks, InMemoryCacheMap, Prompt
from cachemap.prompt import TOKEN_ID_BYTES
from router.config import ModelConfig
from router.errors import NoWorkers, QueueOverflow, QueueTimeout
from router.handoff import HANDOFFS, Handoff
from router.upstream import Upstream, Upstreams
from router.worker_monitor import WorkerReport
from scheduler import Job, Lease, Placement, Prices, QueueFull, Scheduler, WorkerState

# Weight of one call in the running means of what a fleet learns.
_LEARNING_RATE = 1 / 64
# Prompts shorter than this say more about the chat template than about the text.
_LEARN_FROM_TOKENS = 128
# The map is resized when the learned bytes per token have moved by this much.
_RESIZE_AT = 0.02
# Cap on the prior guess at a call's output, until the fleet's own mean is known.
_PRIOR_OUTPUT_TOKENS = 1024
_PRIOR_CALLS = 16


@dataclass(frozen=True, slots=True)
class Held:
    """A prompt's size, and its leading bytes that each worker held before it was placed."""

    prompt_bytes: int
    is_token_ids: bool
    by_worker: dict[str, int]


@dataclass(slots=True)
class _Waiting:
    """A call without a place yet."""

    job: Job
    blocks: Blocks
    held: Held
    body_bytes: int
    place: asyncio.Future[Lease] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Fleet:
    """Workers, queue and prefix knowledge of one model."""

    def __init__(
        self,
        config: ModelConfig,
        cachemap: InMemoryCacheMap,
        upstreams: Upstreams,
        prices: Prices,
        *,
        max_waiting: int,
        max_waiting_bytes: int,
        queue_timeout_s: float,
        default_capacity_tokens: int,
        io_ratio_prior: float,
    ) -> None:
        self.name = config.name
        self.handoff: Handoff = HANDOFFS[config.handoff]
        self.scheduler = Scheduler(prices, max_waiting)
        self.cachemap = cachemap
        self.reports: dict[str, WorkerReport] = {}
        self._upstreams: dict[str, Upstream] = {}
        self._bytes_per_token = config.bytes_per_token
        self._sized_for = config.bytes_per_token
        self._mean_output_tokens = 0.0
        self._calls_seen = 0
        self._io_ratio_prior = io_ratio_prior
        self._queue_timeout_s = queue_timeout_s
        self._default_capacity_tokens = default_capacity_tokens
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._waiting: dict[str, _Waiting] = {}
        decode_pools = [pool for pool in config.pools if pool.role != "prefill"]
        mean_weight = sum(pool.weight for pool in decode_pools) / sum(
            len(pool.workers) for pool in decode_pools
        )
        for pool in config.pools:
            for worker in pool.workers:
                state = WorkerState(
                    id=urlsplit(worker.url).netloc,
                    url=worker.url,
                    model=config.name,
                    pool=pool.name,
                    role=pool.role,
                    # The pool's share is split over its workers; the mean worker's is 1.
                    weight=pool.weight / len(pool.workers) / mean_weight,
                )
                self._upstreams[state.id] = upstreams.worker(worker.url)
                self.scheduler.add_worker(state)
                self._size(state)

    @property
    def workers(self) -> Sequence[WorkerState]:
        return list(self.scheduler.workers.values())

    @property
    def max_model_len(self) -> int | None:
        """The shortest context window that a worker reports, in tokens."""
        known = [r.max_model_len for r in self.reports.values() if r.max_model_len]
        return min(known, default=None)

    def upstream(self, worker: WorkerState) -> Upstream:
        return self._upstreams[worker.id]

    # What a call needs

    def held(self, prompt: Prompt, blocks: Blocks) -> Held:
        return Held(len(prompt.data), prompt.is_token_ids, self.cachemap.match(blocks))

    def held_now(self, held: Held, blocks: Blocks) -> Held:
        """The same prompt, as the map knows it by now."""
        return replace(held, by_worker=self.cachemap.match(blocks))

    def job(
        self,
        job_id: str,
        held: Held,
        output_limit: int | None,
        *,
        decode_only: bool,
        excluded: frozenset[str],
    ) -> Job:
        ratio = TOKEN_ID_BYTES if held.is_token_ids else self._bytes_per_token
        prompt_tokens = max(1, round(held.prompt_bytes / ratio))
        return Job(
            id=job_id,
            prompt_tokens=prompt_tokens,
            expected_output_tokens=self._expected_output(prompt_tokens, output_limit),
            held_tokens=self.in_tokens(held, prompt_tokens),
            decode_only=decode_only,
            excluded=excluded,
        )

    def in_tokens(self, held: Held, prompt_tokens: int) -> dict[str, int]:
        """What each worker holds of a prompt that has `prompt_tokens`, in whole engine blocks."""
        if not held.by_worker:
            return {}
        ratio = prompt_tokens / held.prompt_bytes
        workers = self.scheduler.workers
        return {
            name: int(size * ratio) // workers[name].block_tokens * workers[name].block_tokens
            for name, size in held.by_worker.items()
            if name in workers
        }

    async def acquire(
        self, job: Job, blocks: Blocks, held: Held, body_bytes: int
    ) -> tuple[Lease, Held]:
        """A place for `job`, as soon as there is one, and who held its prompt at that moment.

        `body_bytes` is what the call keeps in memory while it waits. Raises what a client should
        hear.
        """
        try:
            lease = self.scheduler.submit(job, time.monotonic())
        except QueueFull:
            raise QueueOverflow(
                f"{self.scheduler.depth} calls wait already; queue.max_waiting allows no more.",
                retry_after_s=1,
            ) from None
        if lease is not None:
            self._arriving(lease.placement, blocks)
            return lease, held
        try:
            return await self._wait(_Waiting(job, blocks, held, body_bytes))
        except TimeoutError:
            raise QueueTimeout(
                f"No room within {self._queue_timeout_s:g} s (queue.timeout_s).",
                retry_after_s=math.ceil(self._queue_timeout_s),
            ) from None

    async def _wait(self, waiting: _Waiting) -> tuple[Lease, Held]:
        job_id, place = waiting.job.id, waiting.place
        self._waiting[job_id] = waiting
        self._waiting_bytes += waiting.body_bytes
        try:
            if not self.scheduler.servable():
                raise NoWorkers(f"No worker of the model {self.name} can take calls now.")
            if self._waiting_bytes > self._max_waiting_bytes:
                raise QueueOverflow(
                    "The calls that wait are too large together (queue.max_waiting_bytes).",
                    retry_after_s=1,
                )
            async with asyncio.timeout(self._queue_timeout_s):
                lease = await place
            return lease, waiting.held
        except BaseException:
            self.scheduler.withdraw(job_id)
            if place.done() and not place.cancelled():  # given a place, but too late to take it
                self.release(place.result())
            raise
        finally:
            self._waiting_bytes -= waiting.body_bytes
            del self._waiting[job_id]

    def release(self, lease: Lease) -> None:
        """The call is over: give its place to whoever waits."""
        self.scheduler.close(lease)
        self.wake()

    def wake(self) -> None:
        """Place waiting calls, after room or a worker came back."""
        if not self._waiting:
            return
        left = []
        for lease in self.scheduler.place_waiting(time.monotonic(), self._refreshed):
            waiting = self._waiting[lease.job.id]
            if waiting.place.done():  # cancelled in this very turn of the loop
                left.append(lease)
            else:
                self._arriving(lease.placement, waiting.blocks)
                waiting.place.set_result(lease)
        for lease in left:
            self.release(lease)

    def _refreshed(self, job: Job) -> Job:
        """Match again: the turn before may have been placed while this one waited."""
        waiting = self._waiting[job.id]
        waiting.held = self.held_now(waiting.held, waiting.blocks)
        return replace(job, held_tokens=self.in_tokens(waiting.held, job.prompt_tokens))

    # What the map learns

    def _arriving(self, placement: Placement, blocks: Blocks) -> None:
        """The prompt will soon be held where it was placed: equal calls behind it follow it."""
        for worker in (placement.prefill, placement.decode):
            if worker is not None:
                self.cachemap.store(worker.id, blocks)

    def not_arrived(self, worker: WorkerState, blocks: Blocks, held: Held) -> None:
        """The call failed on `worker`: it holds no more than before."""
        self.cachemap.forget(worker.id, blocks, held.by_worker.get(worker.id, 0))

    def learn(self, held: Held, prompt_tokens: int, output_tokens: int) -> None:
        """What an engine counted for one call."""
        if output_tokens:
            self._calls_seen += 1
            rate = max(_LEARNING_RATE, 1 / self._calls_seen)
            self._mean_output_tokens += rate * (output_tokens - self._mean_output_tokens)
        if prompt_tokens < _LEARN_FROM_TOKENS or held.is_token_ids:
            return
        observed = held.prompt_bytes / prompt_tokens
        self._bytes_per_token += _LEARNING_RATE * (observed - self._bytes_per_token)
        if abs(self._bytes_per_token / self._sized_for - 1) > _RESIZE_AT:
            self._sized_for = self._bytes_per_token
            for worker in self.workers:
                self._size(worker)

    def apply(self, worker_id: str, report: WorkerReport) -> None:
        """A probe's result: availability, load, capacity, and whether the engine restarted."""
        worker = self.scheduler.workers.get(worker_id)
        if worker is None:
            return
        before = self.reports.get(worker_id)
        self.reports[worker_id] = report
        started = {before.started_at if before else None, report.started_at} - {None}
        if len(started) > 1:
            worker.epoch += 1
            self.cachemap.clear(worker_id)
        worker.up = report.ready
        worker.kv_usage = report.kv_usage
        worker.engine_running = report.engine_running or 0
        worker.engine_waiting = report.engine_waiting or 0
        worker.block_tokens = report.block_tokens or worker.block_tokens
        if report.capacity_tokens and report.capacity_tokens != worker.capacity_tokens:
            worker.capacity_tokens = report.capacity_tokens
            self._size(worker)
        self.wake()

    def _expected_output(self, prompt_tokens: int, limit: int | None) -> int:
        if self._calls_seen >= _PRIOR_CALLS:
            expected = self._mean_output_tokens
        else:
            expected = min(self._io_ratio_prior * prompt_tokens, _PRIOR_OUTPUT_TOKENS)
        return max(1, int(min(expected, limit) if limit is not None else expected))

    def _size(self, worker: WorkerState) -> None:
        tokens = worker.capacity_tokens or self._default_capacity_tokens
        self.cachemap.add_worker(worker.id, int(tokens * self._bytes_per_token))
