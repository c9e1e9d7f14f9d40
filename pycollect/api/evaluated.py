"""The environment, the policy and the episodes of an Evaluator."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from pycollect.data.frame import MASK
from pycollect.data.split import split_trajectories
from pycollect.envs.base import close_quietly
from pycollect.envs.make import check_entry, is_env, is_torchrl_env

_ROW = ("collector", "row")


class Episodes:
    """Keeps batches until each environment has ended its number of episodes.

    Episodes that end first are short. Taking them from any environment would underweight long ones.

    Args:
        wanted: Total number of episodes; each of P environments has ``ceil(wanted / P)``.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._batches: list[TensorDictBase] = []
        self._ended = torch.zeros(0, dtype=torch.int64, device="cpu")

    @property
    def are_enough(self) -> bool:
        """Whether each environment has ended its number of episodes."""
        return bool(self._batches) and bool((self._ended >= self._quota).all())

    @property
    def _quota(self) -> int:
        return -(-self._wanted // len(self._ended))

    def add(self, td: TensorDictBase) -> None:
        """Add the next batch, [*P, T], of the same environments in the same order."""
        td = td.reshape(-1, td.shape[-1]) if td.ndim > 1 else td.unsqueeze(0)
        td.names = None
        if not self._batches:
            self._ended = torch.zeros(len(td), dtype=torch.int64, device="cpu")
        rows = torch.arange(len(td), device=td["next", "done"].device)
        td = td.copy().set(_ROW, rows.unsqueeze(1).expand(td.shape))
        self._batches.append(td)
        self._ended += td["next", "done"].flatten(2).any(-1).sum(1).cpu()

    def trajectories(self) -> TensorDictBase:
        """Return the episodes, ``[N, T_max]`` with ``("collector", "mask")``.

        They are ordered by environment, then by time.
        """
        split = split_trajectories(torch.cat(self._batches, 1))
        lengths = split[MASK].sum(1)
        last = lengths - 1
        every = torch.arange(len(split), device=last.device)
        complete = split["next", "done"].flatten(2).any(-1)[every, last]
        rows = torch.where(complete, split[_ROW][:, 0], -1)
        kept = [(rows == row).nonzero()[: self._quota, 0] for row in range(len(self._ended))]
        return split[torch.cat(kept)].exclude(_ROW)


_NORMALISERS = ("VecNorm", "VecNormV2")  # TorchRL's, recognized by name


def frozen_entry(env: Any) -> Any:
    """Return the environment to evaluate, or the callable or callables that make it.

    Raises:
        TypeError, ValueError: As in :func:`check_entry`.
    """
    entry = check_entry(env)
    if isinstance(entry, list):
        return [MakesFrozen(make) for make in entry]
    return frozen(entry) if is_env(entry) else MakesFrozen(entry)


class MakesFrozen:
    """Makes an environment with frozen running statistics; picklable if `make` is."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, **kwargs: Any) -> Any:
        """Make the environment."""
        return frozen(self._make(**kwargs))


def frozen(env: Any) -> Any:
    """Freeze the statistics of an environment, which training shares, and return it."""
    if is_torchrl_env(env):
        for module in env.modules():
            if any(kind.__name__ in _NORMALISERS for kind in type(module).__mro__):
                module.freeze()
    return env


def counts_steps(env: Any) -> bool:
    """Return whether a TorchRL environment has a StepCounter; a second one is impossible."""
    if not is_torchrl_env(env):
        return False
    from pycollect.envs.torchrl.specs import has_step_count

    return has_step_count(env)


def own_policy(policy: Any) -> Any:
    """Return a copy in evaluation mode, so that the caller's policy may be trained meanwhile."""
    return _evaluating(copy.deepcopy(policy))


class MakesPolicy:
    """Makes a policy in evaluation mode; picklable if `factory` and `env` are.

    Args:
        factory: Takes no argument, or an environment as its first.
        env: The environment, or callables that make it. An environment that is made only for the
            factory is closed afterwards.
    """

    def __init__(self, factory: Callable[..., Any], env: Any) -> None:
        self._factory, self._env = factory, env

    def __call__(self) -> Any:
        """Make the policy."""
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
    """Return whether the first parameter is required or named env."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False  # a callable without a signature
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = next((p for p in parameters if p.kind in kinds), None)
    return first is not None and (first.default is first.empty or first.name == "env")


def _evaluating(policy: Any) -> Any:
    return policy.eval() if isinstance(policy, nn.Module) else policy
