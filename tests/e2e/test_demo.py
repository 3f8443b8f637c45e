"""What a newcomer does first, and what an operator adds: the demo, and a Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.cluster import ROOT, chat, end, free_port, http, process, prompt, sse, until

MODEL = "glm-5.2-nvfp4"


@dataclass(frozen=True, slots=True)
class Demo:
    url: str
    child: subprocess.Popen[bytes]
    log: Path
    started_in_s: float


@pytest.fixture(params=["SIGINT", "SIGTERM"])
def demo(request, tmp_path) -> Iterator[Demo]:
    """A running demo. It ends by either signal, with status 0, and leaves no process."""
    port, log = free_port(), tmp_path / "demo.log"
    command = [sys.executable, "-m", "router.cli", "demo", "--port", str(port)]
    started_s = time.monotonic()
    with process(command, log) as child:
        until(lambda: "Try:" in log.read_text(), 60, "the demo says what to try")
        children = descendants(child.pid)
        assert len(children) >= 2
        yield Demo(f"http://127.0.0.1:{port}", child, log, time.monotonic() - started_s)
        child.send_signal(getattr(signal, request.param))
        assert child.wait(20) == 0, log.read_text()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 5, "all ended")


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def test_the_demo_answers_curl_and_the_openai_client(demo):
    assert demo.started_in_s < 60
    if shutil.which("curl"):
        # The command as it is printed.
        text = demo.log.read_text()
        printed = re.search(r"^  (curl .*\n.*)$", text, re.MULTILINE)
        assert printed
        done = subprocess.run(
            ["bash", "-c", printed.group(1).replace("curl ", "curl -sS --noproxy '*' ", 1)],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            cwd=ROOT,
        )
        assert done.stdout.endswith("data: [DONE]\n\n")
        assert len(sse(done.stdout)) > 60
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        assert MODEL in [card.id for card in client.models.list()]
        answer = client.chat.completions.create(**chat(prompt("demo"), MODEL))
        assert answer.choices[0].message.content
        stream: Any = client.chat.completions.create(
            **chat(prompt("demo"), MODEL, stream=True, stream_options={"include_usage": True})
        )
        assert [item.usage for item in stream][-1].completion_tokens == 24


PROMETHEUS = """
global: {{scrape_interval: 200ms}}
scrape_configs:
  - job_name: pdrouter
    static_configs: [{{targets: ["{target}"]}}]
"""


def test_prometheus_scrapes_the_router_and_answers_queries(gateway, tmp_path):
    if shutil.which("prometheus") is None:
        if os.environ.get("CI"):
            pytest.fail("prometheus is not installed")
        pytest.skip("prometheus is not installed")
    config = tmp_path / "prometheus.yml"
    config.write_text(PROMETHEUS.format(target=gateway.url.removeprefix("http://")))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    body = chat(prompt("observed", 300))
    for _ in range(2):
        assert gateway.post(body).status_code == 200

    def ask(query: str) -> list[float]:
        try:
            reply = http("GET", f"http://{address}/api/v1/query", params={"query": query})
        except httpx.TransportError:  # not listening yet
            return []
        if reply.status_code != 200:
            return []
        return [float(row["value"][1]) for row in json.loads(reply.text)["data"]["result"]]

    log = tmp_path / "prometheus.log"
    with process(command, log) as child:
        count = 'sum(pdrouter_requests_total{model="sim",code="200"})'
        (calls,) = until(lambda: ask(count), 30, "a scrape")
        assert calls >= 2
        (ratio,) = until(lambda: ask('pdrouter_prefix_hit_ratio{model="sim"}'), 5, "the hit ratio")
        assert 0 < ratio <= 1
        until(lambda: ask('up{job="pdrouter"}') == [1.0], 5, "the target is up")
        end(child)
