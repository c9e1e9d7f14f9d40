"""Check an entry of `create_env_fn` and make an EnvBatch from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from torch import nn

from pycollect.data.devices import Devices
from pycollect.envs.base import EnvBatch, close_quietly
from pycollect.envs.compiled import CompiledEnvBatch, is_compiled_env
from pycollect.envs.gymnasium_support import has_time_limit, maker
from pycollect.envs.info import InfoEnv, InfoKeys
from pycollect.envs.make_vector import make_vector_env
from pycollect.envs.pettingzoo import PettingZooEnvs, is_pettingzoo_env
from pycollect.envs.single import CallablesEnv, SingleEnv
from pycollect.envs.spaces import describe
from pycollect.envs.vector import OBSERVATION_VALID

ENVS = (
    "a gymnasium.Env, a gymnasium.vector.VectorEnv, a PettingZoo environment, a TorchRL EnvBase or "
    "C++ environments (python_env.h)"
)

_ADAPTERS = {
    "brax": "TorchRL's BraxWrapper",
    "dm_control": "Shimmy's DmControlCompatibilityV0",
    "dm_env": "Shimmy's DmControlCompatibilityV0",
    "gym": "Shimmy's GymV26CompatibilityV0(env=env), or GymV21CompatibilityV0 before gym 0.26",
    "gym3": "gym3.ToGymEnv, and around it Shimmy's GymV21CompatibilityV0",
    "gymnax": "gymnax.wrappers.GymnaxToGymWrapper",
    "jumanji": "jumanji.wrappers.JumanjiToGymWrapper",
    "vmas": "TorchRL's VmasWrapper, around vmas.make_env(...) without its argument wrapper",
}
"""Adapters for environments with other interfaces, by the package that defines the interface."""


def check_entry(entry: Any) -> Any:
    """Return an entry as a callable, a list of callables, or an environment.

    A Gymnasium id or EnvSpec becomes a callable.
    """
    if isinstance(entry, (list, tuple)):
        if not entry:
            raise ValueError("create_env_fn: expected at least one callable, got an empty list")
        return [_checked_item(i, item) for i, item in enumerate(entry)]
    if isinstance(entry, str | EnvSpec):
        return maker("create_env_fn", entry)
    is_policy = isinstance(entry, nn.Module)  # TorchRL's environments are modules too
    if (is_policy or not callable(entry)) and not is_env(entry) and not hasattr(entry, "step"):
        raise TypeError(
            "create_env_fn: expected a callable, a Gymnasium id, a list of these or an "
            f"environment, got {describe(entry)}{adapter_for(entry)}"
        )
    if not is_env(entry) and not callable(entry):
        raise TypeError(
            f"create_env_fn: expected {ENVS}, got {describe(entry)}{adapter_for(entry)}"
        )
    return entry


def adapter_for(value: Any) -> str:
    """Return the end of an error message: the adapter for an object of a known package."""
    packages = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    found = next((_ADAPTERS[name] for name in packages if name in _ADAPTERS), None)
    return "" if found is None else f"; wrap it with {found}"


def check_vector_attributes(env: Any) -> None:
    """Raise a TypeError if a vector environment lacks an attribute of Gymnasium's interface."""
    names = ("num_envs", "single_observation_space", "single_action_space")
    missing = [name for name in names if not hasattr(env, name)]
    if missing and not is_old_envpool(env):
        raise TypeError(
            f"create_env_fn: expected a vector environment with {', '.join(names)}, got a "
            f"{type(env).__name__} without {', '.join(missing)}{adapter_for(env) or '; set them'}"
        )


def _checked_item(i: int, item: Any) -> Any:
    if isinstance(item, str | EnvSpec):
        return maker(f"create_env_fn[{i}]", item)
    if is_env(item):
        raise TypeError(
            f"create_env_fn[{i}]: expected a callable that returns an environment, got the "
            f"environment {describe(item)}; pass for example lambda: gymnasium.make(...)"
        )
    if isinstance(item, nn.Module) or not callable(item):
        raise TypeError(
            f"create_env_fn[{i}]: expected a callable that returns an environment, or a Gymnasium "
            f"id, got {describe(item)}{adapter_for(item)}"
        )
    return item


def is_env(value: Any) -> bool:
    """Return whether `value` is an environment of any accepted kind, rather than a factory."""
    if isinstance(value, type):
        return False
    return (
        isinstance(value, gymnasium.Env)
        or is_torchrl_env(value)
        or is_compiled_env(value)
        or is_vector_env(value)
        or is_pettingzoo_env(value)
    )


def is_vector_env(env: Any) -> bool:
    """Return whether `env` has the vector interface; it may also be a `gymnasium.Env`."""
    if isinstance(env, VectorEnv):
        return True
    if not (hasattr(env, "reset") and hasattr(env, "step")):
        return False
    return hasattr(env, "single_action_space") or is_old_envpool(env)


def is_old_envpool(env: Any) -> bool:
    """Return whether `env` is an EnvPool from before it adopted Gymnasium's vector interface.

    Such an environment has `len()`, `config` and `reset(env_id)`.
    """
    return hasattr(env, "all_env_ids") and isinstance(getattr(env, "config", None), dict)


def is_torchrl_env(value: Any) -> bool:
    """Return whether `value` is a TorchRL `EnvBase`, by class name, without importing TorchRL."""
    return any(
        kind.__name__ == "EnvBase" and kind.__module__ == "torchrl.envs.common"
        for kind in type(value).__mro__
    )


def check_distinct(envs: Sequence[Any]) -> None:
    """Check that no environment object occurs twice in a batch.

    Wrappers around one environment count as that environment. Environments inside a vector
    environment are compared, too, unless they are in other processes.
    """
    inner = [unwrapped for env in envs for unwrapped in _inner_envs(env)]
    places: dict[int, list[int]] = {}
    for place, env in enumerate(inner):
        places.setdefault(id(env), []).append(place)
    same = next((indices for indices in places.values() if len(indices) > 1), None)
    if same is not None:
        raise ValueError(
            f"create_env_fn: environments {same} are the same object, "
            f"{describe(inner[same[0]])}; create a new environment in each call"
        )


def _inner_envs(env: Any) -> list[Any]:
    """Return the unwrapped environment, or those inside a vector environment."""
    children: Any
    if is_torchrl_env(env):
        from pycollect.envs.torchrl import inner_envs

        children = inner_envs(env)
    else:
        env = getattr(env, "unwrapped", env)
        children = getattr(env, "envs", None) if is_vector_env(env) else None
    if isinstance(children, (list, tuple)) and children and all(map(is_env, children)):
        return [unwrapped for child in children for unwrapped in _inner_envs(child)]
    return [env]


def registering(entry: Any, policy: Any) -> Any:
    """Return an entry whose TorchRL environments have the transforms that a policy requires."""
    if isinstance(entry, list):
        return [partial(_registered, item, policy) for item in entry]
    return _with_transforms(entry, policy) if is_env(entry) else partial(_registered, entry, policy)


def _registered(create_env_fn: Any, policy: Any, **kwargs: Any) -> Any:
    return _with_transforms(create_env_fn(**kwargs), policy)


def _with_transforms(env: Any, policy: Any) -> Any:
    if not is_torchrl_env(env):
        return env
    from pycollect.envs.torchrl import with_policy_transforms

    return with_policy_transforms(env, policy)


def make_env_batch(
    create_env_fn: Any,
    create_env_kwargs: Mapping[str, Any] | None = None,
    autoreset_mode: Any = None,
    info_keys: InfoKeys | None = None,
    devices: Devices | None = None,
    final_observation: str | None = None,
    as_arrays: bool = False,
) -> EnvBatch:
    """Make one worker's environments, to be closed; a vector environment has been reset.

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
        info_keys: Entries of Gymnasium's info to record, see `InfoEnv`.
        devices: Devices of TorchRL environments.
        final_observation: "unknown" for a vector environment that resets in the same step and may
            not return the last observation of an episode.
        as_arrays: Step vector environments of tensors with numpy arrays. With `info_keys`, or
            observations without a fixed shape and numeric dtype, this is always done.
    """
    make_vector = partial(
        make_vector_env,
        autoreset_mode=autoreset_mode,
        final_observation=final_observation,
        as_arrays=as_arrays or bool(info_keys),
    )
    env = _make(create_env_fn, dict(create_env_kwargs or {}), make_vector, devices)
    try:
        if autoreset_mode is not None:
            _check_is_vector_env(env, autoreset_mode)
        may_lack = any(leaf.key == OBSERVATION_VALID for leaf in env.spec.step_only)
        if final_observation is not None and not may_lack:
            raise ValueError(
                f"final_observation: expected None, got {final_observation!r}; only vector "
                "environments that reset in the same step (SAME_STEP) may lack last observations, "
                f"{env.original} does not"
            )
        return InfoEnv(env, info_keys) if info_keys else env
    except BaseException:
        if not is_env(create_env_fn):
            env.close()
        raise


def _check_is_vector_env(env: EnvBatch, autoreset_mode: Any) -> None:
    if is_compiled_env(env.original) or not is_vector_env(env.original):
        raise ValueError(
            f"autoreset_mode: expected None, got {autoreset_mode!r}; only a vector environment has "
            f"a mode, but create_env_fn is or returns {describe(env.original)}"
        )


def _make(
    create_env_fn: Any,
    kwargs: dict[str, Any],
    make_vector: Callable[[Any], EnvBatch],
    devices: Devices | None,
) -> EnvBatch:
    create_env_fn = check_entry(create_env_fn)
    if isinstance(create_env_fn, list):
        return _make_callables(create_env_fn, kwargs, devices)
    if is_env(create_env_fn):
        if kwargs and hasattr(create_env_fn, "update_kwargs"):
            create_env_fn.update_kwargs(kwargs)  # a batched TorchRL environment before its start
        elif kwargs:
            raise ValueError(
                f"create_env_kwargs: expected None if create_env_fn is an environment, got {kwargs}"
            )
        return _wrap(create_env_fn, make_vector, devices)
    env = create_env_fn(**kwargs)
    if not is_env(env):
        raise TypeError(
            f"create_env_fn: {create_env_fn!r} returned {describe(env)}; expected {ENVS}"
            f"{adapter_for(env)}"
        )
    try:
        return _wrap(env, make_vector, devices)
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
            from pycollect.envs.torchrl import make_torchrl_batch

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


def _wrap(env: Any, make_vector: Callable[[Any], EnvBatch], devices: Devices | None) -> EnvBatch:
    check_distinct([env])
    if is_torchrl_env(env):
        from pycollect.envs.torchrl import make_torchrl_env

        return make_torchrl_env(env, devices)
    batch: EnvBatch
    if is_compiled_env(env):
        batch = CompiledEnvBatch(env)
    elif is_pettingzoo_env(env):
        batch = PettingZooEnvs([env], batched=False)
    elif is_vector_env(env):  # first, because EnvPool's environments are also gymnasium.Env
        check_vector_attributes(env)
        batch = make_vector(env)
    else:
        batch = SingleEnv(env)
    batch.original = env
    batch.time_limit = has_time_limit(env)
    return batch
