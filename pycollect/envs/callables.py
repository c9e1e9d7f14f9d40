"""P single environments as one batch, stepped one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from pycollect._core import StepEach
from pycollect.data.extras import ExtraValues
from pycollect.data.frame import ONE_REWARD
from pycollect.data.layout import Key
from pycollect.envs.base import (
    Arrays,
    BoolArray,
    EnvBatch,
    observation_of,
    reset_env,
    seed_each,
    step_values,
)
from pycollect.envs.gymnasium_support import SEVERAL_REWARDS
from pycollect.envs.info import Tap
from pycollect.envs.info_rows import entry_of
from pycollect.envs.single import SingleEnv, make_act, make_observe, same, unwrap
from pycollect.envs.spaces import (
    Array,
    make_read_extras,
)


class CallablesEnv(EnvBatch):
    """P single environments in this process, with observations in reused buffers [P, *frame].

    Args:
        envs: Environments with equal action spaces and equal observation leaves.

    Raises:
        ValueError: The list is empty, an environment's spaces differ from those of the first one,
            or a space is not supported.
    """

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
        if not envs:
            raise ValueError("create_env_fn: expected at least one callable, got an empty list")
        first = envs[0]
        self.spec = replace(SingleEnv(first).spec, batch_size=(len(envs),))
        self._check_equal_specs(envs)
        self._envs = list(envs)
        self._steps: list[Callable[[Any], Any]] = [env.step for env in envs]
        self._to_action = make_act(first.action_space)
        self._observe = [
            make_observe(env.observation_space, f"environment {i}") for i, env in enumerate(envs)
        ]
        self._buffers = tuple(
            np.zeros((len(envs), *leaf.shape), leaf.dtype) for leaf in self.spec.observation
        )
        self._step_each: StepEach | None = None
        self._is_plain = len(self.spec.action) == len(self._buffers) == 1 and not self.spec.extras
        self.owned = self._envs
        self._extra_values: list[Sequence[Any]] = [()] * len(envs)
        if self.spec.extras:
            self._keep_extras([make_read_extras(env.observation_space) for env in envs])

    def _keep_extras(self, reads: Sequence[Callable[[Any], Sequence[Any]]]) -> None:
        """Also read the extras of every observation from now on."""
        self._observe = [
            self._keeping(i, read, observe)
            for i, (read, observe) in enumerate(zip(reads, self._observe, strict=True))
        ]

    def _keeping(
        self, i: int, read: Callable[[Any], Sequence[Any]], observe: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        def keep_and_observe(value: Any) -> Any:
            self._extra_values[i] = read(value)
            return observe(value)

        return keep_and_observe

    def tap_info(self) -> Callable[[Key], list[Any]]:
        taps = [Tap() for _ in self._steps]
        self._steps = [tap.wrap(step) for tap, step in zip(taps, self._steps, strict=True)]
        self._step_each = None
        return lambda key: [entry_of(tap.info, key) for tap in taps]

    def current_extras(self) -> ExtraValues:
        columns = zip(*self._extra_values, strict=True)
        return {extra.key: list(c) for extra, c in zip(self.spec.extras, columns, strict=True)}

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset every environment, with one seed each; return the observations [P, *frame]."""
        each = seed_each(seeds, len(self._envs))
        for i, (env, seed) in enumerate(zip(self._envs, each, strict=True)):
            self._store(i, observation_of(reset_env(env, seed)))
        return self._arrays()

    def step(self, action: Arrays) -> tuple[Arrays, Array, BoolArray, BoolArray]:
        """Step every environment; the next step may overwrite the returned arrays.

        The reward is float64 [P] or [P, k], the flags are bool [P].
        """
        if self._is_plain:
            if self._step_each is None:
                self._step_each = self._make_step_each()
            return self._step_each(action)
        spec, count = self.spec, len(self._steps)
        several = spec.reward.shape if spec.reward != ONE_REWARD else ()
        reward = np.empty((count, *several), np.float64)
        terminated = np.empty(count, np.bool_)
        truncated = np.empty(count, np.bool_)
        single = len(spec.action) == 1
        for i, step in enumerate(self._steps):
            # The ellipsis keeps the action of a Box of shape () an array.
            row = action[i, ...] if single else [leaf[i, ...] for leaf in action]
            result = step_values(step(self._to_action(row)))
            observation, value, terminated[i], truncated[i], _ = result
            self._store_reward(reward, i, value)
            self._store(i, observation)
        return self._arrays(), reward, terminated, truncated

    def _make_step_each(self) -> StepEach:
        """Return a compiled `step` for observations and actions of one array each."""
        shape = self.spec.action[0].shape
        no_conversion = unwrap if shape == () else same
        to_action = None if self._to_action is no_conversion else self._to_action
        (objectives,) = self.spec.reward.shape
        return StepEach(self._steps, self._observe, to_action, self._buffers[0], objectives)

    def _store_reward(self, rewards: Array, i: int, reward: Any) -> None:
        shape = rewards.shape[1:]
        if shape and np.shape(reward) != shape:
            raise ValueError(
                f"reward: expected shape {list(shape)} from environment {i}, which its "
                f"reward_space declares, got shape {list(np.shape(reward))}"
            )
        try:
            rewards[i] = reward
        except (TypeError, ValueError):
            raise ValueError(
                f"reward: expected one number, got {reward!r}{SEVERAL_REWARDS}"
            ) from None

    def reset_done(self, done: BoolArray) -> Arrays:
        """Reset the environments selected by `done` (bool [P]); keep the other rows."""
        for i in np.flatnonzero(done):
            self._store(i, observation_of(reset_env(self._envs[i])))
        return self._arrays()

    def _store(self, i: Any, observation: Any) -> None:
        value = self._observe[i](observation)
        if len(self._buffers) == 1:
            self._buffers[0][i] = value
            return
        for buffer, leaf in zip(self._buffers, value, strict=True):
            buffer[i] = leaf

    def _arrays(self) -> Arrays:
        return self._buffers[0] if len(self._buffers) == 1 else self._buffers

    def _check_equal_specs(self, envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
        first = self.spec
        for i, env in enumerate(envs[1:], 1):
            other = SingleEnv(env).spec
            if (other.observation, other.extras) != (first.observation, first.extras):
                raise ValueError(
                    "create_env_fn: the environments of a list must have observations with equal "
                    f"keys, dtypes and shapes, got {envs[0].observation_space} from environment 0 "
                    f"and {env.observation_space} from environment {i}"
                )
            if other.action_space != first.action_space:
                raise ValueError(
                    "create_env_fn: the environments of a list must have equal action spaces, got "
                    f"{first.action_space} from environment 0 and {other.action_space} from "
                    f"environment {i}"
                )
            if other.reward != first.reward:
                raise ValueError(
                    "create_env_fn: the environments of a list must have rewards of equal shapes, "
                    f"got {list(first.reward.shape)} from environment 0 and "
                    f"{list(other.reward.shape)} from environment {i}"
                )
