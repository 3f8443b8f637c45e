"""The model list in OpenAI's shape: configured names and their aliases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter

from router.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str
    aliases: tuple[str, ...] = ()
    max_model_len: int | None = None  # tokens of prompt and answer, as its workers report


def model_routes(models: Callable[[], Sequence[ModelCard]], *, created_s: int) -> APIRouter:
    """`created_s` is the Unix time given as the models' creation, which engines do not know."""
    routes = APIRouter(prefix="/v1/models", tags=["models"])

    @routes.get("")
    async def list_models() -> dict[str, Any]:
        """Every name under which a model can be asked for."""
        return {"object": "list", "data": list(_entries(models(), created_s))}

    # A name may contain slashes.
    @routes.get("/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        """One model by name or alias."""
        for entry in _entries(models(), created_s):
            if entry["id"] == name:
                return entry
        raise ModelNotFound(f"The model `{name}` does not exist.", code="model_not_found")

    return routes


def _entries(models: Sequence[ModelCard], created_s: int) -> Iterator[dict[str, Any]]:
    for card in models:
        for name in (card.name, *card.aliases):
            yield {
                "id": name,
                "object": "model",
                "created": created_s,
                "owned_by": "pdrouter",
                "root": card.name,
                "parent": None,
                "max_model_len": card.max_model_len,
            }
