"""The demo's parts: what it configures, says, and does when a child does not do its part."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import pytest

from router import demo as subject
from router.config import validate
from router.demo import DemoError, claim_port, demo_config, run_demo, welcome

WORKERS = [
    {"name": f"{role}-{n}", "role": role, "url": f"http://127.0.0.1:{port + n}"}
    for role, port in (("prefill", 8100), ("decode", 8200))
    for n in (0, 1)
]
ANNOUNCE = f"print({json.dumps(json.dumps({'workers': WORKERS}))}, flush=True)\n"

# Answers every request with 200, on the port of the configuration it is given.
READY_ROUTER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
HTTPServer(("127.0.0.1", json.load(sys.stdin)["listen"]["port"]), Handler).serve_forever()
"""
IDLE = "import time\ntime.sleep(600)\n"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def run(simulator: str, router: str, say=lambda text: None) -> None:
    await subject.demo(0, simulator=python(simulator), router=python(router), say=say)


def test_its_configuration_is_valid_and_complete():
    config = validate(demo_config(8123, WORKERS))
    assert config.listen.port == 8123
    (model,) = config.models
    assert (model.name, model.aliases) == (subject.MODEL, (subject.ALIAS,))
    assert [(pool.role, len(pool.workers)) for pool in model.pools] == [
        ("prefill", 2),
        ("decode", 2),
    ]


def test_the_welcome_holds_a_curl_that_names_router_and_model():
    text = welcome("http://127.0.0.1:8123")
    assert "curl -N http://127.0.0.1:8123/v1/chat/completions" in text
    assert f'"model": "{subject.MODEL}"' in text
    assert "http://127.0.0.1:8123/metrics" in text
    assert 'OpenAI(base_url="http://127.0.0.1:8123/v1"' in text


def test_a_busy_port_is_named_before_anything_starts(capsys, monkeypatch):
    monkeypatch.setattr(subject, "SIMULATOR", ("/nothing/that/could/start",))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run_demo(port) == 1
    text = capsys.readouterr().err
    assert f"port {port} cannot be used (Address already in use)" in text
    assert "--port N" in text


def test_port_0_takes_a_free_one():
    port = claim_port(0)
    assert claim_port(port) == port


def test_it_says_what_to_try_when_the_router_is_ready_and_ends_with_a_child():
    said: list[str] = []
    router = READY_ROUTER.replace("serve_forever()", "handle_request()")
    with pytest.raises(DemoError, match=r"the router ended \(exit status 0\)"):
        asyncio.run(run(ANNOUNCE + IDLE, router, said.append))
    assert "curl" in said[0]


def test_workers_that_die_while_it_runs_end_it():
    simulator = ANNOUNCE + "import sys, time\ntime.sleep(1.0)\nsys.exit(3)\n"
    with pytest.raises(DemoError, match=r"the simulated workers ended \(exit status 3\)"):
        asyncio.run(run(simulator, READY_ROUTER))


def test_workers_that_do_not_start_are_reported():
    with pytest.raises(DemoError, match=r"the simulated workers ended \(exit status 4\)"):
        asyncio.run(run("import sys\nsys.exit(4)", READY_ROUTER))


def test_a_router_that_does_not_start_is_reported():
    with pytest.raises(DemoError, match=r"the router ended \(exit status 5\)"):
        asyncio.run(run(ANNOUNCE + IDLE, "import sys\nsys.exit(5)"))


def test_what_takes_too_long_to_start_is_reported(monkeypatch):
    monkeypatch.setattr(subject, "START_TIMEOUT_S", 0.3)
    with pytest.raises(DemoError, match=r"workers did not start in 0\.3 s"):
        asyncio.run(run(IDLE, READY_ROUTER))


def test_ending_it_ends_the_children_even_one_that_will_not(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "STOP_TIMEOUT_S", 0.2)
    pids = [tmp_path / "simulator", tmp_path / "router"]
    note = "import os, pathlib\npathlib.Path({!r}).write_text(str(os.getpid()))\n"
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    simulator = note.format(str(pids[0])) + stubborn + ANNOUNCE + IDLE
    router = note.format(str(pids[1])) + READY_ROUTER

    async def scenario() -> None:
        ready = asyncio.Event()
        task = asyncio.create_task(run(simulator, router, lambda text: ready.set()))
        await asyncio.wait_for(ready.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


@pytest.fixture
def running() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The real demo as a user starts it, and its address."""
    command = (sys.executable, "-m", "router.cli", "demo", "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = (re.match(r"Metrics: (\S+)/metrics", line) for line in process.stdout)
            yield process, next(match.group(1) for match in found if match)
        finally:
            process.kill()


def test_the_cluster_answers_over_http_and_the_openai_client(running):
    process, base = running
    body = {"model": subject.ALIAS, "prompt": "Once upon a time", "max_tokens": 3}
    response = httpx.post(f"{base}/v1/completions", json=body, timeout=30)
    assert response.status_code == 200
    assert response.headers["x-pdrouter-prefill"]
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model=subject.MODEL,
            max_tokens=3,
            stream=True,
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text
    metrics = httpx.get(f"{base}/metrics").text
    assert 'pdrouter_requests_total{model="glm-5.2-nvfp4",queue="default",plan="pd"' in metrics
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_killing_the_demo_leaves_nothing_behind(running):
    process, base = running
    process.kill()
    process.wait(20)
    # Its children hold the output open: the end of it is their end.
    process.communicate(timeout=20)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{base}/health/live")
