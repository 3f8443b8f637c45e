"""Every example configuration is one that the router accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import load

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "deploy/config").glob("*.yaml"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_loads(path):
    config = load(path, environ={"PDROUTER_API_KEYS": "key-1,key-2"})
    for model in config.models:
        roles = {pool.role for pool in model.pools}
        assert roles == {"prefill", "decode"}, "an example shows prefill and decode apart"
    # Inside a container or on a node, a loopback address would serve nobody.
    assert config.listen.host == "0.0.0.0"
