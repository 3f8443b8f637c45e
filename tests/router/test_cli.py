"""What the command line says and returns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import httpx
import pytest

from router import __version__, cli
from router.demo import claim_port

CONFIG = """
models:
  - {name: glm, pools: [{name: d, role: decode, workers: [{url: "http://127.0.0.1:1"}]}]}
"""


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pdrouter {__version__}\n"


@pytest.mark.parametrize("arguments", [["serv"], []])
def test_an_unknown_command_lists_what_there_is(arguments, capsys):
    assert cli.main(arguments) == 2
    text = capsys.readouterr().err
    for command in cli.COMMANDS:
        assert command in text
    assert ("there is no command 'serv'" in text) == bool(arguments)


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_commands_have_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert "--port" in capsys.readouterr().out


@pytest.mark.parametrize("port", ["-1", "65536", "http", "8000.0"])
def test_a_port_that_is_none_is_refused(port, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", "--port", port])
    assert caught.value.code == 2
    assert "argument --port" in capsys.readouterr().err


def test_a_bad_configuration_stops_serve_with_the_path_of_the_fault(tmp_path, capsys):
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG.replace("http://127", "htp://127"))
    assert cli.main(["serve", "--config", str(path)]) == 2
    text = capsys.readouterr().err
    assert str(path) in text
    assert "models[0].pools[0].workers[0].url: not an http:// address" in text


def test_a_missing_file_stops_serve(tmp_path, capsys):
    assert cli.main(["serve", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_module_can_be_run():
    done = subprocess.run(
        [sys.executable, "-m", "router.cli", "nope"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "there is no command 'nope'" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_listens_on_the_port_given_and_ends_well_when_told_to(number):
    port = claim_port(0)
    command = (sys.executable, "-m", "router.cli", "serve", "--config", "-", "--port", str(port))
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(CONFIG)
            process.stdin.close()
            with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
                assert client.get(f"http://127.0.0.1:{port}/health/live").status_code == 200
            process.send_signal(number)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("given", "run"),
    [
        (["simulate-worker", "--worker", "both:0"], ["simulator", "--worker", "both:0"]),
        (["replay", "t.jsonl", "--url", "u"], ["bench", "replay", "t.jsonl", "--url", "u"]),
        (["bench", "--list"], ["bench", "--list"]),
    ],
)
def test_some_commands_become_another_program(given, run, monkeypatch):
    class Replaced(Exception):
        pass

    def execv(path: str, arguments: list[str]) -> None:
        raise Replaced(path, arguments)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(Replaced) as caught:
        cli.main(given)
    assert caught.value.args == (sys.executable, [sys.executable, "-m", *run])


def test_a_package_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main(["simulate-worker"]) == 2
    assert "'simulator' is not installed" in capsys.readouterr().err
