"""Queue, batch and timers: what goes in comes out, and the sums stay right."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from simulator.batch import Batch, Queue, Timers
from simulator.hashing import Chain
from simulator.sequence import Request, Sequence, State


def sequence(state, computed=0):
    made = Sequence(Request("r", np.arange(40, dtype=np.uint32)), Chain([], 0), 1, 9, 0.0)
    made.state, made.computed = state, computed
    return made


@pytest.mark.parametrize("state", [State.WAITING, State.LOADED, State.PULLING])
def test_a_sequence_leaves_the_queue_it_is_in(state):
    queue, made = Queue(), sequence(state)
    if state is State.PULLING:
        queue.pulling["r"] = made
    else:
        (queue.waiting if state is State.WAITING else queue.loaded).append(made)
    assert len(queue) == 1
    queue.withdraw(made)
    assert len(queue) == 0


def test_the_context_is_that_of_decoding_sequences():
    batch, one, other = Batch(), sequence(State.RUNNING, 40), sequence(State.RUNNING, 7)
    batch.join(one)
    batch.join(other)
    batch.start_decoding(one)
    assert (batch.context_tokens, batch.prefilling, batch.decoding) == (40, [other], [one])
    batch.withdraw(other)
    assert (batch.context_tokens, batch.admitted) == (40, [one])
    batch.withdraw(one)
    assert (batch.context_tokens, batch.admitted, batch.decoding) == (0, [], [])


def test_timers_go_off_in_order_of_time_then_of_arrival():
    timers = Timers()
    assert timers.next_s == inf
    for time_s, what in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        timers.add(time_s, what, "r")
    assert timers.next_s == 1.0
    assert [timers.pop() for _ in range(3)] == [("a", "r"), ("b", "r"), ("c", "r")]
