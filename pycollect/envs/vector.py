"""Vector environments (`gymnasium.vector` or the same interface) as an EnvBatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from pycollect._core import Leaf, Recorder
from pycollect.data.extras import ExtraValues
from pycollect.data.layout import Key
from pycollect.envs.base import (
    Arrays,
    AutoresetCalls,
    BoolArray,
    EnvBatch,
    EnvSpec,
    ReadInfo,
    is_wrapped,
)
from pycollect.envs.info_rows import (
    final_mask,
    final_observations,
    is_list,
    lacks_final_rows,
    rows_of,
    rows_of_step,
)
from pycollect.envs.spaces import Array, conform, make_flatten, make_read_extras
from pycollect.envs.vector_api import Leaves, VectorApi, VectorStep, rows_differ
from pycollect.errors import warn_user

OBSERVATION_VALID: Key = ("observation_valid",)
"""Key under "next" of the flag that the next observation is the true one."""

OTHER_FINAL = "returned an observation that differs from info['final_obs']"


class VectorEnvBatch(EnvBatch):
    """A vector environment that resets finished rows by mask, or that has `skips_after_done`.

    Args:
        skips_after_done: Whether a finished row resets itself in the following step.
        steps_rows: Whether rows can be stepped separately. A finished row then resets itself in its
            following step, unless `reset_done` resets it first.
    """

    def __init__(
        self, api: VectorApi, *, skips_after_done: bool = False, steps_rows: bool = False
    ) -> None:
        self.spec = EnvSpec(
            batch_size=(api.num_envs,),
            observation=api.observation,
            action=api.action,
            action_space=api.action_space,
            reward=api.reward,
            skips_after_done=skips_after_done,
            can_reset=not skips_after_done,
            extras=api.extras,
        )
        self.api, self.steps_rows, self.overlaps = api, steps_rows, api.overlaps
        self._info: Any = {}  # of the last step
        self._single = len(api.observation) == 1
        self._one_action = len(api.action) == 1
        self.owned = [api]
        self._flatten = make_flatten(api.observation_space)
        self._watches_mode = True
        self._resetting: BoolArray | None = None  # rows that the next step only resets

    def tap_info(self) -> ReadInfo:
        self.api.info_is_read = True
        return lambda key: rows_of(self._info, key, self.api.num_envs)

    def current_extras(self) -> ExtraValues:
        return self._by_key(self.api.extra_values)

    def _by_key(self, values: list[list[Any]]) -> ExtraValues:
        return {extra.key: rows for extra, rows in zip(self.spec.extras, values, strict=True)}

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset all rows; see `EnvBatch.reset`.

        An environment that takes only one int (CartPoleVectorEnv) receives the first seed. EnvPool
        takes no seed after its construction, and warns.
        """
        self._resetting = None
        return self._arrays(self.api.reset(seeds))

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """Step all rows; the reward is float [P], the flags are bool [P]."""
        return self._result(self.api.step((action,) if self._one_action else action))

    def send(self, action: Arrays) -> None:
        self.api.send((action,) if self._one_action else action)

    def receive(self) -> tuple[Arrays, Any, Any, Any]:
        return self._result(self.api.receive())

    def step_rows(self, action: Arrays, rows: BoolArray) -> tuple[Arrays, Any, Any, Any]:
        leaves = (action,) if self._one_action else action
        return self._result(self.api.step_rows(leaves, rows))

    def _result(self, step: VectorStep) -> tuple[Arrays, Any, Any, Any]:
        """Check a step's result and return its `Arrays`, reward and flags."""
        observation, reward, terminated, truncated, info = step
        self._info = info
        if self._watches_mode:
            self._check_mode(observation, reward, terminated | truncated, info)
        return self._arrays(observation), reward, terminated, truncated

    def _check_mode(self, observation: Leaves, reward: Array, ended: BoolArray, info: Any) -> None:
        """Check, at the first end of an episode, that the reset is not in the same step."""
        if self._resetting is not None:
            self._watches_mode = False
            ends, has_reward = ended[self._resetting], reward[self._resetting]
            check_reset_step(self.api.env, bool(ends.any()), bool(has_reward.any()))
        elif ended.any():
            self._watches_mode = self.spec.skips_after_done
            self._resetting = ended
            final = final_observations(info, ended, self.api.observation_space)
            rows = np.flatnonzero(ended & ~lacks_final_rows(info, final, ended))
            if final is not None and any(
                not np.array_equal(leaf[row], value, equal_nan=leaf.dtype.kind == "f")
                for leaf, values in zip(observation, self._final_leaves(final, rows), strict=True)
                for row, value in zip(rows, values, strict=True)
            ):
                refuse_mode(self.api.env, OTHER_FINAL)

    def _final_leaves(self, final: Any, rows: Array) -> list[Any]:
        """Return terminal values of `rows` by leaf; `final` is one batch or an array of P."""
        if isinstance(final, np.ndarray) and final.dtype == object:
            by_row = [self._flatten(final[row]) for row in rows]
            return list(zip(*by_row, strict=True))
        leaves = [np.asarray(leaf) for leaf in self._flatten(final)]
        check_final_rows(self.api.env, leaves, self.api.num_envs)
        return [leaf[rows] for leaf in leaves]

    def reset_done(self, done: BoolArray) -> Arrays:
        if self.spec.skips_after_done:
            raise RuntimeError("reset_done: this vector environment cannot reset single rows")
        return self._arrays(self.api.reset_rows(done))

    def _arrays(self, leaves: Leaves) -> Arrays:
        return leaves[0] if self._single else leaves


class SameStepEnvBatch(VectorEnvBatch):
    """A vector environment in SAME_STEP mode; its `step` has already reset the finished rows.

    For finished rows, `step` returns the terminal observation (`info["final_obs"]`), and
    `reset_done` returns the reset observation that the environment returned instead.

    Args:
        can_reset: Whether the environment honors `reset_mask`, so that other rows can be reset too.
        final_is_unknown: Whether `info` may lack terminal observations. `step` then returns the
            reset observations of such rows, and the entry `OBSERVATION_VALID` marks them.
    """

    def __init__(self, api: VectorApi, *, can_reset: bool, final_is_unknown: bool = False) -> None:
        super().__init__(api)
        valid = (Leaf(OBSERVATION_VALID, "bool", (1,)),) if final_is_unknown else ()
        self.spec = replace(self.spec, can_reset=can_reset, step_only=valid)
        self._single = self._single and not final_is_unknown
        self._has_validity = self._warns_of_truncation = final_is_unknown
        self._all_valid = np.ones((api.num_envs, 1), np.bool_)
        self._ended = np.zeros(api.num_envs, np.bool_)
        self._after: Leaves = ()
        self._watch_final = True
        self._raw: Any = None  # values of the last step, if the recorder has read them itself
        self._final_extras: list[list[Any]] | None = None  # if the last step ended rows
        self._read_row = make_read_extras(api.observation_space)

    def tap_info(self) -> ReadInfo:
        self.api.info_is_read = True
        wrapped = is_wrapped(self.api.env)
        return lambda key: rows_of_step(
            self._info, key, self._ended, self.api.reset_info if wrapped else None
        )

    def current_extras(self) -> ExtraValues:
        if self._final_extras is None:
            return super().current_extras()
        return self._by_key(self._final_extras)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        self._ended = np.zeros(self.api.num_envs, np.bool_)
        self._final_extras = self._resetting = self._raw = None
        self._after = self.api.reset(seeds)
        return self._reset_arrays(self._after)

    def _result(self, step: VectorStep) -> tuple[Arrays, Any, Any, Any]:
        """Return a step's result with terminal observations in the rows that ended."""
        observation, reward, terminated, truncated, info = step
        self._info, self._final_extras = info, None
        self._after = observation
        self._ended = terminated | truncated
        valid = self._all_valid
        if self._ended.any():
            final = final_observations(info, self._ended, self.api.observation_space)
            if isinstance(final, np.ndarray) and final.dtype == object:
                check_final_rows(self.api.env, [final], self.api.num_envs)
            lacks = lacks_final_rows(info, final, self._ended)
            if lacks.any():
                self._check_lacking(lacks, info, final)
                valid = ~lacks[:, None]
                if (truncated & lacks).any():
                    self.warn_of_truncation()
            rows = np.flatnonzero(self._ended & ~lacks)
            if len(rows):
                observation = self._true_next(observation, final, rows)
        if self._has_validity:
            observation = (*observation, valid)
        return self._arrays(observation), reward, terminated, truncated

    def autoreset_calls(self, recorder: Recorder) -> AutoresetCalls | None:
        api = self.api
        if self.spec.extras or self._has_validity or api.info_is_read or not api.raw_is_on_host:
            return None

        def step(action: Arrays) -> Any:
            return api.step_raw((action,) if self._one_action else action)

        def record(result: Any) -> int:
            observation, reward, terminated, truncated, info = result
            resets = recorder.record_autoreset(
                api.raw_leaves(observation),
                reward,
                terminated,
                truncated,
                self._raw_final(info, terminated, truncated),
            )
            if resets is None:  # it needs casts, or is an error
                self._raw = None
                return recorder.record(self._result(api.check(result)))
            self._raw = observation, reward, terminated, truncated, {}
            return resets

        return AutoresetCalls(step, record)

    def _raw_final(self, info: Any, terminated: Any, truncated: Any) -> Any:
        """Return the terminal observations as they are; ``None`` if they need checks or casts."""
        if self._watch_final or not isinstance(info, Mapping):
            return None
        final = info.get("final_obs", info.get("final_observation"))
        if final is None or (isinstance(final, np.ndarray) and final.dtype == object):
            return None
        mask = final_mask(info)
        if mask is not None:
            ended = np.logical_or(np.asarray(terminated), np.asarray(truncated))
            if lacks_final_rows(info, final, ended.reshape(-1).astype(np.bool_)).any():
                return None
        try:
            return self.api.raw_leaves(final)
        except ValueError:  # perhaps no episode ended
            return None

    def warn_of_truncation(self) -> None:
        """Warn once that the last observation of a truncated episode is unknown."""
        if self._warns_of_truncation:
            self._warns_of_truncation = False
            warn_user(
                f"final_observation: {self.api.env} truncated an episode without returning its "
                "last observation, so its value cannot be bootstrapped; exclude frames whose "
                "('next', 'observation_valid') is False"
            )

    def reset_done(self, done: BoolArray) -> Arrays:
        """Return the reset observations; first reset the rows of `done` that did not end."""
        self._final_extras = None
        if self._raw is not None:
            self._after, _, terminated, truncated, _ = self.api.check(self._raw)
            self._ended, self._raw = terminated | truncated, None
        rest = done & ~self._ended
        if not rest.any():
            return self._reset_arrays(self._after)
        if not self.spec.can_reset:
            raise RuntimeError("reset_done: this vector environment cannot reset single rows")
        merged = tuple(np.array(leaf) for leaf in self._after)
        for leaf, fresh in zip(merged, self.api.reset_rows(rest), strict=True):
            leaf[rest] = fresh[rest]
        self._after = merged
        return self._reset_arrays(merged)

    def _reset_arrays(self, leaves: Leaves) -> Arrays:
        return self._arrays((*leaves, self._all_valid) if self._has_validity else leaves)

    def _check_lacking(self, lacks: BoolArray, info: Any, final: Any) -> None:
        """Raise a ValueError if rows may not lack their terminal observations."""
        if self._has_validity:
            return
        row = np.flatnonzero(lacks)[0]
        if final is None:
            if is_list(info) and len(info) != len(lacks):
                got = f"{len(info)} infos for {len(lacks)} environments"
            else:
                got = f"the keys {list(info[row] if is_list(info) else info)}"
            raise ValueError(lacks_final(self.api.env, f", got {got}"))
        raise ValueError(lacks_final(self.api.env, f", got none for environment {row}"))

    def _true_next(self, observation: Leaves, final: Any, rows: Array) -> Leaves:
        """Return the observation with the terminal observations of `rows`."""
        if self.spec.extras:
            self._final_extras = self._true_next_extras(final, rows)
        result = tuple(np.array(leaf) for leaf in observation)
        for leaf, out, values in zip(
            self.spec.observation, result, self._final_leaves(final, rows), strict=True
        ):
            if isinstance(values, np.ndarray):
                out[rows] = conform(values, leaf, (len(rows), *leaf.shape), self.api.env)
                continue
            for row, value in zip(rows, values, strict=True):
                out[row] = conform(value, leaf, leaf.shape, f"environment {row}")
        if self._watch_final:
            self._watch_final = False
            if not rows_differ(result, observation)[rows].any():
                self.warn_of_overwritten()
        return result

    def _true_next_extras(self, final: Any, rows: Array) -> list[list[Any]]:
        values = [list(column) for column in self.api.extra_values]
        by_row = isinstance(final, np.ndarray) and final.dtype == object
        batched = [] if by_row else self.api.read_extras(final)
        for row in rows:
            own = self._read_row(final[row]) if by_row else [column[row] for column in batched]
            for column, value in zip(values, own, strict=True):
                column[row] = value
        return values

    def warn_of_overwritten(self) -> None:
        """Warn that the first terminal observation equals the reset observation.

        Gymnasium 1.4.0 keeps a reference to the environment's observation. If the environment
        reuses that memory for the next observation, the terminal observation is lost.
        """
        warn_user(
            f"create_env_fn: final_obs of {self.api.env} equals the following reset "
            "observation, so ('next', observation) may be wrong at the end of episodes. If the "
            "environment reuses its observation buffer, return a copy, or use the autoreset "
            "mode NEXT_STEP or DISABLED"
        )


def check_reset_step(env: Any, ends: bool, has_reward: bool) -> None:
    """Check the step after the end of an episode in NEXT_STEP mode, which should only reset rows.

    Raise a ValueError if it `ends` an episode. Warn of a reward unless a wrapper may have added it.
    """
    if ends:
        refuse_mode(
            env,
            "ended an episode in the step that should only reset the row",
            "SAME_STEP, or DISABLED if it does not reset rows itself",
        )
    if has_reward and not is_wrapped(env):
        warn_user(
            f"autoreset_mode: {env} declares NEXT_STEP, so the step after the end of an episode "
            "only resets the row and is not recorded, but it has a reward; if the environment "
            "resets in the same step, set its metadata['autoreset_mode'] to SAME_STEP"
        )


def refuse_mode(env: Any, why: str, mode: str = "SAME_STEP") -> NoReturn:
    """Raise a ValueError because the environment contradicts its autoreset mode."""
    raise ValueError(
        f"autoreset_mode: {env} does not follow the mode that it declares: it {why}; set its "
        f"metadata['autoreset_mode'] to {mode}"
    )


def check_final_rows(env: Any, leaves: Sequence[Any], envs: int) -> None:
    """Raise a ValueError if terminal observations do not have one row per environment."""
    for leaf in leaves:
        if leaf.shape[:1] != (envs,):
            raise ValueError(
                f"final_observation: expected info['final_obs'] of {env} to have one row for each "
                f"of {envs} environments, got the shape {list(leaf.shape)}; include rows of the "
                "environments that continue, with any values"
            )


def lacks_final(env: Any, got: str) -> str:
    """Return the error text for a missing terminal observation in SAME_STEP mode."""
    return (
        f"final_observation: expected info['final_obs'] from {env} at the end of an episode in "
        f"SAME_STEP mode{got}; add it, or pass final_observation='unknown' if it is not available. "
        "If the environment resets in the following step, its mode is NEXT_STEP"
    )
