"""The command line: `pdrouter COMMAND ...`, or `python -m router.cli COMMAND ...`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec

from router import __version__
from router.config import Config, ConfigError, load

COMMANDS: Mapping[str, str] = {
    "serve": "run the router with a configuration file",
    "demo": "run a whole cluster on this machine: simulated workers and a router",
    "simulate-worker": "run simulated workers (python -m simulator)",
    "replay": "send real traffic to a router (python -m bench replay)",
    "bench": "measure and verify (python -m bench)",
}

# These take their own options and run in place of this process.
_PASSED_ON: Mapping[str, tuple[str, ...]] = {
    "simulate-worker": ("simulator",),
    "replay": ("bench", "replay"),
    "bench": ("bench",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit status (2: wrong usage or configuration)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given[0] if given else ""
    if command in _PASSED_ON:
        return _pass_on(_PASSED_ON[command], given[1:])
    if command and command not in COMMANDS and not command.startswith("-"):
        print(f"pdrouter: there is no command {command!r}\n\n{_overview()}", file=sys.stderr)
        return 2
    options = _parser().parse_args(given)
    if options.command == "serve":
        return _serve(options.config, options.port)
    if options.command == "demo":
        return _demo(options.port)
    print(_overview(), file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdrouter",
        usage="pdrouter COMMAND [options]",
        description=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pdrouter {__version__}")
    commands = parser.add_subparsers(dest="command", help=argparse.SUPPRESS)
    serve = commands.add_parser("serve", description=COMMANDS["serve"])
    serve.add_argument(
        "--config", required=True, metavar="FILE", help="YAML file; - reads standard input"
    )
    serve.add_argument("--port", type=_port, help="listen here instead of on listen.port")
    demo = commands.add_parser("demo", description=COMMANDS["demo"])
    demo.add_argument(
        "--port", type=_port, default=8000, help="port of the router (8000); 0 takes a free one"
    )
    return parser


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {what}" for name, what in COMMANDS.items())
    return "\n".join(("commands:", *lines, "", "pdrouter COMMAND --help says more."))


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _serve(path: str, port: int | None) -> int:
    try:
        config = load(path)
    except ConfigError as error:
        print(f"pdrouter: the configuration {path} cannot be used:\n{error}", file=sys.stderr)
        return 2
    # Imported late, so that a wrong file is refused without loading a web server.
    from router.app import run

    # The server ends in good order on both signals and then raises them again: being told to stop
    # is not a failure.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        run(config if port is None else _listening_on(config, port))
    return 0


def _listening_on(config: Config, port: int) -> Config:
    listen = config.listen.model_copy(update={"port": port})
    return config.model_copy(update={"listen": listen})


def _demo(port: int) -> int:
    from router.demo import run_demo

    return run_demo(port)


def _pass_on(target: Sequence[str], arguments: Sequence[str]) -> int:
    """Replace this process by another package's command line. Returns only if there is none."""
    package, *subcommand = target
    if find_spec(package) is not None:
        os.execv(sys.executable, [sys.executable, "-m", package, *subcommand, *arguments])
    print(f"pdrouter: the package {package!r} is not installed here", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
