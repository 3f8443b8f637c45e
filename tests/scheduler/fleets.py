"""Workers and jobs in few words."""

from __future__ import annotations

import itertools
from typing import Any

from scheduler import PROFILES, Job, Role, Scheduler, WorkerState

PRICES = PROFILES["b300-tp4"]
_numbers = itertools.count()


def worker(name: str, role: Role, **more: Any) -> WorkerState:
    more = {"up": True, "pool": role, **more}
    return WorkerState(id=name, url=f"http://{name}", model="m", role=role, **more)


def fleet(prefill: int, decode: int, **more: Any) -> dict[str, WorkerState]:
    """Workers p0, p1, ... and d0, d1, ..."""
    prefillers = [worker(f"p{i}", "prefill", **more) for i in range(prefill)]
    decoders = [worker(f"d{i}", "decode", **more) for i in range(decode)]
    return {each.id: each for each in prefillers + decoders}


def scheduler_of(workers: dict[str, WorkerState], max_waiting: int = 1000) -> Scheduler:
    scheduler = Scheduler(PRICES, max_waiting)
    for each in workers.values():
        scheduler.add_worker(each)
    return scheduler


def job(prompt: int = 2000, output: int = 100, **more: Any) -> Job:
    more = {"id": f"job-{next(_numbers)}", **more}
    return Job(
        prompt_tokens=prompt,
        expected_output_tokens=output,
        held_tokens=more.pop("held", {}),
        **more,
    )
