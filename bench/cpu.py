"""CPU, memory and open files of processes, from /proc."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def tree(root: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                children.setdefault(int(_fields(int(entry))[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """User and system seconds used so far by those of `pids` that are alive."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            fields = _fields(pid)
            total += (int(fields[11]) + int(fields[12])) / _TICK
    return total


def rss_mb(pids: Sequence[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1])
    return total / 1024


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def core_busy_s() -> list[float]:
    """Seconds that each core was busy, by anyone, since boot."""
    busy = []
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(value) for value in values]
            busy.append((sum(ticks[:3]) + sum(ticks[5:8])) / _TICK)
    return busy


@dataclass(slots=True)
class CpuUse:
    """Share of one core by process and second; `machine` is the share of all cores in use."""

    by_name: dict[str, list[float]] = field(default_factory=dict)
    machine: list[float] = field(default_factory=list)

    def mean(self, name: str) -> float:
        values = self.by_name.get(name) or [0.0]
        return sum(values) / len(values)

    def mean_machine(self) -> float:
        return sum(self.machine) / len(self.machine) if self.machine else 0.0

    def saturated(self, limit: float = 0.9) -> dict[str, float]:
        """Names that used more than `limit` of a core on average."""
        means = {name: self.mean(name) for name in self.by_name}
        return {name: share for name, share in means.items() if share > limit}

    def foreign(self) -> float:
        """Cores that other programs used, on average."""
        ours = sum(self.mean(name) for name in self.by_name)
        return max(0.0, self.mean_machine() * (os.cpu_count() or 1) - ours)


class CpuSampler:
    """Samples processes once a second in a thread while it is entered."""

    def __init__(self, pids: Mapping[str, int], period_s: float = 1.0) -> None:
        self._pids = dict(pids)
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.use = CpuUse({name: [] for name in pids})

    def watch(self, name: str, pid: int) -> None:
        self._pids[name] = pid
        self.use.by_name.setdefault(name, [])

    def __enter__(self) -> CpuSampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before, cores, then = self._read(), core_busy_s(), time.monotonic()
        while not self._stop.wait(self._period_s):
            now, after, busy = time.monotonic(), self._read(), core_busy_s()
            for name, used in after.items():
                if name in before:
                    share = max(0.0, used - before[name]) / (now - then)
                    self.use.by_name[name].append(share)
            spent = sum(b - a for a, b in zip(cores, busy, strict=True))
            self.use.machine.append(spent / (len(busy) * (now - then)))
            before, cores, then = after, busy, now

    def _read(self) -> dict[str, float]:
        return {name: cpu_s([pid]) for name, pid in list(self._pids.items())}
