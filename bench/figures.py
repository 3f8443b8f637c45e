"""Small statistics: percentiles, summaries, ratios with their spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence


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


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median of our figure over the median of theirs, with the range that the repeats give.

    The interval is that of the ratio of the quartiles taken crosswise: our lower quartile over
    their upper one, and the reverse. A claim holds beyond the spread when `high` is below 1.
    """
    if not ours or not theirs:
        return {"ratio": math.nan, "low": math.nan, "high": math.nan}
    middle = statistics.median(ours) / statistics.median(theirs)
    return {
        "ratio": middle,
        "low": percentile(ours, 0.25) / percentile(theirs, 0.75),
        "high": percentile(ours, 0.75) / percentile(theirs, 0.25),
    }
