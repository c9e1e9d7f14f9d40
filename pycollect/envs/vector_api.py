"""VectorApi: one interface for the vector environments of different libraries."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from gymnasium import error, spaces
from gymnasium.vector import AsyncVectorEnv

from pycollect.data.frame import ONE_REWARD
from pycollect.envs.arrays import NumpyVectorEnv, check_no_tensors
from pycollect.envs.base import (
    BoolArray,
    close_quietly,
    observation_of,
    reset_env,
    seed_each,
    step_values,
)
from pycollect.envs.gymnasium_support import SEVERAL_REWARDS, declared_reward
from pycollect.envs.info_rows import MaskOptions
from pycollect.envs.random_actions import make_sampler
from pycollect.envs.spaces import (
    Array,
    action_leaves,
    check_real,
    conform,
    make_flatten,
    make_read_rows,
    make_unflatten,
    observation_extras,
    observation_leaves,
)
from pycollect.errors import warn_user

Leaves: TypeAlias = tuple[Array, ...]
VectorStep: TypeAlias = tuple[Leaves, Array, BoolArray, BoolArray, Any]
"""Observation, reward, terminated, truncated and info of all rows."""

_CLOSE_SECONDS = 5.0
_SETTLE_STEPS = 256
_REWARD_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
_FLAG_DTYPES = (np.dtype(np.bool_),)


class VectorApi:
    """A vector environment of any library, with one way to seed, step and reset rows.

    Observations are tuples of arrays [P, *frame] in leaf order, in the dtypes of the space; they
    may be the environment's own buffers.

    Attributes:
        returns_only_reset_rows: Whether a masked reset returned only the reset rows, as EnvPool
            does.
        steps_rows: Whether the environment can step some rows without the others, as EnvPool can.
        overlaps: Whether `send` can begin a step and `receive` wait for it.
        info_is_read: Whether entries of the info are recorded; `step_rows` then expands them.
        reset_clears: Whether the first step after a reset of all rows is a real step in every row,
            even if episodes had just ended. Otherwise (AsyncVectorEnv without shared memory in
            NEXT_STEP mode), `reset` first makes steps until no row has just ended.
        ended: Rows that ended in the last step, bool [P]. A caller that steps `env` directly must
            set it before `reset`, unless `reset_clears`.
        reset_info: Info of the last `reset` of all rows.
        extra_values: Extras of the last observation: a list of P values for each of `extras`.
    """

    def __init__(self, env: Any) -> None:
        old_envpool = not hasattr(env, "num_envs")
        self.env = env
        self.num_envs = int(len(env) if old_envpool else env.num_envs)
        self._check_sizes()
        self.observation_space = (
            env.observation_space if old_envpool else env.single_observation_space
        )
        self.action_space = env.action_space if old_envpool else env.single_action_space
        self.observation = observation_leaves(self.observation_space)
        self.action = action_leaves(self.action_space)
        self.returns_only_reset_rows = False
        self.steps_rows = _takes_ids(env)
        begin_and_wait = _parts_of_step(env)
        self.overlaps = begin_and_wait is not None
        self._begin, self._wait = begin_and_wait or ("", "")
        self._is_stepping = False
        self.info_is_read = False
        self.reset_clears = True
        self.reset_info: Any = {}
        self.ended = np.zeros(self.num_envs, np.bool_)
        self._takes_env_ids = old_envpool
        self._flatten = make_flatten(self.observation_space)
        self.extras = observation_extras(self.observation_space)
        self.extra_values: list[list[Any]] = []
        if self.extras:
            self._keep_extras()
        self._to_action = make_unflatten(self.action_space)
        self._plain_observation = not isinstance(self.observation_space, spaces.Dict | spaces.Tuple)
        self._dtypes = tuple(np.dtype(leaf.dtype) for leaf in self.observation)
        self._row_shape = (self.num_envs,)
        self._shapes = tuple((self.num_envs, *leaf.shape) for leaf in self.observation)
        self._seed_forms = range(3)  # forms of seeds that the environment may accept
        self._as_arrays = isinstance(env, NumpyVectorEnv)
        self._is_new = not self._as_arrays
        declared = declared_reward(env, self._random_reward, self.num_envs)
        self.reward = declared or ONE_REWARD
        self._reward_shape = (*self._row_shape, *(declared.shape if declared else ()))
        self._rewards_are_columns = declared == ONE_REWARD  # [P, 1]

    def _random_reward(self) -> Any:
        self.reset()
        return step_values(self.env.step(self._to_action(next(self.random_actions()))))[1]

    def random_actions(self, seed: int = 0) -> Iterator[Leaves]:
        """Yield random actions of all rows, which are equal for equal seeds."""
        sampler = make_sampler(self.action_space, self.num_envs, batched=True)
        rng = np.random.default_rng(seed)
        while True:
            yield tuple(leaf[0] for leaf in sampler(1, rng))

    def _keep_extras(self) -> None:
        """Also read the extras of every observation from now on."""
        flatten, self.read_extras = self._flatten, make_read_rows(self.observation_space)

        def keep_and_flatten(observation: Any) -> tuple[Any, ...]:
            self.extra_values = self.read_extras(observation)
            return flatten(observation)

        self._flatten = keep_and_flatten

    def _check_sizes(self) -> None:
        if self.num_envs < 1:
            raise ValueError(
                f"create_env_fn: expected num_envs >= 1, got {self.num_envs} from {self.env}"
            )
        config = getattr(self.env, "config", None)
        batch_size = config.get("batch_size") if isinstance(config, dict) else None
        if batch_size is None:
            batch_size = getattr(getattr(self.env, "unwrapped", self.env), "batch_size", None)
        if isinstance(batch_size, int) and batch_size not in (0, self.num_envs):
            raise ValueError(
                "create_env_fn: expected a vector environment that steps all rows at once, got "
                f"batch_size={batch_size} with num_envs={self.num_envs}; omit batch_size"
            )

    def reset(self, seeds: Sequence[int] | None = None) -> Leaves:
        """Reset all rows; with P `seeds`, each row with its own seed if the environment can."""
        if self._is_stepping:
            with contextlib.suppress(Exception):  # the result of this step is discarded
                self.receive()
        if not self.reset_clears:
            self._settle()
        if seeds is None or self._takes_env_ids:
            result = self.env.reset()
        else:
            result = self._seeded_reset(seed_each(seeds, self.num_envs))
        observation = observation_of(result)
        if self._is_new:
            self._is_new = False
            check_no_tensors(observation)
        self.reset_info = result[1]
        return self._conform(self._flatten(observation))

    def _settle(self) -> None:
        for action in islice(self.random_actions(), _SETTLE_STEPS):
            if not self.ended.any():
                return
            self.step(action)
        warn_user(
            f"create_env_fn: {self.env} may skip the first step of some rows after this reset, "
            f"because an episode ended in each of the {_SETTLE_STEPS} steps before it. Use "
            "AsyncVectorEnv with shared_memory=True, or the autoreset mode DISABLED"
        )

    def _seeded_reset(self, seeds: list[int]) -> Any:
        # Gymnasium takes a list of seeds, ALE an array of int32, CartPoleVectorEnv one int.
        forms = (seeds, np.array(seeds, np.uint64).astype(np.int64) & 0x7FFFFFFF, seeds[0])
        for number in self._seed_forms:
            try:
                result = reset_env(self.env, forms[number])
            except (TypeError, ValueError, AssertionError, error.Error):
                if number == self._seed_forms[-1]:
                    raise
            else:
                self._seed_forms = range(number, number + 1)
                return result
        raise AssertionError("unreachable")

    def reset_rows(self, mask: BoolArray) -> Leaves:
        """Reset the rows selected by `mask` (bool [P]); only these rows of the result are defined.

        If the environment honors the mask and returns all rows, the other rows are unchanged.
        """
        if mask.all():
            return self.reset()  # equivalent, and correct even if the environment ignores masks
        if self._takes_env_ids:
            observation, info = self.env.reset(np.flatnonzero(mask).astype(np.int32))
        else:
            observation, info = self.env.reset(options=MaskOptions(mask.copy()))
        leaves = self._flatten(observation)
        rows = np.flatnonzero(mask)
        if leaves and len(leaves[0]) == len(rows):
            self.returns_only_reset_rows = True
            return self._placed(leaves, _ids_of("reset", info, rows))
        return self._conform(leaves)

    def _placed(self, leaves: tuple[Any, ...], ids: Array) -> Leaves:
        """Return observations of all rows, with those of the rows `ids` filled in."""
        for values in self.extra_values:
            by_row = dict(zip(ids.tolist(), values, strict=True))
            values[:] = map(by_row.get, range(self.num_envs))
        return tuple(
            self._among_all(conform(value, leaf, (len(ids), *leaf.shape), self.env), ids)
            for value, leaf in zip(leaves, self.observation, strict=True)
        )

    def _among_all(self, values: Array, ids: Array) -> Array:
        full = np.zeros((self.num_envs, *values.shape[1:]), values.dtype)
        full[ids] = values
        return full

    def step(self, action: Leaves) -> VectorStep:
        """Step all rows. The reward is float32 or float64, [P] or [P, k]; flags are bool [P]."""
        return self.check(self.step_raw(action))

    def step_raw(self, action: Leaves) -> Any:
        """Step all rows; return the environment's own five values, an argument of `check`."""
        native = self._to_action(action)
        return (
            self.env.step_arrays(native) if self._as_arrays else step_values(self.env.step(native))
        )

    def check(self, raw: Any) -> VectorStep:
        """Return the result of `step` for the values of `step_raw`, after checks and casts."""
        return self._checked(*(self.env.as_arrays(raw) if self._as_arrays else raw))

    def raw_leaves(self, observation: Any) -> Any:
        """Return the leaves of an observation of `step_raw`, or its only leaf, without a check."""
        return observation if self._plain_observation else self._flatten(observation)

    @property
    def raw_is_on_host(self) -> bool:
        """Whether the values of `step_raw` are arrays or torch tensors on the CPU."""
        return not self._as_arrays or bool(self.env.shares_memory)

    def send(self, action: Leaves) -> None:
        getattr(self.env, self._begin)(self._to_action(action))
        self._is_stepping = True

    def receive(self) -> VectorStep:
        self._is_stepping = False
        return self._checked(*step_values(getattr(self.env, self._wait)()))

    def _checked(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any
    ) -> VectorStep:
        reward = self._rewards(reward)
        terminated = self._flags("terminated", terminated)
        truncated = self._flags("truncated", truncated)
        self.ended = terminated | truncated
        return self._conform(self._flatten(observation)), reward, terminated, truncated, info

    def step_rows(self, action: Leaves, rows: BoolArray) -> VectorStep:
        """Step the rows selected by `rows` (bool [P]); only if `steps_rows`.

        The result has P rows, of which only the stepped ones are defined.
        """
        requested = np.flatnonzero(rows).astype(np.int32)
        some = tuple(leaf[requested] for leaf in action)
        observation, *columns, info = step_values(self.env.step(self._to_action(some), requested))
        ids = _ids_of("step", info, requested)
        reward, terminated, truncated = (
            self._among_all(np.asarray(column), ids) for column in columns
        )
        return (
            self._placed(self._flatten(observation), ids),
            self._rewards(reward),
            self._flags("terminated", terminated),
            self._flags("truncated", truncated),
            self._info_among_all(info, ids) if self.info_is_read else {},
        )

    def _info_among_all(self, info: Any, ids: Array) -> Any:
        if isinstance(info, Mapping):
            return {key: self._info_among_all(entry, ids) for key, entry in info.items()}
        is_row = isinstance(info, np.ndarray) and info.shape[:1] == ids.shape
        return self._among_all(info, ids) if is_row else info

    def _rewards(self, value: Any) -> Array:
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.shape != self._reward_shape:
            is_declared = self._reward_shape != self._row_shape
            raise ValueError(
                f"reward: expected shape {list(self._reward_shape)} from {self.env}, got "
                f"{list(array.shape)}"
                f"{'; its reward_space declares the shape' if is_declared else SEVERAL_REWARDS}"
            )
        if self._rewards_are_columns:
            array = array.reshape(self._row_shape)
        if array.dtype in _REWARD_DTYPES:
            return array
        return check_real(array, "reward", self.env).astype(np.float64)

    def _flags(self, name: str, value: Any) -> BoolArray:
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.shape != self._row_shape:
            raise ValueError(
                f"{name}: expected shape [{self.num_envs}] from {self.env}, got {list(array.shape)}"
            )
        if array.dtype in _FLAG_DTYPES:
            return array
        return check_real(array, name, self.env).astype(np.bool_)

    def _conform(self, leaves: tuple[Any, ...]) -> Leaves:
        for value, dtype, shape in zip(leaves, self._dtypes, self._shapes, strict=True):
            if type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
                break
        else:
            return leaves
        return tuple(
            conform(value, leaf, shape, self.env)
            for value, leaf, shape in zip(leaves, self.observation, self._shapes, strict=True)
        )

    def close(self) -> None:
        """Close the environment, even if its processes are dead or hang; never raises."""
        processes = getattr(getattr(self.env, "unwrapped", self.env), "processes", None)
        if processes is None:
            close_quietly(self.env)
            return
        try:
            # With a timeout, because an interrupted step may never end.
            self.env.close(timeout=_CLOSE_SECONDS)
        except Exception:
            for process in processes:
                with contextlib.suppress(Exception):
                    process.terminate()
            for process in processes:
                with contextlib.suppress(Exception):
                    process.join(_CLOSE_SECONDS)
                    process.kill()
            with contextlib.suppress(Exception):
                self.env.unwrapped.closed = True  # otherwise its __del__ tries again and fails


def _parts_of_step(env: Any) -> tuple[str, str] | None:
    """Return the names of the methods that begin a step and wait for it, or ``None``.

    Only methods of the class count, because a wrapper may forward attributes of its environment.
    """
    kind = type(env)
    if isinstance(env, AsyncVectorEnv) and kind.step is not AsyncVectorEnv.step:
        return None  # an overridden `step` may do more than these two methods
    for names in (("step_async", "step_wait"), ("send", "recv")):
        if all(callable(getattr(kind, name, None)) for name in names):
            return names
    return None


def _takes_ids(env: Any) -> bool:
    """Return whether `step` takes the ids of the rows to step, as EnvPool's does."""
    if not hasattr(env, "all_env_ids"):
        return False
    with contextlib.suppress(TypeError, ValueError):
        return "env_id" in inspect.signature(env.step).parameters
    return False


def _ids_of(name: str, info: Any, requested: Array) -> Array:
    """Return the row numbers of a result, in its order."""
    ids = np.asarray(info["env_id"]) if "env_id" in info else requested
    if not np.array_equal(np.sort(ids), requested):
        raise ValueError(f"{name}: expected the rows {requested.tolist()}, got {ids.tolist()}")
    return ids


def rows_differ(a: Leaves, b: Leaves) -> BoolArray:
    """Return which rows differ in any bit, as bool [P]; NaN equals NaN."""
    count = len(a[0])
    result = np.zeros(count, np.bool_)
    for x, y in zip(a, b, strict=True):
        x_bytes = np.ascontiguousarray(x).reshape(count, -1).view(np.uint8)
        y_bytes = np.ascontiguousarray(y).reshape(count, -1).view(np.uint8)
        result |= (x_bytes != y_bytes).any(axis=1)
    return result
