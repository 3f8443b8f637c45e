"""`python -m bench NAME`: each command measures one claim and says whether it holds."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

# What each shows. The module of that name has add_arguments(parser) and run(options) -> status;
# it is imported when it is asked for, since some need packages that a router does without.
COMMANDS = {
    "equality": "text through prefill and decode workers is that of one aggregated worker",
    "replay": "real traffic: hit rate, balance, latency, and whether the router's metrics agree",
    "disconnects": "clients that leave at any phase leave no work, lease, socket or memory behind",
    "overhead": "CPU per call and chunk, added time to first token, memory; beside peers if given",
}


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        return _run(arguments[0], arguments[1:])
    listing = "\n".join(f"  {name:12} {shows}" for name, shows in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog=f"commands:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="say what each command shows")
    parser.add_argument("command", nargs="?", metavar="NAME", choices=sorted(COMMANDS))
    if not parser.parse_args(arguments).list:
        parser.print_help()
        return 2
    print(listing)
    return 0


def _run(name: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(f"bench.{name}")
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=COMMANDS[name])
    module.add_arguments(parser)
    options = parser.parse_args(arguments)
    # So that a terminated bench leaves through its context managers and stops its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return int(module.run(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
