"""Prometheus text of a worker, under vLLM's metric names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate

from simulator.engine import Engine, Sequence

_LATENCY = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5)


class Histogram:
    """Counts by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Observations:
    """What is known of finished requests."""

    def __init__(self) -> None:
        self.latency = {
            "time_to_first_token_seconds": Histogram(_LATENCY),
            "inter_token_latency_seconds": Histogram(_LATENCY),
            "request_time_per_output_token_seconds": Histogram(_LATENCY),
            "e2e_request_latency_seconds": Histogram(_LATENCY),
            "request_queue_time_seconds": Histogram(_LATENCY),
            "request_inference_time_seconds": Histogram(_LATENCY),
            "request_prefill_time_seconds": Histogram(_LATENCY),
            "request_decode_time_seconds": Histogram(_LATENCY),
            "request_prompt_tokens": Histogram(_TOKENS),
            "request_generation_tokens": Histogram(_TOKENS),
            "request_prefill_kv_computed_tokens": Histogram(_TOKENS),
        }
        self.finished: Counter[str] = Counter()

    def observe(self, sequence: Sequence) -> None:
        """Take note of a finished sequence."""
        reason = sequence.reason.value if sequence.reason else "abort"
        self.finished[reason] += 1
        first, end = sequence.first_token_s, sequence.finished_s
        if first is None or end is None or sequence.scheduled_s is None:
            return
        arrival, scheduled = sequence.arrival_s, sequence.scheduled_s
        latency, output = self.latency, sequence.generated
        latency["time_to_first_token_seconds"].observe(first - arrival)
        latency["e2e_request_latency_seconds"].observe(end - arrival)
        latency["request_queue_time_seconds"].observe(scheduled - arrival)
        latency["request_inference_time_seconds"].observe(end - scheduled)
        latency["request_prefill_time_seconds"].observe(first - scheduled)
        latency["request_decode_time_seconds"].observe(end - first)
        latency["request_prompt_tokens"].observe(sequence.prompt_len)
        latency["request_generation_tokens"].observe(output)
        known = sequence.external_tokens or sequence.cached_tokens or 0
        latency["request_prefill_kv_computed_tokens"].observe(sequence.prompt_len - known)
        if output > 1:
            step_s = (end - first) / (output - 1)
            latency["inter_token_latency_seconds"].observe(step_s, output - 1)
            latency["request_time_per_output_token_seconds"].observe(step_s)


class _Page:
    def __init__(self, model: str) -> None:
        self._labels = f'engine="0",model_name="{model}"'
        self.lines: list[str] = []

    def family(self, name: str, kind: str, text: str, samples: Mapping[str, float] | float) -> None:
        """One metric; `samples` by their further labels."""
        full = f"vllm:{name}"
        self.lines += (f"# HELP {full} {text}", f"# TYPE {full} {kind}")
        if isinstance(samples, Mapping):
            for labels, value in samples.items():
                self.lines.append(f"{full}{{{self._labels},{labels}}} {float(value)}")
        else:
            self.lines.append(f"{full}{{{self._labels}}} {float(samples)}")

    def counters(self, rows: Iterable[tuple[str, str, Mapping[str, float] | float]]) -> None:
        for name, text, samples in rows:
            self.family(f"{name}_total", "counter", text, samples)

    def histogram(self, name: str, histogram: Histogram) -> None:
        full = f"vllm:{name}"
        self.lines += (f"# HELP {full} Histogram.", f"# TYPE {full} histogram")
        running = list(accumulate(histogram.counts))
        for bound, value in zip([*histogram.bounds, float("inf")], running, strict=True):
            label = "+Inf" if bound == float("inf") else str(float(bound))
            self.lines.append(f'{full}_bucket{{{self._labels},le="{label}"}} {float(value)}')
        self.lines.append(f"{full}_count{{{self._labels}}} {float(running[-1])}")
        self.lines.append(f"{full}_sum{{{self._labels}}} {histogram.sum}")


def render(engine: Engine, observed: Observations, model: str, started_at_s: float) -> bytes:
    """The /metrics page. `started_at_s` is Unix time."""
    page = _Page(model)
    page.lines += (
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_at_s}",
    )
    _render_load(page, engine)
    _render_counters(page, engine, observed)
    for name, histogram in observed.latency.items():
        page.histogram(name, histogram)
    page.lines.append(_cache_config(engine))
    return ("\n".join(page.lines) + "\n").encode()


def _cache_config(engine: Engine) -> str:
    """The one metric without a model label."""
    blocks, tokens = engine.blocks.capacity, engine.block_tokens
    return (
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
        "# TYPE vllm:cache_config_info gauge\n"
        f'vllm:cache_config_info{{block_size="{tokens}",cache_dtype="auto",'
        f'enable_prefix_caching="True",engine="0",kv_cache_size_tokens="{blocks * tokens}",'
        f'num_gpu_blocks="{blocks}",prefix_caching_hash_algo="simulated"}} 1.0'
    )


def _render_load(page: _Page, engine: Engine) -> None:
    page.family("num_requests_running", "gauge", "Requests in execution batches.", engine.running)
    page.family(
        "num_requests_waiting", "gauge", "Requests waiting to be processed.", engine.waiting
    )
    deferred = engine.pulling
    page.family(
        "num_requests_waiting_by_reason",
        "gauge",
        "Waiting requests by reason.",
        {'reason="capacity"': engine.waiting - deferred, 'reason="deferred"': deferred},
    )
    page.family(
        "num_requests_kv_fetch_by_stage",
        "gauge",
        "Waiting requests by KV load stage.",
        {
            'stage="waiting_to_start"': 0,
            'stage="in_progress"': deferred,
            'stage="completed_waiting"': engine.loaded,
        },
    )
    page.family(
        "engine_sleep_state",
        "gauge",
        "Engine sleep state.",
        {
            'sleep_state="awake"': 1,
            'sleep_state="weights_offloaded"': 0,
            'sleep_state="discard_all"': 0,
        },
    )
    usage = engine.blocks.held / engine.blocks.capacity
    page.family("kv_cache_usage_perc", "gauge", "KV-cache usage, 1 is full.", usage)


def _render_counters(page: _Page, engine: Engine, observed: Observations) -> None:
    totals = engine.totals
    page.counters(
        [
            ("prefix_cache_queries", "Prefix cache queries, in tokens.", totals.cache_queries),
            ("prefix_cache_hits", "Prefix cache hits, in tokens.", totals.cache_hits),
            (
                "external_prefix_cache_queries",
                "Tokens asked of other workers.",
                totals.external_queries,
            ),
            ("external_prefix_cache_hits", "Tokens had from other workers.", totals.external_hits),
            ("num_preemptions", "Preemptions.", totals.preemptions),
            ("prompt_tokens", "Prefill tokens processed.", totals.prompt),
            (
                "prompt_tokens_by_source",
                "Prompt tokens by source.",
                {
                    'source="local_compute"': totals.local_compute,
                    'source="local_cache_hit"': totals.cached,
                    'source="external_kv_transfer"': totals.external,
                },
            ),
            ("prompt_tokens_cached", "Cached prompt tokens.", totals.cached + totals.external),
            (
                "prompt_tokens_cached_by_source",
                "Cached prompt tokens by tier.",
                {
                    'source="device"': totals.cached,
                    'source="host"': 0,
                    'source="p2p"': totals.external,
                    'source="disk"': 0,
                    'source="external_unspecified"': 0,
                },
            ),
            ("generation_tokens", "Generation tokens processed.", totals.output),
            (
                "request_success",
                "Finished requests.",
                {
                    f'finished_reason="{reason}"': observed.finished[reason]
                    for reason in ("stop", "length", "abort", "error", "repetition")
                },
            ),
            ("nixl_num_failed_transfers", "Failed transfers.", totals.transfer_failures),
            ("nixl_num_failed_notifications", "Failed notifications.", 0),
            ("nixl_num_kv_expired_reqs", "Requests whose KV expired.", totals.expired),
            (
                "nixl_num_notifications_after_expiry",
                "Notifications for requests that were not tracked any more.",
                totals.late_releases,
            ),
        ]
    )
    for name, value in (
        ("nixl_xfer_time_seconds", totals.transfer_s),
        ("nixl_bytes_transferred", float(totals.transfer_bytes)),
    ):
        histogram = Histogram(())
        histogram.counts[-1] = totals.transfers
        histogram.sum = value
        page.histogram(name, histogram)
