"""What the engine tells its drivers."""

from __future__ import annotations

import numpy as np

from simulator.hashing import Chain
from simulator.sequence import Progress, Request, Sequence, State


def test_a_new_sequence_waits_and_says_so():
    request = Request("r", np.arange(5, dtype=np.uint32))
    sequence = Sequence(request, Chain([], 0), identity=7, limit=3, now_s=1.5)
    assert sequence.state is State.WAITING
    assert (sequence.key, sequence.prompt_len, sequence.arrival_s) == (7, 5, 1.5)
    assert repr(sequence) == "<r waiting computed 0 of 5 + 0>"


def test_progress_starts_empty_and_is_not_shared():
    one, other = Progress(), Progress()
    one.actions.append(object())  # type: ignore[arg-type]
    assert not other.actions
    assert not other.sequences
