"""The collector, the environment, the policy and the episodes of an Evaluator."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from pycollect import checks as check
from pycollect.api.single import SyncDataCollector
from pycollect.data.frame import MASK
from pycollect.data.layout import Key, as_key, show
from pycollect.data.split import split_trajectories
from pycollect.envs.base import close_quietly
from pycollect.envs.make import check_entry, is_env, is_torchrl_env

_STEPS = 200  # default number of frames of each worker in a batch
_OFF: Mapping[str, Callable[[Any], bool]] = {
    "drop_uncollected": operator.not_,
    "split_trajs": operator.not_,
    "trajs_per_batch": lambda value: not check.check_count("trajs_per_batch", value),
    "postproc": lambda value: value is None,
    "replay_buffer": lambda value: value is None,
    "cat_results": lambda value: value is None or value == "stack",
    "total_frames": lambda value: check.check_total_frames("total_frames", value) is None,
    "set_truncated": operator.not_,
    "reset_at_each_iter": operator.not_,
    "init_random_frames": lambda value: not check.check_count("init_random_frames", value),
}
"""Collector arguments that prevent an evaluation, each with a test for a harmless value."""
DONE: tuple[str, str] = ("next", "done")
_ROW = ("collector", "row")


@contextmanager
def naming_weights() -> Iterator[None]:
    """Name the argument `weights` in errors that name the one of `update_policy_weights_`."""
    theirs = "policy_or_weights:"
    try:
        yield
    except (TypeError, ValueError) as error:
        if not str(error).startswith(theirs):
            raise
        raise type(error)(str(error).replace(theirs, "weights:", 1)) from error.__cause__


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
        rows = torch.arange(len(td), device=td[DONE].device)
        td = td.copy().set(_ROW, rows.unsqueeze(1).expand(td.shape))
        self._batches.append(td)
        self._ended += td[DONE].flatten(2).any(-1).sum(1).cpu()

    def trajectories(self) -> TensorDictBase:
        """Return the episodes, ``[N, T_max]`` with ``("collector", "mask")``.

        They are ordered by environment, then by time.
        """
        split = split_trajectories(torch.cat(self._batches, 1))
        lengths = split[MASK].sum(1)
        last = lengths - 1
        every = torch.arange(len(split), device=last.device)
        complete = split[DONE].flatten(2).any(-1)[every, last]
        rows = torch.where(complete, split[_ROW][:, 0], -1)
        kept = [(rows == row).nonzero()[: self._quota, 0] for row in range(len(self._ended))]
        return split[torch.cat(kept)].exclude(_ROW)


_NORMALIZERS = ("VecNorm", "VecNormV2")  # TorchRL's, recognized by name


def frozen_entry(env: Any) -> Any:
    """Return the environment to evaluate, or the callable or callables that make it."""
    entry = check_entry(env)
    if isinstance(entry, list):
        return [partial(made_frozen, make) for make in entry]
    return frozen(entry) if is_env(entry) else partial(made_frozen, entry)


def made_frozen(make: Callable[..., Any], /, **kwargs: Any) -> Any:
    """Make an environment with frozen running statistics."""
    return frozen(make(**kwargs))


def frozen(env: Any) -> Any:
    """Freeze the statistics of an environment, which training shares, and return it."""
    if is_torchrl_env(env):
        for module in env.modules():
            if any(kind.__name__ in _NORMALIZERS for kind in type(module).__mro__):
                module.freeze()
    return env


def own_policy(policy: Any) -> Any:
    """Return a copy in evaluation mode, so that the caller's policy may be trained meanwhile."""
    return _evaluating(copy.deepcopy(policy))


def made_policy(factory: Callable[..., Any], env: Any) -> Any:
    """Make a policy in evaluation mode, by a factory that may take an environment.

    `env` is the environment, or the callables that make it. An environment that is made only for
    the factory is closed afterwards.
    """
    if not _takes_an_env(factory):
        return _evaluating(factory())
    if is_env(env):
        return _evaluating(factory(env))
    made = (env[0] if isinstance(env, list) else env)()
    try:
        return _evaluating(factory(made))
    finally:
        close_quietly(made)


def _takes_an_env(factory: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False  # a callable without a signature
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = next((p for p in parameters if p.kind in kinds), None)
    return first is not None and (first.default is first.empty or first.name == "env")


def _evaluating(policy: Any) -> Any:
    return policy.eval() if isinstance(policy, nn.Module) else policy


def check_given(done_keys: Any, collector_cls: Any) -> None:
    """Refuse values of TorchRL's arguments that are not supported."""
    if not check.is_one_of(done_keys, (DONE,)):
        raise ValueError(
            f"done_keys: expected {DONE}, got {done_keys!r}; episodes always end at this flag"
        )
    if collector_cls is not None:
        raise ValueError(
            f"collector_cls: expected None, got {collector_cls!r}; choose the place with backend"
        )


def check_reward_key(value: Any) -> Key:
    """Check that `reward_keys` is one key, and return it as a flat tuple."""
    with suppress(TypeError):
        key = as_key(value)
        if isinstance(value, str | tuple) and key and all(isinstance(part, str) for part in key):
            return key
    raise TypeError(f"reward_keys: expected one key, a string or a tuple of strings, got {value!r}")


def rewards_of(td: TensorDictBase, key: Key) -> torch.Tensor:
    """Return the sum of each frame's rewards, [N, T_max]."""
    leaves = {as_key(name): value for name, value in td.items(True, True)}
    rewards = leaves.get(key)
    if not isinstance(rewards, torch.Tensor):
        others = [show(other) for other in leaves if other[-1] == "reward"]
        raise ValueError(
            f"reward_keys: expected the key of a tensor in the batch, got {show(key)}"
            + (f"; rewards are {', '.join(others)}" if others else "")
        )
    return rewards.reshape(*td.shape, -1).sum(-1)


def check_kwargs(given: Any) -> None:
    """Refuse arguments that prevent counting whole episodes of the policy."""
    given = check.check_named("collector_kwargs", given)
    others = [repr(name) for name, is_off in _OFF.items() if not is_off(given.get(name))]
    if others:
        raise ValueError(
            f"collector_kwargs: cannot contain {', '.join(others)}; an Evaluator counts whole "
            "episodes of the policy, so it needs unlimited, unmodified batches"
        )


def frames_of(env: Any, limit: int) -> int:
    """Return the default frames per batch of a worker, rounded up to equal shares."""
    steps = min(limit, _STEPS) if limit else _STEPS
    envs = max(len(env), 1) if isinstance(env, (list, tuple)) else 1
    return -(-steps // envs) * envs


def of_each_actor(
    backend: str, ray_kwargs: Mapping[str, Any] | None, num_gpus: float | None
) -> dict[str, Any] | None:
    """Return `backend_options` with Ray's options of each actor."""
    for name, value in (("ray_kwargs", ray_kwargs), ("num_gpus", num_gpus)):
        if value is not None and backend != "ray":
            raise ValueError(f"{name}: expected None with backend={backend!r}, got {value}")
    gpus = {} if num_gpus is None else {"num_gpus": num_gpus}
    configs = {**(ray_kwargs or {}), **gpus}
    return {"remote_configs": configs} if configs else None


def collector_here(
    env: Any, policy: Any, factory: Any, init_fn: Any, arguments: dict[str, Any]
) -> SyncDataCollector:
    """Make the collector for "thread"; the factory may receive its environment."""
    if check.check_callable("init_fn", init_fn) is not None:
        init_fn()
    entry = frozen_entry(env)
    env_kwargs = arguments.pop("create_env_kwargs", None) or {}
    if isinstance(entry, partial):
        entry = entry(**env_kwargs)
    try:
        if is_torchrl_env(entry):
            from pycollect.envs.torchrl.specs import has_step_count

            if has_step_count(entry):  # a second StepCounter is impossible
                arguments["max_frames_per_traj"] = None
        if factory is None:
            acting = own_policy(policy)
        else:
            acting = check.built_policy(partial(made_policy, factory, entry))
        return SyncDataCollector(entry, acting, **arguments)
    except BaseException:
        if is_env(entry):
            close_quietly(entry)
        raise


def remote_collector(env: Any, policy: Any, factory: Any, arguments: dict[str, Any]) -> Any:
    """Make the collector for "process" and "ray"."""
    makers = frozen_entry(env)
    if factory is not None:
        arguments["policy_factory"] = partial(made_policy, factory, makers)
    envs = [makers] * arguments["num_collectors"]
    return SyncDataCollector(envs, own_policy(policy), sync=True, **arguments)
