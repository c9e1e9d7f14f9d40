"""The command line of `python -m pycollect demo`, its summary and its plot.

Help imports no torch; only `drawn` imports matplotlib.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycollect.arguments import natural, positive

if TYPE_CHECKING:
    from pycollect.demo.train import Run

_EXAMPLES = """examples:
  python -m pycollect demo                              # CartPole, two Ray actors
  python -m pycollect demo --backend single             # in this process, without Ray
  python -m pycollect demo --env ALE/Pong-v5 --workers 4
"""

_PHASES = {
    "idle": "waiting for workers",
    "env": "environments",
    "policy": "policy",
    "record": "recording",
    "transport": "transport",
    "assemble": "assembly",
    "deliver": "delivery",
    "user": "learning",
}
"""Phases of a run by their names in `stats()["seconds"]`."""
_RETURN, _SPEED, _QUIET = "#1f5fa8", "#d9772b", "0.45"


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
    add("--seed", type=natural, default=0, help="random seed (default: %(default)s)")
    add(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="FOLDER",
        help="folder for the plot (default: %(default)s)",
    )
    parser.set_defaults(run=partial(_run, parser), parser=parser)


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
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: {error}")
    from gymnasium.error import Error

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


def _plot_row(run: Run, setup: str, folder: Path) -> str:
    """Save the plot; return the summary's last row: its path, or why there is none."""
    if not run.points:
        return _row("plot", "none, no batch was collected")
    if not is_installed("matplotlib"):
        return _row("plot", "none, matplotlib is not installed: pip install matplotlib")
    title = f"PPO on {run.task.env_id}, {setup}"
    try:
        return _row("plot", str(save_plot(run, title, folder)))
    except OSError as error:
        return _row("plot", f"none, {error}")


def summary(run: Run) -> str:
    """Return the outcome, the collector's times and the figures, as plain text."""
    return "\n".join([_verdict(run), "", *_times(run), "", *_figures(run)])


def _verdict(run: Run) -> str:
    target = run.task.target
    if run.outcome == "interrupted":
        return "Interrupted."
    if run.outcome == "target":
        return f"Solved: the mean return passed {target:g}."
    if target is None:
        return "The frame budget is used up."
    return f"The frame budget is used up, but the mean return did not pass {target:g}."


def _times(run: Run) -> list[str]:
    seconds = run.stats.get("seconds", {})
    total = seconds.get("elapsed", 0.0)
    rows = {label: seconds[name] for name, label in _PHASES.items() if name in seconds}
    return [
        f"{'where the time went':<24}{'seconds':>10}{'share':>9}",
        *(
            f"{label:<24}{value:>10.2f}{value / total if total else 0.0:>9.1%}"
            for label, value in {**rows, "total": total}.items()
        ),
    ]


def _figures(run: Run) -> list[str]:
    stats = run.stats
    frames, episodes = stats.get("frames", 0), stats.get("episodes", 0)
    workers = [worker["seconds"] for worker in stats.get("workers", {}).values()]
    phases = ("env", "policy", "record")
    worked = sum(seconds.get(name, 0.0) for seconds in workers for name in phases)
    mean = stats.get("episode_return")
    last = f"of the last {min(episodes, run.RECENT_EPISODES)} episodes"
    return [
        _row("frames", f"{frames:,}"),
        _row("frames/s", _rate(frames, run.points[-1].seconds if run.points else 0.0)),
        _row("  of each worker", _rate(frames, worked)),
        _row("episodes", f"{episodes:,}"),
        _row("mean return", "-" if mean is None else f"{mean:.1f} {last}"),
    ]


def _rate(frames: int, seconds: float) -> str:
    return f"{frames / seconds:,.0f}" if seconds else "-"


def _row(label: str, value: str) -> str:
    return f"{label:<24}{value}"


def save_plot(run: Run, title: str, folder: Path) -> Path:
    """Draw a run of at least one batch; save it in `folder`, made if missing; return its path."""
    figure = drawn(run, title)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.task.env_id.replace('/', '-')}.png"
    figure.savefig(path, dpi=150)
    return path


def drawn(run: Run, title: str) -> Any:
    """Return matplotlib's figure of a run with at least one batch: returns and frames/s."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", fontsize=13)
    if all(isnan(point.mean_return) for point in run.points):
        panels = [figure.subplots()]
        figure.supxlabel("No episode ended, so there is no return to show", fontsize=10)
    else:
        panels = [*figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))]
        _draw_returns(panels[0], run)
    _draw_speed(panels[-1], run)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
        axes.tick_params(color=_QUIET, labelcolor="0.3")
    return figure


def _draw_returns(axes: Any, run: Run) -> None:
    known = [point for point in run.points if not isnan(point.mean_return)]
    axes.plot(
        [point.seconds for point in known],
        [point.mean_return for point in known],
        color=_RETURN,
        lw=2,
        marker="o" if len(known) == 1 else None,  # a single point has no line
    )
    axes.margins(y=0.1)  # space for the target's label
    _caption(axes, f"Mean return of the last {run.RECENT_EPISODES} episodes")
    target = run.task.target
    if target is not None:
        axes.axhline(target, color=_QUIET, lw=1, ls="--")
        place = {"xytext": (4, 3), "textcoords": "offset points", "color": _QUIET}
        axes.annotate(f"target {target:g}", (0, target), **place)


def _draw_speed(axes: Any, run: Run) -> None:
    edges = [0.0, *(point.seconds for point in run.points)]
    counts = [0, *(point.frames for point in run.points)]
    speeds = [
        (after - before) / (end - start)
        for (start, end), (before, after) in zip(pairwise(edges), pairwise(counts), strict=True)
    ]
    axes.stairs(speeds, edges, color=_SPEED, lw=1.5)
    axes.stairs(speeds, edges, color=_SPEED, alpha=0.12, fill=True)
    average = counts[-1] / edges[-1]
    axes.axhline(average, color=_QUIET, lw=1, ls="--")
    _caption(axes, f"Frames per second, learning included (dashed: average {average:,.0f})")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _caption(axes: Any, text: str) -> None:
    """Set a caption above the panel, which is easier to read than a rotated axis label."""
    axes.set_title(text, loc="left", fontsize=10, color="0.3")
