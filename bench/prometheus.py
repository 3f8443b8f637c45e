"""Reads a Prometheus text page into sums, so that two readings can be subtracted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Page:
    samples: Mapping[tuple[str, Labels], float]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all series of `name` that carry the given labels."""
        wanted = set(labels.items())
        return sum(v for (n, have), v in self.samples.items() if n == name and wanted <= have)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of `name` grouped by one label."""
        groups: dict[str, float] = {}
        for (found, have), value in self.samples.items():
            if found == name:
                key = dict(have).get(label, "")
                groups[key] = groups.get(key, 0.0) + value
        return groups

    def since(self, before: Page) -> Page:
        """Counters' growth since an earlier page; gauges are their difference."""
        return Page({k: v - before.samples.get(k, 0.0) for k, v in self.samples.items()})

    def mean(self, histogram: str, **labels: str) -> float | None:
        count = self.total(f"{histogram}_count", **labels)
        return self.total(f"{histogram}_sum", **labels) / count if count else None


def parse(text: str) -> Page:
    samples: dict[tuple[str, Labels], float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match:
            name, labels, value = match.groups()
            samples[name, frozenset(_LABEL.findall(labels or ""))] = float(value)
    return Page(samples)


def scrape(url: str, timeout_s: float = 10.0) -> Page:
    reply = httpx.get(f"{url}/metrics", timeout=timeout_s, trust_env=False)
    reply.raise_for_status()
    return parse(reply.text)
