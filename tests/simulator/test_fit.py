"""Fitting: constants that made the data come back, and the shipped fit is one of the data."""

from __future__ import annotations

import subprocess
import sys

import orjson
import pytest

from simulator.fit import fit_decode, fit_prefill
from simulator.profile import DecodeCost, PrefillCost, load


def test_prefill_constants_are_found_again():
    cost = PrefillCost(a=0.004, b=3e-5, d=1e-9, e=5e-7, floor=0.001)
    rows = [
        {"new": u, "ctx": c, "ms": cost.seconds(u, c) * 1e3}
        for u in (16, 64, 256, 1024, 4096)
        for c in (0, 2048, 16384)
    ]
    assert fit_prefill(rows).max_error < 0.02


def test_decode_constants_are_found_again():
    cost = DecodeCost(a=0.005, b=2e-5, d=3e-8, floor=4e-7)
    rows = [
        {"batch": n, "ctx": c, "ms": cost.seconds(n, c) * 1e3}
        for n in (1, 4, 16, 64, 256)
        for c in (256, 2048, 16384)
    ]
    assert fit_decode(rows).max_error < 0.02


@pytest.fixture(scope="module")
def measured_path(shared):
    return shared("profiles/h200-llama8b-bf16.json")


def test_shipped_fit_is_within_its_stated_error_of_the_measurements(measured_path):
    measured, profile = orjson.loads(measured_path.read_bytes()), load("h200-llama8b")
    prefill = [
        abs(profile.prefill.seconds(row["new"], row["ctx"]) * 1e3 / row["ms"] - 1)
        for row in measured["prefill"]
    ]
    decode = [
        abs(profile.decode.seconds(row["batch"], row["ctx"]) * 1e3 / row["ms"] - 1)
        for row in measured["decode"]
    ]
    assert max(prefill) < 0.111
    assert sum(prefill) / len(prefill) < 0.043
    assert max(decode) < 0.096
    assert sum(decode) / len(decode) < 0.053
    for row in measured["kv_copy"]:
        seconds = profile.transfer.seconds(row["tokens"] * profile.kv_bytes_per_token)
        assert seconds * 1e3 == pytest.approx(row["ms"], rel=0.05)


def test_the_command_fits_as_well_again(measured_path):
    done = subprocess.run(
        [sys.executable, "-m", "simulator.fit", str(measured_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = orjson.loads(done.stdout)
    assert found["errors"]["prefill"]["max"] < 0.13
    assert found["errors"]["decode"]["max"] < 0.11
    assert found["kv_bytes_per_token"] == load("h200-llama8b").kv_bytes_per_token
