"""How these tests ask an application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI

Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask() -> Ask:
    """A GET to an application in this process."""

    def get(app: FastAPI, path: str, **headers: str) -> httpx.Response:
        async def scenario() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                return await client.get(path, headers=headers)

        return asyncio.run(scenario())

    return get
