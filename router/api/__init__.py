"""The cold endpoints: health, the model list, metrics. The calls themselves do not come by here."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from fastapi import Depends, FastAPI, Request, Response

from router.api.health import Readiness, health_routes, readiness
from router.api.model_list import ModelCard, model_routes
from router.errors import RouterError
from router.metrics import CONTENT_TYPE, Metrics

__all__ = ["ModelCard", "Readiness", "install", "readiness"]


def install(
    app: FastAPI,
    *,
    models: Callable[[], Sequence[ModelCard]],
    ready: Callable[[], Readiness],
    metrics: Metrics,
    guard: Callable[[Request], None] | None = None,
) -> None:
    """Add the endpoints to `app`. `models` and `ready` are asked anew for every request.

    `guard` may raise a RouterError (Unauthorized) for a request to /v1; health and metrics are
    open, as probes and scrapers expect.
    """
    guards = [] if guard is None else [Depends(_asynchronous(guard))]
    app.include_router(health_routes(ready))
    app.include_router(model_routes(models, created_s=int(time.time())), dependencies=guards)
    app.add_exception_handler(RouterError, _render_error)

    @app.get("/metrics", tags=["operations"], response_class=Response)
    async def metrics_text() -> Response:
        """Prometheus metrics as text."""
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})


def _asynchronous(guard: Callable[[Request], None]) -> Callable[[Request], Awaitable[None]]:
    # FastAPI would send a plain function to a thread.
    async def check(request: Request) -> None:
        guard(request)

    return check


async def _render_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    return Response(error.body(), error.status, media_type="application/json")
