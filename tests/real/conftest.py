"""Real vLLM engines, two to prefill, two to decode, one plain for reference, and a router.

Engines come from a launcher outside the repository: `real_engine.py` in the folder `real-engine`
of PDROUTER_SHARED (default: `shared` beside the repository). It installs what it needs by itself,
which takes minutes and 3 GiB, and runs a tiny model on the CPU. `make test-real` runs these tests.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("PDROUTER_SHARED") or ROOT.parent / "shared")
LAUNCHER = SHARED / "real-engine" / "real_engine.py"
INSTALL_S = 900
START_S = 600
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine; `role` is prefill, decode or plain."""

    name: str
    role: str
    url: str

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's series that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")) and all(w in line for w in wanted):
                total += float(line.rsplit(" ", 1)[1])
        return total


class Fleet:
    """All engines of a run."""

    def __init__(self, engines: list[Engine]) -> None:
        self.prefill = [engine for engine in engines if engine.role == "prefill"]
        self.decode = [engine for engine in engines if engine.role == "decode"]
        self.plain = next(engine for engine in engines if engine.role == "plain")

    @property
    def workers(self) -> list[Engine]:
        return self.prefill + self.decode

    def external_tokens(self) -> float:
        """Prompt tokens whose KV came to the decode engines over the transfer."""
        name = "vllm:prompt_tokens_by_source_total"
        return sum(e.metric(name, source="external_kv_transfer") for e in self.decode)

    def computed_tokens(self) -> float:
        """Prompt tokens that the decode engines computed themselves."""
        name = "vllm:prompt_tokens_by_source_total"
        return sum(e.metric(name, source="local_compute") for e in self.decode)

    def busy(self) -> float:
        """Requests that any worker runs or holds back."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(engine.metric(name) for engine in self.workers for name in names)

    def empty_caches(self) -> None:
        for engine in (*self.workers, self.plain):
            httpx.post(f"{engine.url}/reset_prefix_cache", timeout=30).raise_for_status()


@dataclass(frozen=True, slots=True)
class Router:
    url: str

    def metric(self, name: str) -> float:
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                total += float(line.rsplit(" ", 1)[1])
        return total


def launcher(*words: str, timeout: float) -> str:
    """Run the launcher; what it printed. Its log goes to standard error."""
    done = subprocess.run(
        [sys.executable, str(LAUNCHER), *words],
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        pytest.exit(f"real_engine.py {words[0]} failed, see its messages above", returncode=3)
    return done.stdout


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    if not LAUNCHER.is_file():
        pytest.exit(f"there is no {LAUNCHER}: set PDROUTER_SHARED to its folder", returncode=3)
    # A terminated run must leave through the `finally` below: engines are processes of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        command = ("up", "--prefill", "2", "--decode", "2", "--plain", "1")
        launcher(*command, "--wait", str(START_S), timeout=INSTALL_S + START_S)
        described = json.loads(launcher("status", "--json", timeout=60))
        assert all(engine["healthy"] for engine in described)
        yield Fleet([Engine(e["name"], e["role"], e["url"]) for e in described])
    finally:
        launcher("down", timeout=180)


@pytest.fixture(scope="session")
def router(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    config = {
        "listen": {"host": "127.0.0.1", "port": port},
        "models": [
            {
                "name": MODEL,
                "aliases": ["tiny-alias"],
                "handoff": "vllm-nixl",
                "pools": [pool("prefill", fleet.prefill), pool("decode", fleet.decode)],
            }
        ],
    }
    path = tmp_path_factory.mktemp("router") / "config.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML too
    with serving(path) as process:
        running = Router(f"http://127.0.0.1:{port}")
        until_ready(running, process)
        yield running


def pool(role: str, engines: list[Engine]) -> Mapping[str, Any]:
    workers = [{"url": engine.url} for engine in engines]
    return {"name": f"{role}-a", "role": role, "workers": workers}


@contextmanager
def serving(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "router.cli", "serve", "--config", str(config)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def until_ready(router: Router, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        assert process.poll() is None, "the router ended"
        try:
            if httpx.get(f"{router.url}/health/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail("the router is not ready within 30 s")


def client_of(url: str) -> openai.OpenAI:
    # No retries of its own: what is tested is what the router does.
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def routed(router: Router) -> Iterator[openai.OpenAI]:
    """The OpenAI client, through the router."""
    with client_of(router.url) as client:
        yield client


@pytest.fixture(scope="session")
def plain(fleet: Fleet) -> Iterator[openai.OpenAI]:
    """The OpenAI client on one engine without KV transfer: what is right."""
    with client_of(fleet.plain.url) as client:
        yield client
