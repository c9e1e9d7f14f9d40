"""Vector environments with one fault each, and correct ones, for tests of the checker."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from faulty_envs import Sound
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space


class Rows(VectorEnv):
    """Random walks with autoreset mode as a class attribute; each row has its own generator."""

    mode: Any = AutoresetMode.NEXT_STEP
    declared: Any = AutoresetMode.NEXT_STEP

    def __init__(self, num_envs: int = 3) -> None:
        self.metadata = {"autoreset_mode": self.declared} if self.declared else {}
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generators = [np.random.default_rng(i) for i in range(num_envs)]
        self.places = np.zeros((num_envs, 2), np.float32)
        self.ended = np.zeros(num_envs, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.generators = [np.random.default_rng(own) for own in seed]
        self.start(self.mask(options))
        return self.places.copy(), {}

    def mask(self, options: Any) -> Any:
        masked = options is not None and "reset_mask" in options
        return options["reset_mask"] if masked else np.ones(self.num_envs, bool)

    def start(self, rows: Any) -> None:
        for row in np.flatnonzero(rows):
            self.places[row] = self.generators[row].normal(size=2)
        self.ended = self.ended & ~rows

    def step(self, actions: Any) -> Any:
        resets = (
            self.ended if self.mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        )
        moved = self.places + 0.5 * actions
        self.places = np.where(resets[:, None], self.places, moved).astype(np.float32)
        self.start(resets)
        rolls = np.array([own.random() for own in self.generators]) < 0.2
        terminated, info = rolls & ~resets, {}
        self.ended = terminated
        reward = np.where(resets, 0.0, self.places.sum(1))
        if self.mode is AutoresetMode.SAME_STEP and terminated.any():
            info = self.final(self.places.copy())
            self.start(terminated)
        return self.places.copy(), reward, terminated, np.zeros(self.num_envs, bool), info

    def final(self, places: Any) -> dict[str, Any]:
        return {"final_obs": places}


class CostsOfActions(VectorWrapper):
    def __init__(self) -> None:
        super().__init__(Rows())

    def step(self, actions: Any) -> Any:
        observation, reward, *rest = self.env.step(actions)
        return observation, reward - np.square(actions).sum(1), *rest


class SameStepRows(Rows):
    mode = declared = AutoresetMode.SAME_STEP


class DisabledRows(Rows):
    mode = declared = AutoresetMode.DISABLED


class KeepsEnds(Rows):
    """The first step after a reset also resets the rows that had ended before."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        ended = self.ended
        result = super().reset(seed=seed, options=options)
        self.ended = ended
        return result


class UndeclaredMode(Rows):
    declared = None


class SaysNextStep(SameStepRows):
    declared = AutoresetMode.NEXT_STEP


class SaysNextStepInSilence(SaysNextStep):
    def final(self, places: Any) -> dict[str, Any]:
        return {}


class SaysNextStepAndShowsNothing(SaysNextStepInSilence):
    """Only its rewards depend on actions."""

    def reset(self, **arguments: Any) -> Any:
        observation, info = super().reset(**arguments)
        return np.zeros_like(observation), info

    def step(self, actions: Any) -> Any:
        observation, *rest = super().step(actions)
        return np.zeros_like(observation), *rest


class SaysDisabled(SameStepRows):
    declared = AutoresetMode.DISABLED


class NeverResets(DisabledRows):
    declared = AutoresetMode.NEXT_STEP


class NoFinal(SameStepRows):
    def final(self, places: Any) -> dict[str, Any]:
        return {}


class IgnoresMask(DisabledRows):
    def mask(self, options: Any) -> Any:
        return np.ones(self.num_envs, bool)


class ColumnRewards(Rows):
    def step(self, actions: Any) -> Any:
        observation, reward, *rest = super().step(actions)
        return observation, reward[:2], *rest


class ReturnsItsBuffer(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros((3, 2), np.float32)

    def step(self, actions: Any) -> Any:
        observation, *rest = super().step(actions)
        self.buffer[:] = observation
        return self.buffer, *rest


class EqualRows(Rows):
    def step(self, actions: Any) -> Any:
        return super().step(np.repeat(actions[:1], self.num_envs, 0))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=[0] * self.num_envs, options=None)


class IgnoresSeeds(Rows):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(options=options)


class TwiceTheSame(SyncVectorEnv):
    def __init__(self) -> None:
        env = Sound()
        super().__init__([lambda: env] * 2)


class TensorRows(SameStepRows):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        return torch.from_numpy(observation), info

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, torch.Tensor)
        observation, *rest, info = super().step(actions.numpy())
        final = {key: torch.from_numpy(own) for key, own in info.items()}
        return torch.from_numpy(observation), *map(torch.from_numpy, rest), final


class TensorsWithNaN(TensorRows):
    def step(self, actions: Any) -> Any:
        observation, *rest = super().step(actions)
        observation[1, 0] = torch.nan
        return observation, *rest
