"""Small deterministic environments for all tests; they need only numpy and Gymnasium.

If a process cannot import this module, pickle the classes by value:
`cloudpickle.register_pickle_by_value(envs_for_tests)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class CountingEnv(gymnasium.Env):
    """Observation (env number, episode, step), reward = step; ends after `length` steps.

    Args:
        number: number of the env, part of its observation.
        length: steps of an episode, or a sequence of lengths to cycle through.
        truncates: episodes end by truncation instead of termination.
        dtype: dtype of the observation.

    `seeds` records the seed of every `reset`, `actions` every action, and `closed` the number of
    `close` calls.
    """

    def __init__(
        self,
        number: int = 0,
        length: int | Sequence[int] = 5,
        truncates: bool = False,
        dtype: Any = np.float32,
    ) -> None:
        self.observation_space = spaces.Box(0, 10_000, (3,), dtype)
        self.action_space = spaces.Discrete(2)
        self.number = number
        self.lengths = (length,) if isinstance(length, int) else tuple(length)
        self.truncates = truncates
        self.episode = -1
        self.steps = 0
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []
        self.closed = 0

    def observe(self) -> Any:
        dtype = self.observation_space.dtype
        return np.array([self.number, self.episode, self.steps], dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode += 1
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.steps += 1
        end = self.steps >= self.lengths[self.episode % len(self.lengths)]
        ends = (False, end) if self.truncates else (end, False)
        return self.observe(), float(self.steps), *ends, {}

    def close(self) -> None:
        self.closed += 1


class ReusedBufferEnv(CountingEnv):
    """A CountingEnv that overwrites and returns the same array each time."""

    buffer: Any = None

    def observe(self) -> Any:
        if self.buffer is None:
            self.buffer = np.zeros(3, self.observation_space.dtype)
        self.buffer[:] = self.number, self.episode, self.steps
        return self.buffer


class EnvBrokeError(RuntimeError):
    """Raised by RaisingEnv."""


class RaisingEnv(CountingEnv):
    """A CountingEnv that raises EnvBrokeError in step `at` (from 1, over its life).

    If `close_raises` is set, `close` also raises it.
    """

    def __init__(self, at: int, close_raises: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.left = at
        self.close_raises = close_raises

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        if self.left == 0:
            raise EnvBrokeError(f"env {self.number} broke")
        return super().step(action)

    def close(self) -> None:
        super().close()
        if self.close_raises:
            raise EnvBrokeError("close broke")


class WrongObservationEnv(CountingEnv):
    """A CountingEnv that declares float32 [3] and returns observations changed by `convert`."""

    def __init__(self, convert: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.convert = convert

    def observe(self) -> Any:
        return self.convert(super().observe())


class ConstantEnv(CountingEnv):
    """A CountingEnv that always observes zeros."""

    def observe(self) -> Any:
        return np.zeros(3, self.observation_space.dtype)


class SparseRewardEnv(CountingEnv):
    """A CountingEnv with zero rewards."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 0.0, terminated, truncated, info


class DiscreteEnv(CountingEnv):
    """Observation Discrete(10_000, start=-3): the step - 3, as a Python int; actions 5 to 7."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = spaces.Discrete(10_000, start=-3)
        self.action_space = spaces.Discrete(3, start=5)

    def observe(self) -> Any:
        return self.steps - 3


class NestedEnv(CountingEnv):
    """Nested observations (step counts in every leaf) and actions, of all numeric kinds."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = spaces.Dict(
            {
                "count": spaces.Box(0, 10_000, (3,), np.float32),
                "pair": spaces.Tuple((spaces.Discrete(10_000), spaces.MultiBinary(4))),
                "deep": spaces.Dict({"er": spaces.MultiDiscrete([[9, 9], [9, 9]])}),
            }
        )
        self.action_space = spaces.Dict(
            {
                "move": spaces.Box(-1, 1, (2,), np.float32),
                "press": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2))),
            }
        )

    def observe(self) -> Any:
        return {
            "count": np.array([self.number, self.episode, self.steps], np.float32),
            "pair": (self.steps, np.full(4, self.steps % 2, np.int8)),
            "deep": {"er": np.full((2, 2), self.steps % 9, np.int64)},
        }


class BoxActionEnv(CountingEnv):
    """Takes actions Box [2] and overwrites them with zeros, because the env owns them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action.copy())
        action[:] = 0
        return result


class ActedEnv(CountingEnv):
    """A CountingEnv with another action space."""

    def __init__(self, space: spaces.Space[Any], number: int = 0) -> None:
        super().__init__(number, length=100)
        self.action_space = space


class PixelEnv(CountingEnv):
    """4 x 84 x 84 uint8, every pixel the step modulo 256; very cheap to step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.frame = np.zeros((4, 84, 84), np.uint8)

    def observe(self) -> Any:
        self.frame[:] = self.steps % 256
        return self.frame


class TextEnv(CountingEnv):
    """Observation: (number, episode, step), also as text, and step + 1 rows of the step number."""

    def __init__(self, number: int = 0, **kwargs: Any) -> None:
        super().__init__(number, **kwargs)
        self.observation_space = spaces.Dict(
            {
                "hint": spaces.Text(20),
                "count": self.observation_space,
                "deep": spaces.Dict({"rows": spaces.Sequence(spaces.Box(0, 99, (2,)), stack=True)}),
            }
        )

    def observe(self) -> Any:
        numbers = (self.number, self.episode, self.steps)
        return {
            "hint": "{} {} {}".format(*numbers),
            "count": np.array(numbers, np.float32),
            "deep": {"rows": np.full((self.steps + 1, 2), self.steps, np.float32)},
        }


class LongDoubleEnv(CountingEnv):
    """Declares two observations, one of a dtype that tensors do not support."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        other = spaces.Box(0, 1, (2,), np.longdouble)
        self.observation_space = spaces.Dict({"count": self.observation_space, "other": other})


class CountingVectorEnv(VectorEnv):
    """CountingEnvs as a foreign vector env in any autoreset mode, with selectable faults.

    Args:
        envs: the single envs.
        mode: NEXT_STEP, SAME_STEP or DISABLED; with ``None``, it uses NEXT_STEP without metadata.
        ignores_mask: a masked reset resets every row.
        swallows: in NEXT_STEP, a reset after an episode's end does not prevent the automatic reset
            in the next step.
        one_seed: accepts only an int as seed.
        batched_final: `final_obs` is one batched observation, not an array of objects.
    """

    def __init__(
        self,
        envs: Sequence[CountingEnv],
        mode: str | None = "NEXT_STEP",
        ignores_mask: bool = False,
        swallows: bool = False,
        one_seed: bool = False,
        batched_final: bool = False,
    ) -> None:
        self.envs = list(envs)
        self.num_envs = len(self.envs)
        self.metadata = {} if mode is None else {"autoreset_mode": AutoresetMode[mode]}
        self.mode = mode or "NEXT_STEP"
        self.ignores_mask, self.swallows, self.one_seed = ignores_mask, swallows, one_seed
        self.batched_final = batched_final
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.rows = np.zeros((self.num_envs, 3), np.float32)
        self.ended = np.zeros(self.num_envs, bool)
        self.masks: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.one_seed and not (seed is None or isinstance(seed, int)):
            raise TypeError("one int, please")
        mask = (options or {}).pop("reset_mask", None)
        self.masks.append(mask)
        if mask is None or self.ignores_mask:
            mask = np.ones(self.num_envs, bool)
        seeds = seed if isinstance(seed, list) else [seed] * self.num_envs
        for i in np.flatnonzero(mask):
            self.rows[i] = self.envs[i].reset(seed=seeds[i])[0]
        if not self.swallows:
            self.ended = self.ended & ~mask
        return self.rows.copy(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        info: dict[str, Any] = {}
        for i, env in enumerate(self.envs):
            if self.mode == "NEXT_STEP" and self.ended[i]:
                self.rows[i] = env.reset()[0]
                continue
            self.rows[i], reward[i], terminated[i], truncated[i], _ = env.step(actions[i])
        self.ended = terminated | truncated
        if self.mode == "SAME_STEP" and self.ended.any():
            info = {"final_obs": self._final(), "_final_obs": self.ended.copy()}
            for i in np.flatnonzero(self.ended):
                self.rows[i] = self.envs[i].reset()[0]
        return self.rows.copy(), reward, terminated, truncated, info

    def _final(self) -> Any:
        if self.batched_final:
            return self.rows.copy()
        final = np.full(self.num_envs, None, object)
        for i in np.flatnonzero(self.ended):
            final[i] = self.rows[i].copy()
        return final

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            env.close()


class CompactVectorEnv(CountingVectorEnv):
    """Like EnvPool: a masked reset returns only the rows of the mask, with their `env_id`.

    A step with ids likewise steps and returns only these environments.
    """

    def __init__(self, envs: Sequence[CountingEnv], **kwargs: Any) -> None:
        super().__init__(envs, **kwargs)
        self.all_env_ids = np.arange(len(envs))

    def step(self, actions: Any, env_id: Any = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if env_id is None:
            return super().step(actions)
        rows = []
        for i, action in zip(env_id, actions, strict=True):
            if self.ended[i]:
                result = (self.envs[i].reset()[0], 0.0, False, False)
            else:
                result = self.envs[i].step(action)[:4]
            self.rows[i], self.ended[i] = result[0], result[2] or result[3]
            rows.append(result)
        columns = (np.array(column[::-1]) for column in zip(*rows, strict=True))
        return (*columns, {"env_id": np.asarray(env_id)[::-1]})

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask")
        observation, info = super().reset(seed=seed, options=options)
        if mask is None:
            return observation, info
        ids = np.flatnonzero(mask)[::-1]
        return observation[ids], {"env_id": ids}


class OldEnvPool:
    """The interface of EnvPool before 1.0: `len`, `config`, `reset(env_id)`, no metadata."""

    def __init__(self, envs: Sequence[CountingEnv], batch_size: int = 0) -> None:
        self.inner = CompactVectorEnv(envs)
        self.observation_space = self.inner.single_observation_space
        self.action_space = self.inner.single_action_space
        self.all_env_ids = np.arange(len(envs))
        self.config = {"num_envs": len(envs), "batch_size": batch_size}

    def __len__(self) -> int:
        return self.inner.num_envs

    def reset(self, env_id: Any = None) -> tuple[Any, dict[str, Any]]:
        if env_id is None:
            return self.inner.reset()
        mask = np.isin(self.all_env_ids, env_id)
        return self.inner.reset(options={"reset_mask": mask})

    def step(self, action: Any, env_id: Any = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self.inner.step(action, env_id)

    def close(self) -> None:
        self.inner.close()
