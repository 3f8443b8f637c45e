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

# A token computed again costs the call its time, and the calls behind it on the worker theirs; a
# wait costs this call alone. Chosen by replaying traces: docs/adr/0008-price-of-a-prefill.md.
CONGESTION = 4.0
# Share of a worker's recent surplus of prefill work that counts against it, so that a prefix that
# everybody shares gets a second holder before queues form.
BALANCE = 0.2


# One half of a plan, or a whole one on a decode worker alone: price in ms, the worker's last
# placement, the worker, and the price's parts: (wait, compute, spread) of a prefill half,
# (transfer, growth) of a decode half, (compute, growth) of a decode worker alone. A plain tuple,
# as one is made for every worker and call.
Candidate = tuple[float, int, WorkerState, tuple[float, ...]]

# Among equals the worker longest without work is first.
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
    now_s: float,
) -> Placement | None:
    """Choose the cheapest plan among `workers`, or None where no decode worker has room."""
    decoders = _decoders(job, workers)
    if not decoders:
        return None
    prefillers = [] if job.decode_only else _prefillers(job, workers)
    first = _price_prefill(job, prefillers, prices, now_s)
    second, alone = _price_decode(job, decoders, prices)
    candidates = (first, second, alone)
    price, _, decode, _ = min(alone, key=_ORDER)
    pair = _cheapest_pair(first, second)
    if pair is not None and pair[0] <= price:
        price, prefill, decode = pair
        return Placement(prefill, decode, price, job.cached_tokens(prefill.id), candidates)
    return Placement(None, decode, price, job.cached_tokens(decode.id), candidates)


def _cheapest_pair(
    first: Sequence[Candidate], second: Sequence[Candidate]
) -> tuple[float, WorkerState, WorkerState] | None:
    """Price, prefill and decode worker of the cheapest plan on two workers, if there is one."""
    if not first:
        return None
    p, d = min(first, key=_ORDER), min(second, key=_ORDER)
    if p[2] is not d[2]:
        return p[0] + d[0], p[2], d[2]
    # A worker of both roles is the best for either: it keeps one, the runner-up gets the other.
    pairs = [(p, other) for other in second if other[2] is not d[2]]
    pairs += [(other, d) for other in first if other[2] is not p[2]]
    if not pairs:
        return None
    p, d = min(pairs, key=lambda pair: pair[0][0] + pair[1][0])
    return p[0] + d[0], p[2], d[2]


def _decoders(job: Job, workers: Sequence[WorkerState]) -> list[WorkerState]:
    room = [w for w in workers if w.up and w.role != "prefill" and has_room(job, w)]
    if not job.excluded:
        return room
    # A decode worker that failed this call is better than none: what failed may have been the KV.
    return [worker for worker in room if worker.id not in job.excluded] or room


def _prefillers(job: Job, workers: Sequence[WorkerState]) -> list[WorkerState]:
    # Where all failed, decoding alone serves the call.
    return [w for w in workers if w.up and w.role != "decode" and w.id not in job.excluded]


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
    now_s: float,
) -> list[Candidate]:
    if not workers:
        return []
    prompt_tokens, held = job.prompt_tokens, job.held_tokens
    mean_recent = sum([worker.recent_prefill_tokens for worker in workers]) / len(workers)
    spread_per_token = BALANCE * prices.prefill_b
    computes: dict[int, float] = {}  # by cached tokens: most workers hold the same, nothing
    candidates: list[Candidate] = []
    for worker in workers:
        cached = min(held.get(worker.id, 0), prompt_tokens - 1) if held else 0
        compute = computes.get(cached)
        if compute is None:
            compute = CONGESTION * prices.prefill(prompt_tokens - cached, cached)
            computes[cached] = compute
        wait = prefill_wait_ms(worker, now_s) if worker.prefill_jobs else 0.0
        spread = spread_per_token * (worker.recent_prefill_tokens - mean_recent)
        price = wait + compute + spread
        candidates.append((price, worker.last_placed, worker, (wait, compute, spread)))
    return candidates


def _price_decode(
    job: Job, workers: Sequence[WorkerState], prices: Prices
) -> tuple[list[Candidate], list[Candidate]]:
    """The decode half behind a prefill worker, and the whole call, on each of `workers`.

    Growth is what the call's output costs there: its own steps, and the time that its tokens and
    its context add to the steps of every call that decodes beside it.
    """
    behind: list[Candidate] = []
    alone: list[Candidate] = []
    prompt_tokens, held = job.prompt_tokens, job.held_tokens
    output = job.expected_output_tokens
    own_effect = prices.decode_b + prices.decode_d * (prompt_tokens + output // 2)
    costs: dict[int, tuple[float, float]] = {}  # transfer and compute by cached tokens
    for worker in workers:
        cached = min(held.get(worker.id, 0), prompt_tokens - 1) if held else 0
        cost = costs.get(cached)
        if cost is None:
            uncached = prompt_tokens - cached
            cost = prices.transfer(uncached), CONGESTION * prices.prefill(uncached, cached)
            costs[cached] = cost
        transfer, compute = cost
        calls, weight, placed = worker.decode_jobs, worker.weight, worker.last_placed
        # A worker of twice the weight is as dear with twice the load.
        step = prices.decode_step(calls / weight, worker.decode_work_tokens / weight)
        growth = output * (step + own_effect * (calls / weight + 1))
        compute *= prices.interference(calls)
        behind.append((transfer + growth, placed, worker, (transfer, growth)))
        alone.append((compute + growth, placed, worker, (compute, growth)))
    return behind, alone
