"""The mock engine and the load generator that measure a router, and CPU read inside the window.

Two rigs with one interface: the compiled one kept beside the repository, if it is there and a
compiler too, or the one in this package. The router runs on core 0, engine and load on core 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import cpu
from bench.cluster import ROOT, ClusterError, free_port, process, tail, wait_ready

JSON = dict[str, Any]
ROUTER_CORE, LOAD_CORE = "0", "1"
MODEL = "mock"
LOAD_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Tools:
    """Commands of the engine and the load generator, and which rig they are."""

    name: str
    engine: Sequence[str]
    load: Sequence[str]


def own_tools() -> Tools:
    python = sys.executable
    return Tools("python", [python, "-m", "bench.rig_engine"], [python, "-m", "bench.rig_load"])


def compiled_tools(source: Path, build: Path) -> Tools | None:
    """Build the compiled rig outside of its own folder; None where it cannot be had."""
    needed = [source / "engine.c", source / "load.c", source / "Makefile"]
    if not all(path.is_file() for path in needed) or not shutil.which("make"):
        return None
    build.mkdir(parents=True, exist_ok=True)
    for path in needed:
        shutil.copyfile(path, build / path.name)
    done = subprocess.run(["make", "-s", "-C", str(build)], capture_output=True, check=False)
    if done.returncode:
        return None
    folder = build.resolve() / "build"
    return Tools("compiled", [str(folder / "engine")], [str(folder / "load")])


def pinned(core: str) -> str | None:
    """The core as taskset takes it, or None on a machine without a second one."""
    return core if len(os.sched_getaffinity(0)) > 1 and shutil.which("taskset") else None


def wait_calm(longest_s: float, busy: float = 0.15, period_s: float = 0.4) -> None:
    """Wait until other programs leave every core alone, or for `longest_s`."""
    end_s = time.monotonic() + longest_s
    while time.monotonic() < end_s:
        before = cpu.core_busy_s()
        time.sleep(period_s)
        used = (b - a for a, b in zip(before, cpu.core_busy_s(), strict=True))
        if max(used) / period_s < busy:
            return


@dataclass(frozen=True, slots=True)
class Ports:
    regular: int
    prefill: tuple[int, int]
    decode: tuple[int, int]
    router: int

    @staticmethod
    def free() -> Ports:
        found: list[int] = []
        while len(found) < 6:
            port = free_port()
            if port not in found:
                found.append(port)
        return Ports(found[0], (found[1], found[2]), (found[3], found[4]), found[5])

    def engine_arguments(self) -> list[str]:
        return [
            str(self.regular),
            *(f"{port}:prefill" for port in self.prefill),
            *(f"{port}:decode" for port in self.decode),
        ]


def router_config(ports: Ports) -> JSON:
    """Two prefill and two decode workers, everything else as it comes."""
    pools = [
        {
            "name": role,
            "role": role,
            "workers": [{"url": f"http://127.0.0.1:{port}"} for port in found],
        }
        for role, found in (("prefill", ports.prefill), ("decode", ports.decode))
    ]
    return {
        "listen": {"host": "127.0.0.1", "port": ports.router},
        "models": [{"name": MODEL, "handoff": "vllm-nixl", "pools": pools}],
    }


def router_command(config: Path) -> list[str]:
    return [sys.executable, "-m", "router.cli", "serve", "--config", str(config)]


class Rig:
    """A running engine and, in front of it, a running router."""

    def __init__(self, tools: Tools, ports: Ports, engine_pid: int, router_pid: int) -> None:
        self._tools = tools
        self.ports = ports
        self._engine_pid = engine_pid
        self.router_pid = router_pid
        self.failures: list[str] = []

    def control(self, query: str) -> None:
        httpx.get(f"http://127.0.0.1:{self.ports.regular}/_ctl?{query}", trust_env=False)

    def legs(self) -> dict[str, int]:
        """Requests and handoff legs that the engine has seen since the last reset."""
        url = f"http://127.0.0.1:{self.ports.regular}/_stats"
        stats = httpx.get(url, trust_env=False).json()
        names = ("reqs", "nixl_prefill", "nixl_decode_ok")
        return {name: sum(int(port[name]) for port in stats.values()) for name in names}

    def load(self, port: int, *arguments: str) -> JSON:
        """One load run: its own figures, and `router_cpu` seconds used inside its window."""
        command = [*self._tools.load, "--port", str(port), "--model", MODEL, *arguments]
        core = pinned(LOAD_CORE)
        if core:
            command = ["taskset", "-c", core, *command]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        assert child.stdout is not None
        try:
            child.stdout.readline()  # "W": the window opens
            pids = cpu.tree(self.router_pid)
            before = cpu.cpu_s(pids)
            line = child.stdout.readline()
            used = cpu.cpu_s(pids) - before
            child.wait(LOAD_TIMEOUT_S)
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        if not line:
            raise ClusterError("the load generator ended without figures")
        found = json.loads(line)
        if found["bad"]:
            why = found.get("faults") or f"status {found.get('bad_status')}"
            self.failures.append(f"{' '.join(arguments)}: {found['bad']} failed: {why}")
        return {**found, "router_cpu": used}


@contextlib.contextmanager
def running(tools: Tools, folder: Path) -> Iterator[Rig]:
    """Engine and router, each on its core."""
    ports = Ports.free()
    config = folder / "router.yaml"
    config.write_text(json.dumps(router_config(ports)))
    engine_log, router_log = folder / "engine.log", folder / "router.log"
    engine_command = [*tools.engine, *ports.engine_arguments()]
    with process(engine_command, engine_log, cpus=pinned(LOAD_CORE)) as engine:
        wait_engine(ports.regular, engine, engine_log)
        command = router_command(config)
        with process(command, router_log, cpus=pinned(ROUTER_CORE)) as child:
            wait_ready(f"http://127.0.0.1:{ports.router}", child, router_log)
            yield Rig(tools, ports, engine.pid, child.pid)


def wait_engine(port: int, engine: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s and engine.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=1.0, trust_env=False)
            return
        time.sleep(0.05)
    raise ClusterError(f"the mock engine does not answer: {tail(log)}")
