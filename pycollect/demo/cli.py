"""The command line of `python -m pycollect demo`. Help imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
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
    """Check the arguments, train and report; return the exit code: 0, or 130 after Ctrl-C."""
    if args.backend == "single" and args.workers not in (None, 1):
        parser.error(
            f"--workers: expected 1 with --backend single, got {args.workers}; "
            "use --envs-per-worker"
        )
    missing = _missing_extra(args.env, args.backend)
    if missing is not None:
        parser.error(missing)
    from gymnasium.error import Error

    from pycollect.demo.report import summary
    from pycollect.demo.train import make_task, train

    actors = 0 if args.backend == "single" else args.workers or 2
    try:
        task = make_task(args.env, max(1, actors), args.envs_per_worker)
    except (ValueError, Error) as error:
        parser.error(f"--env: {error}")
    target = task.target if args.target is None else args.target
    task = replace(task, frames=args.frames or task.frames, target=target)
    setup = f"{task.num_envs} environments in this process"
    if actors:
        setup = f"{actors} Ray actors with {task.num_envs} environments each"
    goal = f"{task.frames:,} frames"
    if target is not None:
        goal = f"until mean return {target:g} or {goal}"
    print(f"{task.env_id}: PPO, {setup}, {goal}", flush=True)
    run = train(task, actors, args.seed)
    print(f"\n{summary(run)}\n{_plot_row(run, setup, args.output)}", flush=True)
    return 130 if run.outcome == "interrupted" else 0


def _missing_extra(env_id: str, backend: str) -> str | None:
    """Return a message about a missing package and how to continue, or None."""
    if not is_installed("gymnasium"):
        return "gymnasium is not installed: pip install gymnasium"
    if env_id.startswith("ALE/") and not is_installed("ale_py"):
        return (
            f"{env_id} needs ale-py, which is not installed: "
            "pip install ale-py opencv-python-headless"
        )
    if backend == "ray" and not is_installed("ray"):
        return "ray is not installed: pip install ray, or run in this process with --backend single"
    return None


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported, without importing it."""
    return find_spec(module) is not None


def _plot_row(run: Any, setup: str, folder: Path) -> str:
    """Save the plot; return the summary's last row: its path, or why there is none."""
    from pycollect.demo.report import row, save_plot

    if not run.points:
        return row("plot", "none, no batch was collected")
    if not is_installed("matplotlib"):
        return row("plot", "none, matplotlib is not installed: pip install matplotlib")
    title = f"PPO on {run.task.env_id}, {setup}"
    return row("plot", str(save_plot(run, title, folder)))
