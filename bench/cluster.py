"""Starts the simulated workers and the router of a bench, and stops them whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

JSON = dict[str, Any]
MODEL = "glm-5.2-nvfp4"
ROOT = Path(__file__).resolve().parent.parent


class ClusterError(RuntimeError):
    """A process that did not start; the text holds the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    role: str
    url: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """Running processes by name (`router`, `simulator-...`) and where they listen."""

    router_url: str
    workers: Sequence[Worker]
    pids: Mapping[str, int]
    logs: Path

    def of_role(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]


@dataclass(frozen=True, slots=True)
class Fleet:
    """What to start. `prefill_args` and `decode_args` go to the simulator as they are."""

    prefill: int = 2
    decode: int = 2
    speed: float = 1.0
    profile: str = "b300-tp4"
    args: Sequence[str] = ()
    prefill_args: Sequence[str] = ()
    decode_args: Sequence[str] = ()
    router: Mapping[str, Any] = field(default_factory=dict)  # merged into its configuration
    router_env: Mapping[str, str] = field(default_factory=dict)


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def process(
    command: Sequence[str],
    log: Path,
    cpus: str | None = None,
    capture: bool = False,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own; the whole session is stopped on exit.

    Should this process be killed outright, the kernel ends the child, where setpriv can ask it to.
    """
    prefix = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    prefix += ["taskset", "-c", cpus] if cpus else []
    with log.open("ab") as sink:
        child = subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else sink,
            stderr=sink,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        )
        try:
            yield child
        finally:
            stop(child)


def stop(child: subprocess.Popen[bytes], patience_s: float = 8.0) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        try:
            child.wait(patience_s)
            break
        except subprocess.TimeoutExpired:
            continue
    if child.stdout is not None:
        child.stdout.close()


def simulator_command(
    roles: Sequence[tuple[str, str]], fleet: Fleet, extra: Sequence[str]
) -> list[str]:
    """`roles`: (role, name) of each worker, all in one process."""
    command = [sys.executable, "-m", "simulator", "--model", MODEL, "--profile", fleet.profile]
    for role, name in roles:
        command += ["--worker", f"{role}:0:{name}"]
    return [*command, "--speed", f"{fleet.speed:g}", *fleet.args, *extra]


@contextlib.contextmanager
def simulators(
    roles: Sequence[tuple[str, str]],
    fleet: Fleet,
    extra: Sequence[str],
    log: Path,
    cpus: str | None = None,
) -> Iterator[tuple[list[Worker], int]]:
    """One simulator process; yields its workers and its process id."""
    command = simulator_command(roles, fleet, extra)
    with process(command, log, cpus=cpus, capture=True) as child:
        line = _first_line(child, log, timeout_s=30.0)
        workers = [Worker(w["name"], w["role"], w["url"]) for w in json.loads(line)["workers"]]
        yield workers, child.pid


def router_config(workers: Sequence[Worker], port: int, fleet: Fleet) -> JSON:
    """One pool per role, all workers of that role in it."""
    pools = [
        {
            "name": role,
            "role": role,
            "workers": [{"url": w.url} for w in workers if w.role == role],
        }
        for role in dict.fromkeys(worker.role for worker in workers)
    ]
    model = {"name": MODEL, "handoff": "vllm-nixl", "prices": fleet.profile, "pools": pools}
    config: JSON = {"listen": {"host": "127.0.0.1", "port": port}, "models": [model]}
    return config | dict(fleet.router)


@contextlib.contextmanager
def router(
    workers: Sequence[Worker], fleet: Fleet, folder: Path, cpus: str | None = None
) -> Iterator[tuple[str, int]]:
    """The router in front of the workers, ready; yields its url and process id."""
    port = free_port()
    config = folder / "router.yaml"
    config.write_text(json.dumps(router_config(workers, port, fleet)))  # JSON is YAML too
    command = [sys.executable, "-m", "router.cli", "serve", "--config", str(config)]
    log = folder / "router.log"
    with process(command, log, cpus=cpus, env=fleet.router_env) as child:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, child, log)
        yield url, child.pid


@contextlib.contextmanager
def cluster(fleet: Fleet) -> Iterator[Cluster]:
    """Prefill workers in one process, decode workers in another, and the router before them."""
    with (
        tempfile.TemporaryDirectory(prefix="pdrouter-bench-") as name,
        contextlib.ExitStack() as held,
    ):
        folder = Path(name)
        prefill, prefill_pid = held.enter_context(
            simulators(
                [("prefill", f"p{i}") for i in range(fleet.prefill)],
                fleet,
                fleet.prefill_args,
                folder / "prefill.log",
            )
        )
        decode, decode_pid = held.enter_context(
            simulators(
                [("decode", f"d{i}") for i in range(fleet.decode)],
                fleet,
                fleet.decode_args,
                folder / "decode.log",
            )
        )
        url, router_pid = held.enter_context(router([*prefill, *decode], fleet, folder))
        pids = {"router": router_pid, "prefill": prefill_pid, "decode": decode_pid}
        yield Cluster(url, [*prefill, *decode], pids, folder)


def wait_ready(
    url: str, child: subprocess.Popen[bytes], log: Path, timeout_s: float = 30.0
) -> None:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if child.poll() is not None:
            raise ClusterError(f"the router ended with {child.returncode}: {tail(log)}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/ready", timeout=2.0, trust_env=False).status_code == 200:
                return
        time.sleep(0.05)
    raise ClusterError(f"the router is not ready after {timeout_s:g} s: {tail(log)}")


def tail(log: Path, size: int = 2000) -> str:
    return log.read_bytes()[-size:].decode(errors="replace").strip()


def _first_line(child: subprocess.Popen[bytes], log: Path, timeout_s: float) -> bytes:
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        if not selector.select(timeout_s):
            raise ClusterError(f"the simulator said nothing for {timeout_s:g} s: {tail(log)}")
    line = bytes(child.stdout.readline())
    if not line:
        raise ClusterError(f"the simulator ended: {tail(log)}")
    return line
