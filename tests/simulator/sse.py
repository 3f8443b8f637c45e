"""Reading the event streams that workers answer with."""

from __future__ import annotations

from typing import Any

import orjson


def events(body: str) -> list[Any]:
    """Data of an event stream: JSON objects, and [DONE]."""
    found: list[Any] = []
    for event in body.split("\n\n"):
        if not event.strip():
            continue
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else orjson.loads(data))
    return found
