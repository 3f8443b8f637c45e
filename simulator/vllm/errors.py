"""How vLLM refuses a request."""

from __future__ import annotations

import orjson

from simulator.tokenizer import JSON


class ApiError(Exception):
    """A request that the engine refuses, as it is told to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        return orjson.dumps({"error": self._members()})

    def _members(self) -> JSON:
        return {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }


INTERNAL_ERROR = ApiError(500, "Internal server error", "InternalServerError")
ERROR_EVENT = (
    b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", '
    b'"param": null, "code": 500}}\n\n'
)


def invalid(name: str, kind: str, text: str, value: str) -> ApiError:
    """A refusal in the words of a schema check."""
    detail = f"{{'type': '{kind}', 'loc': 'body.{name}', 'msg': '{text}', 'input': {value}}}"
    return ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", f"body.{name}")


def refused(name: str, text: str, value: object) -> ApiError:
    """A refusal in the words of the engine."""
    return ApiError(400, f"{text} (parameter={name}, value={value})", param=name)
