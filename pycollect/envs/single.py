"""One `gymnasium.Env` as an EnvBatch without a batch dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from pycollect._core import Leaf
from pycollect.data.extras import ExtraValues
from pycollect.data.layout import Key
from pycollect.envs.base import (
    Arrays,
    BoolArray,
    EnvBatch,
    EnvSpec,
    FastStep,
    observation_of,
    random_step,
    reset_env,
    seed_each,
    step_values,
)
from pycollect.envs.gymnasium_support import declared_reward
from pycollect.envs.info import Tap
from pycollect.envs.info_rows import entry_of
from pycollect.envs.spaces import (
    Array,
    Space,
    action_leaves,
    conform,
    conform_scalar,
    entry_names,
    leaf_spaces,
    make_flatten,
    make_read_extras,
    make_unflatten,
    observation_extras,
    observation_leaves,
)


class SingleEnv(EnvBatch):
    """One environment with any supported spaces.

    An observation leaf of shape () and an integer dtype (from a Discrete space) is returned as a
    Python int. Any other leaf is an array [*frame] in the dtype of the space.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.spec = EnvSpec(
            batch_size=(),
            observation=observation_leaves(env.observation_space),
            action=action_leaves(env.action_space),
            action_space=env.action_space,
            extras=observation_extras(env.observation_space),
        )
        self._env = env
        # Bound once, because each lookup of `env.step` costs as much as a check.
        self._step: Callable[[Any], Any] = env.step
        self._to_action = make_act(env.action_space)
        self._to_arrays = make_observe(env.observation_space)
        self.owned = [env]
        self._extra_values: Sequence[Any] = ()
        if self.spec.extras:
            self._keep_extras(make_read_extras(env.observation_space))
        reward = declared_reward(env, lambda: random_step(self)[1])
        if reward is not None:
            self.spec = replace(self.spec, reward=reward)

    def _keep_extras(self, read: Callable[[Any], Sequence[Any]]) -> None:
        """Also read the extras of every observation from now on."""
        to_arrays = self._to_arrays

        def observe(value: Any) -> Any:
            self._extra_values = read(value)
            return to_arrays(value)

        self._to_arrays = observe

    def tap_info(self) -> Callable[[Key], list[Any]]:
        tap = Tap()
        self._step = tap.wrap(self._step)
        return lambda key: [entry_of(tap.info, key)]

    def current_extras(self) -> ExtraValues:
        pairs = zip(self.spec.extras, self._extra_values, strict=True)
        return {extra.key: [value] for extra, value in pairs}

    @property
    def fast_step(self) -> FastStep | None:
        """See `EnvBatch.fast_step`; ``None`` if an action or the only leaf is nested."""
        space = self._env.observation_space
        is_array = isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)
        names = entry_names(space)
        is_fast = is_array or names or len(self.spec.observation) > 1
        if any(_is_small_integer(leaf) for leaf in self.spec.observation):
            names = ()  # the recorder reads any Python int as int64
        if self._to_action not in (unwrap, same) or not is_fast:
            return None
        scalars, extra_names = self._to_action is unwrap, entry_names(space, extras=True)
        return FastStep(self._step, self._to_arrays, scalars, names, extra_names)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset the environment, with the one seed of `seeds`; return its observation [*frame]."""
        (seed,) = seed_each(seeds, 1)
        return self._to_arrays(observation_of(reset_env(self._env, seed)))

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """Step the environment; return reward and flags without a conversion."""
        result = step_values(self._step(self._to_action(action)))
        observation, reward, terminated, truncated, _ = result
        return self._to_arrays(observation), reward, terminated, truncated

    def reset_done(self, done: BoolArray) -> Arrays:
        """Reset the environment (`done` is [True]) and return its observation."""
        return self._to_arrays(observation_of(reset_env(self._env)))


def make_act(space: Space) -> Callable[[Any], Any]:
    """Return a function from the arrays of one environment's action to the argument of its `step`.

    The function rebuilds nested actions, and returns numpy scalars for Discrete spaces.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return unwrap if isinstance(space, spaces.Discrete) else same
    unflatten = make_unflatten(space)
    scalar = [isinstance(child, spaces.Discrete) for _, child in leaf_spaces(space, (), "action")]
    if len(scalar) == 1:
        return lambda action: unflatten((action[()] if scalar[0] else action,))
    return lambda action: unflatten(
        [leaf[()] if s else leaf for leaf, s in zip(action, scalar, strict=True)]
    )


def make_observe(space: Space, env: str = "the environment") -> Callable[[Any], Any]:
    """Return a function that checks and casts one environment's observation to `Arrays`.

    Args:
        env: Name of the environment in error messages.
    """
    leaves = observation_leaves(space)
    if not leaves:
        return lambda value: ()
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return _observe_leaf(leaves[0], env)
    flatten = make_flatten(space)
    checks = [_observe_leaf(leaf, env) for leaf in leaves]
    if len(checks) == 1:
        return lambda value: checks[0](flatten(value)[0])
    return lambda value: tuple(
        [check(entry) for check, entry in zip(checks, flatten(value), strict=True)]
    )


def _is_small_integer(leaf: Leaf) -> bool:
    """Return whether the leaf is one integer of a dtype that cannot hold every int64."""
    dtype = np.dtype(leaf.dtype)
    return leaf.shape == () and dtype.kind in "iu" and dtype != np.int64


def _observe_leaf(leaf: Leaf, env: str) -> Callable[[Any], Any]:
    dtype, shape = np.dtype(leaf.dtype), leaf.shape
    if _is_small_integer(leaf):
        return lambda value: conform_scalar(value, leaf, env)
    if shape == () and dtype.kind in "iu":  # the core checks the range of an int64
        return lambda value: value if type(value) is int else conform_scalar(value, leaf, env)

    def observe(value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype is dtype and value.shape == shape:
            return value
        return conform(value, leaf, shape, env)

    return observe


def same(action: Array) -> Array:
    """Return an action that needs no conversion."""
    return action


def unwrap(action: Array) -> Any:
    """Return an array of shape () as a numpy scalar."""
    return action[()]
