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
        help="train PPO on a real environment, then show where the time went",
        description="Train PPO on what a collector yields, until the mean return of the last 100 "
        "episodes passes the target or the frame budget ends.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--env", default="CartPole-v1", help="a Gymnasium id, e.g. ALE/Pong-v5 [%(default)s]")
    add("--backend", choices=("ray", "single"), default="ray", help="[%(default)s]")
    add("--workers", type=positive, help="Ray actors [2]")
    add("--envs-per-worker", type=positive, help="environments that each steps [32, Atari 8]")
    add("--frames", type=positive, help="the budget [300000, Atari 30000]")
    add("--target", type=float, help="mean return to stop at [the one Gymnasium names, if any]")
    add("--seed", type=int, default=0, help="[%(default)s]")
    add("--output", type=Path, default=Path("demo-output"), help="folder of the plot [%(default)s]")
    parser.set_defaults(run=partial(_run, parser))


def positive(text: str) -> int:
    """A number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {value}")
    return value


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from pycollect.demo.run import run

    return run(parser, args)
