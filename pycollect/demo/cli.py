"""The command line of `python -m pycollect demo`. Help imports no torch."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

_EXAMPLES = """examples:
  python -m pycollect demo                              # CartPole, two Ray actors
  python -m pycollect demo --backend single             # in this process, without Ray
  python -m pycollect demo --env ALE/Pong-v5 --workers 4
"""


def add_command(commands: Any) -> None:
    """Add `demo` to the subparsers of `python -m pycollect`."""
    parser = commands.add_parser(
        "demo",
        help="train PPO on a Gymnasium environment and report where the time went",
        description="Train PPO with a collector, until the mean return of the last 100 episodes\n"
        "reaches the target or the maximum number of frames is collected.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--env",
        default="CartPole-v1",
        help="Gymnasium id, such as ALE/Pong-v5 (default: %(default)s)",
    )
    add(
        "--backend",
        choices=("ray", "single"),
        default="ray",
        help="collect in Ray actors or in this process (default: %(default)s)",
    )
    add("--workers", type=positive, metavar="N", help="number of Ray actors (default: 2)")
    add(
        "--envs-per-worker",
        type=positive,
        metavar="N",
        help="number of environments per worker (default: 32; 8 for Atari)",
    )
    add(
        "--frames",
        type=positive,
        metavar="N",
        help="stop after this many frames (default: 300000; 30000 for Atari)",
    )
    add(
        "--target",
        type=float,
        metavar="RETURN",
        help="stop at this mean return (default: the reward threshold registered in Gymnasium)",
    )
    add("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    add(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="FOLDER",
        help="folder for the plot (default: %(default)s)",
    )
    parser.set_defaults(run=partial(_run, parser), parser=parser)


def positive(text: str) -> int:
    """Return an int of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {value}")
    return value


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from pycollect.demo.run import run

    return run(parser, args)
