"""P environments in groups: while one of them steps, the policy is called for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from pycollect import checks as check

from .base import EnvBatch
from .distinct import check_distinct
from .entry import check_entry, is_env

_POSSIBLE = (
    "a callable that returns a vector environment which steps elsewhere (Gymnasium's "
    "AsyncVectorEnv, an EnvPool, ALE's AtariVectorEnv)"
)
_SEVERAL = "a list of at least two callables, or a callable that returns a vector environment"


def check_env_groups(name: str, value: Any) -> int:
    """How many groups there are: 1 or 2."""
    number = check.check_positive(name, value)
    if number > 2:
        raise ValueError(
            f"{name}: expected 1, or 2 (one steps while another is acted on), got {number}"
        )
    return number


def group_entries(entry: Any, count: int, policy_elsewhere: bool = False) -> list[Any]:
    """The entry of each group: of a list its own, else the callable itself for each.

    Args:
        policy_elsewhere: environments may step in this thread, as the policy is called in another
            process; a longer list is then cut in `count` parts.

    Raises:
        ValueError: a list of another length, or an environment that is made already.
    """
    entry = check_entry(entry)
    if is_env(entry):
        raise ValueError(
            "env_groups: expected 1 with an environment that is made already, as each group is one "
            f"of its own; give {_SEVERAL if policy_elsewhere else _POSSIBLE}, which is called for "
            f"each group; got {entry}"
        )
    if not isinstance(entry, list):
        return [entry] * count
    if policy_elsewhere:
        return _parts(entry, count)
    if len(entry) != count:
        raise ValueError(
            "env_groups: expected 1 with environments that are stepped one after the other in one "
            f"process, or a list of {count}, each {_POSSIBLE}; got a list of {len(entry)}"
        )
    return entry


def _parts(entry: list[Any], count: int) -> list[Any]:
    """A list in parts of which none has two more than another; single callables by themselves."""
    if len(entry) < count:
        raise ValueError(
            f"env_groups: expected 1 with {len(entry)} environment in a worker, or {_SEVERAL}, got "
            f"{count}"
        )
    if len(entry) == count:
        return entry
    ends = [len(entry) * place // count for place in range(count + 1)]
    return [entry[begin:end] for begin, end in pairwise(ends)]


class EnvGroups:
    """The environments of one worker, in groups that are stepped each for itself.

    Attributes:
        groups: P environments in all, one group after the other.
        num_envs: P.
    """

    def __init__(self, groups: Sequence[EnvBatch]) -> None:
        self.groups = tuple(groups)
        self.num_envs = sum(group.num_envs for group in groups)

    @property
    def num_seeds(self) -> int:
        """How many seeds all of them take, see `EnvBatch`."""
        return sum(group.num_seeds for group in self.groups)

    @property
    def batch_size(self) -> tuple[int, ...]:
        """The batch dimensions before time; (P,) where there are several groups."""
        return self.groups[0].batch_size if len(self.groups) == 1 else (self.num_envs,)

    @property
    def can_reset(self) -> bool:
        """Whether single rows can be reset at any time."""
        return all(group.can_reset for group in self.groups)

    @property
    def time_limit(self) -> bool:
        """Whether episodes are known to end."""
        return all(group.time_limit for group in self.groups)

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.groups[0].device

    @property
    def original(self) -> Any:
        """What the user passed, or the callable returned; a list where there are several groups."""
        originals = [group.original for group in self.groups]
        if len(originals) == 1:
            return originals[0]
        lists = [own if isinstance(own, list) else [own] for own in originals]
        return [own for part in lists for own in part]

    def close(self) -> None:
        """Close the environments. Idempotent."""
        for group in self.groups:
            group.close()


def make_groups(
    entry: Any, count: int, make: Callable[[Any], EnvBatch], policy_elsewhere: bool = False
) -> EnvGroups:
    """Make one worker's environments.

    Args:
        entry: the worker's; see `group_entries`.
        count: of the groups.
        make: makes the environments of one of these entries.
        policy_elsewhere: see `group_entries`.

    Raises:
        ValueError: several groups of environments that step in this thread while the policy is
            called in it, too, or that are not alike; or one environment alone; or one environment
            in two places.
    """
    if count == 1:
        return EnvGroups([make(entry)])
    groups: list[EnvBatch] = []
    try:
        for own in group_entries(entry, count, policy_elsewhere):
            groups.append(make(own))
            _check_group(groups, policy_elsewhere)
            if not isinstance(entry, (list, tuple)) and not groups[-1].batched:
                raise ValueError(
                    f"env_groups: expected 1 with one environment in a worker, or {_SEVERAL}, got "
                    f"{groups[-1].original}"
                )
        made = EnvGroups(groups)
        check_distinct(made.original)
    except BaseException:
        for group in groups:
            group.close()
        raise
    return made


def _check_group(groups: Sequence[EnvBatch], policy_elsewhere: bool) -> None:
    """Check the last of them."""
    first, last = groups[0], groups[-1]
    if not last.overlaps and not policy_elsewhere:
        raise ValueError(
            f"env_groups: expected 1, or {_POSSIBLE}, got {last.original}, during whose steps "
            "nothing else can be done"
        )
    for name in ("observation", "action", "step_only", "extras", "step_extras"):
        expected, came = getattr(first, name), getattr(last, name)
        if came != expected:
            raise ValueError(
                "create_env_fn: expected groups of environments that are alike, their "
                f"{name}s differ: {expected} and {came}"
            )
