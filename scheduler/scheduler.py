"""The queue of one model's calls and the books of its workers.

Methods change the books and say what was decided; whoever calls them does what follows. Time is an
argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from scheduler.jobs import Job
from scheduler.placement import Placement, place
from scheduler.prices import Prices
from scheduler.workers import WorkerState

Phase = Literal["prefill", "transfer", "decode", "closed"]

# Recent prefill work fades by half for every so many tokens placed on each worker of the stage:
# counted in work and not in time, balance is the same at any speed.
RECENT_WORK_TOKENS = 262_144


class QueueFull(Exception):
    """The queue holds as many calls as it may."""


@dataclass(slots=True, eq=False)
class Lease:
    """What one placed call occupies. `Scheduler` moves it through its phases, forward only."""

    job: Job
    placement: Placement
    phase: Phase
    prefill_tokens: int
    prefill_ms: float
    decode_tokens: int


class Scheduler:
    """Places jobs of one model on its workers, first come first served."""

    def __init__(self, prices: Prices, max_waiting: int) -> None:
        self.workers: dict[str, WorkerState] = {}
        self.leases: set[Lease] = set()
        self._prices = prices
        self._max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._placed = 0
        self._listed: list[WorkerState] = []

    @property
    def depth(self) -> int:
        """Jobs that wait for a place."""
        return len(self._waiting)

    def add_worker(self, worker: WorkerState) -> None:
        self.workers[worker.id] = worker
        self._listed = list(self.workers.values())

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker. Leases on it stay valid and release what they hold."""
        self.workers.pop(worker_id, None)
        self._listed = list(self.workers.values())

    def servable(self) -> bool:
        """Whether any worker that is up could ever take a job."""
        return any(worker.up and worker.can_decode for worker in self._listed)

    def submit(self, job: Job, now_s: float) -> Lease | None:
        """Place `job` at once, or let it wait (None).

        Raises `QueueFull`. A waiting job is placed by `place_waiting` or taken back by `withdraw`.
        """
        if not self._waiting:
            lease = self._place(job, now_s)
            if lease is not None:
                return lease
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull
        self._waiting.append(job)
        return None

    def place_waiting(
        self, now_s: float, refresh: Callable[[Job], Job] = lambda job: job
    ) -> Iterator[Lease]:
        """Place jobs from the head of the queue while there is room, one for each step.

        `refresh` brings a job up to date first: who holds its prefix changes while it waits.
        """
        while self._waiting:
            lease = self._place(refresh(self._waiting[0]), now_s)
            if lease is None:
                return
            self._waiting.popleft()
            yield lease

    def withdraw(self, job_id: str) -> None:
        """Take back a job that waits; any other is left alone."""
        self._waiting = deque(job for job in self._waiting if job.id != job_id)

    def prefill_done(self, lease: Lease, now_s: float) -> None:
        """The prefill worker has answered: what it was charged ends here, not with the call."""
        if lease.phase == "prefill":
            self._release_prefill(lease)
            (lease.placement.prefill or lease.placement.decode).prefill_since_s = now_s
            lease.phase = "transfer"

    def decode_started(self, lease: Lease, now_s: float) -> None:
        """The first output token is there."""
        self.prefill_done(lease, now_s)
        if lease.phase == "transfer":
            lease.phase = "decode"

    def close(self, lease: Lease) -> None:
        """The call is over, however it ended. Closing twice is closing once."""
        if lease.phase == "closed":
            return
        if lease.phase == "prefill":
            self._release_prefill(lease)
        lease.phase = "closed"
        self.leases.discard(lease)
        decode = lease.placement.decode
        decode.decode_jobs -= 1
        decode.decode_work_tokens -= lease.decode_tokens
        decode.running -= 1

    def _place(self, job: Job, now_s: float) -> Lease | None:
        placement = place(job, self._listed, self._prices, now_s)
        if placement is None:
            return None
        return self._open(job, placement, now_s)

    def _open(self, job: Job, placement: Placement, now_s: float) -> Lease:
        self._placed += 1
        decode, prefill = placement.decode, placement.prefill
        computes = prefill or decode
        uncached = job.prompt_tokens - placement.cached_tokens
        lease = Lease(
            job=job,
            placement=placement,
            phase="prefill",
            prefill_tokens=uncached,
            prefill_ms=self._prices.prefill(uncached, placement.cached_tokens),
            decode_tokens=job.prompt_tokens + job.expected_output_tokens,
        )
        if not computes.prefill_jobs:
            computes.prefill_since_s = now_s
        computes.prefill_jobs += 1
        computes.prefill_work_tokens += lease.prefill_tokens
        computes.prefill_work_ms += lease.prefill_ms
        decode.decode_jobs += 1
        decode.decode_work_tokens += lease.decode_tokens
        decode.running += 1
        decode.last_placed = self._placed
        if prefill is not None:
            prefill.running += 1
            prefill.last_placed = self._placed
            self._remember(prefill, uncached)
        self.leases.add(lease)
        return lease

    def _remember(self, prefill: WorkerState, tokens: int) -> None:
        stage = [worker for worker in self._listed if worker.role != "decode"]
        fade = 0.5 ** (tokens / (RECENT_WORK_TOKENS * max(len(stage), 1)))
        for worker in stage:
            worker.recent_prefill_tokens *= fade
        prefill.recent_prefill_tokens += tokens

    def _release_prefill(self, lease: Lease) -> None:
        worker = lease.placement.prefill or lease.placement.decode
        if lease.placement.prefill is not None:
            worker.running -= 1
        worker.prefill_jobs -= 1
        worker.prefill_work_tokens -= lease.prefill_tokens
        # The sum of many floats may end beside zero; an idle worker owes nothing.
        worker.prefill_work_ms = (
            worker.prefill_work_ms - lease.prefill_ms if worker.prefill_jobs else 0.0
        )
