"""Faults that a worker can be told to have, over HTTP, while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

JSON = dict[str, Any]


class FaultError(Exception):
    """A set of faults that makes no sense; the message names the member."""


@dataclass(frozen=True, slots=True)
class Faults:
    """All faults of one worker. The defaults are a healthy worker."""

    slow: float = 1.0
    "Every engine step takes this many times as long."
    throttle: float = 1.0
    "Fraction of its speed that the worker keeps."
    stall: bool | Literal["all"] = False
    "Accept and never answer: /v1 and KV reads, or everything but /sim."
    die: bool = False
    "Close every connection, refuse new ones, lose the engine. False afterwards: a restart."
    refuse: bool = False
    "Refuse new connections; those that are open stay."
    error_5xx: float = 0.0
    "Fraction of /v1 requests answered with `error_status`, evenly spread."
    error_status: int = 500
    drop_transfer: bool = False
    "KV reads by or from this worker fail."
    transfer_limit: int | None = None
    "KV reads by this worker fail beyond this many at once."
    wrong_lease: bool = False
    "Handoff parameters name blocks that are not the request's."
    error_after_tokens: int | None = None
    "An answer ends in an error after this many tokens."
    cut_after_tokens: int | None = None
    "The connection is cut after this many tokens."
    freeze_after_tokens: int | None = None
    "An answer goes silent after this many tokens, the connection left open."
    host_check: bool = False
    "Refuse /v1 requests whose Host header is not this worker's own address."
    for_s: float | None = None
    "Seconds of real time after which all of this is over."

    def __post_init__(self) -> None:
        if self.slow <= 0 or not 0 < self.throttle <= 1:
            raise FaultError("slow must be above 0, throttle above 0 and at most 1")
        if not 0 <= self.error_5xx <= 1:
            raise FaultError("error_5xx is a fraction from 0 to 1")
        if not 500 <= self.error_status <= 599:
            raise FaultError("error_status is from 500 to 599")

    @property
    def pace(self) -> float:
        """Factor on the time of an engine step."""
        return self.slow / self.throttle

    def as_json(self) -> JSON:
        return asdict(self)


_NUMBERS = {"slow", "throttle", "error_5xx", "for_s"}
_FLAGS = {"die", "refuse", "drop_transfer", "wrong_lease", "host_check"}


def _checked(name: str, value: object) -> object:
    flag = isinstance(value, bool)
    if name == "stall":
        valid = flag or value == "all"
    elif name in _FLAGS:
        valid = flag
    elif name in _NUMBERS:
        valid = isinstance(value, int | float) and not flag
    else:
        valid = isinstance(value, int) and not flag and value >= 0
    if not valid:
        raise FaultError(f"{name}: {value!r} is not a value for it")
    return value


def parse(data: object) -> Faults:
    """Faults from a JSON object; members left out or null are off."""
    if not isinstance(data, Mapping):
        raise FaultError("faults are a JSON object")
    known = {field.name for field in fields(Faults)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise FaultError(f"unknown faults {unknown}; known are {sorted(known)}")
    given: JSON = {name: _checked(name, value) for name, value in data.items() if value is not None}
    return Faults(**given)
