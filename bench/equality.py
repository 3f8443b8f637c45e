"""`python -m bench equality`: what a client reads through prefill and decode on two workers is
what one aggregated worker answers.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import answers, report
from bench.answers import Answer
from bench.cluster import MODEL, ClusterError, Fleet, cluster, simulators
from bench.conversations import Request, conversation
from bench.progress import Progress

JSON = dict[str, Any]
EXAMPLES_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--conversations", type=int, default=1000)
    add("--seed", type=int, default=0)
    add("--prefill", type=int, default=2, help="prefill workers")
    add("--decode", type=int, default=2, help="decode workers")
    add("--speed", type=float, default=50.0, help="of the simulated workers")
    add("--concurrency", type=int, default=16, help="conversations at a time")


@dataclass(slots=True)
class Tally:
    """Calls by kind, and what differed in which."""

    calls: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[tuple[str, str]] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, request: Request, ours: Answer, reference: Answer, plan: str) -> None:
        self.calls[request.kind] += 1
        self.plans[plan] += 1
        self.statuses[ours.status] += 1
        for difference in ours.differences(reference):
            self.mismatches[request.kind, difference] += 1
            where = f"conversation {request.conversation}, turn {request.turn}"
            self.examples.append(f"{request.kind}: {difference} ({where})")


def run(options: argparse.Namespace) -> int:
    started_s = time.monotonic()
    fleet = Fleet(options.prefill, options.decode, speed=options.speed)
    try:
        with ExitStack() as held:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            single, _ = held.enter_context(
                simulators([("both", "single")], fleet, [], folder / "single.log")
            )
            running = held.enter_context(cluster(fleet))
            tally = asyncio.run(_compare(options, running.router_url, single[0].url))
    except ClusterError as error:
        report.say(f"equality: {error}")
        return report.finish({"error": str(error)}, ok=False)
    return _show(options, tally, time.monotonic() - started_s)


async def _compare(options: argparse.Namespace, router_url: str, single_url: str) -> Tally:
    tally = Tally()
    numbers = iter(range(options.conversations))
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=router_url, timeout=60, limits=limits, trust_env=False) as ours,
        httpx.AsyncClient(base_url=single_url, timeout=60, limits=limits, trust_env=False) as one,
    ):
        with Progress("equality", options.conversations) as bar:

            async def take() -> None:
                for number in numbers:
                    for request in conversation(number, options.seed, MODEL):
                        pair = await asyncio.gather(_ask(ours, request), _ask(one, request))
                        tally.add(request, pair[0][0], pair[1][0], pair[0][1])
                    bar.at(number + 1)

            await asyncio.gather(*(take() for _ in range(options.concurrency)))
    return tally


async def _ask(client: httpx.AsyncClient, request: Request) -> tuple[Answer, str]:
    """The answer, and the plan that the router's headers tell of."""
    try:
        reply = await client.post(request.path, json=request.body)
    except httpx.HTTPError as error:
        return Answer(0, faults=[type(error).__name__]), "none"
    read = answers.streamed if request.streams else answers.whole
    split = bool(reply.headers.get("x-pdrouter-prefill"))
    return read(reply.status_code, reply.content), "pd" if split else "decode"


def _show(options: argparse.Namespace, tally: Tally, wall_s: float) -> int:
    wrong = Counter[str]()
    for (kind, _), count in tally.mismatches.items():
        wrong[kind] += count
    rows = [(kind, count, wrong[kind]) for kind, count in sorted(tally.calls.items())]
    report.say(report.table(["kind of call", "calls", "differences"], rows))
    for example in tally.examples[:EXAMPLES_SHOWN]:
        report.say(f"  {example}")
    figures: JSON = {
        "conversations": options.conversations,
        "seed": options.seed,
        "calls": sum(tally.calls.values()),
        "plans": dict(tally.plans),
        "statuses": dict(tally.statuses),
        "mismatches": {f"{kind}: {what}": n for (kind, what), n in tally.mismatches.items()},
        "wall_s": wall_s,
    }
    # A run in which nothing was split over two workers would show nothing.
    split = tally.plans["pd"] > 0
    return report.finish(figures, ok=not tally.mismatches and split)
