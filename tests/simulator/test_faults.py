"""Faults: what can be set, and what is said about the rest."""

from __future__ import annotations

import pytest

from simulator.faults import FaultError, Faults, parse


def test_nothing_is_a_healthy_worker():
    assert parse({}) == Faults()
    assert parse({"slow": None, "die": None}) == Faults()
    assert Faults().pace == 1


def test_pace_joins_slow_and_throttle():
    assert parse({"slow": 3, "throttle": 0.5}).pace == 6


def test_all_members_are_taken():
    faults = parse(Faults(slow=2, stall="all", error_5xx=0.5, transfer_limit=0).as_json())
    assert (faults.slow, faults.stall, faults.error_5xx, faults.transfer_limit) == (
        2,
        "all",
        0.5,
        0,
    )


@pytest.mark.parametrize(
    "bad",
    [
        [],
        {"melt": True},
        {"slow": 0},
        {"slow": "2"},
        {"throttle": 1.5},
        {"throttle": 0},
        {"error_5xx": 2},
        {"error_status": 404},
        {"stall": "some"},
        {"die": 1},
        {"error_after_tokens": -1},
        {"transfer_limit": True},
    ],
)
def test_what_makes_no_sense_is_refused(bad):
    with pytest.raises(FaultError):
        parse(bad)
