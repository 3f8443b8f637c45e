"""One set of simulated workers and two routers for the whole run.

`gateway` has the default time limits. `strict` has short ones, asks for a key and lets one call
wait. Both serve the model `sim` (2 prefill and 2 decode workers, p0 p1 d0 d1) and `scripted` (one
of each, played by a `ScriptedEngine`). `gateway` also serves `wide` (1 prefill, 5 decode workers)
and `strict` `hooked`, where scripted engines stand before the workers p2 p3 d2 d3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import openai
import pytest

from tests.e2e.cluster import Gateway, Sim, Sims, model, routed, simulated, until
from tests.fakes import LoopThread, ScriptedEngine, forward, prefilled, whole

MODELS = ("sim", "wide", "hooked")
KEY = "a-key-of-the-tests"
WORKERS = [
    *(f"prefill:p{i}" for i in range(5)),
    *(f"decode:d{i}" for i in range(4)),
    *(f"decode:w{i}" for i in range(5)),
    "both:alone",
]
MONITOR = {"interval_s": 0.2, "timeout_s": 1.0, "scrape_s": 0.5}


@dataclass(frozen=True, slots=True)
class Scripted:
    """Engines whose answers a test scripts, one per role."""

    prefill: ScriptedEngine
    decode: ScriptedEngine


@dataclass(frozen=True, slots=True)
class Hooked:
    """Engines that stand before simulated workers, for a test to step in between."""

    prefill: tuple[ScriptedEngine, ...]
    decode: tuple[ScriptedEngine, ...]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return Path(tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def sims(folder) -> Iterator[Sims]:
    with simulated(WORKERS, MODELS, folder) as running:
        yield running


def _started(loop_thread: LoopThread, engine: ScriptedEngine) -> ScriptedEngine:
    loop_thread.run(engine.start())
    return engine


@pytest.fixture(scope="session")
def engines(loop_thread) -> Iterator[Scripted]:
    pair = Scripted(
        _started(loop_thread, ScriptedEngine("scripted", whole(200, prefilled()))),
        # Room for one call at a time.
        _started(loop_thread, ScriptedEngine("scripted", whole(200, {}), capacity_tokens=16)),
    )
    yield pair
    for engine in (pair.prefill, pair.decode):
        loop_thread.run(engine.stop())


@pytest.fixture(scope="session")
def stand_ins(loop_thread, sims) -> Iterator[Hooked]:
    def before(*names: str) -> tuple[ScriptedEngine, ...]:
        return tuple(
            _started(
                loop_thread,
                ScriptedEngine("hooked", forward(sim.url), probes_through=sim.url),
            )
            for sim in sims.group(*names)
        )

    pair = Hooked(before("p2", "p3"), before("d2", "d3"))
    yield pair
    for engine in (*pair.prefill, *pair.decode):
        loop_thread.run(engine.stop())


def _rests(engine: ScriptedEngine) -> bool:
    return engine.active == 0


@pytest.fixture
def scripted(engines: Scripted) -> Scripted:
    """The scripted engines, with nothing received and the plainest behaviour."""
    engines.prefill.behaviour = whole(200, prefilled())
    for engine in (engines.prefill, engines.decode):
        engine.hang_up()
        until(partial(_rests, engine), 5, "nothing runs on it")
        engine.received.clear()
    return engines


@pytest.fixture
def hooked(stand_ins, sims, loop_thread) -> Iterator[Hooked]:
    """The stand-ins, handing everything on until a test says otherwise."""
    yield stand_ins
    for engine, sim in zip(
        (*stand_ins.prefill, *stand_ins.decode), sims.group("p2", "p3", "d2", "d3"), strict=True
    ):
        engine.behaviour = forward(sim.url)


def _urls(sims: list[Sim]) -> list[str]:
    return [sim.url for sim in sims]


@pytest.fixture(scope="session")
def _gateway(sims, engines, folder) -> Iterator[Gateway]:
    config = {
        "models": [
            model(
                "sim",
                _urls(sims.group("p0", "p1")),
                _urls(sims.group("d0", "d1")),
                aliases=["sim-alias"],
            ),
            model("wide", [sims["p4"].url], _urls(sims.group(*(f"w{i}" for i in range(5))))),
            model("scripted", [engines.prefill.url], [engines.decode.url]),
        ],
        "monitor": MONITOR,
        "log": {"level": "debug"},
    }
    with routed(config, folder / "gateway.log") as running:
        yield running


@pytest.fixture(scope="session")
def _strict(sims, engines, stand_ins, folder) -> Iterator[Gateway]:
    config = {
        "models": [
            model("sim", _urls(sims.group("p0", "p1")), _urls(sims.group("d0", "d1"))),
            model("scripted", [engines.prefill.url], [engines.decode.url]),
            model(
                "hooked",
                [engine.url for engine in stand_ins.prefill],
                [engine.url for engine in stand_ins.decode],
            ),
        ],
        "auth": {"keys_env": "E2E_KEYS"},
        "queue": {"max_waiting": 1, "timeout_s": 1.0},
        "timeouts": {"connect_s": 2.0, "first_byte_s": 1.0, "idle_s": 1.0, "handoff_gap_s": 0.7},
        "monitor": MONITOR,
        "log": {"level": "debug"},
    }
    with routed(config, folder / "strict.log", {"E2E_KEYS": KEY}) as running:
        running.key = KEY
        yield running


@pytest.fixture
def gateway(_gateway, healthy) -> Iterator[Gateway]:
    yield from _used(_gateway, healthy)


@pytest.fixture
def strict(_strict, healthy) -> Iterator[Gateway]:
    yield from _used(_strict, healthy)


def _used(running: Gateway, healthy: list[Sim]) -> Iterator[Gateway]:
    """The router, with all workers up; after the test nothing may be left in its books."""
    known = running.page.by("pdrouter_worker_up", "worker")
    mine = [sim for sim in healthy if sim.id in known]
    until(lambda: running.up(mine), 15, "all workers up")
    yield running
    until(running.at_rest, 5, "leases, queue and charges back at zero")


@pytest.fixture
def healthy(sims) -> Iterator[list[Sim]]:
    """All simulated workers, without faults before and after the test."""
    workers = list(sims.workers.values())
    yield workers
    for sim in workers:
        if sim.name in sim.faulty:
            sim.fault()
            sim.faulty.discard(sim.name)


@pytest.fixture
def sdk(gateway) -> Iterator[openai.OpenAI]:
    """OpenAI's client, without retries of its own."""
    with client_of(gateway) as client:
        yield client


@pytest.fixture
def strict_sdk(strict) -> Iterator[openai.OpenAI]:
    with client_of(strict) as client:
        yield client


def client_of(router: Gateway) -> openai.OpenAI:
    # No certificates: reading them takes longer than most tests.
    transport = openai.DefaultHttpxClient(verify=False, timeout=30)
    base = f"{router.url}/v1"
    return openai.OpenAI(base_url=base, api_key=router.key, max_retries=0, http_client=transport)
