"""What all cold endpoints share: who may ask, and in which form they answer."""

from __future__ import annotations

from fastapi import FastAPI, Request

from router.api import install, readiness
from router.errors import Unauthorized
from router.metrics import Metrics


def application(guard=None) -> FastAPI:
    app = FastAPI()
    metrics = Metrics(["glm"])
    install(app, models=list, ready=lambda: readiness((), ()), metrics=metrics, guard=guard)
    return app


def test_the_guard_watches_v1_and_not_probes_or_scrapes(ask):
    def guard(request: Request) -> None:
        if request.headers.get("authorization") != "Bearer key":
            raise Unauthorized("No valid API key.")

    app = application(guard)
    refused = ask(app, "/v1/models")
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert ask(app, "/v1/models", authorization="Bearer key").status_code == 200
    for path in ("/health/live", "/health/ready", "/metrics"):
        assert ask(app, path).status_code == 200


def test_metrics_are_prometheus_text(ask):
    response = ask(application(), "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# TYPE pdrouter_ttft_seconds histogram" in response.text
