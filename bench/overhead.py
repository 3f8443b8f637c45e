"""`python -m bench overhead`: what the router itself costs, on a core of its own."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from bench import cpu, report, rig, side_by_side, traces
from bench.cluster import ClusterError
from bench.progress import Progress
from bench.report import Mark
from bench.rig import Rig, Tools

JSON = dict[str, Any]
ADDED_TTFT_AT_MOST_MS = 0.4
GROWTH_AT_MOST = 0.05
STREAMS = 512
KB_128 = 131072


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--reps", type=int, default=3)
    add("--secs", type=float, default=3.0, help="length of each window")
    add("--quiet", type=float, default=10.0, help="seconds to wait for a calm machine, per test")
    add("--shared", help="folder that holds perf/ (default: PDROUTER_SHARED, or ../shared)")
    add("--peers", type=Path, help="folder of venv-vllm-router and venv-sglang-router")
    add("--own-rig", action="store_true", help="the rig of this package though another is there")
    add("--out", type=Path, default=Path("bench-results/overhead"), help="builds, logs, samples")


def run(options: argparse.Namespace) -> int:
    source = traces.shared_dir(options.shared) / "perf"
    options.out.mkdir(parents=True, exist_ok=True)
    tools = None if options.own_rig else rig.compiled_tools(source, options.out / "rig")
    if options.peers and tools is None:
        report.say(f"overhead: --peers needs the compiled rig of {source}, make and a compiler")
        return report.finish({"error": "no compiled rig"}, ok=False)
    tools = tools or rig.own_tools()
    if tools.name == "python":
        report.say("No compiled rig: engine and load are Python, and dearer than a compiled one.")
    try:
        figures, marks = _alone(tools, options)
        if options.peers:
            more, more_marks = _beside_peers(options, source)
            figures, marks = figures | more, marks + more_marks
    except ClusterError as error:
        report.say(f"overhead: {error}")
        return report.finish({"error": str(error)}, ok=False)
    for mark in marks:
        report.say(f"  {mark}")
    figures["marks"] = [mark.as_json() for mark in marks]
    return report.finish(figures, all(mark.ok for mark in marks))


def _alone(tools: Tools, options: argparse.Namespace) -> tuple[JSON, list[Mark]]:
    samples: dict[str, list[float]] = {}
    rss_mb: list[float] = []
    with (
        rig.running(tools, options.out) as running,
        Progress("overhead", options.reps * len(_TESTS)) as bar,
    ):
        for repeat in range(options.reps):
            for number, test in enumerate(_TESTS):
                rig.wait_calm(options.quiet)
                for name, value in test(running, options.secs).items():
                    samples.setdefault(name, []).append(value)
                bar.at(repeat * len(_TESTS) + number + 1)
            rss_mb.append(cpu.rss_mb(cpu.tree(running.router_pid)))
    rows = [
        (name, statistics.median(values), min(values), max(values))
        for name, values in samples.items()
    ]
    report.say(report.table([f"{tools.name} rig", "median", "least", "most"], rows))
    growth = (rss_mb[-1] - rss_mb[0]) / rss_mb[0]
    marks = [
        Mark(
            "added TTFT p50 at one client, ms",
            statistics.median(samples["added_ttft_p50_ms"]),
            ADDED_TTFT_AT_MOST_MS,
        ),
        Mark("failed calls in all tests", sum(samples["failed"]), 0.0),
        Mark("memory growth from the first repeat to the last", growth, GROWTH_AT_MOST),
    ]
    for failure in running.failures:
        report.say(f"  {failure}")
    figures = {
        "rig": tools.name,
        "reps": options.reps,
        "rss_mb": rss_mb,
        "failures": running.failures,
    }
    return {**figures, **samples}, marks


def _latency(running: Rig, secs: float) -> dict[str, float]:
    """One client; time to first token through the router less that of the engine itself."""
    arguments = ["--conc", "1", "--stream", "--max-tokens", "4", "--secs", f"{secs / 2:g}"]
    direct = running.load(running.ports.regular, *arguments, "--warmup", "0.1")
    through = running.load(running.ports.router, *arguments, "--warmup", "0.3")
    return {
        "added_ttft_p50_ms": through["ttft_ms"]["p50"] - direct["ttft_ms"]["p50"],
        "added_ttft_p99_ms": through["ttft_ms"]["p99"] - direct["ttft_ms"]["p99"],
        "failed": float(through["bad"]),
    }


def _short(running: Rig, secs: float) -> dict[str, float]:
    return _calls(running, secs, 1024, "1k")


def _long(running: Rig, secs: float) -> dict[str, float]:
    return _calls(running, secs, KB_128, "128k")


def _calls(running: Rig, secs: float, prompt_bytes: int, label: str) -> dict[str, float]:
    running.control("reset=1")
    found = running.load(
        running.ports.router,
        *("--conc", "64", "--max-tokens", "4", "--prompt", str(prompt_bytes)),
        *("--secs", f"{secs:g}", "--warmup", "0.7", "--abort"),
    )
    done = max(1, found["done"])
    return {
        f"cpu_ms_per_{label}_call": 1000 * found["router_cpu"] / done,
        f"legs_per_{label}_call": running.legs()["reqs"] / max(1, found["started"]),
        "failed": float(found["bad"]),
    }


def _paced(running: Rig, secs: float) -> dict[str, float]:
    """256 streams of 20 events a second each, as a batching engine sends them."""
    running.control("itl_us=50000")
    found = running.load(
        running.ports.router,
        *("--conc", "256", "--stream", "--max-tokens", "100000"),
        *("--secs", f"{secs:g}", "--warmup", "1.5", "--abort"),
    )
    running.control("itl_us=0")
    time.sleep(0.5)  # the router gives up the streams that the load generator dropped
    return {
        "cpu_us_per_chunk": 1e6 * found["router_cpu"] / max(1, found["events"]),
        "failed": float(found["bad"]),
    }


def _many_streams(running: Rig, secs: float) -> dict[str, float]:
    running.control("itl_us=20000")
    found = running.load(
        running.ports.router,
        *("--conc", str(STREAMS), "--n", str(2 * STREAMS), "--stream", "--max-tokens", "50"),
    )
    running.control("itl_us=0")
    return {"failed": float(found["bad"] + 2 * STREAMS - found["done"])}


_TESTS = (_latency, _short, _paced, _long, _many_streams)


def _beside_peers(options: argparse.Namespace, source: Path) -> tuple[JSON, list[Mark]]:
    wanted = side_by_side.Comparison(
        source=source,
        build=options.out / "rig" / "build",
        peers=options.peers,
        reps=options.reps,
        secs=options.secs,
        quiet_s=options.quiet,
    )
    rows = side_by_side.run(wanted, options.out)
    costs = side_by_side.costs(rows)
    table = [
        (
            cost.name,
            statistics.median(cost.ours or [float("nan")]),
            statistics.median(cost.theirs or [float("nan")]),
            cost.best,
            cost.ratio.ratio,
            f"{cost.ratio.low:.2f}-{cost.ratio.high:.2f}",
            "yes" if cost.ratio.carried else "no",
        )
        for cost in costs
    ]
    headers = ["", "ours", "best peer", "which", "ratio", "95 %", "carried"]
    report.say(report.table(headers, table))
    missing = side_by_side.missing_peers(rows)
    added = side_by_side.samples(rows, side_by_side.OURS, "lat1k", "added_p50_ms")
    marks = [Mark(f"{cost.name}, ratio to the best peer", cost.ratio.ratio, 1.0) for cost in costs]
    marks += [
        Mark("peers that could not be measured", float(len(missing)), 0.0),
        Mark(
            "added TTFT p50 in the comparison, ms",
            statistics.median(added or [float("nan")]),
            ADDED_TTFT_AT_MOST_MS,
        ),
        Mark(
            "calls through both legs",
            float(side_by_side.legs_ok(rows, side_by_side.OURS)),
            1.0,
            at_least=True,
        ),
    ]
    figures = {
        "ratios": {
            cost.name: {
                "ratio": cost.ratio.ratio,
                "interval_95": [cost.ratio.low, cost.ratio.high],
                "carried": cost.ratio.carried,
                "best_peer": cost.best,
                "ours": list(cost.ours),
                "theirs": list(cost.theirs),
            }
            for cost in costs
        },
        "missing_peers": missing,
    }
    return figures, marks
