"""`python -m pycollect COMMAND`: finds the command and runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pycollect.bench.cli import add_command as add_bench
from pycollect.demo.cli import add_command as add_demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit code, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m pycollect")
    commands = parser.add_subparsers(metavar="command", required=True)
    add_demo(commands)
    add_bench(commands)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
