"""When a model counts as served, and how health says what is missing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fastapi import FastAPI

from router.api.health import health_routes, readiness


@dataclass
class Worker:
    id: str
    role: str
    up: bool = True
    model: str = "glm"


def application(workers: list[Worker], *, models=("glm",), unprobed=()) -> FastAPI:
    app = FastAPI()
    app.include_router(health_routes(lambda: readiness(models, workers, unprobed)))
    return app


def test_a_live_process_says_so_whatever_its_workers_do(ask):
    assert ask(application([]), "/health/live").status_code == 200


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
def test_ready_means_a_complete_plan_for_the_model(ask, workers, status, missing):
    response = ask(application(workers, unprobed={"new"}), "/health/ready")
    assert response.status_code == status
    assert response.json()["ready"] == (status == 200)
    if missing:
        assert missing in response.json()["missing"]["glm"]


def test_ready_names_every_model_that_is_not(ask):
    workers = [Worker("d", "decode"), Worker("e", "decode", up=False, model="llama")]
    response = ask(application(workers, models=("glm", "llama")), "/health/ready")
    assert response.status_code == 503
    assert list(response.json()["missing"]) == ["llama"]


@pytest.mark.parametrize(
    ("up", "status", "word"),
    [((True, True), 200, "ok"), ((False, True), 200, "degraded"), ((True, False), 503, None)],
)
def test_health_tells_degraded_from_unavailable(ask, up, status, word):
    workers = [Worker("p", "prefill", up[0]), Worker("d", "decode", up[1])]
    response = ask(application(workers), "/health")
    assert response.status_code == status
    assert response.json()["status"] == (word or "unavailable")
    assert response.json()["models"]["glm"]["decode_up"] == up[1]
