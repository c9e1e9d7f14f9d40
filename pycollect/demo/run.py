"""The demo command: check requirements, choose the collector, train and report."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from pycollect.demo.collect import ray, single
from pycollect.demo.plot import save_plot
from pycollect.demo.report import row, summary
from pycollect.demo.tasks import Task, is_atari, make_task
from pycollect.demo.train import Run, train


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Run the demo; return the exit code: 0, or 130 after Ctrl-C."""
    if args.backend == "single" and args.workers not in (None, 1):
        parser.error(
            f"--workers: expected 1 with --backend single, got {args.workers}; "
            "use --envs-per-worker"
        )
    missing = missing_extra(args.env, args.backend)
    if missing is not None:
        parser.error(missing)
    workers = 1 if args.backend == "single" else args.workers or 2
    task = settle(parser, args, workers)
    return train_and_report(task, args, workers)


def missing_extra(env_id: str, backend: str) -> str | None:
    """Return a message about a missing package and how to continue, or None."""
    if not is_installed("gymnasium"):
        return "gymnasium is not installed: pip install gymnasium"
    if is_atari(env_id) and not is_installed("ale_py"):
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


def settle(parser: argparse.ArgumentParser, args: argparse.Namespace, workers: int) -> Task:
    """Return the task with the caller's choices; exit if it is impossible."""
    from gymnasium.error import Error

    try:
        task = make_task(args.env, workers, args.envs_per_worker)
    except (ValueError, Error) as error:
        parser.error(f"--env: {error}")
    frames = args.frames or task.frames
    return replace(task, frames=frames, target=task.target if args.target is None else args.target)


def train_and_report(task: Task, args: argparse.Namespace, workers: int) -> int:
    """Train, print the summary, save the plot."""
    if args.backend == "single":
        make = partial(single, task)
        setup = f"{task.num_envs} environments in this process"
    else:
        make = partial(ray, task, workers)
        setup = f"{workers} Ray actors with {task.num_envs} environments each"
    print(f"{task.env_id}: PPO, {setup}, {goal(task)}", flush=True)
    result = train(task, make, args.seed)
    print(f"\n{summary(result)}\n{plot_row(result, setup, args.output)}", flush=True)
    return 130 if result.outcome == "interrupted" else 0


def goal(task: Task) -> str:
    """Describe when the run ends."""
    budget = f"{task.frames:,} frames"
    return budget if task.target is None else f"until mean return {task.target:g} or {budget}"


def plot_row(result: Run, setup: str, folder: Path) -> str:
    """Save the plot; return the summary's last row: its path, or why there is none."""
    if not result.points:
        return row("plot", "none, no batch was collected")
    if not is_installed("matplotlib"):
        return row("plot", "none, matplotlib is not installed: pip install matplotlib")
    title = f"PPO on {result.task.env_id}, {setup}"
    return row("plot", str(save_plot(result, title, folder)))
