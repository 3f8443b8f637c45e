"""From the calls of one replay to its figures, pass marks and charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import plots, reference
from bench.cpu import CpuUse
from bench.figures import busiest_over_mean, relative_difference, summary
from bench.observation import Call
from bench.pace import Pace
from bench.prometheus import Page
from bench.report import Mark, Section
from bench.traces import Row

JSON = dict[str, Any]

# The traces whose hit rate and balance have a pass mark; the rest must run without error.
MARKED = ("mooncake_conversation", "bfcl_live", "tau_airline", "agent_coding")
HIT_RATIO_AT_LEAST = 0.9
BUSIEST_AT_MOST = 1.25
AGREEMENT_AT_MOST = 0.05
# Below this share of the prompt tokens, reuse is the template's own start and no trace's doing.
NEGLIGIBLE_REUSE = 0.002
# With less of the machine to spare, processes wait for a core and latencies are the machine's.
BUSY_MACHINE = 0.9
STAGES = ("decision", "queue_wait", "prefill", "handoff_gap")
CURVE_POINTS = 60


@dataclass(frozen=True, slots=True)
class Run:
    """All that was observed in one replay.

    `computed`: prompt tokens per prefill worker; `busy`: share of its time that each worker
    computed, where it can be asked.
    """

    trace: str
    rows: Sequence[Row]
    dropped: int
    calls: Sequence[Call]
    workers: int
    capacity_tokens: int
    pace: Pace
    utilisation: Mapping[str, float]
    wall_s: float
    router: Page
    computed: Mapping[str, float]
    busy: Mapping[str, float]
    cpu: CpuUse
    slo_ttft_s: float


def figures(run: Run) -> JSON:
    good = [call for call in run.calls if not call.error]
    prompt = sum(call.prompt_tokens for call in good)
    cached = sum(call.cached_tokens for call in good)
    has_blocks = any(row.runs is not None for row in run.rows)
    pooled = reference.pooled(run.rows, run.workers, run.capacity_tokens)
    hit_rate = cached / prompt if prompt else 0.0
    return {
        "trace": run.trace,
        "prefill_workers": run.workers,
        "rows": len(run.rows),
        "dropped_rows": run.dropped,
        "speed": run.pace.speed,
        "load": run.pace.load,
        "arrivals_speed_up": run.pace.arrivals,
        "expected_utilisation": dict(run.utilisation),
        "wall_s": run.wall_s,
        "errors": dict(Counter(call.error for call in run.calls if call.error)),
        "prompt_tokens": prompt,
        "trace_prompt_tokens": pooled.prompt_tokens,
        "output_tokens": sum(call.output_tokens for call in good),
        "hit_rate": hit_rate,
        "pooled_hit_rate": pooled.hit_rate if has_blocks else None,
        "hit_ratio": hit_rate / pooled.hit_rate if pooled.hit_tokens else None,
        "computed_tokens": dict(run.computed),
        "workers_busy": dict(run.busy),
        "busiest_over_mean": busiest_over_mean(list(run.computed.values())),
        "plans": dict(Counter(_plan(call) for call in good)),
        "hit_rate_by_plan": _hit_rate_by_plan(good),
        **_latency(good, run.pace.speed),
        **_router(run, good, cached, prompt),
        **_goodput(run, good),
        "cpu": {name: run.cpu.mean(name) for name in run.cpu.by_name}
        | {"others": run.cpu.foreign(), "machine": run.cpu.mean_machine()},
        "saturated": run.cpu.saturated(),
        "disturbed": run.cpu.mean_machine() > BUSY_MACHINE,
    }


def _plan(call: Call) -> str:
    return "pd" if call.prefill else "decode"


def _hit_rate_by_plan(good: Sequence[Call]) -> dict[str, float]:
    prompt, cached = Counter[str](), Counter[str]()
    for call in good:
        prompt[_plan(call)] += call.prompt_tokens
        cached[_plan(call)] += call.cached_tokens
    return {plan: cached[plan] / prompt[plan] for plan in prompt if prompt[plan]}


def _latency(good: Sequence[Call], speed: float) -> JSON:
    """Latencies in simulated time, as the fleet's users would see them; lag on the wall clock."""
    return {
        "ttft_s": summary((call.ttft_s for call in good), speed),
        "tpot_ms": summary((call.tpot_s for call in good), speed * 1000),
        "e2e_s": summary((call.e2e_s for call in good), speed),
        "send_lag_ms": summary((call.sent_s - call.due_s for call in good), 1000),
    }


def _router(run: Run, good: Sequence[Call], cached: int, prompt: int) -> JSON:
    """The router's own account beside the client's."""
    kinds = run.router.by("pdrouter_prefix_tokens_total", "kind")
    predicted, delivered = kinds.get("predicted", 0.0), kinds.get("delivered", 0.0)
    router_ttft_s = run.router.mean("pdrouter_ttft_seconds")
    client_ttft_s = summary(call.ttft_s for call in good).get("mean")
    agree = relative_difference(predicted, delivered)
    if max(predicted, delivered) < NEGLIGIBLE_REUSE * prompt:
        agree = 0.0
    return {
        "prefix_tokens": kinds,
        "predicted_vs_delivered": agree,
        "delivered_vs_client": relative_difference(delivered, cached),
        "router_ttft_ms": router_ttft_s and router_ttft_s * 1000,
        "client_ttft_ms": client_ttft_s and client_ttft_s * 1000,
        "ttft_difference": relative_difference(router_ttft_s or 0.0, client_ttft_s or 0.0),
        "router_stages_ms": {stage: _mean_ms(run.router, stage) for stage in STAGES},
        "rejected": run.router.by("pdrouter_rejected_total", "reason"),
        "retries": run.router.total("pdrouter_retries_total"),
    }


def _mean_ms(page: Page, stage: str) -> float:
    return 1000 * (page.mean(f"pdrouter_{stage}_seconds") or 0.0)


def _goodput(run: Run, good: Sequence[Call]) -> JSON:
    """Calls answered within the limit on time to first token, per simulated second."""
    limit_s = run.slo_ttft_s / run.pace.speed
    within = sum(1 for call in good if call.ttft_s is not None and call.ttft_s <= limit_s)
    return {
        "goodput_calls_per_s": within / (run.wall_s * run.pace.speed),
        "within_ttft_limit": within / len(run.calls) if run.calls else 0.0,
    }


def marks(found: JSON) -> list[Mark]:
    out = [
        Mark("errors", float(sum(found["errors"].values())), 0.0),
        Mark("predicted vs delivered", found["predicted_vs_delivered"], AGREEMENT_AT_MOST),
        Mark("router's TTFT vs client's", found["ttft_difference"], AGREEMENT_AT_MOST),
        Mark("processes that saturated a core", float(len(found["saturated"])), 0.0),
    ]
    if found["trace"] in MARKED:
        ratio = found["hit_ratio"] or 0.0
        out.append(Mark("hit rate over pooled", ratio, HIT_RATIO_AT_LEAST, at_least=True))
        out.append(Mark("busiest over mean", found["busiest_over_mean"], BUSIEST_AT_MOST))
    return out


def rows_for_table(found: JSON) -> list[tuple[str, Any]]:
    """The figures one reads first, flattened."""
    out: list[tuple[str, Any]] = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            text = ", ".join(f"{k} {_compact(v)}" for k, v in value.items())
            out.append((name, text or "none"))
        else:
            out.append((name, "-" if value is None else value))
    return out


def _compact(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 10000 else f"{value:,.0f}"


def section(run: Run, found: JSON) -> Section:
    good = [call for call in run.calls if not call.error]
    speed = run.pace.speed
    ttft = [call.ttft_s * speed for call in good if call.ttft_s is not None]
    e2e = [call.e2e_s * speed for call in good if call.e2e_s is not None]
    tpot = [call.tpot_s * speed * 1000 for call in good if call.tpot_s is not None]
    charts = [
        plots.lines(
            "Hit rate over the replay", _hit_curves(run), "time in the trace, s", "hit rate"
        ),
        plots.lines(
            "Latency (simulated time)",
            {"TTFT": plots.distribution(ttft), "end to end": plots.distribution(e2e)},
            "seconds, logarithmic",
            "share of calls",
            log_x=True,
        ),
        plots.lines(
            "Time per output token",
            {"TPOT": plots.distribution(tpot)},
            "milliseconds, logarithmic",
            "share of calls",
            log_x=True,
        ),
        plots.bars("Prompt tokens computed", dict(run.computed), "tokens"),
        plots.lines("Calls in flight", {"calls": _in_flight(run)}, "wall clock, s", "calls"),
        plots.lines(
            "CPU of each process",
            {name: list(enumerate(values)) for name, values in run.cpu.by_name.items()},
            "wall clock, s",
            "cores",
        ),
    ]
    title = f"{run.trace}, {run.workers} prefill workers"
    return Section(title, rows_for_table(found), marks(found), charts)


def _hit_curves(run: Run) -> dict[str, plots.Points]:
    """Delivered and pooled hit rate over equal numbers of calls, at the calls' trace time."""
    hits = reference.row_hits(run.rows, run.workers * run.capacity_tokens)
    size = max(1, len(run.rows) // CURVE_POINTS)
    delivered, pooled = [], []
    for start in range(0, len(run.rows), size):
        end = min(start + size, len(run.rows))
        at_s = run.rows[end - 1].arrival_ms / 1000
        prompt = sum(call.prompt_tokens for call in run.calls[start:end])
        cached = sum(call.cached_tokens for call in run.calls[start:end])
        delivered.append((at_s, cached / prompt if prompt else 0.0))
        asked = sum(row.input_tokens for row in run.rows[start:end])
        pooled.append((at_s, sum(hits[start:end]) / asked))
    return {"delivered": delivered, "pooled reference": pooled}


def _in_flight(run: Run) -> plots.Points:
    changes = sorted(
        change
        for call in run.calls
        if call.end_s is not None
        for change in ((call.sent_s, 1), (call.end_s, -1))
    )
    if not changes:
        return []
    start_s, level, points = changes[0][0], 0, []
    keep = max(1, len(changes) // 400)
    for number, (at_s, step) in enumerate(changes):
        level += step
        if number % keep == 0:
            points.append((at_s - start_s, float(level)))
    return points
