"""The cold endpoints, asked over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx
import httpx2
import openai
import pytest
from fastapi import FastAPI, Request

from router.api import ModelCard, Readiness, install, readiness
from router.errors import Unauthorized
from router.metrics import Metrics


@dataclass
class Worker:
    id: str
    role: str
    up: bool = True
    model: str = "glm"


CARDS = [ModelCard("org/glm", ("glm-latest",), 8192), ModelCard("llama")]


def application(
    workers: list[Worker] | None = None, *, models=("glm",), unprobed=(), guard=None
) -> FastAPI:
    app = FastAPI()

    def ready() -> Readiness:
        return readiness(models, workers or [], unprobed)

    install(app, models=lambda: CARDS, ready=ready, metrics=Metrics(["glm"]), guard=guard)
    return app


def get(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(scenario())


def test_a_live_process_says_so_whatever_its_workers_do():
    assert get(application([]), "/health/live").status_code == 200


@pytest.mark.parametrize(
    ("workers", "status", "missing"),
    [
        ([], 503, "no decode worker is up (of 0)"),
        ([Worker("p", "prefill"), Worker("d", "decode")], 200, None),
        ([Worker("p", "prefill"), Worker("d", "decode", up=False)], 503, "no decode worker is up"),
        ([Worker("b", "both")], 200, None),
        ([Worker("d", "decode")], 200, None),
        # Without any prefill worker the decode workers serve calls alone.
        ([Worker("p", "prefill", up=False), Worker("d", "decode")], 200, None),
        ([Worker("new", "prefill", up=False), Worker("d", "decode")], 503, "not been probed yet"),
        (
            [Worker("new", "prefill", up=False), Worker("p", "prefill"), Worker("d", "decode")],
            200,
            None,
        ),
        ([Worker("d", "decode", model="other")], 503, "no decode worker is up (of 0)"),
    ],
)
def test_ready_means_a_complete_plan_for_the_model(workers, status, missing):
    response = get(application(workers, unprobed={"new"}), "/health/ready")
    assert response.status_code == status
    assert response.json()["ready"] == (status == 200)
    if missing:
        assert missing in response.json()["missing"]["glm"]


def test_ready_names_every_model_that_is_not():
    workers = [Worker("d", "decode"), Worker("e", "decode", up=False, model="llama")]
    response = get(application(workers, models=("glm", "llama")), "/health/ready")
    assert response.status_code == 503
    assert list(response.json()["missing"]) == ["llama"]


@pytest.mark.parametrize(
    ("up", "status", "word"),
    [((True, True), 200, "ok"), ((False, True), 200, "degraded"), ((True, False), 503, None)],
)
def test_health_tells_degraded_from_unavailable(up, status, word):
    workers = [Worker("p", "prefill", up[0]), Worker("d", "decode", up[1])]
    response = get(application(workers), "/health")
    assert response.status_code == status
    assert response.json()["status"] == (word or "unavailable")
    assert response.json()["models"]["glm"]["decode_up"] == up[1]


def test_models_are_listed_with_their_aliases():
    body = get(application(), "/v1/models").json()
    assert body["object"] == "list"
    assert [entry["id"] for entry in body["data"]] == ["org/glm", "glm-latest", "llama"]
    assert [entry["root"] for entry in body["data"]] == ["org/glm", "org/glm", "llama"]
    assert [entry["max_model_len"] for entry in body["data"]] == [8192, 8192, None]


def test_one_model_can_be_asked_for_by_a_name_with_a_slash():
    assert get(application(), "/v1/models/org/glm").json()["id"] == "org/glm"
    response = get(application(), "/v1/models/nope")
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


def test_the_guard_watches_v1_and_not_probes_or_scrapes():
    def guard(request: Request) -> None:
        if request.headers.get("authorization") != "Bearer key":
            raise Unauthorized("No valid API key.")

    app = application([Worker("b", "both")], guard=guard)
    refused = get(app, "/v1/models")
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert get(app, "/v1/models", authorization="Bearer key").status_code == 200
    for path in ("/health/live", "/health/ready", "/health", "/metrics"):
        assert get(app, path).status_code == 200


def test_metrics_are_prometheus_text():
    response = get(application(), "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# TYPE pdrouter_ttft_seconds histogram" in response.text
