"""Where an engine's sequences stand: in a queue, in the batch, in the step under way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from simulator.sequence import Sequence, State


@dataclass(slots=True)
class Queue:
    """Sequences that are not in the batch."""

    waiting: deque[Sequence] = field(default_factory=deque)
    loaded: deque[Sequence] = field(default_factory=deque)
    pulling: dict[str, Sequence] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)
    "Malformed claims, which are also pulling."

    def __len__(self) -> int:
        return len(self.waiting) + len(self.loaded) + len(self.pulling)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out, if it is in."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.LOADED:
            self.loaded.remove(sequence)
        elif sequence.state is State.PULLING:
            del self.pulling[sequence.request.id]


@dataclass(slots=True)
class Batch:
    """Sequences that take part in steps."""

    admitted: list[Sequence] = field(default_factory=list)
    "All of them, oldest first; the last one is preempted first."
    prefilling: list[Sequence] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    context_tokens: int = 0
    "Sum of the KV lengths of the decoding ones."

    def join(self, sequence: Sequence) -> None:
        self.admitted.append(sequence)
        self.prefilling.append(sequence)

    def start_decoding(self, sequence: Sequence) -> None:
        """All tokens of a sequence that was prefilling are computed."""
        self.prefilling.remove(sequence)
        self.decoding.append(sequence)
        self.context_tokens += sequence.computed

    def withdraw(self, sequence: Sequence) -> None:
        self.admitted.remove(sequence)
        if sequence in self.decoding:
            self.decoding.remove(sequence)
            self.context_tokens -= sequence.computed
        else:
            self.prefilling.remove(sequence)


@dataclass(slots=True)
class Step:
    """One forward pass in flight."""

    start_s: float
    end_s: float
    prefill: list[tuple[Sequence, int]]
    "Sequences, each with how many tokens of it are computed."
    decode: list[Sequence]


@dataclass(slots=True)
class Link:
    """The network port that KV arrives through: one transfer's bytes at a time."""

    free_s: float = 0.0
    peers: set[str] = field(default_factory=set)
    "Engines that a connection exists to."


class Timers:
    """What is due at some later time, in order of time and then of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, Sequence | str]] = []
        self._ticket = count()

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else inf

    def add(self, time_s: float, what: str, subject: Sequence | str) -> None:
        heappush(self._heap, (time_s, next(self._ticket), what, subject))

    def pop(self) -> tuple[str, Sequence | str]:
        _time_s, _ticket, what, subject = heappop(self._heap)
        return what, subject
