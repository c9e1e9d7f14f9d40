"""`python -m pycollect COMMAND`: finds the command and runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pycollect.cpp import cmake_dir, include_dir

_PLACES = {"--cmake-dir": cmake_dir, "--include-dir": include_dir}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit code, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Builds ask for these, where there may be no torch: nothing is imported for them.
    if len(arguments) == 1 and arguments[0] in _PLACES:
        try:
            print(_PLACES[arguments[0]]())
        except FileNotFoundError as error:
            sys.exit(str(error))
        return 0
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    from pycollect.bench.cli import add_command as add_bench
    from pycollect.demo.cli import add_command as add_demo

    parser = argparse.ArgumentParser(
        prog="python -m pycollect",
        epilog="Alone: --cmake-dir prints where CMake finds the C++ core, --include-dir where its "
        "headers are.",
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    add_demo(commands)
    add_bench(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
