"""Small statistics: percentiles, summaries, ratios with their spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0..1) of the sorted values do not exceed, interpolated."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary(values: Iterable[float | None], scale: float = 1.0) -> dict[str, float]:
    """Mean and percentiles of the values that are there, times `scale`."""
    present = [value * scale for value in values if value is not None]
    if not present:
        return {"count": 0}
    return {
        "count": len(present),
        "mean": statistics.fmean(present),
        "p50": percentile(present, 0.5),
        "p90": percentile(present, 0.9),
        "p99": percentile(present, 0.99),
        "max": max(present),
    }


def busiest_over_mean(values: Sequence[float]) -> float:
    """1.0 is an even share; nothing at all counts as even."""
    mean = statistics.fmean(values) if values else 0.0
    return max(values) / mean if mean else 1.0


def relative_difference(value: float, reference: float) -> float:
    """|value - reference| / reference; 0 when both are 0."""
    if reference == 0:
        return 0.0 if value == 0 else math.inf
    return abs(value - reference) / abs(reference)


FEWEST_REPEATS = 4  # below it the repeats say nothing about their spread


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our median over theirs, and the 95 % interval that the repeats support.

    The interval is a bootstrap over the repeats of both sides. `carried` says that the whole
    interval is at or below 1: a claim of "no dearer" that the spread does not undo.
    """

    ratio: float
    low: float
    high: float

    @property
    def carried(self) -> bool:
        return self.high <= 1.0


def ratio_of_medians(
    ours: Sequence[float], theirs: Sequence[float], resamples: int = 4000, seed: int = 1
) -> Ratio:
    if not ours or not theirs:
        return Ratio(math.nan, math.nan, math.nan)
    ratio = statistics.median(ours) / statistics.median(theirs)
    if min(len(ours), len(theirs)) < FEWEST_REPEATS:
        return Ratio(ratio, 0.0, math.inf)
    dice = np.random.default_rng(seed)

    def medians(values: Sequence[float]) -> NDArray[np.float64]:
        picks = dice.choice(np.asarray(values, dtype=np.float64), (resamples, len(values)))
        return np.asarray(np.median(picks, axis=1), dtype=np.float64)

    low, high = np.percentile(medians(ours) / medians(theirs), (2.5, 97.5))
    return Ratio(ratio, float(low), float(high))
