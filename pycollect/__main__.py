"""`python -m pycollect COMMAND`: find the command and run it. Help imports no torch."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence

import pycollect
from pycollect.bench.cli import add_command as add_bench
from pycollect.check.cli import add_command as add_check
from pycollect.cpp import cmake_dir, include_dir
from pycollect.demo.cli import add_command as add_demo

_EXAMPLES = """examples:
  python -m pycollect demo --backend single    # train PPO on CartPole in this process
  python -m pycollect bench cpu --quick        # compare collectors with a plain loop
  python -m pycollect check CartPole-v1        # say what is wrong with an environment
  cmake -Dpycollect_DIR=$(python -m pycollect --cmake-dir) ...
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in the arguments; return the exit code.

    It is 130 after Ctrl-C, and 141 if the reader of stdout, such as ``head``, is gone.
    """
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:  # with the usage of the command, not of the whole program
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return args.run(args) or 0 if args.tell is None else _print(args.tell)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        stdout = select.poll()
        stdout.register(1, 0)
        if not stdout.poll(0):  # it has a reader, so another pipe is broken
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush when Python ends
        return 141


def _print(tell: Callable[[], object]) -> int:
    try:
        print(tell(), flush=True)
    except FileNotFoundError as error:
        sys.exit(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pycollect",
        description="Collect data for reinforcement learning with a compiled core.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tells = parser.add_mutually_exclusive_group()
    for name, tell, text in (
        ("--version", lambda: pycollect.__version__, "print the version"),
        ("--cmake-dir", cmake_dir, "print the C++ core's CMake folder, the value of pycollect_DIR"),
        ("--include-dir", include_dir, "print the folder of the C++ headers"),
    ):
        tells.add_argument(name, action="store_const", const=tell, dest="tell", help=text)
    parser.set_defaults(run=lambda _: parser.print_help(), parser=parser)
    commands = parser.add_subparsers(metavar="command")
    add_demo(commands)
    add_bench(commands)
    add_check(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
