import os
import threading
import time

from bench import cpu
from bench.cpu import CpuSampler, CpuUse


def test_a_process_sees_itself():
    pid = os.getpid()
    assert pid in cpu.tree(pid)
    assert cpu.rss_mb([pid]) > 1
    assert cpu.open_files(pid) > 2
    assert cpu.cpu_s([pid]) > 0
    assert cpu.cpu_s([2**22 + 1]) == 0
    assert len(cpu.core_busy_s()) == os.cpu_count()


def test_busy_processes_are_told_from_idle_ones():
    use = CpuUse({"busy": [0.95, 0.99], "idle": [0.1, 0.2]}, [0.5, 0.6])
    assert list(use.saturated()) == ["busy"]
    assert CpuUse().mean("nobody") == 0
    assert CpuUse().foreign() == 0


def test_samples_are_taken_while_entered():
    enough = threading.Event()
    with CpuSampler({"me": os.getpid()}, period_s=0.05) as sampler:
        end = time.monotonic() + 5
        while len(sampler.use.machine) < 2 and time.monotonic() < end:
            enough.wait(0.02)
    assert len(sampler.use.by_name["me"]) >= 2
    assert all(0 <= share < 64 for share in sampler.use.by_name["me"])
