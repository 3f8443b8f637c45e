"""The composition root: a configuration becomes a running router."""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import resource
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from cachemap import InMemoryCacheMap
from router import __version__, api
from router.access_log import AccessLog
from router.config import Config, PriceConfig, api_keys
from router.dispatch import CHAT, COMPLETIONS, Dispatcher
from router.edge import EdgeProtocol, Handler
from router.errors import Unauthorized, error_object
from router.fleet import Fleet
from router.metrics import FleetSnapshot, Metrics
from router.outcome import Outcome
from router.upstream import Upstreams
from router.worker_monitor import WorkerMonitor, WorkerReport
from scheduler import PROFILES, Prices, WorkerState

logger = logging.getLogger("pdrouter")

_KEEP_ALIVE_S = 75
_SHUTDOWN_S = 30
_BACKLOG = 4096


class Router:
    """All parts of one router, built from `config`. `app` serves the cold endpoints and, by its
    lifespan, starts and stops the rest; `protocol` is the HTTP protocol class for uvicorn."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.keys = api_keys(config)
        self.cachemap = InMemoryCacheMap(config.cachemap.max_bytes)
        self.upstreams = Upstreams(
            config.timeouts.connect_s, config.timeouts.first_byte_s, config.timeouts.idle_s
        )
        self.fleets = [
            Fleet(
                model,
                self.cachemap,
                self.upstreams,
                _prices(model.prices),
                max_waiting=config.queue.max_waiting,
                max_waiting_bytes=config.queue.max_waiting_bytes,
                queue_timeout_s=config.queue.timeout_s,
                default_capacity_tokens=config.cachemap.default_capacity_tokens,
                io_ratio_prior=config.io_ratio.prior,
            )
            for model in config.models
        ]
        self.metrics = Metrics([model.name for model in config.models], self._snapshot)
        self.access_log = AccessLog(sys.stdout.fileno(), enabled=config.log.access)
        monitor = config.monitor
        self.monitor = WorkerMonitor(
            self.workers,
            self._apply,
            interval_s=monitor.interval_s,
            timeout_s=monitor.timeout_s,
            scrape_s=monitor.scrape_s,
            fail_after=monitor.fail_after,
            pass_after=monitor.pass_after,
        )
        self.dispatcher = Dispatcher(
            {
                name: fleet
                for model, fleet in zip(config.models, self.fleets, strict=True)
                for name in (model.name, *model.aliases)
            },
            keys=self.keys,
            max_attempts=config.retries.max_attempts,
            handoff_gap_s=config.timeouts.handoff_gap_s,
            observe=self._observe,
            suspect=self.monitor.suspect,
        )
        self.protocol = _protocol(
            {CHAT: self.dispatcher.serve, COMPLETIONS: self.dispatcher.serve},
            config.limits.max_body_bytes,
            config.timeouts.client_stall_s,
        )
        self.app = self._application()

    @property
    def workers(self) -> Sequence[WorkerState]:
        return [worker for fleet in self.fleets for worker in fleet.workers]

    def _application(self) -> FastAPI:
        app = FastAPI(title="pdrouter", version=__version__, lifespan=self._lifespan)
        api.install(
            app,
            models=self._model_cards,
            ready=lambda: api.readiness(
                [fleet.name for fleet in self.fleets], self.workers, self.monitor.unprobed
            ),
            metrics=self.metrics,
            guard=self._guard if self.keys else None,
        )
        app.add_exception_handler(HTTPException, _render_http_error)
        return app

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(self.monitor.run())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self.upstreams.close()
            self.access_log.close()

    def _observe(self, outcome: Outcome) -> None:
        self.metrics.observe(outcome)
        self.access_log.write(outcome)

    def _apply(self, worker_id: str, report: WorkerReport) -> None:
        for fleet in self.fleets:
            fleet.apply(worker_id, report)

    def _snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(
            workers=self.workers,
            queue_depth={"default": sum(fleet.scheduler.depth for fleet in self.fleets)},
            leases=sum(len(fleet.scheduler.leases) for fleet in self.fleets),
            cachemap_blocks=self.cachemap.blocks_held(),
            cachemap_bytes=self.cachemap.memory_bytes(),
        )

    def _model_cards(self) -> list[api.ModelCard]:
        return [
            api.ModelCard(model.name, model.aliases, fleet.max_model_len)
            for model, fleet in zip(self.config.models, self.fleets, strict=True)
        ]

    def _guard(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not any(hmac.compare_digest(given, b"Bearer " + key.encode()) for key in self.keys):
            raise Unauthorized("No valid API key was given.", code="invalid_api_key")


def build(config: Config) -> Router:
    return Router(config)


def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT; running calls get time to finish."""
    logging.basicConfig(
        level=config.log.level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    router = build(config)
    server = uvicorn.Server(
        uvicorn.Config(
            router.app,
            host=config.listen.host,
            port=config.listen.port,
            http=router.protocol,
            loop="uvloop",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            backlog=_BACKLOG,
        )
    )
    _allow_connections()
    # What exists by now lives as long as the process: no collection needs to look at it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    server.run()


def _allow_connections() -> None:
    # A streaming call holds two sockets, and the usual soft limit is 1,024 for all of them.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _protocol(
    hot: Mapping[bytes, Handler], max_body_bytes: int, client_stall_s: float
) -> type[EdgeProtocol]:
    bound = {"hot": hot, "max_body_bytes": max_body_bytes, "client_stall_s": client_stall_s}
    return type("BoundEdge", (EdgeProtocol,), bound)


def _prices(given: str | PriceConfig) -> Prices:
    if isinstance(given, str):
        return PROFILES[given]
    prefill, step, transfer = given.prefill, given.decode_step, given.transfer
    return Prices(
        prefill_a=prefill.base_ms,
        prefill_b=prefill.per_token_ms,
        prefill_d=prefill.per_token_context_ms,
        prefill_e=prefill.per_cached_token_ms,
        decode_a=step.base_ms,
        decode_b=step.per_sequence_ms,
        decode_d=step.per_sequence_context_ms,
        transfer_latency=transfer.base_ms,
        transfer_per_token=transfer.per_token_ms,
    )


async def _render_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = error_object(str(error.detail), kind)
    return Response(body, error.status_code, error.headers, media_type="application/json")
