"""Tasks for the demo: Gymnasium ids with vector or pixel observations and discrete actions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from pycollect.demo.ppo import PPOConfig


class EnvFactory(Protocol):
    """Makes a vector environment: a function or a `partial`, so that it can be pickled."""

    def __call__(self) -> Any:
        """Make the environment."""


class Spaces(NamedTuple):
    """The shape of one observation and the number of actions, for the network."""

    observation: tuple[int, ...]
    actions: int


@dataclass(frozen=True)
class Task:
    """An environment with all settings of the demo.

    `steps` is the length of a rollout per environment, `frames` the maximum number of frames,
    `target` the mean return that ends the run early (or None), `threads` the learner's torch
    threads.
    """

    env_id: str
    make_env: EnvFactory
    num_envs: int
    steps: int
    frames: int
    target: float | None
    threads: int
    spaces: Spaces
    ppo: PPOConfig


def make_vector_env(env_id: str, num_envs: int, **kwargs: Any) -> Any:
    """Return `num_envs` copies of `env_id`, in its own vector implementation if it has one."""
    import gymnasium

    register(env_id)
    native = gymnasium.spec(env_id).vector_entry_point is not None
    mode = "vector_entry_point" if native else "sync"
    return gymnasium.make_vec(env_id, num_envs=num_envs, vectorization_mode=mode, **kwargs)


def register(env_id: str) -> None:
    """Register Atari ids in Gymnasium if this id is one."""
    if is_atari(env_id):
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)


def is_atari(env_id: str) -> bool:
    """Return whether the id is one of ale-py's."""
    return env_id.startswith("ALE/")


def make_task(env_id: str, workers: int, num_envs: int | None = None) -> Task:
    """Inspect one environment, and return the task for `workers` workers of `num_envs` each.

    Raises:
        ValueError: The demo's PPO does not support its spaces.
        gymnasium.error.Error: Gymnasium does not know the id.
    """
    make = _make_atari_task if is_atari(env_id) else _make_vector_task
    return make(env_id, workers, num_envs)


def _make_vector_task(env_id: str, workers: int, num_envs: int | None) -> Task:
    num_envs = num_envs or 32
    make_env = partial(make_vector_env, env_id, num_envs)
    return Task(
        env_id=env_id,
        make_env=make_env,
        num_envs=num_envs,
        steps=64,
        frames=300_000,
        target=reward_threshold(env_id),
        threads=1,
        spaces=look_at(env_id, make_env),
        ppo=PPOConfig(learning_rate=2e-3),
    )


def _make_atari_task(env_id: str, workers: int, num_envs: int | None) -> Task:
    num_envs = num_envs or 8
    cores = len(os.sched_getaffinity(0))
    # Defaults of the emulator: a stack of 4 gray 84x84 frames, frame skip 4.
    make_env = partial(make_vector_env, env_id, num_envs, num_threads=max(1, cores // workers))
    return Task(
        env_id=env_id,
        make_env=make_env,
        num_envs=num_envs,
        steps=128,
        frames=30_000,
        target=reward_threshold(env_id),
        # Half of the cores: a learner that contends for cores waits in OpenMP's spin loops.
        threads=max(1, cores // 2),
        spaces=look_at(env_id, make_env),
        ppo=PPOConfig(learning_rate=5e-4, epochs=3, clip=0.1),
    )


def reward_threshold(env_id: str) -> float | None:
    """Return the mean return at which Gymnasium considers the environment solved, or None."""
    import gymnasium

    register(env_id)
    threshold = gymnasium.spec(env_id).reward_threshold
    return None if threshold is None else float(threshold)


def look_at(env_id: str, make_env: EnvFactory) -> Spaces:
    """Make one environment, and return its spaces."""
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
    return Spaces(shape, int(action.n))
