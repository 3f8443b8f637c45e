"""A closed-loop load generator for one endpoint: what `bench overhead` uses without a compiled one.

Prints `W` when its window opens, so that a driver can read CPU clocks there, and one JSON line at
the end. Only what ends inside the window counts. With --n: exactly that many calls, no window.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import string
import sys
from collections import Counter
from collections.abc import Sequence

from bench.figures import percentile
from bench.http_client import Pool, clock_s

PATH = "/v1/chat/completions"


class Reply:
    """A Listener that counts events and says whether the reply was whole."""

    def __init__(self) -> None:
        self.ended_ok: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.events = 0
        self.events_before = 0  # those that came before the window opened
        self.first_s: float | None = None
        self.fault = ""
        self._status = 0
        self._tail = b""

    @property
    def events_inside(self) -> int:
        return self.events - self.events_before

    def started(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        if self.first_s is None:
            self.first_s = clock_s()
        self.events += data.count(b"data: ")
        self._tail = (self._tail + data)[-64:]

    def ended(self) -> None:
        if self._status != 200:
            self.fault = f"HTTP {self._status}"
        self._finish(self._status == 200)

    def failed(self, reason: str) -> None:
        self.fault = reason
        self._finish(False)

    def complete(self, stream: bool, tokens: int) -> bool:
        """A stream carries all its events and [DONE]."""
        return not stream or (self.events > tokens and b"[DONE]" in self._tail)

    def _finish(self, ok: bool) -> None:
        if not self.ended_ok.done():
            self.ended_ok.set_result(ok)


class Load:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._pool = Pool(f"http://127.0.0.1:{options.port}")
        self._dice = random.Random()
        letters = self._dice.choices(string.ascii_lowercase + " ", k=max(64, options.prompt))
        self._text = "".join(letters)
        self._live: set[Reply] = set()
        self._window_s = 0.0
        self._started = 0
        self.done = self.bad = self.events = 0
        self.faults: Counter[str] = Counter()
        self.ttft_s: list[float] = []

    async def run(self) -> dict[str, object]:
        options = self._options
        callers = [asyncio.create_task(self._caller()) for _ in range(options.conc)]
        await asyncio.sleep(options.warmup)
        self._open_window()
        if options.n:
            await asyncio.gather(*callers)
        else:
            await asyncio.sleep(options.secs)
        seconds = clock_s() - self._window_s
        events = self.events + sum(reply.events_inside for reply in self._live)
        for caller in callers:
            caller.cancel()
        self._pool.close()
        return {
            "done": self.done,
            "bad": self.bad,
            "faults": dict(self.faults),
            "started": self._started,
            "secs": seconds,
            "rps": self.done / seconds,
            "events": events,
            "eps": events / seconds,
            "ttft_ms": {
                "p50": percentile(self.ttft_s, 0.5) * 1000 if self.ttft_s else 0.0,
                "p99": percentile(self.ttft_s, 0.99) * 1000 if self.ttft_s else 0.0,
            },
        }

    def _open_window(self) -> None:
        if not self._options.n:
            self.done = self.events = 0
            self.ttft_s.clear()
            for reply in self._live:
                reply.events_before = reply.events
        self._window_s = clock_s()
        sys.stdout.write("W\n")
        sys.stdout.flush()

    async def _caller(self) -> None:
        while not self._options.n or self._started < self._options.n:
            self._started += 1
            await self._call()

    async def _call(self) -> None:
        options = self._options
        body = self._body()
        connection = await self._pool.take()
        reply = Reply()
        self._live.add(reply)
        sent_s = clock_s()
        connection.send(self._pool.head(PATH, len(body)), body, reply)
        ok = await reply.ended_ok and reply.complete(options.stream, options.max_tokens)
        self._live.discard(reply)
        self.events += reply.events_inside
        self.done += ok
        self.bad += not ok
        if not ok:
            self.faults[reply.fault or f"{reply.events} events"] += 1
        if reply.first_s is not None:
            self.ttft_s.append(reply.first_s - sent_s)

    def _body(self) -> bytes:
        """Half of the text is shared by all calls, the rest is behind a unique part."""
        options = self._options
        half = len(self._text) // 2
        unique = f"{self._dice.getrandbits(128):032x}"
        text = self._text[:half] + unique + self._text[half + 32 :]
        return json.dumps(
            {
                "model": options.model,
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": text},
                ],
                "max_tokens": options.max_tokens,
                "temperature": 0.7,
                "stream": options.stream,
            }
        ).encode()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rig_load", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--conc", type=int, default=1)
    parser.add_argument("--secs", type=float, default=3.0)
    parser.add_argument("--n", type=int, default=0)
    parser.add_argument("--warmup", type=float, default=0.0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--abort", action="store_true", help="for a window always on; accepted")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024, help="bytes")
    parser.add_argument("--model", default="mock")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    import uvloop

    load = Load(parse(arguments))
    sys.stdout.write(json.dumps(uvloop.run(load.run())) + "\n")
    return 1 if load.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
