"""The demo's loop: collect, learn, send the weights, and record the progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tqdm import tqdm

from pycollect.demo.interrupt import Interrupt
from pycollect.demo.ppo import PPO, ActorCritic
from pycollect.demo.tasks import Task

RECENT_EPISODES = 100
"""Number of episodes in the average `episode_return` of collectors."""

Outcome = Literal["target", "budget", "interrupted"]


class Clock:
    """Wall-clock seconds by activity."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`, also after an exception."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Point:
    """The state of the run after one batch.

    Attributes:
        seconds: Time since training began.
        frames: Number of frames collected.
        mean_return: Mean return of recent episodes; nan before the first has ended.
    """

    seconds: float
    frames: int
    mean_return: float


@dataclass
class Run:
    """Data for the summary and the plot; `stats` are the collector's."""

    task: Task
    clock: Clock = field(default_factory=Clock)
    points: list[Point] = field(default_factory=list)
    outcome: Outcome = "budget"
    stats: dict[str, Any] = field(default_factory=dict)


def train(task: Task, make_collector: Callable[[Any], Any], seed: int) -> Run:
    """Train until the target, the last frame or Ctrl-C; always shut the collector down.

    Args:
        task: The task.
        make_collector: Makes the collector for a policy.
        seed: Seed of the network, the learner and the collector.
    """
    run = Run(task)
    torch.manual_seed(seed)
    net = ActorCritic(*task.spaces)
    with Interrupt() as interrupt, _threads(task.threads):
        with run.clock.measure("start"):
            collector = make_collector(net.policy())
        try:
            with run.clock.measure("start"):
                collector.set_seed(seed)
            with interrupt.insistence():
                _loop(run, collector, PPO(net, task.ppo), interrupt)
        except KeyboardInterrupt:
            pass
        finally:
            with run.clock.measure("stop"):
                run.stats = collector.stats()
                collector.shutdown()
        if interrupt.requested:
            run.outcome = "interrupted"
    return run


def _loop(run: Run, collector: Any, learner: PPO, interrupt: Interrupt) -> None:
    task, clock = run.task, run.clock
    batches = iter(collector)
    start = time.perf_counter()
    with tqdm(total=task.frames, desc=task.env_id, unit=" frames", unit_scale=True) as bar:
        while not interrupt.requested:
            with clock.measure("collect"):
                batch = next(batches, None)
            if batch is None:
                return
            stats = collector.stats()
            with clock.measure("learn"):
                learner.learn(batch, remaining=1 - stats["frames"] / task.frames)
            with clock.measure("push weights"):
                collector.update_policy_weights_()
            point = Point(time.perf_counter() - start, stats["frames"], _mean_return(stats))
            run.points.append(point)
            bar.set_postfix_str(f"return {point.mean_return:.1f}", refresh=False)
            bar.update(min(point.frames, task.frames) - bar.n)
            if _has_passed(stats, task.target):
                run.outcome = "target"
                return


def _has_passed(stats: dict[str, Any], target: float | None) -> bool:
    """Return whether a full window of recent episodes averages at least the target."""
    full = stats["episodes"] >= RECENT_EPISODES
    return target is not None and full and _mean_return(stats) >= target


def _mean_return(stats: dict[str, Any]) -> float:
    mean = stats["episode_return"]
    return float("nan") if mean is None else float(mean)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
