"""Simulated workers and routers as processes, and what tests ask them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from bench.prometheus import Page, parse

JSON = dict[str, Any]
T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.02
PR_SET_PDEATHSIG = 1
SPEED = 4.0


def until(check: Callable[[], T], seconds: float, what: str) -> T:
    """The first true result of `check`. Another process is waited for; it can only be asked."""
    end_s = time.monotonic() + seconds
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {seconds:g} s: {what} (last: {found!r})")
        time.sleep(POLL_S)


def http(method: str, url: str, **options: Any) -> httpx.Response:
    """One request on a connection of its own, without a proxy. No certificates: that is slow."""
    return httpx.request(method, url, trust_env=False, verify=False, **options)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def prompt(number: object, words: int = 60) -> str:
    """Text of some `words` words that shares no prefix with that of another number."""
    return f"{number} " + " ".join(f"w{number}-{i}" for i in range(words))


def chat(content: str, model: str = "sim", **more: Any) -> JSON:
    message = {"role": "user", "content": content}
    return {"model": model, "messages": [message], "max_tokens": 24, **more}


@contextlib.contextmanager
def process(command: Sequence[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own, ended on the way out; it writes to `log`."""
    with log.open("ab") as sink:
        settings: JSON = {"stdin": subprocess.DEVNULL, "stdout": sink, "stderr": sink} | options
        child: Any = subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, preexec_fn=_end_with_parent, **settings
        )
        try:
            yield child
        finally:
            end(child)
            if child.stdout is not None:
                child.stdout.close()


def _end_with_parent() -> None:
    """Make the kernel end this process when the tests are killed outright (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end(child: subprocess.Popen[bytes], patience_s: float = 10.0) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
            return


@dataclass(frozen=True, slots=True)
class Sim:
    """One simulated worker."""

    name: str
    url: str
    # Its /sim/ on the port of the whole process, which answers also when the worker is dead.
    control: str
    # Names of all workers that have been given faults.
    faulty: set[str]

    @property
    def id(self) -> str:
        """The name that the router has for it."""
        return self.url.removeprefix("http://")

    @property
    def state(self) -> JSON:
        return dict(http("GET", f"{self.control}/state").json())

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and no KV is kept for anybody."""
        return self.unworked and not self.state["pinned_requests"]

    @property
    def unworked(self) -> bool:
        state = self.state
        return not state["running"] and not state["waiting"]

    def fault(self, **faults: Any) -> None:
        self.faulty.add(self.name)
        http("PUT", f"{self.control}/faults", json=faults).raise_for_status()

    def restart(self) -> None:
        http("POST", f"{self.control}/restart").raise_for_status()

    def record(self, last: int) -> None:
        reply = http("PUT", f"{self.control}/record", json={"last": last})
        reply.raise_for_status()


@dataclass(frozen=True, slots=True)
class Sims:
    """The simulated workers of a test run, by name."""

    workers: Mapping[str, Sim]

    def __getitem__(self, name: str) -> Sim:
        return self.workers[name]

    def group(self, *names: str) -> list[Sim]:
        return [self.workers[name] for name in names]

    def text(self, body: JSON, path: str = "/v1/chat/completions") -> str:
        """What one engine alone, without any router, answers."""
        plain = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
        reply = http("POST", self["alone"].url + path, json=plain, timeout=60)
        reply.raise_for_status()
        return text_of(reply.json())


def text_of(reply: JSON) -> str:
    choice = reply["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@contextlib.contextmanager
def simulated(workers: Sequence[str], models: Sequence[str], folder: Path) -> Iterator[Sims]:
    """Workers given as ROLE:NAME, in one process, all under every name of `models`."""
    log = folder / "simulator.log"
    command = [sys.executable, "-m", "simulator", "--model", models[0], "--speed", f"{SPEED:g}"]
    for alias in models[1:]:
        command += ["--alias", alias]
    for worker in workers:
        role, name = worker.split(":")
        command += ["--worker", f"{role}:0:{name}"]
    with process(command, log, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            assert selector.select(30), log.read_text()
        said = json.loads(child.stdout.readline() or "{}")
        assert said, log.read_text()
        control = f"{said['admin']}/sim/workers"
        names = [(worker["name"], worker["url"]) for worker in said["workers"]]
        faulty: set[str] = set()
        yield Sims({name: Sim(name, url, f"{control}/{name}", faulty) for name, url in names})


@dataclass(slots=True)
class Gateway:
    """A running router."""

    url: str
    log: Path
    child: subprocess.Popen[bytes]
    key: str = "none"
    _read: int = field(default=0)

    @property
    def page(self) -> Page:
        return parse(http("GET", f"{self.url}/metrics").text)

    def post(self, body: JSON | bytes, path: str = "/v1/chat/completions", **more: Any) -> Any:
        given: JSON = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"authorization": f"Bearer {self.key}"} | more.pop("headers", {})
        return http("POST", self.url + path, headers=headers, timeout=60, **given, **more)

    def outcomes(self, request_id: str) -> list[JSON]:
        """Lines of the access log about one call."""
        found = []
        for line in self.log.read_bytes().splitlines():
            if request_id.encode() in line and line.startswith(b"{"):
                entry = json.loads(line)
                if entry.get("request_id") == request_id:
                    found.append(entry)
        return found

    def outcome(self, request_id: str) -> JSON:
        """The one line about a call."""
        until(lambda: self.outcomes(request_id), 5, f"an outcome of {request_id}")
        (only,) = self.outcomes(request_id)
        return only

    def at_rest(self) -> bool:
        """Nothing runs, waits or is charged."""
        page = self.page
        names = ("leases", "queue_depth", "worker_running", "worker_work_tokens")
        return not any(page.total(f"pdrouter_{name}") for name in names)

    def up(self, sims: Sequence[Sim]) -> bool:
        up = self.page.by("pdrouter_worker_up", "worker")
        return all(up[sim.id] == 1 for sim in sims)

    def retries(self, **labels: str) -> float:
        return self.page.total("pdrouter_retries_total", **labels)


@contextlib.contextmanager
def routed(config: JSON, log: Path, environ: Mapping[str, str] | None = None) -> Iterator[Gateway]:
    """A router with `config`, ready."""
    port = free_port()
    file = log.with_suffix(".yaml")
    file.write_text(json.dumps(config | {"listen": {"host": "127.0.0.1", "port": port}}))
    command = [sys.executable, "-m", "router.cli", "serve", "--config", str(file)]
    with process(command, log, env=os.environ | dict(environ or {})) as child:
        gateway = Gateway(f"http://127.0.0.1:{port}", log, child)
        until(lambda: ready(gateway), 30, f"readiness: {log.read_text()[-2000:]}")
        yield gateway


def ready(gateway: Gateway) -> bool:
    assert gateway.child.poll() is None, gateway.log.read_text()[-2000:]
    with contextlib.suppress(httpx.TransportError):
        reply = http("GET", f"{gateway.url}/health")
        return bool(reply.json()["status"] == "ok")
    return False


def model(name: str, prefill: Sequence[str], decode: Sequence[str], **more: Any) -> JSON:
    """Configuration of a model with one pool per role; workers are URLs."""
    pools = [
        {"name": f"{name}-{role}", "role": role, "workers": [{"url": url} for url in urls]}
        for role, urls in (("prefill", prefill), ("decode", decode))
        if urls
    ]
    return {"name": name, "handoff": "vllm-nixl", "prices": "b300-tp4", "pools": pools, **more}


def sse(text: str) -> list[JSON]:
    """The JSON events of a stream; [DONE] is left out."""
    found = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


def streamed_text(text: str) -> str:
    """The content of a chat stream or completion stream, as a client puts it together."""
    pieces = []
    for item in sse(text):
        for choice in item.get("choices", ()):
            pieces.append((choice.get("delta") or {}).get("content") or choice.get("text") or "")
    return "".join(pieces)
