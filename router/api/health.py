"""Health: is the process alive, can every model be served, and if not, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fastapi import APIRouter
from fastapi.responses import JSONResponse


class ServingWorker(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def up(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ModelHealth:
    """Workers of one model by what they can do; a worker of role `both` counts in each."""

    model: str
    prefill_up: int
    prefill_workers: int
    decode_up: int
    decode_workers: int
    missing: str  # what keeps the model from being served, or nothing


@dataclass(frozen=True, slots=True)
class Readiness:
    models: tuple[ModelHealth, ...]

    @property
    def ready(self) -> bool:
        """Every model can be served."""
        return all(not model.missing for model in self.models)

    @property
    def status(self) -> str:
        if all(model.missing for model in self.models):
            return "unavailable"
        whole = all(
            (m.prefill_up, m.decode_up) == (m.prefill_workers, m.decode_workers)
            for m in self.models
        )
        return "ok" if self.ready and whole else "degraded"


def readiness(
    models: Iterable[str], workers: Iterable[ServingWorker], unprobed: Collection[str] = ()
) -> Readiness:
    """Judge what can be served.

    A model needs a worker that decodes: with a prefill worker that is a complete plan, and without
    one the decode worker serves calls alone. Prefill workers whose ids are still in `unprobed` are
    waited for, so that a router that has just started does not send everything the second way.
    """
    known = list(workers)
    return Readiness(
        tuple(
            _model_health(name, [worker for worker in known if worker.model == name], unprobed)
            for name in models
        )
    )


def _model_health(
    model: str, workers: Sequence[ServingWorker], unprobed: Collection[str]
) -> ModelHealth:
    prefill = [worker for worker in workers if worker.role != "decode"]
    decode = [worker for worker in workers if worker.role != "prefill"]
    prefill_up = sum(worker.up for worker in prefill)
    decode_up = sum(worker.up for worker in decode)
    missing = ""
    if not decode_up:
        missing = f"no decode worker is up (of {len(decode)})"
    elif not prefill_up and any(worker.id in unprobed for worker in prefill):
        missing = "prefill workers have not been probed yet"
    return ModelHealth(model, prefill_up, len(prefill), decode_up, len(decode), missing)


def health_routes(ready: Callable[[], Readiness]) -> APIRouter:
    routes = APIRouter(prefix="/health", tags=["operations"])

    @routes.get("/live")
    async def live() -> dict[str, str]:
        """200 as long as the process answers."""
        return {"status": "ok"}

    @routes.get("/ready")
    async def is_ready() -> JSONResponse:
        """200 if every model can be served, else 503 and what is missing."""
        found = ready()
        missing = {model.model: model.missing for model in found.models if model.missing}
        body = {"ready": found.ready, "missing": missing}
        return JSONResponse(body, 200 if found.ready else 503)

    @routes.get("")
    async def health() -> JSONResponse:
        """The workers of each model; 503 only if no model can be served."""
        found = ready()
        models: dict[str, Any] = {model.model: asdict(model) for model in found.models}
        body = {"status": found.status, "models": models}
        return JSONResponse(body, 503 if found.status == "unavailable" else 200)

    return routes
