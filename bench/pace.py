"""How fast to replay a trace: slow enough for this machine, and no heavier than the fleet bears.

Two factors. `speed` is simulated seconds per second of wall clock: the workers run that much
faster than their profile. `load` is trace seconds per simulated second: above 1 the fleet gets
the trace's calls closer together than they came, below 1 further apart, because the fleet is
smaller than the one the trace was taken from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.reference import row_hits
from bench.traces import Row
from scheduler import Prices

# Of the busier stage, in the busiest WINDOW_SHARE of the trace.
TARGET_UTILISATION = 0.7
WINDOW_SHARE = 0.05
SHORTEST_S, LONGEST_S = 60.0, 600.0
# What one call costs all processes of a replay together on a machine of two cores, with reserve.
SECONDS_PER_CALL = 0.015
BYTES_PER_SECOND = 40e6
EVENTS_PER_SECOND = 400.0
# What a second of one simulated worker costs, at half of a core for all of them.
SECONDS_PER_WORKER_SECOND = 0.0036
BYTES_PER_TOKEN = 4
LARGEST_BATCH = 256
ASSUMED_REUSE = 0.9


@dataclass(frozen=True, slots=True)
class Pace:
    """`arrivals` is how much faster than in the trace calls come on the wall clock."""

    speed: float
    load: float

    @property
    def arrivals(self) -> float:
        return self.speed * self.load


@dataclass(frozen=True, slots=True)
class Demand:
    """Worker seconds that each stage needs per second of the trace, on average and at most."""

    prefill: float
    decode: float
    busiest: float


def demand(rows: Sequence[Row], prices: Prices, workers: int, capacity_tokens: int) -> Demand:
    """Prefill at ASSUMED_REUSE of what one pooled cache holds, so that the fleet bears the load
    also where the router does no better; decode by the share of a full batch that a call takes up
    from the start of its prefill, as its room is kept from then on.
    """
    hits = row_hits(rows, workers * capacity_tokens)
    prefill_ms, decode_ms = [], []
    for row, hit in zip(rows, hits, strict=True):
        held = min(round(hit * ASSUMED_REUSE), row.input_tokens - 1)
        computing_ms = prices.prefill(row.input_tokens - held, held)
        prefill_ms.append(computing_ms)
        context = row.input_tokens + row.output_tokens
        batch = max(1, min(LARGEST_BATCH, capacity_tokens // context))
        streaming_ms = row.output_tokens * prices.decode_step(batch, batch * context)
        decode_ms.append((2 * computing_ms + streaming_ms) / batch)
    span_ms = span_s(rows) * 1000
    return Demand(
        sum(prefill_ms) / span_ms,
        sum(decode_ms) / span_ms,
        max(busiest_rate(rows, prefill_ms), busiest_rate(rows, decode_ms)),
    )


def span_s(rows: Sequence[Row]) -> float:
    return max(1.0, (rows[-1].arrival_ms - rows[0].arrival_ms) / 1000)


def busiest_rate(rows: Sequence[Row], amounts_ms: Sequence[float]) -> float:
    """Largest sum of `amounts_ms` over arrivals within WINDOW_SHARE of the span, per ms of it."""
    window_ms = span_s(rows) * 1000 * WINDOW_SHARE
    most = inside = 0.0
    first = 0
    for row, amount in zip(rows, amounts_ms, strict=True):
        inside += amount
        while row.arrival_ms - rows[first].arrival_ms > window_ms:
            inside -= amounts_ms[first]
            first += 1
        most = max(most, inside)
    return most / window_ms


def choose(rows: Sequence[Row], needed: Demand, workers: int, longest_s: float) -> Pace:
    """The heaviest load that the fleet bears, at the lowest speed that this machine has time for.

    A trace that is light for the fleet runs at a speed of 1 and as close together as the shortest
    run asks for.
    """
    most_load = TARGET_UTILISATION * workers / max(needed.busiest, 1e-9)
    wall_s = min(longest_s, max(SHORTEST_S, _need_s(rows, workers, most_load)))
    arrivals = max(1.0, span_s(rows) / wall_s)
    speed = max(1.0, arrivals / most_load)
    return Pace(speed, arrivals / speed)


def _need_s(rows: Sequence[Row], workers: int, load: float) -> float:
    """How long this machine should take over the rows."""
    total_bytes = BYTES_PER_TOKEN * sum(row.input_tokens for row in rows)
    calls_s = SECONDS_PER_CALL * len(rows) + total_bytes / BYTES_PER_SECOND
    simulated_s = workers * span_s(rows) / load
    return max(calls_s, SECONDS_PER_WORKER_SECOND * simulated_s)


def utilisation(pace: Pace, rate: float, workers: int) -> float:
    """Share of the simulated time that a stage's workers are busy, at that rate of demand."""
    return rate * pace.load / workers


def stream_interval(rows: Sequence[Row], seconds: float) -> int:
    """Tokens per streamed event that keep the events within what this machine can carry."""
    tokens = sum(row.output_tokens for row in rows)
    return max(1, math.ceil(tokens / (EVENTS_PER_SECOND * seconds)))
