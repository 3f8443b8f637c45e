"""The command line: what it prints, what it refuses, and workers of several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import orjson
import pytest

from simulator.__main__ import main

COMMAND = [sys.executable, "-m", "simulator", "--model", "tiny"]
CHAT = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Why? " * 99}]}


@contextmanager
def process(*args):
    """A simulator process; yields what it said when it was ready."""
    with subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE) as started:
        try:
            assert started.stdout is not None
            yield orjson.loads(started.stdout.readline()), started
        finally:
            started.terminate()
            assert started.wait(10) is not None


def test_it_says_where_its_workers_are_and_ends_on_sigterm():
    args = ("--worker", "prefill:0", "--worker", "decode:0:dec", "--alias", "little")
    with process(*args) as (said, started):
        named = [(worker["name"], worker["role"]) for worker in said["workers"]]
        assert named == [("p0", "prefill"), ("dec", "decode")]
        reply = httpx.get(said["workers"][1]["url"] + "/v1/models").json()
        assert [model["id"] for model in reply["data"]] == ["tiny", "little"]
        started.send_signal(signal.SIGTERM)
        assert started.wait(10) == 0


def test_kv_moves_between_processes_until_one_is_killed():
    with (
        process("--worker", "prefill:0", "--speed", "50") as (one, prefill),
        process("--worker", "decode:0", "--speed", "50") as (other, _),
        httpx.Client(timeout=20) as client,
    ):
        p, d = one["workers"][0]["url"], other["workers"][0]["url"]
        path = "/v1/chat/completions"

        def first_leg():
            body = CHAT | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            return client.post(p + path, json=body).json()["kv_transfer_params"]

        plain = client.post(p + path, json=CHAT).json()["choices"][0]["message"]
        params = first_leg()
        reply = client.post(d + path, json=CHAT | {"kv_transfer_params": params}).json()
        assert reply["choices"][0]["message"] == plain
        assert client.get(d + "/sim/state").json()["external_tokens_total"] > 100
        for _ in range(200):
            if client.get(p + "/sim/state").json()["pinned_requests"] == 0:
                break
        else:
            raise AssertionError("the prefill worker was not told")
        params = first_leg()
        os.kill(prefill.pid, signal.SIGKILL)
        prefill.wait(10)
        reply = client.post(d + path, json=CHAT | {"kv_transfer_params": params})
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, 500)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "--worker"),
        (["--worker", "prefill"], "want ROLE:PORT"),
        (["--worker", "chef:0"], "want ROLE:PORT"),
        (["--worker", "both:99999"], "want ROLE:PORT"),
        (["--worker", "both:0:a", "--worker", "both:0:a"], "already"),
        (["--worker", "both:0", "--profile", "abacus"], "b300-tp4"),
        (["--worker", "both:0", "--speed", "0"], "above 0"),
        (["--worker", "both:0", "--capacity-tokens", "0"], "at least 1"),
        (["--worker", "both:0", "--host", "192.0.2.1"], "cannot listen"),
    ],
)
def test_bad_arguments_are_explained(args, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--model", "tiny", *args])
    assert caught.value.code
    assert said in str(caught.value) + capsys.readouterr().err


def test_events_without_their_extra_are_explained(monkeypatch):
    monkeypatch.delitem(sys.modules, "simulator.kv_publisher", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(SystemExit, match=r"zmq.*pdrouter\[events\]"):
        main(["--model", "tiny", "--worker", "both:0", "--kv-events"])


def test_without_events_nothing_of_the_extra_is_imported():
    code = "import simulator.__main__, sys; sys.exit(bool({'zmq', 'msgspec'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
