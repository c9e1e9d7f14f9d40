"""The environment and the policy of an Evaluator, as they are evaluated."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from pycollect.envs.entry import check_entry, is_env, is_torchrl_env
from pycollect.envs.single import close_quietly

_NORMALISERS = ("VecNorm", "VecNormV2")  # of TorchRL, told by their names


def env_here(env: Any, env_kwargs: Mapping[str, Any] | None) -> Any:
    """What is evaluated in this process: an environment, or a list of callables that make some.

    Raises:
        TypeError, ValueError: as :func:`check_entry`.
    """
    entry = check_entry(env)
    if isinstance(entry, list):
        return [MakesFrozen(make) for make in entry]
    return frozen(entry if is_env(entry) else entry(**(env_kwargs or {})))


def env_elsewhere(env: Any) -> Any:
    """What makes the environments that are evaluated in another process; as :func:`env_here`."""
    entry = check_entry(env)
    if isinstance(entry, list):
        return [MakesFrozen(make) for make in entry]
    return frozen(entry) if is_env(entry) else MakesFrozen(entry)


class MakesFrozen:
    """Makes an environment whose running statistics stay as they are; it pickles as `make` does."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, **kwargs: Any) -> Any:
        """As `make`."""
        return frozen(self._make(**kwargs))


def frozen(env: Any) -> Any:
    """The environment itself. What an evaluation sees would count as what is trained on."""
    if is_torchrl_env(env):
        for module in env.modules():
            if any(kind.__name__ in _NORMALISERS for kind in type(module).__mro__):
                module.freeze()
    return env


def counts_steps(env: Any) -> bool:
    """Whether it is one of TorchRL's that has a StepCounter: there can be no second beside it."""
    if not is_torchrl_env(env):
        return False
    from pycollect.envs.torchrl.specs import has_step_count

    return has_step_count(env)


def own_policy(policy: Any) -> Any:
    """A copy in evaluation mode, so that the caller's may be trained meanwhile."""
    return _evaluating(copy.deepcopy(policy))


class MakesPolicy:
    """Builds a policy in evaluation mode; it pickles as `factory` and `env` do.

    Args:
        factory: takes nothing, or first of all an environment.
        env: the environment, or what makes some; one that is made for the factory alone is closed
            when it has returned.
    """

    def __init__(self, factory: Callable[..., Any], env: Any) -> None:
        self._factory, self._env = factory, env

    def __call__(self) -> Any:
        """The policy."""
        if not _takes_an_env(self._factory):
            return _evaluating(self._factory())
        if is_env(self._env):
            return _evaluating(self._factory(self._env))
        env = (self._env[0] if isinstance(self._env, list) else self._env)()
        try:
            return _evaluating(self._factory(env))
        finally:
            close_quietly(env)


def _takes_an_env(factory: Callable[..., Any]) -> bool:
    """Whether its first parameter is needed, or is called env."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False  # a callable without a signature
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = next((p for p in parameters if p.kind in kinds), None)
    return first is not None and (first.default is first.empty or first.name == "env")


def _evaluating(policy: Any) -> Any:
    return policy.eval() if isinstance(policy, nn.Module) else policy
