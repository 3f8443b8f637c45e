"""Our router beside its peers in one interleaved run of the comparison kept beside the repository,
in a network namespace with nothing but loopback.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import rig
from bench.cluster import ROOT, ClusterError
from bench.figures import Ratio, ratio_of_medians

JSON = dict[str, Any]
OURS = "pdrouter"
PEERS = ("vllm-router-pd", "vllm-router-pd-rr", "sglang-router-pd", "sglang-router-pd-rr")
# Name, test, figure of that test: what must not be dearer than the best peer's.
COSTS = (
    ("CPU per short call, ms", "short", "cpu_ms_per_req"),
    ("CPU per 128 KB call, ms", "short128k", "cpu_ms_per_req"),
    ("CPU per streamed chunk, us", "paced", "cpu_s_per_1M"),
)
TESTS = "lat1k,lat128k,integrity,short,paced,short128k"
# The rig's own ports, free in a namespace of its own.
RIG_PORTS = rig.Ports(9101, (9201, 9202), (9301, 9302), 9500)
CALM_SHARE = 0.2
SECONDS_PER_ROUTER = 400.0  # on a machine that is never calm


@dataclass(frozen=True, slots=True)
class Cost:
    """One figure of ours against the best peer's of the same run."""

    name: str
    ours: tuple[float, ...]
    best: str
    theirs: tuple[float, ...]
    ratio: Ratio


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where the comparison and the peers are, and how long to measure.

    `quiet_s` is how long to wait for a calm machine before each test.
    """

    source: Path
    build: Path
    peers: Path
    reps: int
    secs: float
    quiet_s: float


def run(wanted: Comparison, folder: Path) -> list[JSON]:
    """The samples of all routers, as the comparison writes them."""
    config = folder / "router.yaml"
    config.write_text(json.dumps(rig.router_config(RIG_PORTS)))
    out = folder / "samples.jsonl"
    out.unlink(missing_ok=True)
    command = [
        *(sys.executable, str(wanted.source / "compare.py"), str(wanted.source / "routers.toml")),
        *("--add", f"{OURS}|nixl|{shlex.join(rig.router_command(config))}"),
        *("--only", ",".join([OURS, *PEERS]), "--base", OURS, "--tests", TESTS),
        *("--reps", str(wanted.reps), "--secs", f"{wanted.secs:g}"),
        *("--quiet", f"{wanted.quiet_s:g}"),
        *("--venvs", str(wanted.peers.resolve()), "--bin", str(wanted.build.resolve())),
        *("--logs", str(folder.resolve() / "logs"), "--out", str(out.resolve())),
    ]
    script = f"ip link set lo up && exec {shlex.join(command)}"
    limit_s = 120 + wanted.reps * (len(PEERS) + 1) * SECONDS_PER_ROUTER
    with (folder / "compare.log").open("wb") as log:
        done = subprocess.run(
            ["unshare", "-n", "bash", "-c", script],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=limit_s,
            check=False,
        )
    if done.returncode or not out.is_file():
        raise ClusterError(f"the comparison ended with {done.returncode}: {folder}/compare.log")
    return [json.loads(line) for line in out.read_text().splitlines()]


def samples(rows: Sequence[JSON], name: str, test: str, figure: str) -> tuple[float, ...]:
    """Values of one figure, those of a calm machine where there are at least two of them."""
    found = [
        (row["fig"][figure], max(row["raw"].get("foreign") or [0.0]))
        for row in rows
        if row["name"] == name and row["test"] == test and row["fig"].get(figure) is not None
    ]
    found = [(value, noise) for value, noise in found if value == value]
    calm = tuple(value for value, noise in found if noise < CALM_SHARE)
    return calm if len(calm) >= 2 else tuple(value for value, _ in found)


def costs(rows: Sequence[JSON]) -> list[Cost]:
    return [_cost(rows, *cost) for cost in COSTS]


def _cost(rows: Sequence[JSON], name: str, test: str, figure: str) -> Cost:
    by_peer: Mapping[str, tuple[float, ...]] = {
        peer: found for peer in PEERS if (found := samples(rows, peer, test, figure))
    }
    ours = samples(rows, OURS, test, figure)
    if not by_peer or not ours:
        return Cost(name, ours, "none", (), ratio_of_medians((), ()))
    best = min(by_peer, key=lambda peer: ratio_of_medians(by_peer[peer], ours).ratio)
    return Cost(name, ours, best, by_peer[best], ratio_of_medians(ours, by_peer[best]))


def legs_ok(rows: Sequence[JSON], name: str) -> bool:
    """Whether every call of the integrity test went through both legs, whole."""
    tests = [row["fig"] for row in rows if row["name"] == name and row["test"] == "integrity"]
    return bool(tests) and all(fig["legs_ok"] and fig["good"] == fig["of"] for fig in tests)


def missing_peers(rows: Sequence[JSON]) -> list[str]:
    return [peer for peer in PEERS if not any(row["name"] == peer for row in rows)]
