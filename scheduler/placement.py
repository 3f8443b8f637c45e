"""The price of every plan, and the cheapest one.

The price of a pair is the sum of a prefill half and a decode half, as the KV of any prefill worker
reaches any decode worker alike; so pricing every half prices every pair, in the sum of the two
fleets' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.jobs import Job
from scheduler.prices import Prices
from scheduler.workers import WorkerState

# A token computed twice costs the call its time, and the calls behind it on the worker theirs.
# These weights were chosen by replaying traces: docs/adr/0009-the-price-of-a-prefill.md.
CONGESTION = 2.0
# Taking in a token where the cache is full pushes out one that somebody may come back for.
DISPLACEMENT = 1.0
# Share of a worker's recent surplus of prefill work that counts against it, so that a prefix that
# everybody shares gets a second holder before queues form.
BALANCE = 0.1


class Candidate(NamedTuple):
    """One half of a plan with its price in ms, in parts."""

    worker: WorkerState
    price: float
    wait: float
    compute: float
    spread: float
    transfer: float
    growth: float


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen plan: prefill on `prefill` and decode on `decode`, or all on `decode`.

    `cached_tokens` is what the worker that prefills is expected to reuse. `candidates` are all
    halves that were priced: prefill workers, decode workers behind one, decode workers alone.
    """

    prefill: WorkerState | None
    decode: WorkerState
    price: float
    cached_tokens: int
    candidates: tuple[Sequence[Candidate], Sequence[Candidate], Sequence[Candidate]]


def place(
    job: Job, workers: Sequence[WorkerState], prices: Prices, room_tokens: dict[str, int], now_s: float
) -> Placement | None:
    """Choose the cheapest plan among `workers`, or None where no decode worker has room.

    `room_tokens` maps a worker to the prompt tokens its cache takes in without evicting.
    """
    up = [worker for worker in workers if worker.up]
    decoders = _decoders(job, up)
    if not decoders:
        return None
    alone = [_decode_alone(job, worker, prices) for worker in decoders]
    prefillers = [] if job.decode_only else _prefillers(job, up)
    best_alone = min(alone, key=_preference)
    if not prefillers:
        decode = best_alone.worker
        return Placement(
            None, decode, best_alone.price, job.cached_tokens(decode.id), ((), (), alone)
        )
    mean = sum(worker.recent_prefill_tokens for worker in prefillers) / len(prefillers)
    first = [_prefill(job, worker, prices, room_tokens, mean, now_s) for worker in prefillers]
    second = [_decode_behind(job, worker, prices) for worker in decoders]
    best_first, best_second = min(first, key=_preference), min(second, key=_preference)
    candidates = (first, second, alone)
    pair_price = best_first.price + best_second.price
    if best_alone.price < pair_price or best_first.worker is best_second.worker:
        decode = best_alone.worker
        return Placement(
            None, decode, best_alone.price, job.cached_tokens(decode.id), candidates
        )
    prefill = best_first.worker
    return Placement(
        prefill, best_second.worker, pair_price, job.cached_tokens(prefill.id), candidates
    )


def _decoders(job: Job, up: Sequence[WorkerState]) -> list[WorkerState]:
    room = [worker for worker in up if worker.can_decode and has_room(job, worker)]
    # A decode worker that failed this call is better than none: what failed may have been the KV.
    return [worker for worker in room if worker.id not in job.excluded] or room


def _prefillers(job: Job, up: Sequence[WorkerState]) -> list[WorkerState]:
    # Where all failed, decoding alone serves the call.
    return [worker for worker in up if worker.can_prefill and worker.id not in job.excluded]


def has_room(job: Job, worker: WorkerState) -> bool:
    """Whether the KV of the whole call fits beside what is promised; an idle worker takes any."""
    if worker.capacity_tokens is None or not worker.decode_jobs:
        return True
    need = job.prompt_tokens + job.expected_output_tokens
    return worker.decode_work_tokens + need <= worker.capacity_tokens


def prefill_wait_ms(worker: WorkerState, now_s: float) -> float:
    """Prefill work that `worker` still has to do, by our books."""
    if not worker.prefill_jobs:
        return 0.0
    done_ms = (now_s - worker.prefill_since_s) * 1000
    return max(worker.prefill_work_ms - done_ms, 0.0)


def _preference(candidate: Candidate) -> tuple[float, int]:
    return candidate.price, candidate.worker.last_placed


def _prefill(
    job: Job,
    worker: WorkerState,
    prices: Prices,
    room_tokens: dict[str, int],
    mean_recent_tokens: float,
    now_s: float,
) -> Candidate:
    cached = job.cached_tokens(worker.id)
    uncached = job.prompt_tokens - cached
    wait = prefill_wait_ms(worker, now_s)
    compute = CONGESTION * prices.prefill(uncached, cached)
    surplus = BALANCE * (worker.recent_prefill_tokens - mean_recent_tokens)
    displaced = DISPLACEMENT * max(uncached - room_tokens.get(worker.id, uncached), 0)
    spread = prices.prefill_b * (surplus + displaced)
    return Candidate(worker, wait + compute + spread, wait, compute, spread, 0.0, 0.0)


def _decode_behind(job: Job, worker: WorkerState, prices: Prices) -> Candidate:
    transfer = prices.transfer(job.prompt_tokens - job.cached_tokens(worker.id))
    growth = _growth(job, worker, prices)
    return Candidate(worker, transfer + growth, 0.0, 0.0, 0.0, transfer, growth)


def _decode_alone(job: Job, worker: WorkerState, prices: Prices) -> Candidate:
    cached = job.cached_tokens(worker.id)
    compute = prices.prefill(job.prompt_tokens - cached, cached)
    compute *= CONGESTION * prices.interference(worker.decode_jobs)
    growth = _growth(job, worker, prices)
    return Candidate(worker, compute + growth, 0.0, compute, 0.0, 0.0, growth)


def _growth(job: Job, worker: WorkerState, prices: Prices) -> float:
    """What this call's output costs on `worker`: its own steps there, and the time that its tokens
    and its context add to the steps of every call that decodes beside it."""
    calls, context = worker.decode_jobs, worker.decode_work_tokens
    own_context = job.prompt_tokens + job.expected_output_tokens / 2
    own = prices.decode_step(calls + 1, context + int(own_context))
    others = calls * (prices.decode_b + prices.decode_d * own_context)
    return job.expected_output_tokens * (own + others) / worker.weight
