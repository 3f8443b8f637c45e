"""Recorded replies of real engines and measurements of real GPUs, read where they lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

JSON = dict[str, Any]


def shared_dir() -> Path:
    """The folder of recordings: PDROUTER_SHARED, or `shared` beside the repository."""
    default = Path(__file__).resolve().parents[3] / "shared"
    folder = Path(os.environ.get("PDROUTER_SHARED", default))
    if not (folder / "fixtures" / "vllm" / "http").is_dir():
        pytest.fail(f"no recordings in {folder}: set PDROUTER_SHARED to the folder that has them")
    return folder


def exchange(name: str) -> JSON:
    """One recorded request and its reply."""
    path = shared_dir() / "fixtures" / "vllm" / "http" / f"{name}.json"
    found: JSON = orjson.loads(path.read_bytes())
    return found


def text(name: str) -> str:
    return (shared_dir() / "fixtures" / "vllm" / "http" / name).read_text()


def events(body: str) -> list[Any]:
    """Data of an event stream: JSON objects, and [DONE]."""
    found: list[Any] = []
    for event in body.split("\n\n"):
        if not event.strip():
            continue
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else orjson.loads(data))
    return found
