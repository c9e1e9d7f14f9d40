"""Entries of `create_env_fn`, as they are given."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from torch import nn

from .compiled import is_compiled_env
from .pettingzoo import is_pettingzoo_env
from .registry import maker
from .spaces import describe
from .vector_api import is_old_envpool, is_vector_env

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

    Raises:
        TypeError: The entry has another type, or its list contains an environment.
        ValueError: The list is empty.
        gymnasium.error.Error: No environment has that id.
    """
    if isinstance(entry, (list, tuple)):
        if not entry:
            raise ValueError("create_env_fn: expected at least one callable, got an empty list")
        return [_checked_item(i, item) for i, item in enumerate(entry)]
    if isinstance(entry, str | EnvSpec):
        return maker("create_env_fn", entry)
    is_policy = isinstance(entry, nn.Module)  # as TorchRL's environments are, too
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
    """Whether it is an environment, of whatever kind, and not what makes one."""
    if isinstance(value, type):
        return False
    return (
        isinstance(value, gymnasium.Env)
        or is_torchrl_env(value)
        or is_compiled_env(value)
        or is_vector_env(value)
        or is_pettingzoo_env(value)
    )


def is_torchrl_env(value: Any) -> bool:
    """Whether it is a TorchRL `EnvBase`: told by its classes' names, TorchRL is not imported."""
    return any(
        kind.__name__ == "EnvBase" and kind.__module__ == "torchrl.envs.common"
        for kind in type(value).__mro__
    )
