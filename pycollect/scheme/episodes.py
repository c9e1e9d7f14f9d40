"""Returns and infos of ended episodes, and the mean return of an actor."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycollect.scheme.names import TRAIN_REWARD
from pycollect.scheme.protocols import Infos

_RECENT = 100  # the usual window of other libraries


class EpisodeReturns:
    """Sums the rewards of P environments by episode."""

    def __init__(self) -> None:
        self._running: Tensor | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def restart(self) -> None:
        """Forget open episodes after a reset of all environments."""
        self._running = None

    def add(self, reward: Tensor, ended: Sequence[int]) -> None:
        """Add a step: rewards ``[P, 1]`` and the environments with an ended episode."""
        running = reward.clone() if self._running is None else self._running + reward
        if ended:
            self._recent.extend(running[ended, 0].tolist())
            running[ended] = 0.0
        self._running = running

    @property
    def mean(self) -> float:
        """Mean return of the last 100 episodes; nan before the first has ended."""
        return float(np.mean(self._recent)) if self._recent else float("nan")


class EpisodeInfos:
    """Collects the numbers in the infos of ended episodes."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[float]] = defaultdict(list)

    def add(self, infos: Infos, ended: Sequence[int]) -> None:
        """Add a step: its infos and the environments with an ended episode."""
        if isinstance(infos, Mapping):
            for name, values in infos.items():
                if ended and isinstance(values, np.ndarray):
                    self._numbers[_named(name)].extend(values[list(ended)])
            return
        for place in ended:
            for name, value in infos[place].get("episode", {}).items():
                if isinstance(value, (float, int, np.number)):
                    self._numbers[_named(name)].append(float(value))

    def means(self) -> dict[str, Any]:
        """Return the mean of each number over the ended episodes."""
        return {name: np.mean(values) for name, values in self._numbers.items()}


def _named(name: str) -> str:
    return TRAIN_REWARD if name == "r" else name


def is_test_due(algo: Any, rollout: int, updates: int) -> bool:
    """Return whether a test is due in one of the `updates` after `rollout` earlier rollouts."""
    numbers = np.arange(rollout * updates, (rollout + 1) * updates)
    return algo.num_test_episodes > 0 and bool((numbers % algo.test_every == 0).any())


def mean_return(algo: Any, actor: Any, envs: Any, episodes: int) -> float:
    """Return the mean return of an actor, in evaluation mode, with deterministic actions.

    The number of episodes of each environment is fixed in advance, as in Stable-Baselines3's
    ``evaluate_policy``. Taking the episodes that end first, as PyTorchRL does, favors short ones.
    """
    count = envs.num_envs
    wanted = np.array([(episodes + place) // count for place in range(count)])
    finished = np.zeros(count, int)
    running = np.zeros(count)
    returns: list[float] = []
    actor.eval()
    try:
        obs, rhs, done = actor.actor_initial_states(envs.reset())
        with torch.no_grad():
            while (finished < wanted).any():
                _, clipped, rhs, _ = algo.acting_step(obs, rhs, done, deterministic=True)
                obs, reward, done, _ = envs.step(clipped)
                running += reward.cpu().squeeze(-1).numpy()
                ended = done.cpu().squeeze(-1).numpy() == 1.0
                returns += running[ended & (finished < wanted)].tolist()
                finished += ended
                running[ended] = 0.0
    finally:
        actor.train()
    return float(np.mean(returns))
