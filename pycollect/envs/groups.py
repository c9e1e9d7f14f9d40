"""Groups of environments: one group steps while the policy runs for the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from pycollect.data.layout import dotted
from pycollect.envs.base import EnvBatch, EnvSpec
from pycollect.envs.make import check_distinct, check_entry, is_env

_POSSIBLE = (
    "a callable that returns a vector environment with its own processes or threads "
    "(AsyncVectorEnv, EnvPool, AtariVectorEnv)"
)
_SEVERAL = "a list of at least two callables, or a callable that returns a vector environment"


def group_entries(entry: Any, count: int, remote_policy: bool = False) -> list[Any]:
    """Return the entry of each group: an item or a part of the list, or the single callable.

    Args:
        remote_policy: Whether the policy runs in another process. Environments may then step in
            this thread, and a longer list is split into `count` parts.
    """
    entry = check_entry(entry)
    if is_env(entry):
        raise ValueError(
            f"env_groups: each group needs its own environments, but create_env_fn is {entry}. Use "
            f"1, or pass {_SEVERAL if remote_policy else _POSSIBLE}"
        )
    if not isinstance(entry, list):
        return [entry] * count
    if remote_policy:
        return _parts(entry, count)
    if len(entry) != count:
        raise ValueError(
            f"env_groups: a list of {len(entry)} environments is stepped one by one. Use 1, or "
            f"pass a list of {count}, each {_POSSIBLE}"
        )
    return entry


def _parts(entry: list[Any], count: int) -> list[Any]:
    """Split a list into parts of nearly equal length; a part of one item is the item itself."""
    if len(entry) < count:
        raise ValueError(
            f"env_groups: {len(entry)} environment per worker cannot be split into {count} groups. "
            f"Use 1, or pass {_SEVERAL}"
        )
    if len(entry) == count:
        return entry
    ends = [len(entry) * place // count for place in range(count + 1)]
    return [entry[begin:end] for begin, end in pairwise(ends)]


class EnvGroups:
    """The environments of one worker, in groups that are stepped separately."""

    def __init__(self, groups: Sequence[EnvBatch]) -> None:
        self.groups = tuple(groups)
        self.num_seeds = sum(group.num_seeds for group in groups)

    @property
    def spec(self) -> EnvSpec:
        specs = [group.spec for group in self.groups]
        if len(specs) == 1:
            return specs[0]
        return replace(
            specs[0],
            batch_size=(sum(spec.num_envs for spec in specs),),
            can_reset=all(spec.can_reset for spec in specs),
        )

    def check_can_cut(self) -> None:
        """Raise a ValueError if the collector cannot cut the trajectories of single rows."""
        if not self.spec.can_reset:
            raise ValueError(
                "max_frames_per_traj: this vector environment is not known to support reset_mask, "
                "so single rows cannot be reset; use another environment, or a list of callables"
            )
        for spec in (group.spec for group in self.groups if not group.spec.own_flags):
            leaves, extras = (*spec.observation, *spec.step_only), (*spec.extras, *spec.step_extras)
            keys = [*(leaf.key for leaf in leaves), *(extra.key for extra in extras)]
            if any(key[0] == "step_count" for key in keys):
                raise ValueError(
                    "max_frames_per_traj: the environment already has an entry 'step_count', which "
                    "this argument would add; rename the entry with a wrapper, or limit the "
                    "episodes with gymnasium.wrappers.TimeLimit"
                )

    def check_has_truncated(self) -> None:
        """Raise a ValueError if an environment lacks the flag 'truncated'."""
        for spec in (group.spec for group in self.groups if group.spec.own_flags):
            if all(leaf.key[-1] != "truncated" for leaf in spec.observation):
                raise ValueError(
                    "set_truncated: expected an environment with a flag 'truncated', got "
                    f"{[dotted(leaf.key) for leaf in spec.observation]}; call its "
                    "add_truncated_keys()"
                )

    def rows_at(self, index: Any) -> list[int]:
        """Return which of the P environments an index into their batch dimensions selects."""
        spec = self.spec
        if not spec.batch_size:
            raise RuntimeError("index: expected None because there is a single environment")
        if not spec.can_reset:
            raise RuntimeError(
                "index: expected None because this vector environment may not support "
                "options={'reset_mask': ...}"
            )
        rows = torch.arange(spec.num_envs, device="cpu").view(spec.batch_size)
        return sorted(set(rows[index].reshape(-1).tolist()))

    @property
    def original(self) -> Any:
        """Environment that the user passed or made; a list if there are several groups."""
        originals = [group.original for group in self.groups]
        if len(originals) == 1:
            return originals[0]
        lists = [envs if isinstance(envs, list) else [envs] for envs in originals]
        return [env for envs in lists for env in envs]

    def close(self) -> None:
        for group in self.groups:
            group.close()


def make_groups(
    entry: Any, count: int, make: Callable[[Any], EnvBatch], remote_policy: bool = False
) -> EnvGroups:
    """Make one worker's environments."""
    if count == 1:
        return EnvGroups([make(entry)])
    groups: list[EnvBatch] = []
    try:
        for part in group_entries(entry, count, remote_policy):
            groups.append(make(part))
            _check_group(groups, remote_policy)
            if not isinstance(entry, (list, tuple)) and not groups[-1].spec.batch_size:
                raise ValueError(
                    f"env_groups: one environment per worker ({groups[-1].original}) cannot be "
                    f"split into {count} groups. Use 1, or pass {_SEVERAL}"
                )
        made = EnvGroups(groups)
        check_distinct(made.original)
    except BaseException:
        for group in groups:
            group.close()
        raise
    return made


def _check_group(groups: Sequence[EnvBatch], remote_policy: bool) -> None:
    """Check that the last group can overlap with the first one and has equal leaves."""
    first, last = groups[0], groups[-1]
    if not last.overlaps and not remote_policy:
        raise ValueError(
            f"env_groups: {last.original} steps in the thread that calls the policy, so they "
            f"cannot overlap. Use 1, or pass {_POSSIBLE}"
        )
    for name in ("observation", "action", "reward", "step_only", "extras", "step_extras"):
        expected, value = getattr(first.spec, name), getattr(last.spec, name)
        if value != expected:
            raise ValueError(
                f"create_env_fn: the environments of all groups must be alike, but {name!r} "
                f"differs: {expected} and {value}"
            )
