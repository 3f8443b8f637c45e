"""What a worker answers over HTTP: vLLM's endpoints, and the faults that show there."""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_hex
from time import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from simulator import metrics
from simulator.control import control
from simulator.generation import Generation
from simulator.http_server import Exchange
from simulator.vllm import endpoints, errors, replies, requests

if TYPE_CHECKING:
    from simulator.worker import Worker

JSON = dict[str, Any]

_NOT_FOUND = b'{"detail":"Not Found"}'
_NOT_ALLOWED = b'{"detail":"Method Not Allowed"}'
_UNAUTHORIZED = b'{"error":"Unauthorized"}'


class Frontend:
    """The HTTP side of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._error_share = 0.0

    def handle(self, exchange: Exchange) -> None:
        """One request. Every reply of this worker starts here."""
        path = exchange.path.partition("?")[0]
        if path.startswith("/sim/"):
            control(self._worker, exchange, path.removeprefix("/sim/"))
            return
        if self._worker.faults.stall == "all":
            return
        try:
            self._route(exchange, path)
        except errors.ApiError as error:
            exchange.reply(error.status, error.body())

    def _route(self, exchange: Exchange, path: str) -> None:
        if path.startswith("/v1/") or path in _POST_ROUTES:
            self._worker.received.note(exchange)
            if self._worker.faults.stall or not self._authorized(exchange, path):
                return
        if path in _GENERATE:
            if exchange.method == "POST":
                self._generate(exchange, _GENERATE[path])
            else:
                exchange.reply(405, _NOT_ALLOWED, extra=b"allow: POST\r\n")
            return
        allowed = ("GET", "HEAD") if path in _GET_ROUTES else ("POST",)
        route = _GET_ROUTES.get(path) or _POST_ROUTES.get(path)
        if route is None:
            exchange.reply(404, _NOT_FOUND)
        elif exchange.method not in allowed:
            exchange.reply(405, _NOT_ALLOWED, extra=b"allow: %b\r\n" % allowed[0].encode())
        else:
            route(self, exchange)

    def _authorized(self, exchange: Exchange, path: str) -> bool:
        key = self._worker.config.api_key if path.startswith("/v1/") else None
        if key is not None and exchange.header(b"authorization") != f"Bearer {key}":
            exchange.reply(401, _UNAUTHORIZED)
            return False
        if (
            self._worker.faults.host_check
            and exchange.header(b"host") != urlsplit(self._worker.url).netloc
        ):
            exchange.reply(421, b'{"detail":"Misdirected Request"}')
            return False
        return True

    def _server_error(self, exchange: Exchange) -> bool:
        """Answer with a server error if it is this request's turn to fail."""
        self._error_share += self._worker.faults.error_5xx
        if self._error_share < 1:
            return False
        self._error_share -= 1
        kind = (
            "ServiceUnavailableError"
            if self._worker.faults.error_status == 503
            else "InternalServerError"
        )
        error = errors.ApiError(self._worker.faults.error_status, "Injected failure", kind)
        exchange.reply(error.status, error.body())
        return True

    def _generate(self, exchange: Exchange, endpoint: requests.Endpoint) -> None:
        if self._worker.faults.error_5xx and self._server_error(exchange):
            return
        if self._worker.engine.dead:
            raise errors.INTERNAL_ERROR
        body = requests.load_body(exchange.body)
        given = exchange.header(b"x-request-id") or body.get("request_id")
        base = str(given) if given else token_hex(8)
        try:
            call = requests.parse_call(endpoint, body, self._worker.served, base)
        except errors.ApiError:
            self._free_rejected(body)
            raise
        Generation(self._worker, exchange, call, self._worker.submit(call)).begin()
        self._worker.pump()

    def _free_rejected(self, body: JSON) -> None:
        """A refused decode leg still tells the prefill worker that nobody will come."""
        try:
            remote, _ = requests.parse_kv_transfer_params(body.get("kv_transfer_params"))
        except errors.ApiError:
            return
        if remote is not None and remote.engine_id is not None:
            self._worker.peers.notify("release", remote)

    # -- plain endpoints ------------------------------------------------------------------------

    def _health(self, exchange: Exchange) -> None:
        exchange.reply(503 if self._worker.engine.dead else 200)

    def _version(self, exchange: Exchange) -> None:
        exchange.reply(200, orjson.dumps({"version": replies.VERSION}))

    def _models(self, exchange: Exchange) -> None:
        exchange.reply(200, endpoints.models(self._worker.served, int(time())))

    def _load(self, exchange: Exchange) -> None:
        exchange.reply(200, orjson.dumps({"server_load": self._worker.open_calls}))

    def _metrics(self, exchange: Exchange) -> None:
        self._worker.pump()
        page = metrics.render(
            self._worker.engine,
            self._worker.observed,
            self._worker.config.names[0],
            self._worker.started_at_s,
        )
        exchange.reply(200, page, "text/plain; version=0.0.4; charset=utf-8")

    def _kv_event_sources(self, exchange: Exchange) -> None:
        source = self._worker.kv_event_source()
        exchange.reply(200, orjson.dumps({"0": source} if source else {}))

    def _tokenize(self, exchange: Exchange) -> None:
        exchange.reply(
            200, endpoints.tokenize(requests.load_body(exchange.body), self._worker.served)
        )

    def _detokenize(self, exchange: Exchange) -> None:
        exchange.reply(200, endpoints.detokenize(requests.load_body(exchange.body)))

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        done = self._worker.engine.reset_cache(self._worker.now_s)
        exchange.reply(200, orjson.dumps({"success": done}))


_Route = Callable[[Frontend, Exchange], None]
_GENERATE: dict[str, requests.Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}
_GET_ROUTES: dict[str, _Route] = {
    "/health": Frontend._health,
    "/ping": Frontend._health,
    "/version": Frontend._version,
    "/v1/models": Frontend._models,
    "/load": Frontend._load,
    "/metrics": Frontend._metrics,
    "/kv_event_sources": Frontend._kv_event_sources,
}
_POST_ROUTES: dict[str, _Route] = {
    "/tokenize": Frontend._tokenize,
    "/detokenize": Frontend._detokenize,
    "/reset_prefix_cache": Frontend._reset_prefix_cache,
}
