"""docker-compose.yml without containers: its commands and files, run on this machine's loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
PROMETHEUS = ROOT / "deploy/prometheus/prometheus.yml"
DOCKERFILE = ROOT / "deploy/Dockerfile"


def installed(program: str) -> str:
    """The path of a program that CI installs and a developer may lack."""
    path = shutil.which(program)
    if path is None and os.environ.get("CI"):
        pytest.fail(f"{program} is not installed")
    return path or pytest.skip(f"{program} is not installed (Debian: prometheus)")


@contextmanager
def running(command: list[str], **options) -> Iterator[subprocess.Popen[str]]:
    """A child process that is stopped on the way out."""
    child = subprocess.Popen(command, cwd=ROOT, text=True, **options)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(5)
        if child.stdout:
            child.stdout.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def eventually(check: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if check():
                return
        except (OSError, urllib.error.URLError):
            pass
        # Another process is waited for; it can only be asked.
        time.sleep(0.1)
    pytest.fail(f"not within {seconds} s: {what}")


def test_volumes_name_files_that_exist():
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).is_file(), source


def test_published_ports_are_on_loopback():
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_the_image_holds_what_the_wheel_needs():
    text = DOCKERFILE.read_text(encoding="utf-8")
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8")
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
        for name in line.split()
    ]
    for package in ("router", "scheduler", "cachemap", "simulator", "bench"):
        assert package in copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}\n" in ignored, f"{name} is not sent to the build"


def test_the_image_does_not_run_as_root():
    users = re.findall(r"^USER (\S+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert users
    assert not users[-1].startswith(("0", "root"))


def test_prometheus_accepts_its_configuration():
    checked = subprocess.run(
        [installed("promtool"), "check", "config", str(PROMETHEUS)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_prometheus_scrapes_the_services_by_their_ports():
    ports = {int(word.split(":")[1]) for word in worker_arguments()}
    config = yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))
    targets = {
        target
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets == {"router:8000"} | {f"workers:{port}" for port in ports}


def worker_arguments() -> list[str]:
    words = SERVICES["workers"]["command"]
    return [word.removeprefix("--worker=") for word in words if word.startswith("--worker=")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The services by name and port, `{"workers:8100": "127.0.0.1:41234", ...}`, all running.

    Commands and configuration are those of the Compose file; only addresses differ.
    """
    folder = tmp_path_factory.mktemp("compose")
    with ExitStack() as stack:
        words = [
            re.sub(r"^(--worker=\w+:)\d+", r"\g<1>0", w) for w in SERVICES["workers"]["command"]
        ]
        words = ["--host=127.0.0.1" if word.startswith("--host") else word for word in words]
        command = [sys.executable, *SERVICES["workers"]["entrypoint"][1:], *words, "--speed=20"]
        workers = stack.enter_context(running(command, stdout=subprocess.PIPE))
        assert workers.stdout is not None
        described = json.loads(workers.stdout.readline())["workers"]
        where = {
            f"workers:{word.split(':')[1]}": worker["url"].removeprefix("http://")
            for word, worker in zip(worker_arguments(), described, strict=True)
        }
        where["router:8000"] = f"127.0.0.1:{free_port()}"

        config = (ROOT / "deploy/config/compose.yaml").read_text(encoding="utf-8")
        path = folder / "config.yaml"
        path.write_text(substituted(config, where), encoding="utf-8")
        words = SERVICES["router"]["command"]
        words = [str(path) if word.startswith("/etc/pdrouter/") else word for word in words]
        command = [sys.executable, "-m", "router.cli", *words, "--port", port_of(where)]
        stack.enter_context(running(command, stdout=subprocess.DEVNULL))
        ready = f"http://{where['router:8000']}/health/ready"
        eventually(lambda: bool(get(ready)), 30, "the router is ready")
        yield where


def port_of(where: dict[str, str]) -> str:
    return where["router:8000"].split(":")[1]


def substituted(text: str, where: dict[str, str]) -> str:
    for name, address in where.items():
        text = text.replace(name, address)
    return text


def test_the_cluster_answers(cluster):
    body = {"model": "glm-5.2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"http://{cluster['router:8000']}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        reply = json.loads(answer.read())
    assert reply["choices"][0]["message"]["content"]
    assert reply["usage"]["completion_tokens"] == 8


def test_prometheus_scrapes_the_cluster(cluster, tmp_path):
    """Real Prometheus with the shipped configuration finds every target up."""
    program = installed("prometheus")
    config = substituted(PROMETHEUS.read_text(encoding="utf-8"), cluster)
    config = config.replace("scrape_interval: 5s", "scrape_interval: 1s")
    config = config.replace("scrape_timeout: 4s", "scrape_timeout: 1s")
    path = tmp_path / "prometheus.yml"
    path.write_text(config, encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        program,
        f"--config.file={path}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]

    def all_up() -> bool:
        answer = json.loads(get(f"http://{address}/api/v1/query?query=up"))
        values = [sample["value"][1] for sample in answer["data"]["result"]]
        return len(values) == len(cluster) and set(values) == {"1"}

    with running(command):
        eventually(all_up, 30, "every target is up")
        answer = json.loads(get(f"http://{address}/api/v1/query?query=pdrouter_worker_up"))
        samples = {s["metric"]["pool"]: s["value"][1] for s in answer["data"]["result"]}
        assert samples == {"prefill-a": "1", "decode-a": "1"}
