"""One `gymnasium.Env` as an EnvBatch without a batch, and P of them as a batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from pycollect._core import Leaf, StepEach
from pycollect.data.extras import ExtraValues
from pycollect.data.frame import ONE_REWARD
from pycollect.data.layout import Key, show
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
from pycollect.envs.gymnasium_support import SEVERAL_REWARDS, declared_reward
from pycollect.envs.info_rows import entry_of
from pycollect.envs.spaces import (
    Array,
    Space,
    action_leaves,
    conform,
    describe,
    has_any,
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

    def __init__(self, env: gymnasium.Env[Any, Any], name: str = "the environment") -> None:
        self.spec = EnvSpec(
            batch_size=(),
            observation=observation_leaves(env.observation_space),
            action=action_leaves(env.action_space),
            action_space=env.action_space,
            extras=observation_extras(env.observation_space),
        )
        self.env = env
        # Bound once, because each lookup of `env.step` costs as much as a check.
        self.step_env: Callable[[Any], Any] = env.step
        self.to_action = make_act(env.action_space)
        self.to_arrays = make_observe(env.observation_space, name)
        self.owned = [env]
        self.extra_values: Sequence[Any] = ()
        if self.spec.extras:
            self._keep_extras(make_read_extras(env.observation_space))
        reward = declared_reward(env, lambda: random_step(self)[1])
        if reward is not None:
            self.spec = replace(self.spec, reward=reward)

    def _keep_extras(self, read: Callable[[Any], Sequence[Any]]) -> None:
        """Also read the extras of every observation from now on."""
        to_arrays = self.to_arrays

        def observe(value: Any) -> Any:
            self.extra_values = read(value)
            return to_arrays(value)

        self.to_arrays = observe

    def tap_info(self) -> Callable[[Key], list[Any]]:
        step, info = self.step_env, None

        def step_and_keep_info(action: Any) -> Any:
            nonlocal info
            result = step(action)
            info = result[4]
            return result

        self.step_env = step_and_keep_info
        return lambda key: [entry_of(info, key)]

    def current_extras(self) -> ExtraValues:
        pairs = zip(self.spec.extras, self.extra_values, strict=True)
        return {extra.key: [value] for extra, value in pairs}

    @property
    def fast_step(self) -> FastStep | None:
        """See `EnvBatch.fast_step`; ``None`` if an action or the only leaf is nested."""
        space = self.env.observation_space
        is_array = isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)
        names = _entry_names(space)
        is_fast = is_array or names or len(self.spec.observation) > 1
        if any(_is_small_integer(leaf) for leaf in self.spec.observation):
            names = ()  # the recorder reads any Python int as int64
        if self.to_action not in (unwrap, same) or not is_fast:
            return None
        scalars, extra_names = self.to_action is unwrap, _entry_names(space, extras=True)
        return FastStep(self.step_env, self.to_arrays, scalars, names, extra_names)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        return self._reset(*seed_each(seeds, 1))

    def _reset(self, seed: int | None = None) -> Arrays:
        return self.to_arrays(observation_of(reset_env(self.env, seed)))

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """Step the environment; return reward and flags without a conversion."""
        result = step_values(self.step_env(self.to_action(action)))
        observation, reward, terminated, truncated, _ = result
        return self.to_arrays(observation), reward, terminated, truncated

    def reset_done(self, done: BoolArray) -> Arrays:
        return self._reset()


class CallablesEnv(EnvBatch):
    """P single environments with equal spaces in this process; observations in reused buffers."""

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
        self._rows = [SingleEnv(env, f"environment {i}") for i, env in enumerate(envs)]
        for i, row in enumerate(self._rows):
            _check_alike(self._rows[0], row, i)
        self.spec = replace(self._rows[0].spec, batch_size=(len(envs),))
        self._step_each: StepEach | None = None
        self.owned = list(envs)
        self._allocate()

    def _allocate(self) -> None:
        spec = self.spec
        self._buffers = tuple(
            np.zeros((*spec.rows, *leaf.shape), leaf.dtype) for leaf in spec.observation
        )
        self._is_plain = len(spec.action) == len(self._buffers) == 1 and not spec.extras

    def tap_info(self) -> Callable[[Key], list[Any]]:
        reads = [row.tap_info() for row in self._rows]
        self._step_each = None
        return lambda key: [value for read in reads for value in read(key)]

    def current_extras(self) -> ExtraValues:
        columns = zip(*(row.extra_values for row in self._rows), strict=True)
        return {extra.key: list(c) for extra, c in zip(self.spec.extras, columns, strict=True)}

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        each = seed_each(seeds, len(self._rows))
        for i, (row, seed) in enumerate(zip(self._rows, each, strict=True)):
            self._store(i, row._reset(seed))
        return self._arrays()

    def step(self, action: Arrays) -> tuple[Arrays, Array, BoolArray, BoolArray]:
        """Step every environment; the next step may overwrite the returned arrays.

        The reward is float64 [P] or [P, k], the flags are bool [P].
        """
        if self._is_plain:
            if self._step_each is None:
                self._step_each = self._make_step_each()
            return self._step_each(action)
        spec, count = self.spec, len(self._rows)
        several = spec.reward.shape if spec.reward != ONE_REWARD else ()
        reward = np.empty((count, *several), np.float64)
        terminated = np.empty(count, np.bool_)
        truncated = np.empty(count, np.bool_)
        single = len(spec.action) == 1
        for i, row in enumerate(self._rows):
            # The ellipsis keeps the action of a Box of shape () an array.
            taken = action[i, ...] if single else [leaf[i, ...] for leaf in action]
            observation, value, terminated[i], truncated[i] = row.step(taken)
            _store_reward(reward, i, value)
            self._store(i, observation)
        return self._arrays(), reward, terminated, truncated

    def _make_step_each(self) -> StepEach:
        """Return a compiled `step` for observations and actions of one array each."""
        to_action = self._rows[0].to_action
        needs_none = to_action is (unwrap if self.spec.action[0].shape == () else same)
        (objectives,) = self.spec.reward.shape
        return StepEach(
            [row.step_env for row in self._rows],
            [row.to_arrays for row in self._rows],
            None if needs_none else to_action,
            self._buffers[0],
            objectives,
        )

    def reset_done(self, done: BoolArray) -> Arrays:
        for i in np.flatnonzero(done):
            self._store(i, self._rows[i]._reset())
        return self._arrays()

    def _store(self, i: Any, value: Arrays) -> None:
        if len(self._buffers) == 1:
            self._buffers[0][i] = value
            return
        for buffer, leaf in zip(self._buffers, value, strict=True):
            buffer[i] = leaf

    def _arrays(self) -> Arrays:
        return self._buffers[0] if len(self._buffers) == 1 else self._buffers


def _store_reward(rewards: Array, i: int, reward: Any) -> None:
    shape = rewards.shape[1:]
    if shape and np.shape(reward) != shape:
        raise ValueError(
            f"reward: expected shape {list(shape)} from environment {i}, which its "
            f"reward_space declares, got shape {list(np.shape(reward))}"
        )
    try:
        is_row = not shape and np.shape(reward) == (1,)
        rewards[i] = reward[0] if is_row else reward
    except (TypeError, ValueError):
        raise ValueError(f"reward: expected one number, got {reward!r}{SEVERAL_REWARDS}") from None


def _check_alike(first: SingleEnv, other: SingleEnv, i: int) -> None:
    """Raise a ValueError if environment i has other spaces than the first one."""
    a, b = first.spec, other.spec
    for what, is_equal, expected, got in (
        (
            "observations with equal keys, dtypes and shapes",
            (a.observation, a.extras) == (b.observation, b.extras),
            first.env.observation_space,
            other.env.observation_space,
        ),
        ("equal action spaces", a.action_space == b.action_space, a.action_space, b.action_space),
        (
            "rewards of equal shapes",
            a.reward == b.reward,
            list(a.reward.shape),
            list(b.reward.shape),
        ),
    ):
        if not is_equal:
            raise ValueError(
                f"create_env_fn: the environments of a list must have {what}, got {expected} from "
                f"environment 0 and {got} from environment {i}"
            )


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
    """Return a function that checks and casts one environment's observation to `Arrays`."""
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


def _entry_names(space: Space, extras: bool = False) -> tuple[Any, ...]:
    """Return the keys of a Dict space's leaves, or of its extras, in order; () if it is nested."""
    children = space.spaces if isinstance(space, spaces.Dict) else {}
    if any(isinstance(child, spaces.Dict | spaces.Tuple) for child in children.values()):
        return ()
    return tuple([key for key, child in children.items() if has_any(child, extras)])


def conform_scalar(value: Any, leaf: Leaf, env: str = "the environment") -> int:
    """Return an integer observation of shape () as a Python int."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(
            f"observation: {show(leaf.key)}: expected an integer, as in the observation space "
            f"of {env}, got {describe(value)}"
        ) from error
    limits = np.iinfo(leaf.dtype)
    if limits.min <= number <= limits.max:
        return number
    raise ValueError(
        f"observation: {show(leaf.key)}: expected {leaf.dtype} ({limits.min} to {limits.max}), as "
        f"in the observation space of {env}, got {number}"
    )


def same(action: Array) -> Array:
    """Return an action that needs no conversion."""
    return action


def unwrap(action: Array) -> Any:
    """Return an array of shape () as a numpy scalar."""
    return action[()]
