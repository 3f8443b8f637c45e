"""A mock engine on loopback ports, for what needs an HTTP server at the other end."""

import sys
from contextlib import ExitStack

import pytest

from bench import rig
from bench.cluster import process


@pytest.fixture
def engine(tmp_path):
    """Ports of a running `bench.rig_engine`: regular, prefill and decode."""
    ports = rig.Ports.free()
    command = [sys.executable, "-m", "bench.rig_engine", *ports.engine_arguments()]
    with ExitStack() as held:
        child = held.enter_context(process(command, tmp_path / "engine.log"))
        rig.wait_engine(ports.regular, child, tmp_path / "engine.log")
        yield ports
