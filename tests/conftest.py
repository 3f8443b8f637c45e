"""What tests of every package share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is not a failure.
settings.register_profile("patient", settings.default, deadline=None)
settings.load_profile("patient")

BESIDE = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """Find recordings, measurements and traces: `shared("traces/x.jsonl.gz")` is their path.

    They are no part of this repository: PDROUTER_SHARED names their folder, else it is `shared`
    beside the repository. A test of what is not there is skipped, but fails where it must be
    there: in CI, and if PDROUTER_SHARED is set.
    """
    named = os.environ.get("PDROUTER_SHARED")
    folder = Path(named) if named else BESIDE

    def find(name: str) -> Path:
        path = folder / name
        if not path.exists():
            missing = f"{name} is not in {folder}; PDROUTER_SHARED names the folder that has it"
            if named or os.environ.get("CI"):
                pytest.fail(missing)
            pytest.skip(missing)
        return path

    return find
