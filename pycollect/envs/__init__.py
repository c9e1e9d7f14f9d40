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
from .entry import check_entry, is_env, is_torchrl_env
from .info import InfoKeys, with_info
from .random_actions import ActionSampler
from .single import close_quietly, make_single_env
from .spaces import describe
from .time_limit import has_time_limit
from .vector import make_vector_env
from .vector_api import is_vector_env

__all__ = ["ActionSampler", "Arrays", "EnvBatch", "check_entry", "make_env_batch"]

_ENVS = (
    "a gymnasium.Env, a gymnasium.vector.VectorEnv, a TorchRL EnvBase or an object of C++ "
    "environments (python_env.h)"
)


def make_env_batch(
    create_env_fn: Any,
    create_env_kwargs: Mapping[str, Any] | None = None,
    autoreset_mode: Any = None,
    info_keys: InfoKeys | None = None,
    devices: Devices | None = None,
) -> EnvBatch:
    """Make one worker's environments.

    Args:
        create_env_fn: the worker's entry: a callable that returns a `gymnasium.Env` (one env, not
            batched), a vector env or a TorchRL env; a list of callables that return a
            `gymnasium.Env` or a TorchRL env each (a batch, also where it is one); such an env
            itself; or the id of one that is registered, wherever a callable is taken. C++
            environments of a class that `python_env.h` made are taken as a vector env is.
        create_env_kwargs: keyword arguments of each callable.
        autoreset_mode: NEXT_STEP, SAME_STEP or DISABLED, for a vector env that does not tell; of no
            effect for other envs.
        info_keys: entries of Gymnasium's info to be recorded, see `with_info`.
        devices: where TorchRL envs are to step.

    Returns:
        The envs; close it after use. A vector env has been reset.

    Raises:
        TypeError: the entry, or what a callable returned, is of another kind.
        ValueError: an empty list, `info_keys` that are the observation's, envs that do not fit
            together, one env in two places, unsupported spaces, a wrong or missing
            `autoreset_mode`, kwargs for an env that is made already.
    """
    env = _make(create_env_fn, create_env_kwargs, autoreset_mode, devices)
    if not info_keys:
        return env
    try:
        informed = with_info(env, info_keys)
        informed.original = env.original
        return informed
    except BaseException:
        if not is_env(create_env_fn):
            env.close()
        raise


def _make(
    create_env_fn: Any,
    create_env_kwargs: Mapping[str, Any] | None,
    autoreset_mode: Any,
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
                f"create_env_kwargs: expected None with an env that is made already, got {kwargs}"
            )
        return _wrap(create_env_fn, autoreset_mode, devices)
    env = create_env_fn(**kwargs)
    if not is_env(env):
        raise TypeError(
            f"create_env_fn: expected {create_env_fn!r} to return {_ENVS}, it returned "
            f"{describe(env)}"
        )
    try:
        return _wrap(env, autoreset_mode, devices)
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
        if any(map(is_torchrl_env, envs)):
            if not all(map(is_torchrl_env, envs)):
                raise TypeError(
                    "create_env_fn: expected the envs of one list to be all of TorchRL's or none, "
                    f"got {[type(env).__name__ for env in envs]}"
                )
            from .torchrl import make_torchrl_batch

            return make_torchrl_batch(envs, devices)
        batch = CallablesEnv(envs)
        batch.original = envs
        batch.time_limit = all(map(has_time_limit, envs))
        return batch
    except BaseException:
        for env in envs:
            close_quietly(env)
        raise


def _check_single(env: Any, fn: Any, i: int) -> None:
    if is_torchrl_env(env):
        return
    if is_vector_env(env) or is_compiled_env(env):
        raise TypeError(
            f"create_env_fn[{i}]: expected {fn!r} to return a single gymnasium.Env, since the list "
            f"is stepped as one batch; it returned the vector env {env}. Give the callable itself, "
            "without the list"
        )
    if not isinstance(env, gymnasium.Env):
        raise TypeError(
            f"create_env_fn[{i}]: expected {fn!r} to return a gymnasium.Env, it returned "
            f"{describe(env)}"
        )


def _wrap(env: Any, autoreset_mode: Any, devices: Devices | None) -> EnvBatch:
    check_distinct([env])
    if is_torchrl_env(env):
        from .torchrl import make_torchrl_env

        return make_torchrl_env(env, devices)
    if is_compiled_env(env):
        compiled = CompiledEnvBatch(env)
        compiled.original, compiled.time_limit = env, has_time_limit(env)
        return compiled
    # EnvPool's envs are both; the vector interface is the one that they have.
    batch = make_vector_env(env, autoreset_mode) if is_vector_env(env) else make_single_env(env)
    batch.original = env
    batch.time_limit = has_time_limit(env)
    return batch
