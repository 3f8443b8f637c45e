"""Streams arrive as they are made, one at a time and by the thousand."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import statistics
import time
from pathlib import Path

import httpx

from tests.e2e.cluster import chat, prompt
from tests.fakes import DONE, ROLE, Answer, Received, chunk

# More of them by hand; a machine of two cores serves 4,000.
STREAMS = int(os.environ.get("PDROUTER_E2E_STREAMS", "600"))
EVENTS = 8


def test_tokens_arrive_at_the_pace_at_which_they_are_made(gateway, scripted):
    """One token every 100 ms is one every 100 ms at the client."""

    async def paced(request: Received, answer: Answer) -> None:
        answer.open_stream()
        answer.send(ROLE)
        for number in range(12):
            await asyncio.sleep(0.1)
            answer.send(chunk({"content": f"t{number} "}))
        answer.send(chunk({}, "stop") + DONE)
        answer.end()

    scripted.decode.behaviour = paced
    came_s = []
    body = chat("hello", "scripted", stream=True)
    with (
        httpx.Client(trust_env=False, timeout=20) as client,
        client.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as reply,
    ):
        for line in reply.iter_lines():
            if '"content":"t' in line:
                came_s.append(time.monotonic())
    gaps_s = [b - a for a, b in itertools.pairwise(came_s)]
    assert len(gaps_s) == 11
    assert 0.09 < statistics.median(gaps_s) < 0.13
    assert max(gaps_s) < 0.3


def test_a_simulated_engine_at_that_pace(gateway, sims):
    for name in ("d0", "d1"):
        sims[name].fault(slow=100 / (7 / 4))
    came_s = []
    body = chat(prompt("paced"), stream=True, max_tokens=10)
    with (
        httpx.Client(trust_env=False, timeout=20) as client,
        client.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as reply,
    ):
        for line in reply.iter_lines():
            if '"content":"' in line and '"role"' not in line:
                came_s.append(time.monotonic())
    gaps_s = [b - a for a, b in itertools.pairwise(came_s)]
    assert len(came_s) == 10
    assert 0.08 < statistics.median(gaps_s) < 0.2


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_thousands_of_streams_at_once(gateway, sims):  # noqa: PLR0915 # one story
    """No error, every stream whole, and memory that stays in bounds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    for name in ("d0", "d1"):
        sims[name].fault(slow=60)
    before_mb = rss_mb(gateway.child.pid)
    peak_mb = [before_mb]
    port = int(gateway.url.rpartition(":")[2])

    async def stream(number: int) -> tuple[int, int]:
        body = httpx.Request(
            "POST",
            "http://x",
            json=chat(f"stream {number}", stream=True, max_tokens=EVENTS),
        ).content
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        data = await reader.read(-1)
        writer.close()
        done = data.count(b"data: [DONE]")
        return int(data.split(b" ", 2)[1]) if data else 0, data.count(b'"content":"') * done

    async def watch() -> None:
        while True:
            peak_mb.append(rss_mb(gateway.child.pid))
            await asyncio.sleep(0.2)

    async def crowd() -> list[tuple[int, int]]:
        watching = asyncio.create_task(watch())
        try:
            return await asyncio.gather(*(stream(i) for i in range(STREAMS)))
        finally:
            watching.cancel()

    try:
        ends = asyncio.run(crowd())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # Beside the tokens there is the event that announces the role.
    assert set(ends) == {(200, EVENTS + 1)}
    assert max(peak_mb) - before_mb < 30 + 0.05 * STREAMS
