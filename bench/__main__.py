"""`python -m bench NAME`: each command measures one claim and says whether it holds."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

# Each module has HELP, add_arguments(parser) and run(options) -> exit status.
COMMANDS = ("equality", "replay", "disconnects", "overhead")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--list", action="store_true", help="say what each command shows")
    commands = parser.add_subparsers(dest="command", metavar="NAME")
    modules = {name: importlib.import_module(f"bench.{name}") for name in COMMANDS}
    for name, module in modules.items():
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(sub)
    options = parser.parse_args(arguments)
    if options.list or options.command is None:
        for name, module in modules.items():
            print(f"{name:12} {module.HELP}")
        return 0 if options.list else 2
    # So that a terminated bench leaves through its context managers and stops its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return int(modules[options.command].run(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
