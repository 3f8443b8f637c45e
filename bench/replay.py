"""`python -m bench replay`: real traffic over HTTP, open loop, against simulated workers behind a
router, or against a router that is running already.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import orjson

from bench import pace, prometheus, replay_figures, report, tokenisation, traces
from bench.cluster import MODEL, Cluster, ClusterError, Fleet, cluster, process, tail
from bench.cpu import CpuSampler
from bench.observation import Call
from bench.open_loop import Job, kept_rows
from bench.progress import Progress
from bench.tokenisation import Tokenisation
from scheduler import PROFILES

JSON = dict[str, Any]
CAPACITY_TOKENS = 1 << 20
WINDOW_TOKENS = 1 << 17
WINDOW_MARGIN_TOKENS = 32  # the chat template may make a prompt a little longer than its row
DRAIN_S = 60.0


class ReplayError(RuntimeError):
    """A replay that could not run to its end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", nargs="*", help="a file, or a name in SHARED/traces; none: those with pass marks")
    add("--all", action="store_true", help="every file in SHARED/traces")
    add("--shared", help="folder that holds traces/ (default: PDROUTER_SHARED, or ../shared)")
    add("--workers", default="2,4", help="prefill workers, and as many decode workers, per run")
    add("--speed", default="auto", help="simulated seconds per second; with --url: of arrivals")
    add("--load", default="auto", help="trace seconds per simulated second")
    add("--longest-s", type=float, default=pace.LONGEST_S, help="wall clock that auto aims at")
    add("--profile", default="b300-tp4", choices=sorted(PROFILES), help="cost of the workers")
    add("--capacity-tokens", type=int, default=CAPACITY_TOKENS, help="KV cache of each worker")
    add("--window", type=int, default=WINDOW_TOKENS, help="of the workers; longer rows drop out")
    add("--rows", type=int, help="only the first so many rows")
    add("--max-output-tokens", type=int, help="cap on each row's output (reported)")
    add("--stream-interval", type=int, help="tokens per streamed event (default: by event rate)")
    add("--slo-ttft-s", type=float, default=5.0, help="what counts as goodput, simulated seconds")
    add("--seed", default="0", help="other filler text")
    add("--out", type=Path, default=Path("bench-results"), help="folder of the JSON and the page")
    add("--url", help="a router that is running: nothing is started")
    add("--model", help="model name to ask for (default: the first that the router lists)")


def run(options: argparse.Namespace) -> int:
    runs: list[tuple[replay_figures.Run, JSON]] = []
    failure = ""
    try:
        paths = _paths(options)
        counts = [int(part) for part in str(options.workers).split(",")]
        for done in _runs(options, paths, counts):
            runs.append(done)  # what is done is reported although a later run fails
    except (traces.TraceError, ReplayError, ClusterError, httpx.HTTPError) as error:
        failure = str(error) or type(error).__name__
        report.say(f"replay: {failure}")
    if not runs:
        return report.finish({"error": failure}, ok=False)
    return _report(options, runs, failure)


def _paths(options: argparse.Namespace) -> list[Path]:
    shared = traces.shared_dir(options.shared)
    if options.all:
        found = sorted((shared / "traces").glob("*.jsonl.gz"))
        if not found:
            raise traces.TraceError(f"no traces in {shared / 'traces'} (see --shared)")
        return found
    return [traces.find(name, shared) for name in options.trace or replay_figures.MARKED]


def _runs(
    options: argparse.Namespace, paths: Sequence[Path], counts: Sequence[int]
) -> Iterator[tuple[replay_figures.Run, JSON]]:
    if options.url is not None:
        counts = [_prefill_workers(options.url.rstrip("/")) or counts[0]]
    for path in paths:
        trace = traces.read(path)
        for workers in counts:
            observed = _one(options, path, trace, workers)
            found = replay_figures.figures(observed)
            _show(found)
            yield observed, found


def _one(
    options: argparse.Namespace, path: Path, trace: traces.Trace, workers: int
) -> replay_figures.Run:
    plan = _plan(options, trace, workers)
    with _target(options, plan) as target:
        plan = replace(plan, job=_job(options, path, plan, target))
        return _drive(options, trace, plan, target)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run sends, and how fast."""

    rows: tuple[traces.Row, ...]
    dropped: int
    workers: int
    window_tokens: int
    pace: pace.Pace
    utilisation: Mapping[str, float]
    stream_interval: int
    job: Job | None = None


def _plan(options: argparse.Namespace, trace: traces.Trace, workers: int) -> Plan:
    window = min(options.window, options.capacity_tokens)
    rows = kept_rows(trace, window - WINDOW_MARGIN_TOKENS, options.rows)
    if not rows:
        raise ReplayError(f"{trace.name}: no row fits a window of {window} tokens")
    fitting = traces.within_window(trace, window - WINDOW_MARGIN_TOKENS)
    needed = pace.demand(rows, PROFILES[options.profile], workers, options.capacity_tokens)
    chosen = _pace(options, rows, needed, workers)
    seconds = pace.span_s(rows) / chosen.arrivals
    return Plan(
        rows=rows,
        dropped=len(trace.rows) - len(fitting.rows),
        workers=workers,
        window_tokens=window,
        pace=chosen,
        utilisation={
            "prefill": pace.utilisation(chosen, needed.prefill, workers),
            "decode": pace.utilisation(chosen, needed.decode, workers),
            "busiest": pace.utilisation(chosen, needed.busiest, workers),
        },
        stream_interval=options.stream_interval or pace.stream_interval(rows, max(1.0, seconds)),
    )


def _pace(
    options: argparse.Namespace,
    rows: Sequence[traces.Row],
    needed: pace.Demand,
    workers: int,
) -> pace.Pace:
    """As asked for; what is `auto` is chosen so that the run fits the machine and the fleet."""
    auto_speed, auto_load = options.speed == "auto", options.load == "auto"
    if options.url is not None:
        return pace.Pace(1.0 if auto_speed else float(options.speed), 1.0)
    best = pace.choose(rows, needed, workers, options.longest_s)
    if auto_speed and auto_load:
        return best
    if auto_speed:
        return pace.Pace(max(1.0, best.arrivals / float(options.load)), float(options.load))
    speed = float(options.speed)
    return pace.Pace(speed, best.arrivals / speed if auto_load else float(options.load))


@dataclass(frozen=True, slots=True)
class Target:
    """The router to send to; `cluster` is None when it was running already."""

    url: str
    model: str
    tokenisation: Tokenisation
    cluster: Cluster | None


@contextlib.contextmanager
def _target(options: argparse.Namespace, plan: Plan) -> Iterator[Target]:
    if options.url is not None:
        url = options.url.rstrip("/")
        model = options.model or _first_model(url)
        yield Target(url, model, _tokenisation(url, model), None)
        return
    fleet = Fleet(
        prefill=plan.workers,
        decode=plan.workers,
        speed=plan.pace.speed,
        profile=options.profile,
        args=[
            "--capacity-tokens",
            str(options.capacity_tokens),
            "--max-model-len",
            str(plan.window_tokens),
        ],
    )
    with cluster(fleet) as running:
        url = running.router_url
        yield Target(url, MODEL, _tokenisation(running.workers[0].url, MODEL), running)


def _prefill_workers(url: str) -> int:
    """Workers that prefill, by the running router's own account; 0 where it does not tell."""
    by_role = _scrape(url).by("pdrouter_worker_up", "role")
    return int(by_role.get("prefill", 0.0))


def _first_model(url: str) -> str:
    try:
        reply = httpx.get(f"{url}/v1/models", timeout=10.0, trust_env=False)
        reply.raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise ReplayError(f"{url} lists no model ({error}); name one with --model") from error


def _tokenisation(url: str, model: str) -> Tokenisation:
    """The worker's own counts, or one token per word of filler where nobody tells."""
    try:
        return tokenisation.ask(url, model)
    except (httpx.HTTPError, LookupError, ValueError):
        report.say(f"{url} does not count tokens (/tokenize): lengths are approximate")
        return Tokenisation()


def _job(options: argparse.Namespace, path: Path, plan: Plan, target: Target) -> Job:
    return Job(
        url=target.url,
        model=target.model,
        trace=str(path),
        output="",
        arrivals=plan.pace.arrivals,
        tokenisation=target.tokenisation,
        window_tokens=plan.window_tokens - WINDOW_MARGIN_TOKENS,
        max_rows=options.rows,
        max_output_tokens=options.max_output_tokens,
        stream_interval=plan.stream_interval,
        seed=f"{path.name}/{options.seed}",
        drain_s=DRAIN_S,
    )


def _drive(
    options: argparse.Namespace, trace: traces.Trace, plan: Plan, target: Target
) -> replay_figures.Run:
    """Run the client process against the target and gather what all sides say."""
    assert plan.job is not None
    pids = target.cluster.pids if target.cluster else {}
    before = _scrape(target.url)
    started_s = time.monotonic()
    with CpuSampler(pids) as sampler:
        calls = _client(plan.job, f"{trace.name} N={plan.workers}", len(plan.rows), sampler)
    wall_s = time.monotonic() - started_s
    states = _states(target)
    simulated_s = wall_s * plan.pace.speed
    return replay_figures.Run(
        trace=trace.name,
        rows=plan.rows,
        dropped=plan.dropped,
        calls=calls,
        workers=plan.workers,
        capacity_tokens=options.capacity_tokens,
        pace=plan.pace,
        utilisation=plan.utilisation,
        wall_s=wall_s,
        router=_scrape(target.url).since(before),
        computed=_computed(states, calls),
        busy={name: state["busy_s"] / simulated_s for name, state in states.items()},
        cpu=sampler.use,
        slo_ttft_s=options.slo_ttft_s,
    )


def _scrape(url: str) -> prometheus.Page:
    try:
        return prometheus.scrape(url)
    except httpx.HTTPError as error:
        raise ReplayError(f"no metrics from {url}: {error}") from error


def _client(job: Job, title: str, total: int, sampler: CpuSampler) -> list[Call]:
    with tempfile.TemporaryDirectory(prefix="pdrouter-bench-") as name:
        folder = Path(name)
        job = replace(job, output=str(folder / "calls.jsonl"))
        job.dump(folder / "job.json")
        log = folder / "client.log"
        command = [sys.executable, "-m", "bench.open_loop", str(folder / "job.json")]
        with process(command, log, capture=True) as child, Progress(title, total) as bar:
            sampler.watch("client", child.pid)
            _follow(child, bar)
            if child.wait() != 0:
                raise ReplayError(f"the load client ended with {child.returncode}: {tail(log)}")
        lines = Path(job.output).read_bytes().splitlines()
        return [Call(**orjson.loads(line)) for line in lines]


def _follow(child: subprocess.Popen[bytes], bar: Progress) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        bar.at(json.loads(line)["done"])


def _states(target: Target) -> dict[str, JSON]:
    """What each simulated worker says of itself, by name."""
    workers = target.cluster.workers if target.cluster else ()
    return {
        worker.name: httpx.get(f"{worker.url}/sim/state", timeout=10.0, trust_env=False).json()
        for worker in workers
    }


def _computed(states: Mapping[str, JSON], calls: Sequence[Call]) -> dict[str, float]:
    """Prompt tokens that each prefill worker computed, by its own count where it can be asked."""
    if states:
        return {
            name: float(state["computed_tokens_total"])
            for name, state in states.items()
            if state["role"] == "prefill"
        }
    computed: dict[str, float] = {}
    for call in calls:
        if call.prefill:
            new = call.prompt_tokens - call.cached_tokens
            computed[call.prefill] = computed.get(call.prefill, 0.0) + new
    return computed


def _show(found: JSON) -> None:
    report.say(f"\n{found['trace']}, {found['prefill_workers']} prefill workers")
    report.say(report.table(["figure", "value"], replay_figures.rows_for_table(found)))
    for mark in replay_figures.marks(found):
        report.say(f"  {mark}")
    if found["disturbed"]:
        report.say("  The machine had no core to spare: read latencies as upper bounds.")


def _report(
    options: argparse.Namespace,
    runs: Sequence[tuple[replay_figures.Run, JSON]],
    failure: str,
) -> int:
    found = [figures for _, figures in runs]
    ok = not failure and all(mark.ok for figures in found for mark in replay_figures.marks(figures))
    sections = [replay_figures.section(observed, figures) for observed, figures in runs]
    document = report.page("Trace replay", sections)
    files = report.write(options.out, "replay", {"runs": found, "ok": ok}, document)
    headers = ["trace", "N", "hit", "pooled", "ratio", "skew", "pred/deliv", "ttft diff", "errors"]
    report.say("\n" + report.table(headers, [_summary(figures) for figures in found]))
    report.say("written: " + ", ".join(map(str, files)))
    return report.finish({"runs": found} | ({"error": failure} if failure else {}), ok)


def _summary(found: JSON) -> list[Any]:
    return [
        found["trace"],
        found["prefill_workers"],
        found["hit_rate"],
        _or_dash(found["pooled_hit_rate"]),
        _or_dash(found["hit_ratio"]),
        found["busiest_over_mean"],
        found["predicted_vs_delivered"],
        found["ttft_difference"],
        sum(found["errors"].values()),
    ]


def _or_dash(value: float | None) -> float | str:
    return "-" if value is None else value
