"""Environments: everything that `create_env_fn` accepts, as an `EnvBatch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium

from .base import Arrays, EnvBatch
from .callables import CallablesEnv
from .random_actions import ActionSampler
from .single import close_quietly, make_single_env
from .spaces import describe
from .vector import make_vector_env
from .vector_api import is_vector_env

__all__ = ["ActionSampler", "Arrays", "EnvBatch", "make_env_batch"]

_EXPECTED = "a callable that returns an env, a list of such callables, or an env"
_ENVS = "a gymnasium.Env or gymnasium.vector.VectorEnv"


def make_env_batch(
    create_env_fn: Any,
    create_env_kwargs: Mapping[str, Any] | None = None,
    autoreset_mode: Any = None,
) -> EnvBatch:
    """Make one worker's environments.

    Args:
        create_env_fn: the worker's entry: a callable that returns a `gymnasium.Env` (one env, not
            batched) or a vector env; a list of callables that return a `gymnasium.Env` each (a
            batch, also where it is one); or such an env itself.
        create_env_kwargs: keyword arguments of each callable.
        autoreset_mode: NEXT_STEP, SAME_STEP or DISABLED, for a vector env that does not tell; of no
            effect for other envs.

    Returns:
        The envs; close it after use. A vector env has been reset.

    Raises:
        TypeError: the entry, or what a callable returned, is of another kind.
        ValueError: an empty list, envs that do not fit together, unsupported spaces, a wrong or
            missing `autoreset_mode`, kwargs for an env that is made already.
        NotImplementedError: TorchRL envs, Text, Sequence and Graph spaces.
    """
    kwargs = {} if create_env_kwargs is None else dict(create_env_kwargs)
    if isinstance(create_env_fn, list | tuple):
        return _make_callables(create_env_fn, kwargs)
    if _is_env(create_env_fn):
        if kwargs:
            raise ValueError(
                f"create_env_kwargs: expected None with an env that is made already, got {kwargs}"
            )
        return _wrap(create_env_fn, autoreset_mode)
    if not callable(create_env_fn):
        raise TypeError(f"create_env_fn: expected {_EXPECTED}, got {describe(create_env_fn)}")
    env = create_env_fn(**kwargs)
    if not _is_env(env):
        raise TypeError(
            f"create_env_fn: expected {create_env_fn!r} to return {_ENVS}, it returned "
            f"{describe(env)}"
        )
    try:
        return _wrap(env, autoreset_mode)
    except BaseException:
        close_quietly(env)
        raise


def _make_callables(entry: list[Any] | tuple[Any, ...], kwargs: dict[str, Any]) -> EnvBatch:
    for i, fn in enumerate(entry):
        if not callable(fn) or _is_env(fn):
            raise TypeError(
                f"create_env_fn[{i}]: expected a callable that returns a gymnasium.Env, "
                f"got {describe(fn)}"
            )
    envs: list[Any] = []
    try:
        for i, fn in enumerate(entry):
            env = fn(**kwargs)
            envs.append(env)
            _check_single(env, fn, i)
        return CallablesEnv(envs)
    except BaseException:
        for env in envs:
            close_quietly(env)
        raise


def _check_single(env: Any, fn: Any, i: int) -> None:
    _refuse_torchrl(env)
    if is_vector_env(env):
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


def _is_env(value: Any) -> bool:
    if isinstance(value, type):
        return False
    _refuse_torchrl(value)
    return isinstance(value, gymnasium.Env) or is_vector_env(value)


def _wrap(env: Any, autoreset_mode: Any) -> EnvBatch:
    # EnvPool's envs are both; the vector interface is the one that they have.
    return make_vector_env(env, autoreset_mode) if is_vector_env(env) else make_single_env(env)


def _refuse_torchrl(value: Any) -> None:
    """Raise for a TorchRL env, known by its classes' module so that TorchRL is not imported."""
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    if any(kind.__module__.startswith("torchrl.envs") for kind in kinds):
        raise NotImplementedError(
            f"create_env_fn: TorchRL environments are not supported yet, got "
            f"{describe(value)}; give the Gymnasium env that it wraps"
        )
