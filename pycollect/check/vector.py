"""Checks of a vector environment that a collector does not make itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from gymnasium import spaces

from pycollect.check.calls import Budget, CallFailed, calling, run, watched_starts
from pycollect.check.report import ERROR, WARNING, Draft
from pycollect.check.single import SEED, check_flags
from pycollect.check.values import copied, is_close, is_equal, make_check
from pycollect.check.walk import (
    KEPT,
    Checked,
    Visit,
    Walk,
    check_times,
    compare,
    global_generators,
    interface,
    step,
    timed,
)
from pycollect.data.frame import ONE_REWARD
from pycollect.envs.arrays import NumpyVectorEnv, TensorsFoundError
from pycollect.envs.base import BoolArray, is_wrapped, step_values
from pycollect.envs.info_rows import final_observations
from pycollect.envs.make import check_vector_attributes
from pycollect.envs.make_vector import (
    Autoreset,
    Finding,
    declared_autoreset,
    parse_autoreset,
    probe_keeps_rows,
)
from pycollect.envs.spaces import describe, make_flatten, make_unflatten
from pycollect.envs.vector_api import VectorApi

MAX_STEPS = 500
_TRIES = 4
_SAME_ROWS = 50


@dataclass
class Vector(Checked):
    """The vector environment under check, with arrays even if it has tensors."""

    second: Any  # another new instance, or ``None``
    api: VectorApi
    mode: Autoreset | None  # the mode that it declares, else the user's, else ``None``

    @property
    def seeds(self) -> list[int]:
        return [SEED + row for row in range(self.api.num_envs)]


def check_vector(env: Any, second: Any, report: Draft, seconds: float, given: Any) -> None:
    """Run all checks of a vector environment."""
    try:
        with calling("the constructor's checks"):
            check_vector_attributes(env)
            declared = declared_autoreset(env)
            env, api = _as_arrays(env)
            second = None if second is None else _as_arrays(second)[0]
    except CallFailed as failed:
        if not failed.refusal:
            raise
        report.add("refused", failed.refusal)
        report.note_end()
        return
    mode = declared or parse_autoreset(given, "autoreset_mode")
    vector = Vector(env, report, seconds, second, api, mode)
    run(_CHECKS, vector, report)


def _as_arrays(env: Any) -> tuple[Any, VectorApi]:
    api = VectorApi(env)
    try:
        api.reset()
    except TensorsFoundError as found:
        env = NumpyVectorEnv(env, found.observation)
        api = VectorApi(env)
    return env, api


def check_mode_is_declared(vector: Vector) -> None:
    """The environment declares its autoreset mode."""
    if vector.mode is not None:
        vector.report.facts["autoreset mode"] = vector.mode.name
        return
    vector.report.add(
        "autoreset-mode",
        f"{vector.env} has no metadata['autoreset_mode']",
        fix="Set metadata = {'autoreset_mode': AutoresetMode.NEXT_STEP} (or SAME_STEP, DISABLED), "
        "or pass autoreset_mode to the collector and to this check.",
    )


def check_rows(vector: Vector) -> None:
    """Observations, rewards and flags of all rows fit the spaces, and stay as they are."""
    fits = make_check(vector.api.observation_space, vector.api.num_envs)

    def observe(visit: Visit) -> None:
        fits(visit.observation, visit.where, vector.report)
        _check_rows_of(visit, vector)
        if visit.overwritten:
            text = f"{visit.overwritten}. Collectors copy each frame at once, other code may not"
            vector.report.add("reused-buffer", text, WARNING)

    with watched_starts() as starts:
        _walk(vector, vector.env, vector.walk, MAX_STEPS, Budget(vector.seconds), [observe])
    if starts:
        vector.report.add(
            "starts-process",
            f"{len(starts)} times a step or reset started {starts[0].kind} (at {starts[0].place})",
            ERROR if len(starts) > 2 * vector.api.num_envs else WARNING,
        )


class _Ends:
    """Writes the ends of the rows' episodes into a walk."""

    def __init__(self, vector: Vector, walk: Walk) -> None:
        self._skips = vector.mode is Autoreset.NEXT_STEP
        self._walk = walk
        self._ages = np.zeros(vector.api.num_envs, int)
        self._resetting = np.zeros(vector.api.num_envs, np.bool_)

    def note(self, values: Any) -> BoolArray:
        """Note the flags of a step; return the rows that ended."""
        ended = _ended(values)
        self._ages = np.where(self._resetting, 0, self._ages + 1)
        flags = [np.ravel(flag).astype(bool).tolist() for flag in values[1:3]]
        for row in np.flatnonzero(ended & ~self._resetting):
            self._walk.lengths.append(int(self._ages[row]))
            self._walk.ends.append((flags[0][row], flags[1][row]))
            self._walk.limits.append(False)
        self._ages[ended] = 0
        self._resetting = ended & self._skips
        return ended


def _walk(
    vector: Vector, env: Any, walk: Walk, steps: int, budget: Budget, observers: Any = ()
) -> None:
    """Step all rows with random actions that are the same in each call."""
    api = vector.api if env is vector.env else VectorApi(env)
    ends, actions = _Ends(vector, walk), api.random_actions(SEED)
    with calling("reset()"):
        walk.kept.append((copied(timed(walk.reset_seconds, lambda: api.reset(vector.seeds))),))
    before: Visit | None = None
    for count, action in enumerate(islice(actions, steps), 1):
        before = visit = step(env, _given(api, action), f"step {count}", before, walk, "actions")
        for observe in observers:
            observe(visit)
        if len(walk.kept) <= KEPT:
            walk.actions.append(action)
            walk.kept.append((visit.kept, *map(copied, visit.values)))
        ended = ends.note(visit.values)
        if vector.mode is Autoreset.DISABLED and ended.any():
            with calling("reset(options={'reset_mask': ...})"):
                api.reset_rows(ended)
        if not budget.is_left:
            break


def _given(api: VectorApi, leaves: tuple[Any, ...]) -> Any:
    is_nest = isinstance(api.action_space, spaces.Dict | spaces.Tuple)
    return make_unflatten(api.action_space)(leaves) if is_nest else leaves[0].copy()


def _ended(values: Any) -> BoolArray:
    return np.asarray(values[1], np.bool_).reshape(-1) | np.asarray(values[2], np.bool_).reshape(-1)


def _check_rows_of(visit: Visit, vector: Vector) -> None:
    declared, rows, report = vector.api.reward, vector.api.num_envs, vector.report
    several = declared.shape if declared != ONE_REWARD else ()
    for name, value, shape in zip(
        ("reward", "terminated", "truncated"), visit.values, (several, (), ()), strict=True
    ):
        code = "reward-type" if name == "reward" else "flag-type"
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            report.add(code, f"{visit.where} returned {name}={describe(value)}")
            continue
        if array.shape != (rows, *shape) and array.shape != (rows, *shape, 1):
            report.add(
                code,
                f"{visit.where} returned {name} of shape {list(array.shape)} for {rows} "
                f"environments",
                fix=f"Return an array of shape {[rows, *shape]}.",
            )
        elif not np.isfinite(array).all():
            report.add("not-finite", f"{visit.where} returned the {name} {array}", about=name)


def check_different_rows(vector: Vector) -> None:
    """Rows with different seeds and actions have different observations."""
    observed = [_entries(vector, result[0]) for result in vector.walk.kept[1:]]
    if len(observed) < _SAME_ROWS or not observed[0] or vector.api.num_envs < 2:
        return
    actions_differ = any((leaf != leaf[:1]).any() for act in vector.walk.actions for leaf in act)
    changes = any(not is_equal(observed[0], entries) for entries in observed)
    rows_are_equal = all((leaf == leaf[:1]).all() for entries in observed for leaf in entries)
    if actions_differ and changes and rows_are_equal:
        vector.report.add(
            "same-rows",
            f"all {vector.api.num_envs} rows had equal observations in {len(observed)} steps, with "
            "different seeds and actions",
        )


def _entries(vector: Vector, observation: Any) -> tuple[Any, ...]:
    """Return the entries of an observation of all rows as arrays."""
    return tuple(map(np.asarray, make_flatten(vector.api.observation_space)(observation)))


def check_same_seeds(vector: Vector) -> None:
    """The same seeds and the same actions give the same results."""
    steps = len(vector.walk.actions)
    for name, env in (("the same instance", vector.env), ("a new instance", vector.second)):
        if env is not None:
            walk, before = Walk(), global_generators()
            _walk(vector, env, walk, steps, Budget(vector.seconds / 2))
            compare(vector.report, (vector.walk, walk), name, before)


def check_final_observations(vector: Vector) -> None:
    """Only a SAME_STEP environment returns `final_obs`."""
    api, budget = vector.api, Budget(vector.seconds / 2)
    if vector.mode is Autoreset.SAME_STEP:
        return  # a collector reports it
    with calling("reset()"):
        api.reset(vector.seeds)
    for action in islice(api.random_actions(SEED), MAX_STEPS):
        if not budget.is_left:
            return
        with calling("a step"):
            _, *values, info = interface(step_values, vector.env.step(_given(api, action)))
        ended = _ended(values)
        if ended.any():
            break
    else:
        return
    final = final_observations(info, ended, api.observation_space)
    if final is not None and vector.mode is not None:
        vector.report.add(
            "autoreset-mode",
            f"info has 'final_obs' at the end of an episode, so the environment resets in the same "
            f"step, but it declares {vector.mode.name}",
            fix="Set metadata['autoreset_mode'] to AutoresetMode.SAME_STEP.",
        )


def check_reset_step(vector: Vector) -> None:
    """In NEXT_STEP mode, the step after an end resets: it does not depend on its action."""
    if vector.mode is not Autoreset.NEXT_STEP or vector.report.has(
        "ignored-seed", "non-deterministic", "autoreset-mode"
    ):
        return
    kept = vector.walk.kept
    end = next((i for i, result in enumerate(kept[1:-1], 1) if _ended(result[1:]).any()), None)
    if end is None:
        return
    row = int(np.flatnonzero(_ended(kept[end][1:]))[0])
    api = vector.api
    # A wrapper may add a cost of the action to every reward.
    count = 1 if is_wrapped(vector.env) else 2

    def compared(observation: Any, *reward: Any) -> tuple[Any, ...]:
        return tuple(np.array(leaf[row]) for leaf in (*_entries(vector, observation), *reward))

    def after_end(action: Any) -> tuple[Any, ...]:
        with calling("a reset and the steps of one episode"):
            api.reset(vector.seeds)
            for other in islice(api.random_actions(SEED), end):
                vector.env.step(_given(api, other))
            result = vector.env.step(_given(api, action))
        return compared(*result[:count])

    expected, again = compared(*kept[end + 1][:count]), after_end(vector.walk.actions[end])
    others = (after_end(next(api.random_actions(100 + trial))) for trial in range(_TRIES))
    if not is_close(again, expected):
        vector.report.add(
            "non-deterministic",
            "after one more reset with the same seeds, the same actions gave another observation "
            f"or reward in step {end + 1} of row {row}",
        )
    elif is_equal(again, expected) and not all(is_equal(other, expected) for other in others):
        vector.report.add(
            "autoreset-mode",
            f"an episode of row {row} ended in step {end}, and the observation or reward of the "
            "next step depends on its action; a NEXT_STEP environment only resets in that step",
            fix="Set metadata['autoreset_mode'] to SAME_STEP if step() itself resets, or to "
            "DISABLED if the caller has to reset.",
        )


def check_mask(vector: Vector) -> None:
    """A reset with a mask resets the rows of the mask, and keeps the others."""
    with calling("a reset with a mask"):
        found = probe_keeps_rows(vector.api)
    vector.report.facts["single rows can be reset"] = {
        Finding.CONFIRMED: "yes",
        Finding.VIOLATED: "no",
        Finding.UNCONFIRMED: "unknown",
    }[found]
    if found is Finding.VIOLATED and vector.mode is Autoreset.DISABLED:
        vector.report.add(
            "reset-mask",
            "in DISABLED mode, reset(options={'reset_mask': ...}) raised or changed other rows",
        )


_CHECKS = (
    check_mode_is_declared,
    check_rows,
    check_different_rows,
    check_same_seeds,
    check_final_observations,
    check_reset_step,
    check_mask,
    check_flags,
    check_times,
)
