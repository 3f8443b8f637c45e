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

TARGET_UTILISATION = 0.5
SHORTEST_S, LONGEST_S = 40.0, 300.0
# What one call costs all processes of a replay together on a machine of two cores, with reserve.
SECONDS_PER_CALL = 0.015
BYTES_PER_SECOND = 40e6
EVENTS_PER_SECOND = 400.0
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
    """Worker seconds that the rows need in all."""

    prefill_s: float
    decode_s: float


def demand(rows: Sequence[Row], prices: Prices, workers: int, capacity_tokens: int) -> Demand:
    """Prefill at ASSUMED_REUSE of what one pooled cache holds, so that the fleet bears the load
    also where the router does no better; decode by the share of a full batch that a call takes up
    from the start of its prefill, as its room is kept from then on.
    """
    hits = row_hits(rows, workers * capacity_tokens)
    prefill_ms = decode_ms = 0.0
    for row, hit in zip(rows, hits, strict=True):
        held = min(round(hit * ASSUMED_REUSE), row.input_tokens - 1)
        computing_ms = prices.prefill(row.input_tokens - held, held)
        prefill_ms += computing_ms
        context = row.input_tokens + row.output_tokens
        batch = max(1, min(LARGEST_BATCH, capacity_tokens // context))
        streaming_ms = row.output_tokens * prices.decode_step(batch, batch * context)
        decode_ms += (2 * computing_ms + streaming_ms) / batch
    return Demand(prefill_ms / 1000, decode_ms / 1000)


def wall_s(rows: Sequence[Row], longest_s: float = LONGEST_S) -> float:
    """How long this machine should take over the rows, at most `longest_s`."""
    total_bytes = BYTES_PER_TOKEN * sum(row.input_tokens for row in rows)
    need_s = SECONDS_PER_CALL * len(rows) + total_bytes / BYTES_PER_SECOND
    return min(longest_s, max(SHORTEST_S, need_s))


def choose(span_s: float, wanted_s: float, needed: Demand, workers: int) -> Pace:
    """The lowest simulation speed that ends in `wanted_s` with the fleet within its target."""
    span_s = max(span_s, 1e-3)
    busiest_s = max(needed.prefill_s, needed.decode_s, 1e-9)
    most_load = TARGET_UTILISATION * workers * span_s / busiest_s
    arrivals = max(1.0, span_s / wanted_s)
    speed = max(1.0, arrivals / most_load)
    return Pace(speed, arrivals / speed)


def utilisation(pace: Pace, span_s: float, seconds: float, workers: int) -> float:
    """Share of the simulated time that the stage's workers are busy."""
    return seconds * pace.load / (workers * max(span_s, 1e-3))


def stream_interval(rows: Sequence[Row], seconds: float) -> int:
    """Tokens per streamed event that keep the events within what this machine can carry."""
    tokens = sum(row.output_tokens for row in rows)
    return max(1, math.ceil(tokens / (EVENTS_PER_SECOND * seconds)))
