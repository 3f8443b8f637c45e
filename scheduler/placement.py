"""The price of every plan, and the cheapest one.

The price of a pair is the sum of a prefill half and a decode half, as the KV of any prefill worker
reaches any decode worker alike; so pricing every half prices every pair, in the sum of the two
fleets' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
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
    """One half of a plan, or a whole one on a decode worker alone, with its price in ms.

    `parts` sum up to the price: (wait, compute, spread) of a prefill half, (transfer, growth) of a
    decode half, (compute, growth) of a decode worker alone.
    """

    price: float
    last_placed: int  # decides between equals: the one longest without work is first
    worker: WorkerState
    parts: tuple[float, ...]


_ORDER = itemgetter(0, 1)


class Placement(NamedTuple):
    """The chosen plan: prefill on `prefill` and decode on `decode`, or all on `decode`.

    `cached_tokens` is what the worker that prefills is expected to reuse. `candidates` are all
    halves that were priced: prefill workers, decode workers behind one, decode workers alone.
    """

    prefill: WorkerState | None
    decode: WorkerState
    price: float
    cached_tokens: int
    candidates: tuple[list[Candidate], list[Candidate], list[Candidate]]


def place(
    job: Job,
    workers: Sequence[WorkerState],
    prices: Prices,
    room_tokens: dict[str, int],
    now_s: float,
) -> Placement | None:
    """Choose the cheapest plan among `workers`, or None where no decode worker has room.

    `room_tokens` maps a worker to the prompt tokens its cache takes in without evicting.
    """
    up = [worker for worker in workers if worker.up]
    decoders = _decoders(job, up)
    if not decoders:
        return None
    prefillers = [] if job.decode_only else _prefillers(job, up)
    first = _price_prefill(job, prefillers, prices, room_tokens, now_s)
    second, alone = _price_decode(job, decoders, prices)
    candidates = (first, second, alone)
    best_alone = min(alone, key=_ORDER)
    if first:
        prefill, decode = min(first, key=_ORDER), min(second, key=_ORDER)
        pair_price = prefill.price + decode.price
        # A worker of both roles needs no handoff to itself.
        if pair_price <= best_alone.price and prefill.worker is not decode.worker:
            cached = job.cached_tokens(prefill.worker.id)
            return Placement(prefill.worker, decode.worker, pair_price, cached, candidates)
    worker = best_alone.worker
    cached = job.cached_tokens(worker.id)
    return Placement(None, worker, best_alone.price, cached, candidates)


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


def _price_prefill(
    job: Job,
    workers: Sequence[WorkerState],
    prices: Prices,
    room_tokens: dict[str, int],
    now_s: float,
) -> list[Candidate]:
    if not workers:
        return []
    mean_recent = sum([worker.recent_prefill_tokens for worker in workers]) / len(workers)
    candidates = []
    for worker in workers:
        cached = job.cached_tokens(worker.id)
        uncached = job.prompt_tokens - cached
        wait = prefill_wait_ms(worker, now_s)
        compute = CONGESTION * prices.prefill(uncached, cached)
        surplus = BALANCE * (worker.recent_prefill_tokens - mean_recent)
        displaced = DISPLACEMENT * max(uncached - room_tokens.get(worker.id, uncached), 0)
        spread = prices.prefill_b * (surplus + displaced)
        price = wait + compute + spread
        candidates.append(Candidate(price, worker.last_placed, worker, (wait, compute, spread)))
    return candidates


def _price_decode(
    job: Job, workers: Sequence[WorkerState], prices: Prices
) -> tuple[list[Candidate], list[Candidate]]:
    """The decode half behind a prefill worker, and the whole call, on each of `workers`.

    Growth is what the call's output costs there: its own steps, and the time that its tokens and
    its context add to the steps of every call that decodes beside it.
    """
    behind, alone = [], []
    output = job.expected_output_tokens
    own_context = job.prompt_tokens + output // 2
    for worker in workers:
        cached = job.cached_tokens(worker.id)
        uncached = job.prompt_tokens - cached
        calls, context = worker.decode_jobs, worker.decode_work_tokens
        own_step = prices.decode_step(calls + 1, context + own_context)
        others = calls * (prices.decode_b + prices.decode_d * own_context)
        growth = output * (own_step + others) / worker.weight
        transfer = prices.transfer(uncached)
        compute = CONGESTION * prices.prefill(uncached, cached) * prices.interference(calls)
        placed = worker.last_placed
        behind.append(Candidate(transfer + growth, placed, worker, (transfer, growth)))
        alone.append(Candidate(compute + growth, placed, worker, (compute, growth)))
    return behind, alone
