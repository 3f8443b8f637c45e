"""Command line: `python -m simulator --worker ROLE:PORT[:NAME] ... --model NAME`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import resource
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

import orjson
import uvloop

from simulator import profile
from simulator.server import Fleet
from simulator.worker import Role, WorkerConfig

_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "both": "both"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulator",
        description="Simulated engine workers: vLLM on the wire, a GPU in time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--worker",
        action="append",
        required=True,
        metavar="ROLE:PORT[:NAME]",
        help="a worker; ROLE is prefill, decode or both; PORT 0 is a free one; repeat for more",
    )
    add("--model", required=True, help="name the workers serve")
    add("--alias", action="append", default=[], help="further name; repeat for more")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--profile", default="b300-tp4", help="shipped profile or a profile file")
    add("--speed", type=_positive, default=1.0, help="everything this many times as fast")
    add("--capacity-tokens", type=_count, help="KV capacity (default: the profile's)")
    add("--block-tokens", type=_count, default=16, help="tokens of a KV block")
    add("--max-model-len", type=_count, help="window (default: the profile's)")
    add("--max-running", type=_count, help="sequences in a batch (default: the profile's)")
    add("--max-batched-tokens", type=_count, help="token budget of a step (default: the profile's)")
    add(
        "--kv-load-failure-policy",
        choices=("fail", "recompute"),
        default="fail",
        help="what a decode worker does when KV cannot be had",
    )
    add(
        "--kv-transfer",
        choices=("pull", "push"),
        default="pull",
        help="whether decode workers fetch KV or prefill workers send it",
    )
    add("--kv-lease-s", type=_positive, default=30.0, help="how long a prefill worker keeps KV")
    add("--stream-interval", type=_count, default=1, help="tokens of an event")
    add("--api-key", help="key that /v1 asks for")
    add("--kv-events", action="store_true", help="publish KV cache events (extra `events`)")
    add("--admin-port", type=int, default=0, help="port of /sim/workers for the whole process")
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _configs(args: argparse.Namespace) -> list[WorkerConfig]:
    fitted = profile.resized(
        profile.load(args.profile),
        capacity_tokens=args.capacity_tokens,
        max_model_len=args.max_model_len,
        max_running=args.max_running,
        max_batched_tokens=args.max_batched_tokens,
    )
    configs: list[WorkerConfig] = []
    counts = {"prefill": 0, "decode": 0, "both": 0}
    for text in args.worker:
        role_text, _, rest = text.partition(":")
        port, _, name = rest.partition(":")
        if role_text not in _ROLES or not port.isdigit() or int(port) > 65535:
            raise SystemExit(f"--worker {text}: want ROLE:PORT[:NAME], e.g. prefill:8101:p0")
        name = name or f"{role_text[0]}{counts[role_text]}"
        counts[role_text] += 1
        if any(config.name == name for config in configs):
            raise SystemExit(f"--worker {text}: there is a worker {name} already")
        configs.append(
            WorkerConfig(
                name=name,
                role=_ROLES[role_text],
                port=int(port),
                profile=fitted,
                names=(args.model, *args.alias),
                host=args.host,
                speed=args.speed,
                block_tokens=args.block_tokens,
                lease_s=args.kv_lease_s,
                recompute_failed_loads=args.kv_load_failure_policy == "recompute",
                stream_interval=args.stream_interval,
                api_key=args.api_key,
                kv_events=args.kv_events,
                kv_push=args.kv_transfer == "push",
            )
        )
    return configs


async def _serve(configs: Sequence[WorkerConfig], admin_port: int) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with Fleet(configs, admin_port=admin_port) as fleet:
        sys.stdout.write(orjson.dumps(fleet.describe()).decode() + "\n")
        sys.stdout.flush()
        await stopped.wait()


def _require_events() -> None:
    try:
        import_module("simulator.kv_publisher")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"--kv-events needs {error.name}, which the extra `events` brings: "
            "pip install 'pdrouter[events]'"
        ) from error


def _prepare_process() -> None:
    """Room for thousands of streams, and garbage collection that does not rescan old caches."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper())
    try:
        configs = _configs(args)
    except profile.ProfileError as error:
        raise SystemExit(str(error)) from error
    if args.kv_events:
        _require_events()
    _prepare_process()
    try:
        uvloop.run(_serve(configs, args.admin_port))
    except OSError as error:
        raise SystemExit(f"cannot listen: {error}") from error


if __name__ == "__main__":
    main()
