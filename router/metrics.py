"""Metrics: one `observe` per call, fleet gauges read when they are scraped.

Counts live in plain dictionaries and lists and the text is written here, because calls pay for
both: a scrape of a large fleet holds up the event loop. prometheus_client adds what is known of
the process. An unknown model or an unexpected flood of label values never becomes a new series.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from router import __version__
from router import metric_definitions as defs
from router.metric_definitions import MetricDef

if TYPE_CHECKING:
    from router.outcome import Outcome

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
UNKNOWN_MODEL = "unknown"
PHASES = ("waiting", "prefill", "transfer", "decode")
KINDS = ("available", "captured", "predicted", "delivered")

# Label values come from the router's own code and configuration; the limit is for the day when
# one of them turns out to carry something a caller can choose.
MAX_SERIES = 512
OVERFLOW = "other"

_times_of = attrgetter(*(name for name, _ in defs.TIMES))


class WorkerView(Protocol):
    """What the gauges read of a worker."""

    @property
    def id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def up(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def prefill_work_tokens(self) -> int: ...
    @property
    def decode_work_tokens(self) -> int: ...
    @property
    def kv_usage(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The state behind the gauges at the moment of a scrape."""

    workers: Sequence[WorkerView] = ()
    queue_depth: Mapping[str, int] = field(default_factory=dict)
    leases: int = 0
    cachemap_blocks: Mapping[str, int] = field(default_factory=dict)
    cachemap_bytes: int = 0


class Metrics:
    """The router's metrics.

    `models` are the names that may become labels; calls for others count as `unknown`.
    `snapshot` may be set later; without it there are no fleet gauges.
    """

    def __init__(
        self, models: Iterable[str] = (), snapshot: Callable[[], FleetSnapshot] | None = None
    ) -> None:
        self.snapshot = snapshot
        self._models = {model: _ModelSeries(model) for model in models}
        self._requests = _Counter(4)
        self._rejected = _Counter(1)
        self._retries = _Counter(2)
        self._disconnects = _Counter(1, ((phase,) for phase in PHASES))
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)

    def observe(self, outcome: Outcome) -> None:
        """Count one ended call."""
        series = self._models.get(outcome.model)
        if series is None:
            series = self._unknown_model()
        self._requests.add((series.model, outcome.queue, outcome.plan, outcome.code))
        for value, histogram in zip(_times_of(outcome), series.histograms, strict=True):
            if value is not None:
                histogram.observe(value)
        series.count_tokens(outcome)
        if outcome.missing_transfer_params:
            series.missing_transfer_params += 1
        if outcome.disconnect_phase:
            self._disconnects.add((outcome.disconnect_phase,))
        if outcome.rejected:
            self._rejected.add((outcome.rejected,))
        for stage_and_reason in outcome.retries:
            self._retries.add(stage_and_reason)

    def render(self) -> bytes:
        """The exposition text, of type CONTENT_TYPE."""
        return "".join(self._families()).encode() + generate_latest(self.registry)

    def _unknown_model(self) -> _ModelSeries:
        return self._models.setdefault(UNKNOWN_MODEL, _ModelSeries(UNKNOWN_MODEL))

    def _families(self) -> Iterator[str]:
        models = list(self._models.values())
        yield _family(defs.REQUESTS, self._requests.series())
        for index, (_, definition) in enumerate(defs.TIMES):
            yield _histogram(definition, ((m.model, m.histograms[index]) for m in models))
        yield _family(defs.PROMPT_TOKENS, (((m.model,), m.prompt_tokens) for m in models))
        yield _family(defs.OUTPUT_TOKENS, (((m.model,), m.output_tokens) for m in models))
        yield _family(defs.PREFIX_TOKENS, _prefix_tokens(models))
        yield _family(defs.PREFIX_HIT_RATIO, _hit_ratios(models))
        yield _family(defs.REJECTED, self._rejected.series())
        yield _family(defs.RETRIES, self._retries.series())
        yield _family(defs.DISCONNECTS, self._disconnects.series())
        missing = (((m.model,), m.missing_transfer_params) for m in models)
        yield _family(defs.MISSING_TRANSFER_PARAMS, missing)
        yield _family(defs.BUILD_INFO, [((__version__, platform.python_version()), 1)])
        if self.snapshot is not None:
            yield from _fleet(self.snapshot())


class _ModelSeries:
    """What is counted per model."""

    __slots__ = (
        "available_tokens",
        "captured_tokens",
        "delivered_tokens",
        "histograms",
        "missing_transfer_params",
        "model",
        "output_tokens",
        "predicted_tokens",
        "prompt_tokens",
        "reported_prompt_tokens",
    )

    def __init__(self, model: str) -> None:
        self.model = model
        self.histograms = tuple(_Histogram(definition.buckets) for _, definition in defs.TIMES)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.available_tokens = 0
        self.captured_tokens = 0
        self.predicted_tokens = 0
        self.delivered_tokens = 0
        # Prompt tokens of the calls whose engine said what it reused: the hit ratio's divisor.
        self.reported_prompt_tokens = 0
        self.missing_transfer_params = 0

    def count_tokens(self, outcome: Outcome) -> None:
        self.prompt_tokens += outcome.prompt_tokens
        self.output_tokens += outcome.output_tokens
        # The four counts are compared with each other, so they are over the same calls.
        if outcome.delivered_tokens is not None:
            self.available_tokens += outcome.available_tokens
            self.captured_tokens += outcome.captured_tokens
            self.predicted_tokens += outcome.predicted_tokens
            self.delivered_tokens += outcome.delivered_tokens
            self.reported_prompt_tokens += outcome.prompt_tokens


class _Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # per bucket, the last one without bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class _Counter:
    """Counts by label values; past MAX_SERIES new ones are counted together."""

    __slots__ = ("_overflow", "_values")

    def __init__(self, labels: int, initial: Iterable[tuple[object, ...]] = ()) -> None:
        self._values: dict[tuple[object, ...], int] = dict.fromkeys(initial, 0)
        self._overflow: tuple[object, ...] = (OVERFLOW,) * labels

    def add(self, key: tuple[object, ...]) -> None:
        values = self._values
        if key not in values:
            if len(values) >= MAX_SERIES:
                key = self._overflow
            values.setdefault(key, 0)
        values[key] += 1

    def series(self) -> Iterable[tuple[Sequence[str], float]]:
        return [([str(label) for label in key], value) for key, value in self._values.items()]


_Series = Iterable[tuple[Sequence[str], float]]


def _family(definition: MetricDef, series: _Series) -> str:
    """The text of a counter or gauge."""
    names = definition.labels
    lines = [f"{definition.name}{_labels(names, labels)} {value}" for labels, value in series]
    return _with_header(definition, lines)


def _histogram(definition: MetricDef, series: Iterable[tuple[str, _Histogram]]) -> str:
    name = definition.name
    bounds = [*map(repr, definition.buckets), "+Inf"]
    lines = []
    for model, histogram in series:
        label = f'model="{_escaped(model)}"'
        counts = list(accumulate(histogram.counts))
        for bound, count in zip(bounds, counts, strict=True):
            lines.append(f'{name}_bucket{{{label},le="{bound}"}} {count}')
        lines.append(f"{name}_sum{{{label}}} {histogram.sum!r}")
        lines.append(f"{name}_count{{{label}}} {counts[-1]}")
    return _with_header(definition, lines)


def _with_header(definition: MetricDef, lines: Sequence[str]) -> str:
    name = definition.name
    header = f"# HELP {name} {definition.help}\n# TYPE {name} {definition.kind}\n"
    return header + "".join(f"{line}\n" for line in lines)


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    pairs = zip(names, values, strict=True)
    return "{" + ",".join([f'{name}="{_escaped(value)}"' for name, value in pairs]) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _prefix_tokens(models: Iterable[_ModelSeries]) -> _Series:
    for m in models:
        counts = (m.available_tokens, m.captured_tokens, m.predicted_tokens, m.delivered_tokens)
        for kind, count in zip(KINDS, counts, strict=True):
            yield (m.model, kind), count


def _hit_ratios(models: Iterable[_ModelSeries]) -> _Series:
    for m in models:
        if m.reported_prompt_tokens:
            yield (m.model,), m.delivered_tokens / m.reported_prompt_tokens


def _fleet(fleet: FleetSnapshot) -> Iterator[str]:
    workers = [((w.model, w.pool, w.role, w.id), w) for w in fleet.workers]
    yield _family(defs.QUEUE_DEPTH, (((name,), depth) for name, depth in fleet.queue_depth.items()))
    yield _family(defs.WORKER_UP, ((labels, int(w.up)) for labels, w in workers))
    yield _family(defs.WORKER_RUNNING, ((labels, w.running) for labels, w in workers))
    yield _family(defs.WORKER_WORK_TOKENS, _work_tokens(workers))
    usage = ((labels, w.kv_usage) for labels, w in workers if w.kv_usage is not None)
    yield _family(defs.WORKER_KV_USAGE, usage)
    yield _family(defs.CACHEMAP_BLOCKS, (((w,), n) for w, n in fleet.cachemap_blocks.items()))
    yield _family(defs.CACHEMAP_BYTES, [((), fleet.cachemap_bytes)])
    yield _family(defs.LEASES, [((), fleet.leases)])


def _work_tokens(workers: Iterable[tuple[tuple[str, ...], WorkerView]]) -> _Series:
    """Prefill work can lie on every worker: those that decode may serve a call alone."""
    for labels, w in workers:
        yield (*labels, "prefill"), w.prefill_work_tokens
        if w.role != "prefill":
            yield (*labels, "decode"), w.decode_work_tokens
