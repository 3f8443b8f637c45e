"""`python -m bench disconnects`: a client that leaves, at whatever moment and in whatever way,
leaves nothing behind: not in the engines, not in the router's books, sockets or memory.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from bench import cpu, prometheus, report
from bench.cluster import MODEL, Cluster, ClusterError, Fleet, cluster
from bench.departures import Cut, Leaver, SdkLeaver, SocketLeaver, cut
from bench.figures import percentile
from bench.progress import Progress
from bench.report import Mark

JSON = dict[str, Any]
GONE_WITHIN_S = 1.0
GIVE_UP_S = 10.0
POLL_S = 0.005
LEAKED_FILES_AT_MOST = 4
GROWTH_AT_MOST_MB = 8.0
LATE_AT_MOST = 30  # the run has failed by then, and each costs up to GIVE_UP_S
LIVE = ("running", "waiting", "pinned_requests")
# Room for three of the longest calls on a decode worker, so that more of them wait in the router.
DECODE_CAPACITY_TOKENS = 32768
# Freed memory goes back to the system, so that what a process has is what it holds (glibc).
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "65536"}
# So little that the router's map of it is full within a few calls: what grows after is a leak.
PREFILL_CAPACITY_TOKENS = 131072


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cuts", type=int, default=1000)
    add("--seed", type=int, default=0)
    add("--speed", type=float, default=4.0, help="of the simulated workers")
    add("--longest-s", type=float, default=0.4, help="latest moment of a cut after the send")


@dataclass(slots=True)
class Tally:
    """What followed the cuts. Times are seconds from the last cut of a group."""

    cuts: int = 0
    gone_s: list[float] = field(default_factory=list)
    leases_s: list[float] = field(default_factory=list)
    ways: Counter[str] = field(default_factory=Counter)
    late: list[str] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    cachemap_mb: list[float] = field(default_factory=list)


class Bench:
    """Drives cuts against one running cluster."""

    def __init__(self, running: Cluster, options: argparse.Namespace) -> None:
        self._cluster = running
        self._options = options
        self._dice = random.Random(options.seed)
        self._http = httpx.AsyncClient(timeout=30, trust_env=False)
        self._sdk = openai.AsyncOpenAI(
            base_url=f"{running.router_url}/v1", api_key="none", max_retries=0, timeout=60
        )
        self.tally = Tally()

    async def run(self) -> Tally:
        await self._whole_calls(16)
        await self._quiet()
        total = self._options.cuts
        with Progress("disconnects", total) as bar:
            while self.tally.cuts < total and len(self.tally.late) < LATE_AT_MOST:
                if self.tally.cuts * 4 >= total * len(self.tally.files):
                    await self._note_process()
                size = min(self._group_size(), total - self.tally.cuts)
                await self._group(size)
                bar.at(self.tally.cuts)
        await self._whole_calls(16)
        await self._quiet()
        await self._note_process()
        await self._sdk.close()
        await self._http.aclose()
        return self.tally

    def _group_size(self) -> int:
        """Mostly one; now and then so many at once that some have to wait for room."""
        return 1 if self._dice.random() < 0.95 else self._dice.randint(12, 20)

    async def _note_process(self) -> None:
        pid = self._cluster.pids["router"]
        page = await self.metrics()
        self.tally.cachemap_mb.append(page.total("pdrouter_cachemap_bytes") / 2**20)
        self.tally.files.append(cpu.open_files(pid))
        self.tally.rss_mb.append(cpu.rss_mb([pid]))

    async def _group(self, size: int) -> None:
        first = self.tally.cuts
        cuts = [
            cut(self._dice, first + i, MODEL, self._options.longest_s, heavy=size > 1)
            for i in range(size)
        ]
        leavers = [self._leaver(one) for one in cuts]
        await asyncio.gather(*(_come_and_go(*pair) for pair in zip(leavers, cuts, strict=True)))
        cut_at_s = time.monotonic()
        gone_s = await self._until(self._engines_idle, cut_at_s)
        leases_s = await self._until(self._books_empty, cut_at_s)
        for leaver in leavers:
            await leaver.clean_up()
        self._count(cuts, gone_s, leases_s)

    def _count(self, cuts: Sequence[Cut], gone_s: float, leases_s: float) -> None:
        tally = self.tally
        for one in cuts:
            tally.cuts += 1
            tally.ways[one.way] += 1
            tally.gone_s.append(gone_s)
            tally.leases_s.append(leases_s)
        if max(gone_s, leases_s) > GONE_WITHIN_S:
            ways = ",".join(sorted({one.way for one in cuts}))
            tally.late.append(
                f"{ways} x{len(cuts)}: engines {gone_s:.2f} s, books {leases_s:.2f} s"
            )

    def _leaver(self, one: Cut) -> Leaver:
        if one.way == "sdk":
            return SdkLeaver(self._sdk, one.body)
        return SocketLeaver(self._cluster.router_url, one.body, one.way)

    async def _until(self, condition: Any, since_s: float) -> float:
        """Seconds from `since_s` until the condition was seen to hold; GIVE_UP_S at the latest."""
        while True:
            if await condition():
                return time.monotonic() - since_s
            if time.monotonic() - since_s > GIVE_UP_S:
                return GIVE_UP_S
            await asyncio.sleep(POLL_S)

    async def _engines_idle(self) -> bool:
        states = await asyncio.gather(*(self._state(w.url) for w in self._cluster.workers))
        return all(state[key] == 0 for state in states for key in LIVE)

    async def _state(self, url: str) -> JSON:
        return dict((await self._http.get(f"{url}/sim/state")).json())

    async def _books_empty(self) -> bool:
        page = await self.metrics()
        return page.total("pdrouter_leases") == 0 and page.total("pdrouter_queue_depth") == 0

    async def metrics(self) -> prometheus.Page:
        return prometheus.parse((await self._http.get(f"{self._cluster.router_url}/metrics")).text)

    async def _quiet(self) -> None:
        if await self._until(self._engines_idle, time.monotonic()) >= GIVE_UP_S:
            raise ClusterError("the simulated workers are busy without any call")

    async def _whole_calls(self, count: int) -> None:
        """Calls that nobody leaves: they must succeed, and they fill the router's pools."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        replies = await asyncio.gather(
            *(
                self._http.post(f"{self._cluster.router_url}/v1/chat/completions", json=body)
                for _ in range(count)
            )
        )
        bad = [reply.status_code for reply in replies if reply.status_code != 200]
        if bad:
            raise ClusterError(f"whole calls failed: {Counter(bad)}")


async def _come_and_go(leaver: Leaver, one: Cut) -> None:
    await leaver.start()
    await asyncio.sleep(one.delay_s)
    await leaver.leave()


def run(options: argparse.Namespace) -> int:
    fleet = Fleet(
        speed=options.speed,
        prefill_args=["--capacity-tokens", str(PREFILL_CAPACITY_TOKENS)],
        decode_args=["--capacity-tokens", str(DECODE_CAPACITY_TOKENS)],
        router_env=RETURN_MEMORY,
    )
    try:
        with cluster(fleet) as running:
            tally = asyncio.run(_cuts(running, options))
            phases = _phases(running)
            expired = _expired(running)
    except ClusterError as error:
        report.say(f"disconnects: {error}")
        return report.finish({"error": str(error)}, ok=False)
    return _show(tally, phases, expired, options.cuts)


async def _cuts(running: Cluster, options: argparse.Namespace) -> Tally:
    return await Bench(running, options).run()


def _phases(running: Cluster) -> dict[str, float]:
    """Departures by the phase that the router saw them in."""
    return prometheus.scrape(running.router_url).by("pdrouter_disconnects_total", "phase")


def _expired(running: Cluster) -> int:
    """Prefilled KV that nobody fetched or gave up, so that only its lease's end freed it."""
    replies = (httpx.get(f"{w.url}/sim/state", trust_env=False) for w in running.workers)
    return sum(int(reply.json()["expired_total"]) for reply in replies)


def _show(tally: Tally, phases: dict[str, float], expired: int, wanted: int) -> int:
    marks = [
        Mark("slowest engine to be rid of the work, s", max(tally.gone_s), GONE_WITHIN_S),
        Mark("slowest return of leases and queue to zero, s", max(tally.leases_s), GONE_WITHIN_S),
        Mark(
            "open files of the router, after less before",
            float(tally.files[-1] - tally.files[0]),
            float(LEAKED_FILES_AT_MOST),
        ),
        Mark(
            "memory growth in the second half, MB",
            tally.rss_mb[-1] - tally.rss_mb[len(tally.rss_mb) // 2],
            GROWTH_AT_MOST_MB,
        ),
        Mark("cuts made", float(tally.cuts), float(wanted), at_least=True),
        Mark("KV left to its lease's end", float(expired), 0.0),
    ]
    marks += [
        Mark(f"cuts in phase {phase}", phases.get(phase, 0.0), 1.0, at_least=True)
        for phase in ("waiting", "prefill", "transfer", "decode")
    ]
    rows: list[tuple[str, Any, Any]] = [
        (name, percentile(values, 0.5), percentile(values, 0.99))
        for name, values in (("engines", tally.gone_s), ("books", tally.leases_s))
    ]
    report.say(report.table(["seconds until clean", "p50", "p99"], rows))
    for mark in marks:
        report.say(f"  {mark}")
    for line in tally.late[:10]:
        report.say(f"  late: {line}")
    figures = {
        "cuts": tally.cuts,
        "ways": dict(tally.ways),
        "phases": phases,
        "gone_s": {q: percentile(tally.gone_s, s) for q, s in (("p50", 0.5), ("p99", 0.99))}
        | {"max": max(tally.gone_s)},
        "leases_s": {"p99": percentile(tally.leases_s, 0.99), "max": max(tally.leases_s)},
        "late": len(tally.late),
        "open_files": tally.files,
        "rss_mb": tally.rss_mb,
        "cachemap_mb": tally.cachemap_mb,
        "marks": [mark.as_json() for mark in marks],
    }
    return report.finish(figures, all(mark.ok for mark in marks))
