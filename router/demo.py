"""`pdrouter demo`: simulated workers and a router on this machine, until Ctrl-C.

Both run as child processes. This one starts them in order, says what to try, and ends them
together, whichever of the three ends first.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import Any

import httpx

MODEL = "glm-5.2-nvfp4"
ALIAS = "glm-5.2"
PROFILE = "b300-tp4"
HOST = "127.0.0.1"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1

SIMULATOR = (
    *(sys.executable, "-m", "simulator", "--host", HOST, "--profile", PROFILE),
    *("--model", MODEL, "--alias", ALIAS, "--log-level", "warning"),
    *("--worker", "prefill:0:prefill-0", "--worker", "prefill:0:prefill-1"),
    *("--worker", "decode:0:decode-0", "--worker", "decode:0:decode-1"),
)
ROUTER = (sys.executable, "-m", "router.cli", "serve", "--config", "-")


def _say(text: str) -> None:
    # At once, also into a pipe or a file: whoever started the demo waits for it.
    print(text, flush=True)


class DemoError(Exception):
    """The demo cannot start or go on; the text says why."""


def run_demo(port: int) -> int:
    """Run until a signal or until a part of it ends; returns the exit status."""
    try:
        with asyncio.Runner() as runner:
            runner.run(_until_signal(port))
    except DemoError as error:
        print(f"pdrouter demo: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("stopped")
    return 0


async def _until_signal(port: int) -> None:
    """Cancelled by SIGINT and SIGTERM, at whatever step."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await demo(port)


async def demo(
    port: int,
    *,
    simulator: Sequence[str] = SIMULATOR,
    router: Sequence[str] = ROUTER,
    say: Callable[[str], None] = _say,
) -> None:
    """Start both commands and wait until cancelled. DemoError if one does not start or ends."""
    if simulator is SIMULATOR and find_spec("simulator") is None:
        raise DemoError("the package 'simulator' is not installed here")
    port = claim_port(port)
    base = f"http://{HOST}:{port}"
    async with _child(simulator, stdin=DEVNULL, stdout=PIPE) as workers:
        config = demo_config(port, await _workers_of(workers))
        async with _child(router, stdin=PIPE) as gateway:
            parts = {"router": gateway, "simulated workers": workers}
            await _hand_over(gateway, json.dumps(config).encode())
            await _until_ready(base, parts)
            say(welcome(base))
            await _until_one_ends(parts)


def claim_port(port: int) -> int:
    """Make sure that a router can listen on `port`, before anything starts; 0 picks a free one."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen(1)
        except OSError as error:
            raise DemoError(
                f"port {port} cannot be used ({error.strerror}); choose another one with "
                "`pdrouter demo --port N` or `make demo PORT=N`"
            ) from None
        claimed: int = listener.getsockname()[1]
    return claimed


def demo_config(port: int, workers: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The configuration of a router before `workers`, each with its `role` and `url`."""
    pools = [
        {
            "name": f"{role}-a",
            "role": role,
            "workers": [{"url": worker["url"]} for worker in workers if worker["role"] == role],
        }
        for role in ("prefill", "decode")
    ]
    model = {"name": MODEL, "aliases": [ALIAS], "prices": PROFILE, "pools": pools}
    return {"listen": {"host": HOST, "port": port}, "models": [model]}


def welcome(base: str) -> str:
    """What to try with the router at `base`."""
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    }
    return f"""
2 prefill and 2 decode workers run behind {base}
They are simulated: their timing is that of a B300, their text means nothing.

Try:

  curl -N {base}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{json.dumps(body)}'

or, in Python:

  from openai import OpenAI
  client = OpenAI(base_url="{base}/v1", api_key="none")
  answer = client.chat.completions.create(
      model="{MODEL}", max_tokens=64,
      messages=[{{"role": "user", "content": "Why is the sky blue?"}}])
  print(answer.choices[0].message.content)

Metrics: {base}/metrics   Health: {base}/health   Stop: Ctrl-C
"""


@asynccontextmanager
async def _child(
    command: Sequence[str], *, stdin: int, stdout: int | None = None
) -> AsyncIterator[Process]:
    """A running child; it is ended on the way out."""
    # In a session of its own: Ctrl-C reaches this process alone, which ends the children in order.
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=stdout,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    try:
        yield process
    finally:
        await _end(process)


def _end_with_parent() -> None:
    """Make the kernel end this process when the demo is killed outright (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except (TimeoutError, asyncio.CancelledError):
        # It hangs, or the user is impatient.
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _workers_of(simulator: Process) -> list[dict[str, str]]:
    """The workers that the simulator announces when all of them listen."""
    assert simulator.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await simulator.stdout.readline()
            if not line:
                await simulator.wait()
    except TimeoutError:
        raise DemoError(f"the simulated workers did not start in {START_TIMEOUT_S:g} s") from None
    _check_running({"simulated workers": simulator})
    workers: list[dict[str, str]] = json.loads(line)["workers"]
    return workers


async def _hand_over(router: Process, config: bytes) -> None:
    assert router.stdin is not None
    # A router that has died already is noticed, and reported, by what comes next.
    with suppress(ConnectionError):
        router.stdin.write(config)
        await router.stdin.drain()
    router.stdin.close()


async def _until_ready(base: str, parts: Mapping[str, Process]) -> None:
    state = "no answer"
    try:
        async with asyncio.timeout(START_TIMEOUT_S), httpx.AsyncClient(trust_env=False) as client:
            while True:
                _check_running(parts)
                with suppress(httpx.TransportError):
                    response = await client.get(f"{base}/health/ready")
                    if response.status_code == 200:
                        return
                    state = response.text
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise DemoError(f"the router was not ready in {START_TIMEOUT_S:g} s: {state}") from None


async def _until_one_ends(parts: Mapping[str, Process]) -> None:
    endings = [asyncio.create_task(process.wait()) for process in parts.values()]
    try:
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for ending in endings:
            ending.cancel()
    _check_running(parts)


def _check_running(parts: Mapping[str, Process]) -> None:
    for name, process in parts.items():
        if process.returncode is not None:
            raise DemoError(
                f"the {name} ended (exit status {process.returncode}); the lines above may say why"
            )
