"""The model list, read over HTTP and by the OpenAI client."""

from __future__ import annotations

import asyncio

import httpx2
import openai
import pytest
from fastapi import FastAPI

from router.api import ModelCard, install, readiness
from router.metrics import Metrics

CARDS = [ModelCard("org/glm", ("glm-latest",), 8192), ModelCard("llama")]


def application() -> FastAPI:
    app = FastAPI()
    install(app, models=lambda: CARDS, ready=lambda: readiness((), ()), metrics=Metrics())
    return app


def test_models_are_listed_with_their_aliases(ask):
    body = ask(application(), "/v1/models").json()
    assert body["object"] == "list"
    assert [entry["id"] for entry in body["data"]] == ["org/glm", "glm-latest", "llama"]
    assert [entry["root"] for entry in body["data"]] == ["org/glm", "org/glm", "llama"]
    assert [entry["max_model_len"] for entry in body["data"]] == [8192, 8192, None]


def test_one_model_can_be_asked_for_by_a_name_with_a_slash(ask):
    assert ask(application(), "/v1/models/org/glm").json()["id"] == "org/glm"
    response = ask(application(), "/v1/models/nope")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_the_openai_client_reads_the_list():
    async def scenario() -> list[str]:
        transport = httpx2.ASGITransport(application())
        async with httpx2.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(
                base_url="http://router/v1", api_key="none", http_client=http
            )
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("nope")
            return [model.id async for model in await client.models.list()]

    assert asyncio.run(scenario()) == ["org/glm", "glm-latest", "llama"]
