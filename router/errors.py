"""All failures of a call, each with its HTTP status, in OpenAI's shape.

`RouterError` is what a client may see. `WorkerFailure` is what a worker did; the dispatcher retries
it elsewhere, and turns it into a `RouterError` where nothing is left to try.
"""

from __future__ import annotations

import orjson


class RouterError(Exception):
    """An answer that is not the engine's. `reason` is a short word for metrics and headers."""

    status = 500
    type = "server_error"
    reason = "internal"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The error object as JSON."""
        return error_object(self.message, self.type, self.param, self.code)


class BadRequest(RouterError):
    status, type, reason = 400, "invalid_request_error", "bad_request"


class Unauthorized(RouterError):
    status, type, reason = 401, "authentication_error", "unauthorized"


class ModelNotFound(RouterError):
    status, type, reason = 404, "invalid_request_error", "unknown_model"


class BodyTooLarge(RouterError):
    status, type, reason = 413, "invalid_request_error", "body_too_large"


class QueueOverflow(RouterError):
    status, type, reason = 429, "rate_limit_error", "queue_full"


class QueueTimeout(RouterError):
    status, type, reason = 429, "rate_limit_error", "queue_timeout"


class NoWorkers(RouterError):
    status, type, reason = 503, "service_unavailable_error", "no_workers"


class CallFailed(RouterError):
    """Workers took the call and did not bring it to its end."""


class WorkersFailed(CallFailed):
    status, type, reason = 502, "server_error", "workers_failed"


class WorkersTimedOut(CallFailed):
    status, type, reason = 504, "server_error", "workers_timed_out"


class WorkerFailure(Exception):
    """A worker did not do its part of a call, and another may. `reason` is a short word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConnectFailed(WorkerFailure):
    """No connection: the worker has not seen the call."""


class Disconnected(WorkerFailure):
    """The connection ended before the reply did."""


class StaleConnection(Disconnected):
    """A pooled connection had been closed before the worker could see the call."""


class TimedOut(WorkerFailure):
    """Nothing came for as long as the phase allows."""


class EngineFailed(WorkerFailure):
    """The engine answered with a server error, as status or inside an event stream."""


def error_object(
    message: str, type_: str, param: str | None = None, code: str | int | None = None
) -> bytes:
    return orjson.dumps(
        {"error": {"message": message, "type": type_, "param": param, "code": code}}
    )


def error_event(error: RouterError) -> bytes:
    """The last event of a stream that broke: the error object, and no [DONE] behind it."""
    return b"data: " + error.body() + b"\n\n"
