"""`python -m pycollect COMMAND`: finds the command and runs it. Help imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import pycollect
from pycollect.bench.cli import add_command as add_bench
from pycollect.cpp import cmake_dir, include_dir
from pycollect.demo.cli import add_command as add_demo

_EXAMPLES = """examples:
  python -m pycollect demo --backend single    # train PPO on CartPole in this process
  python -m pycollect bench cpu --quick        # collectors beside a plain loop
  cmake -Dpycollect_DIR=$(python -m pycollect --cmake-dir) ...
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit code, 130 after Ctrl-C."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.tell is not None:
        try:
            print(args.tell())
        except FileNotFoundError as error:
            sys.exit(str(error))
        return 0
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pycollect",
        description="Data collection for reinforcement learning.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tells = parser.add_mutually_exclusive_group()
    for name, tell, text in (
        ("--version", lambda: pycollect.__version__, "print the version"),
        ("--cmake-dir", cmake_dir, "print where CMake finds the C++ core"),
        ("--include-dir", include_dir, "print where its headers are"),
    ):
        tells.add_argument(name, action="store_const", const=tell, dest="tell", help=text)
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(metavar="command")
    add_demo(commands)
    add_bench(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
