"""Factories of PyTorchRL's components with equal seeds, and programs that use them."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch

with warnings.catch_warnings(), contextlib.redirect_stderr(None):  # hides gym's deprecation notice
    warnings.simplefilter("ignore")
    import gym
    import pytorchrl as prl
    from pytorchrl.agent.actors import OffPolicyActor, OnPolicyActor, get_memory_network
    from pytorchrl.agent.algorithms import PPO, SAC, TD3
    from pytorchrl.agent.env import VecEnv
    from pytorchrl.agent.storages import (
        GAEBuffer,
        NStepReplayBuffer,
        ReplayBuffer,
        VanillaOnPolicyBuffer,
    )
    from pytorchrl.scheme import GWorkerSet, UWorker
    from ray import cloudpickle

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import this file

SEED = 7


class OldEnv(gym.Env):
    """A Gymnasium environment with gym's old interface, which PyTorchRL's vectors call."""

    def __init__(self, env_id: str, index_col_worker: int, index_env: int) -> None:
        self._env = gymnasium.make(env_id)
        self._seed: int | None = 1000 * index_col_worker + index_env
        space = self._env.observation_space
        self.observation_space = gym.spaces.Box(space.low, space.high, dtype=np.float32)
        action = self._env.action_space
        if isinstance(action, gymnasium.spaces.Discrete):
            self.action_space = gym.spaces.Discrete(int(action.n))
        else:
            self.action_space = gym.spaces.Box(action.low, action.high, dtype=np.float32)
        self._return, self._length = 0.0, 0

    def reset(self, **_: Any) -> Any:
        observation, _info = self._env.reset(seed=self._seed)
        self._seed = None
        self._return, self._length = 0.0, 0
        return np.asarray(observation, np.float32)

    def step(self, action: Any) -> Any:
        if isinstance(self.action_space, gym.spaces.Discrete):
            action = int(np.asarray(action).item())
        else:
            action = np.reshape(action, self.action_space.shape)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._return += float(reward)
        self._length += 1
        done = terminated or truncated
        info = {"episode": {"r": self._return, "l": self._length}} if done else {}
        return np.asarray(observation, np.float32), float(reward), done, info

    def close(self) -> None:
        self._env.close()


def make_old_env(env_id: str, index_col_worker: int = 0, index_env: int = 0) -> OldEnv:
    return OldEnv(env_id, index_col_worker, index_env)


@dataclass(frozen=True)
class Factories:
    """The factories that CWorkerSet.create_factory and CWorker take."""

    train_envs_factory: Callable[..., Any]
    test_envs_factory: Callable[..., Any]
    actor_factory: Callable[..., Any]
    algo_factory: Callable[..., Any]
    storage_factory: Callable[..., Any]

    @property
    def named(self) -> dict[str, Callable[..., Any]]:
        return vars(self).copy()


def seeded(make: Callable[..., Any], *place: Any) -> Any:
    """Seed all of a worker's generators when its first component, its environments, is made."""
    index = place[1]
    torch.manual_seed(SEED + index)
    np.random.seed(SEED + index)
    random.seed(SEED + index)
    return make(*place)


def _factories(
    env_id: str, num_envs: int, actor: Any, algo: Any, storage: Any, **actor_kwargs: Any
) -> Factories:
    algo_factory, algo_name = algo
    make_envs, action_space, observation_space = VecEnv.create_factory(
        make_old_env, env_kwargs={"env_id": env_id}, vec_env_size=num_envs
    )
    make_test_envs, _, _ = VecEnv.create_factory(make_old_env, env_kwargs={"env_id": env_id})
    make_actor = actor.create_factory(observation_space, action_space, algo_name, **actor_kwargs)
    return Factories(partial(seeded, make_envs), make_test_envs, make_actor, algo_factory, storage)


_PPO = {"num_mini_batch": 2, "num_epochs": 2, "num_test_episodes": 2, "test_every": 8}
_OFF_POLICY = {"num_updates": 4, "update_every": 12, "start_steps": 20, "mini_batch_size": 16}


def ppo() -> Factories:
    algo = PPO.create_factory(**_PPO)
    return _factories(
        "CartPole-v1", 1, OnPolicyActor, algo, VanillaOnPolicyBuffer.create_factory(48)
    )


def ppo_with_gae_in_processes() -> Factories:
    algo = PPO.create_factory(**_PPO)
    return _factories("CartPole-v1", 2, OnPolicyActor, algo, GAEBuffer.create_factory(32))


def recurrent_ppo() -> Factories:
    algo = PPO.create_factory(**{**_PPO, "num_mini_batch": 1})
    storage = GAEBuffer.create_factory(32)
    net = get_memory_network("GRU")
    return _factories("CartPole-v1", 1, OnPolicyActor, algo, storage, recurrent_net=net)


def td3() -> Factories:
    algo = TD3.create_factory(**_OFF_POLICY, num_test_episodes=0)
    storage = NStepReplayBuffer.create_factory(200, n_step=2)
    return _factories("Pendulum-v1", 1, OffPolicyActor, algo, storage, noise="Gauss")


def sac() -> Factories:
    algo = SAC.create_factory(**_OFF_POLICY, num_test_episodes=0)
    storage = ReplayBuffer.create_factory(200)
    return _factories("Pendulum-v1", 1, OffPolicyActor, algo, storage)


PROGRAMS = [ppo, recurrent_ppo, td3, sac]


def learn(
    worker_set: Any,
    factories: Factories,
    updates: int,
    num_workers: int = 0,
    communication: str = prl.SYNC,
    **arguments: Any,
) -> tuple[list[Any], Any]:
    """Run PyTorchRL's Scheme and Learner over a set; return their infos and weights."""
    col_workers_factory = worker_set.create_factory(num_workers, **factories.named, **arguments)
    grad_workers_factory = GWorkerSet.create_factory(
        num_workers=0, col_workers_factory=col_workers_factory, col_communication=communication
    )
    worker = UWorker(grad_workers_factory=grad_workers_factory, local_device="cpu")
    try:
        infos = [copy.deepcopy(worker.step()) for _ in range(updates)]
        return infos, worker.local_worker.get_weights()
    finally:
        worker.stop()
