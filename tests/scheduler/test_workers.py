from __future__ import annotations

import pytest

from scheduler import WorkerState


@pytest.mark.parametrize(
    ("role", "prefills", "decodes"),
    [("prefill", True, False), ("decode", False, True), ("both", True, True)],
)
def test_roles(role, prefills, decodes):
    worker = WorkerState("w", "http://w", "m", "pool", role)
    assert (worker.can_prefill, worker.can_decode) == (prefills, decodes)


def test_a_new_worker_is_down_and_owes_nothing():
    worker = WorkerState("w", "http://w", "m", "pool", "both")
    assert not worker.up
    assert (worker.running, worker.prefill_work_tokens, worker.decode_work_tokens) == (0, 0, 0)
