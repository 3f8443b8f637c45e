"""Every metric of the router: name, type, labels and meaning, defined once.

`router/metrics.py` fills them; `docs/metrics.md` holds the table made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricDef:
    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()  # upper bounds in seconds, without +Inf


# From a cached short prompt (milliseconds) to a long document behind a queue (minutes).
_FIRST_TOKEN_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
_PER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
_WHOLE_CALL_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)
_WAIT_S = (
    *(0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0),
)
_GAP_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 30.0),
)
_DECISION_S = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1),
)

_MODEL = ("model",)
_WORKER = ("model", "pool", "role", "worker")

REQUESTS = MetricDef(
    "pdrouter_requests_total",
    "counter",
    ("model", "queue", "plan", "code"),
    "Calls ended, by the plan they were served with (pd, decode, none) and the HTTP status sent "
    "(499: the client left first).",
)
TTFT = MetricDef(
    "pdrouter_ttft_seconds",
    "histogram",
    _MODEL,
    "From the arrival of a call to its first content sent to the client.",
    _FIRST_TOKEN_S,
)
TPOT = MetricDef(
    "pdrouter_tpot_seconds",
    "histogram",
    _MODEL,
    "Mean time per output token after the first, of each call.",
    _PER_TOKEN_S,
)
E2E = MetricDef(
    "pdrouter_e2e_seconds",
    "histogram",
    _MODEL,
    "From the arrival of a call to its end, however it ended.",
    _WHOLE_CALL_S,
)
QUEUE_WAIT = MetricDef(
    "pdrouter_queue_wait_seconds",
    "histogram",
    _MODEL,
    "Time a call waited for its placement.",
    _WAIT_S,
)
PREFILL = MetricDef(
    "pdrouter_prefill_seconds",
    "histogram",
    _MODEL,
    "From the prefill request to its answer.",
    _FIRST_TOKEN_S,
)
HANDOFF_GAP = MetricDef(
    "pdrouter_handoff_gap_seconds",
    "histogram",
    _MODEL,
    "From the end of prefill to the sending of the decode request.",
    _GAP_S,
)
DECISION = MetricDef(
    "pdrouter_decision_seconds",
    "histogram",
    _MODEL,
    "Time spent choosing a placement.",
    _DECISION_S,
)
PROMPT_TOKENS = MetricDef(
    "pdrouter_prompt_tokens_total", "counter", _MODEL, "Prompt tokens of the calls ended."
)
OUTPUT_TOKENS = MetricDef(
    "pdrouter_output_tokens_total", "counter", _MODEL, "Tokens generated for the calls ended."
)
PREFIX_TOKENS = MetricDef(
    "pdrouter_prefix_tokens_total",
    "counter",
    ("model", "kind"),
    "Prompt prefix tokens that some worker held (available), that the chosen worker held "
    "(captured), that it was expected to reuse (predicted), that the engine says it reused "
    "(delivered).",
)
PREFIX_HIT_RATIO = MetricDef(
    "pdrouter_prefix_hit_ratio",
    "gauge",
    _MODEL,
    "Delivered prefix tokens per prompt token since the start, over the calls whose engine "
    "reported them. Absent until one did.",
)
QUEUE_DEPTH = MetricDef(
    "pdrouter_queue_depth", "gauge", ("queue",), "Calls that wait for a placement."
)
WORKER_UP = MetricDef(
    "pdrouter_worker_up", "gauge", _WORKER, "1 if the worker takes new work, else 0."
)
WORKER_RUNNING = MetricDef(
    "pdrouter_worker_running", "gauge", _WORKER, "Calls of this router that occupy the worker."
)
WORKER_WORK_TOKENS = MetricDef(
    "pdrouter_worker_work_tokens",
    "gauge",
    (*_WORKER, "stage"),
    "Tokens of work that this router's calls still have on the worker.",
)
WORKER_KV_USAGE = MetricDef(
    "pdrouter_worker_kv_usage_ratio",
    "gauge",
    _WORKER,
    "Used share of the worker's KV cache, as its engine reports it. Absent if it does not.",
)
REJECTED = MetricDef(
    "pdrouter_rejected_total", "counter", ("reason",), "Calls the router refused itself."
)
RETRIES = MetricDef(
    "pdrouter_retries_total",
    "counter",
    ("stage", "reason"),
    "Attempts that failed and were made again, by the stage that failed.",
)
DISCONNECTS = MetricDef(
    "pdrouter_disconnects_total",
    "counter",
    ("phase",),
    "Calls whose client left before the end, by what the call was doing.",
)
MISSING_TRANSFER_PARAMS = MetricDef(
    "pdrouter_missing_transfer_params_total",
    "counter",
    _MODEL,
    "Prefill answers that carried no parameters for the handoff.",
)
CACHEMAP_BLOCKS = MetricDef(
    "pdrouter_cachemap_blocks",
    "gauge",
    ("worker",),
    "Prefix blocks that the worker is believed to hold.",
)
CACHEMAP_BYTES = MetricDef(
    "pdrouter_cachemap_bytes", "gauge", (), "Memory taken by the map of held prefixes."
)
LEASES = MetricDef("pdrouter_leases", "gauge", (), "Calls that hold a lease.")
BUILD_INFO = MetricDef(
    "pdrouter_build_info", "gauge", ("version", "python"), "Always 1; the labels say what runs."
)

# Times of a call, in the order of the fields of an Outcome that `router/metrics.py` reads.
TIMES: tuple[tuple[str, MetricDef], ...] = (
    ("ttft_s", TTFT),
    ("tpot_s", TPOT),
    ("e2e_s", E2E),
    ("queue_wait_s", QUEUE_WAIT),
    ("prefill_s", PREFILL),
    ("handoff_gap_s", HANDOFF_GAP),
    ("decision_s", DECISION),
)


def definitions() -> tuple[MetricDef, ...]:
    """Every metric that `/metrics` can show, in the order shown."""
    return (
        REQUESTS,
        *(definition for _, definition in TIMES),
        PROMPT_TOKENS,
        OUTPUT_TOKENS,
        PREFIX_TOKENS,
        PREFIX_HIT_RATIO,
        QUEUE_DEPTH,
        WORKER_UP,
        WORKER_RUNNING,
        WORKER_WORK_TOKENS,
        WORKER_KV_USAGE,
        REJECTED,
        RETRIES,
        DISCONNECTS,
        MISSING_TRANSFER_PARAMS,
        CACHEMAP_BLOCKS,
        CACHEMAP_BYTES,
        LEASES,
        BUILD_INFO,
    )


def reference_table() -> str:
    """The metrics as a Markdown table."""
    rows = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    for metric in definitions():
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"
