"""The demo's task, its collector, and the loop: collect, learn, send the weights."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from tqdm import tqdm

from pycollect.demo.ppo import PPO, ActorCritic, PPOConfig
from pycollect.worker.worker import torch_threads


@dataclass(frozen=True)
class Task:
    """An environment with all settings of the demo."""

    env_id: str
    make_env: Callable[[], Any]  # makes a vector environment; can be pickled
    num_envs: int
    steps: int  # length of a rollout per environment
    frames: int
    target: float | None  # mean return that ends the run early, or ``None``
    threads: int  # number of the learner's torch threads
    spaces: tuple[tuple[int, ...], int]  # shape of one observation, and number of actions
    ppo: PPOConfig


def make_task(env_id: str, workers: int, num_envs: int | None = None) -> Task:
    """Inspect one environment, and return the task for `workers` workers of `num_envs` each.

    Raises:
        ValueError: The demo's PPO does not support its spaces.
        gymnasium.error.Error: Gymnasium does not know the id.
    """
    cores = len(os.sched_getaffinity(0))
    if is_atari(env_id):
        num_envs = num_envs or 8
        # Defaults of the emulator: a stack of 4 gray 84x84 frames, frame skip 4.
        more = {"num_threads": max(1, cores // workers)}
        # Half of the cores: a learner that contends for cores waits in OpenMP's spin loops.
        steps, frames, threads = 128, 30_000, max(1, cores // 2)
        ppo = PPOConfig(learning_rate=5e-4, epochs=3, clip=0.1)
    else:
        num_envs, more = num_envs or 32, {}
        steps, frames, threads, ppo = 64, 300_000, 1, PPOConfig(learning_rate=2e-3)
    make_env = partial(make_vector_env, env_id, num_envs, **more)
    target, spaces = _spec(env_id).reward_threshold, _spaces(env_id, make_env)
    target = None if target is None else float(target)
    return Task(env_id, make_env, num_envs, steps, frames, target, threads, spaces, ppo)


def is_atari(env_id: str) -> bool:
    """Return whether the id is one of ale-py's."""
    return env_id.startswith("ALE/")


def make_vector_env(env_id: str, num_envs: int, **kwargs: Any) -> Any:
    """Return `num_envs` copies of `env_id`, in its own vector implementation if it has one."""
    import gymnasium

    native = _spec(env_id).vector_entry_point is not None
    mode = "vector_entry_point" if native else "sync"
    return gymnasium.make_vec(env_id, num_envs=num_envs, vectorization_mode=mode, **kwargs)


def _spec(env_id: str) -> Any:
    import gymnasium

    if is_atari(env_id):
        import ale_py

        gymnasium.register_envs(ale_py)
    return gymnasium.spec(env_id)


def _spaces(env_id: str, make_env: Callable[[], Any]) -> tuple[tuple[int, ...], int]:
    from gymnasium.spaces import Box, Discrete

    env = make_env()
    observation, action = env.single_observation_space, env.single_action_space
    env.close()
    shape = tuple(observation.shape or ())
    vector = len(shape) == 1 and observation.dtype == np.float32
    pixels = len(shape) == 3 and min(shape[1:]) >= 36 and observation.dtype == np.uint8
    if not (isinstance(observation, Box) and (vector or pixels)):
        raise ValueError(
            "the demo supports float32 vectors and uint8 frames [C, H, W] of at least 36x36, but "
            f"observations of {env_id} are {observation}"
        )
    if not (isinstance(action, Discrete) and action.start == 0):
        raise ValueError(
            "the demo supports Discrete actions that start at 0, but actions of "
            f"{env_id} are {action}"
        )
    return shape, int(action.n)


def make_collector(task: Task, actors: int, policy: Any) -> Any:
    """Return a collector in this process, or one of Ray actors if there are any.

    The actors belong to a new local Ray, not to a running cluster.
    """
    from pycollect import RayCollector, SyncDataCollector

    frames = max(1, actors) * task.num_envs * task.steps
    with warnings.catch_warnings():
        # Advice on cells without a frame, which the demo's PPO masks.
        warnings.filterwarnings("ignore", "create_env_fn: this vector environment")
        if not actors:
            return SyncDataCollector(
                task.make_env,
                policy,
                frames_per_batch=frames,
                total_frames=task.frames,
                num_threads=task.threads,
            )
        return RayCollector(
            [task.make_env] * actors,
            policy,
            frames_per_batch=frames,
            total_frames=task.frames,
            sync=True,
            ray_init_config={
                "address": "local",
                "num_cpus": actors,
                "include_dashboard": False,
                "logging_level": "error",
            },
        )


class Interrupt:
    """Handles SIGINT within a `with` block, in the main thread.

    The first Ctrl-C sets `requested`, which is checked between batches. A second one raises
    KeyboardInterrupt, but only if that is safe: an exception in a half-started Ray would leave
    processes behind. After a request, SIGINT stays ignored after the exit, because the program is
    about to end.
    """

    def __init__(self) -> None:
        self.requested = False
        self._may_raise = False

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._may_raise = False
        signal.signal(signal.SIGINT, signal.SIG_IGN if self.requested else self._previous)

    @contextmanager
    def insistence(self) -> Iterator[None]:
        """Let a second Ctrl-C raise KeyboardInterrupt within."""
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    def _note(self, *_: Any) -> None:
        if self.requested and self._may_raise:
            raise KeyboardInterrupt
        if not self.requested:
            print("\nstopping when this step is complete ...", file=sys.stderr, flush=True)
        self.requested = True


@dataclass(frozen=True)
class Point:
    """The state of the run after one batch; `mean_return` is nan until an episode has ended."""

    seconds: float
    frames: int
    mean_return: float


@dataclass
class Run:
    """Data for the summary and the plot."""

    RECENT_EPISODES: ClassVar[int] = 100  # number of episodes in their average `episode_return`

    task: Task
    points: list[Point] = field(default_factory=list)
    outcome: Literal["target", "budget", "interrupted"] = "budget"
    stats: dict[str, Any] = field(default_factory=dict)  # the collector's statistics


def train(task: Task, actors: int, seed: int) -> Run:
    """Train until the target, the last frame or Ctrl-C; always shut the collector down.

    Without `actors`, this process collects.
    """
    run = Run(task)
    torch.manual_seed(seed)
    net = ActorCritic(*task.spaces)
    with Interrupt() as interrupt, torch_threads(task.threads):
        collector = make_collector(task, actors, net.policy())
        try:
            collector.set_seed(seed)
            with interrupt.insistence():
                _loop(run, collector, PPO(net, task.ppo), interrupt)
        except KeyboardInterrupt:
            pass
        finally:
            run.stats = collector.stats()
            collector.shutdown()
        if interrupt.requested:
            run.outcome = "interrupted"
    return run


def _loop(run: Run, collector: Any, learner: PPO, interrupt: Interrupt) -> None:
    task, start = run.task, time.perf_counter()
    batches = iter(collector)
    with tqdm(total=task.frames, desc=task.env_id, unit=" frames", unit_scale=True) as bar:
        while not interrupt.requested:
            batch = next(batches, None)
            if batch is None:
                return
            stats = collector.stats()
            learner.learn(batch, remaining=1 - stats["frames"] / task.frames)
            collector.update_policy_weights_()
            mean = float("nan") if stats["episode_return"] is None else stats["episode_return"]
            run.points.append(Point(time.perf_counter() - start, stats["frames"], mean))
            bar.set_postfix_str(f"return {mean:.1f}", refresh=False)
            bar.update(min(stats["frames"], task.frames) - bar.n)
            has_enough = stats["episodes"] >= run.RECENT_EPISODES
            if has_enough and task.target is not None and mean >= task.target:
                run.outcome = "target"
                return
