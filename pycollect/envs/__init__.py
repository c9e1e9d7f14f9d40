"""Environments: everything that `create_env_fn` accepts, as an `EnvBatch`.

What is asked of vector environments stands in `vector_api`, TorchRL's are behind `torchrl/`.

Floor below: `batch`, in whose terms leaves are described.
Way of the data: action -> step of P environments -> observation, reward, flags as arrays in leaf
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium

from pycollect.devices import Devices

from .base import Arrays, EnvBatch
from .callables import CallablesEnv
from .compiled import CompiledEnvBatch, is_compiled_env
from .distinct import check_distinct
from .entry import (
    ENVS,
    adapter_for,
    check_entry,
    check_vector_attributes,
    is_env,
    is_torchrl_env,
)
from .info import InfoKeys, with_info
from .pettingzoo import PettingZooEnvs, is_pettingzoo_env
from .random_actions import ActionSampler
from .single import close_quietly, make_single_env
from .spaces import describe
from .time_limit import has_time_limit
from .vector import OBSERVATION_VALID, make_vector_env
from .vector_api import is_vector_env

__all__ = ["ActionSampler", "Arrays", "EnvBatch", "check_entry", "make_env_batch"]


def make_env_batch(
    create_env_fn: Any,
    create_env_kwargs: Mapping[str, Any] | None = None,
    autoreset_mode: Any = None,
    info_keys: InfoKeys | None = None,
    devices: Devices | None = None,
    final_observation: str | None = None,
    as_arrays: bool = False,
) -> EnvBatch:
    """Make one worker's environments.

    Args:
        create_env_fn: The worker's entry. A callable may return a `gymnasium.Env` (not batched), a
            vector environment, a TorchRL environment or C++ environments of a class from
            `python_env.h`, or a PettingZoo environment. A list of callables that each return a
            `gymnasium.Env`, a TorchRL or a PettingZoo environment makes a batch, even if the list
            has one item. The entry may also be an environment. A Gymnasium id may replace any
            callable.
        create_env_kwargs: Keyword arguments of each callable.
        autoreset_mode: NEXT_STEP, SAME_STEP or DISABLED. Used only for a vector environment that
            does not declare its mode.
        info_keys: Entries of Gymnasium's info to record, see `with_info`.
        devices: Devices of TorchRL environments.
        final_observation: "unknown" for a vector environment that resets in the same step and may
            not return the last observation of an episode.
        as_arrays: Step vector environments of tensors with numpy arrays. With `info_keys`, or
            observations without a fixed shape and numeric dtype, this is always done.

    Returns:
        The environments; close them after use. A vector environment has been reset.

    Raises:
        TypeError: The entry, or a callable's return value, has the wrong type.
        ValueError: The list is empty, `info_keys` overlap the observation's keys, environments do
            not fit together, an environment appears twice, a space is not supported,
            `autoreset_mode` is wrong or missing, or an environment is passed with kwargs.
    """
    vector = autoreset_mode, final_observation, as_arrays or bool(info_keys)
    env = _make(create_env_fn, create_env_kwargs, vector, devices)
    try:
        if final_observation is not None:
            _check_resets_in_same_step(env, final_observation)
        if not info_keys:
            return env
        informed = with_info(env, info_keys)
        informed.original = env.original
        return informed
    except BaseException:
        if not is_env(create_env_fn):
            env.close()
        raise


def _check_resets_in_same_step(env: EnvBatch, final_observation: str) -> None:
    if all(leaf.key != OBSERVATION_VALID for leaf in env.step_only):
        raise ValueError(
            f"final_observation: expected None, got {final_observation!r}; only vector "
            "environments that reset in the same step (SAME_STEP) may lack last observations, "
            f"{env.original} does not"
        )


def _make(
    create_env_fn: Any,
    create_env_kwargs: Mapping[str, Any] | None,
    vector: tuple[Any, str | None, bool],
    devices: Devices | None,
) -> EnvBatch:
    kwargs = {} if create_env_kwargs is None else dict(create_env_kwargs)
    create_env_fn = check_entry(create_env_fn)
    if isinstance(create_env_fn, list):
        return _make_callables(create_env_fn, kwargs, devices)
    if is_env(create_env_fn):
        if kwargs and hasattr(create_env_fn, "update_kwargs"):
            create_env_fn.update_kwargs(kwargs)  # a batched env of TorchRL that has not started
        elif kwargs:
            raise ValueError(
                f"create_env_kwargs: expected None if create_env_fn is an environment, got {kwargs}"
            )
        return _wrap(create_env_fn, vector, devices)
    env = create_env_fn(**kwargs)
    if not is_env(env):
        raise TypeError(
            f"create_env_fn: {create_env_fn!r} returned {describe(env)}; expected {ENVS}"
            f"{adapter_for(env)}"
        )
    try:
        return _wrap(env, vector, devices)
    except BaseException:
        close_quietly(env)
        raise


def _make_callables(entry: list[Any], kwargs: dict[str, Any], devices: Devices | None) -> EnvBatch:
    envs: list[Any] = []
    try:
        for i, fn in enumerate(entry):
            env = fn(**kwargs)
            envs.append(env)
            _check_single(env, fn, i)
        check_distinct(envs)
        _check_one_kind(envs)
        if is_torchrl_env(envs[0]):
            from .torchrl import make_torchrl_batch

            return make_torchrl_batch(envs, devices)
        batch: EnvBatch
        if is_pettingzoo_env(envs[0]):
            batch = PettingZooEnvs(envs, batched=True)
        else:
            batch = CallablesEnv(envs)
        batch.original = envs
        batch.time_limit = all(map(has_time_limit, envs))
        return batch
    except BaseException:
        for env in envs:
            close_quietly(env)
        raise


def _check_one_kind(envs: list[Any]) -> None:
    kinds = [_kind_of(env) for env in envs]
    if len({*kinds}) > 1:
        raise TypeError(
            "create_env_fn: the environments of a list must be of one kind, got "
            f"{[type(env).__name__ for env in envs]} of {kinds}"
        )


def _kind_of(env: Any) -> str:
    if is_torchrl_env(env):
        return "TorchRL"
    return "PettingZoo" if is_pettingzoo_env(env) else "Gymnasium"


def _check_single(env: Any, fn: Any, i: int) -> None:
    if is_torchrl_env(env) or is_pettingzoo_env(env):
        return
    if is_vector_env(env) or is_compiled_env(env):
        raise TypeError(
            f"create_env_fn[{i}]: a list of environments is stepped one by one, but {fn!r} "
            f"returned the vector environment {env}; pass the callable itself instead of a list"
        )
    if not isinstance(env, gymnasium.Env):
        raise TypeError(
            f"create_env_fn[{i}]: {fn!r} returned {describe(env)}; expected a gymnasium.Env, a "
            f"PettingZoo environment or a TorchRL EnvBase{adapter_for(env)}"
        )


def _wrap(env: Any, vector: tuple[Any, str | None, bool], devices: Devices | None) -> EnvBatch:
    check_distinct([env])
    if is_torchrl_env(env):
        from .torchrl import make_torchrl_env

        return make_torchrl_env(env, devices)
    if is_compiled_env(env):
        compiled = CompiledEnvBatch(env)
        compiled.original, compiled.time_limit = env, has_time_limit(env)
        return compiled
    if is_pettingzoo_env(env):
        agents = PettingZooEnvs([env], batched=False)
        agents.original = env
        return agents
    batch: EnvBatch
    if is_vector_env(env):  # EnvPool's are also a gymnasium.Env, without its interface
        check_vector_attributes(env)
        batch = make_vector_env(env, *vector)
    else:
        batch = make_single_env(env)
    batch.original = env
    batch.time_limit = has_time_limit(env)
    return batch
