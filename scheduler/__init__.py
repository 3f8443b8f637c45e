"""DECIDES where a call runs. Pure: time comes in as an argument, nothing here does I/O."""

from scheduler.jobs import Job
from scheduler.placement import Placement
from scheduler.prices import PROFILES, Prices
from scheduler.scheduler import Lease, QueueFull, Scheduler
from scheduler.workers import Role, WorkerState

__all__ = [
    "PROFILES",
    "Job",
    "Lease",
    "Placement",
    "Prices",
    "QueueFull",
    "Role",
    "Scheduler",
    "WorkerState",
]
