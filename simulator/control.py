"""The simulator's own endpoints: what a worker is doing, and what is to go wrong with it.

They are served under `/sim/` on the worker's port, and for a worker that no longer listens through
the process's control port.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from simulator.faults import FaultError, parse
from simulator.http_server import Exchange

if TYPE_CHECKING:
    from simulator.worker import Worker

JSON = dict[str, Any]


@dataclass(slots=True)
class Received:
    """The last requests, if somebody wants to see them."""

    limit: int = 0
    items: deque[JSON] = field(default_factory=deque)

    def note(self, exchange: Exchange) -> None:
        if not self.limit:
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in exchange.headers.items()}
        body = exchange.body.decode("utf-8", "replace")
        self.items.append(
            {"method": exchange.method, "path": exchange.path, "headers": headers, "body": body}
        )
        while len(self.items) > self.limit:
            self.items.popleft()


def state(worker: Worker) -> JSON:
    """What the worker is doing and has done since its engine started."""
    engine, totals = worker.engine, worker.engine.totals
    tokens = engine.block_tokens
    return {
        "name": worker.config.name,
        "role": worker.config.role,
        "url": worker.url,
        "engine_id": engine.engine_id,
        "started_at_s": worker.started_at_s,
        "dead": engine.dead,
        "running": engine.running,
        "waiting": engine.waiting,
        "prefilling": engine.prefilling,
        "pulling": engine.pulling,
        "pinned_requests": len(engine.pins),
        "kv_used_tokens": engine.blocks.held * tokens,
        "kv_capacity_tokens": engine.blocks.capacity * tokens,
        "kv_cached_tokens": engine.blocks.known * tokens,
        "cached_tokens_total": totals.cached,
        "computed_tokens_total": totals.computed,
        "external_tokens_total": totals.external,
        "prompt_tokens_total": totals.prompt,
        "output_tokens_total": totals.output,
        "requests_total": totals.requests,
        "aborted_total": totals.aborted,
        "expired_total": totals.expired,
        "preemptions_total": totals.preemptions,
        "transfers_total": totals.transfers,
        "transfer_failures_total": totals.transfer_failures,
        "late_releases_total": totals.late_releases,
        "busy_s": totals.busy_s,
        "open_connections": len(worker.connections),
        "faults": worker.faults.as_json(),
        "received": list(worker.received.items),
    }


def control(worker: Worker, exchange: Exchange, what: str) -> None:
    """Answer one request; `what` is the path behind `/sim/`."""
    route = _ROUTES.get((exchange.method, what))
    if route is None:
        exchange.reply(404, b'{"detail":"Not Found"}')
    else:
        route(worker, exchange)


def _get_state(worker: Worker, exchange: Exchange) -> None:
    worker.pump()
    exchange.reply(200, orjson.dumps(state(worker)))


def _get_faults(worker: Worker, exchange: Exchange) -> None:
    exchange.reply(200, orjson.dumps(worker.faults.as_json()))


def _put_faults(worker: Worker, exchange: Exchange) -> None:
    try:
        faults = parse(orjson.loads(exchange.body or b"{}"))
    except (FaultError, orjson.JSONDecodeError) as error:
        exchange.reply(400, orjson.dumps({"detail": str(error)}))
        return
    worker.background(worker.set_faults(faults, exchange))


def _put_record(worker: Worker, exchange: Exchange) -> None:
    """`{"last": n}`: keep the last n requests for the state; 0 keeps none."""
    try:
        limit = int(orjson.loads(exchange.body)["last"])
    except (KeyError, TypeError, ValueError):
        exchange.reply(400, b'{"detail":"want {\\"last\\": n}"}')
        return
    worker.received = Received(limit)
    exchange.reply(200, orjson.dumps({"last": limit}))


def _post_restart(worker: Worker, exchange: Exchange) -> None:
    worker.background(worker.restart(exchange))


def _post_reset(worker: Worker, exchange: Exchange) -> None:
    if worker.reset():
        worker.received = Received()
        exchange.reply(200, b"{}")
    else:
        exchange.reply(409, b'{"detail":"requests are running"}')


_ROUTES: dict[tuple[str, str], Callable[[Worker, Exchange], None]] = {
    ("GET", "state"): _get_state,
    ("GET", "faults"): _get_faults,
    ("PUT", "faults"): _put_faults,
    ("PUT", "record"): _put_record,
    ("POST", "restart"): _post_restart,
    ("POST", "reset"): _post_reset,
}
