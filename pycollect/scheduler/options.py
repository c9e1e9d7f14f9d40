"""How work is handed to workers elsewhere: the options, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycollect import checks as check
from pycollect.arguments import argument, checked, flag, made_of
from pycollect.batch.compression import import_lz4


def check_joined(name: str, value: Any, sync: bool) -> str | int | None:
    """How sync results are joined, "stack" for None; None where they are not.

    There "stack" is taken, without effect: programs choose the class by a flag.
    """
    if not sync:
        if value not in (None, "stack"):
            raise ValueError(
                f"{name}: expected None or 'stack' where workers are not sync, got {value!r}"
            )
        return None
    choice: str | int = check.check_choice(
        name, "stack" if value is None else value, ("stack", 0, -1)
    )
    return choice


def check_uneven(joined: str | int | None, uneven: bool, batched: bool) -> None:
    """Raise ValueError where rollouts of different lengths cannot be joined."""
    if uneven and batched and joined == 0:
        raise ValueError(
            "cat_results: expected 'stack' or -1 where workers step a batch of environments and "
            "their rollouts may differ in length (preemptive_threshold, frames_per_batch as a "
            "list), got 0"
        )


def check_ahead(name: str, value: Any, sync: bool) -> int:
    """Rollouts per worker beyond the one being consumed: by default 2, and 0 where sync."""
    if value is None:
        return 0 if sync else 2
    return check.check_not_negative(name, value)


_ROUNDING = 1e-9  # 0.7 * 10 is a little more than 7


@dataclass(frozen=True)
class Preemption:
    """Once enough workers are done, the others stop after their current step.

    Attributes:
        threshold: the share of the workers that has to be done, from 0 to 1.
        min_fraction: the share of its steps that a worker makes in any case.
    """

    threshold: float
    min_fraction: float = 0.0

    @classmethod
    def checked(cls, threshold: Any, min_fraction: Any, sync: bool) -> Preemption | None:
        """Check both; None where nobody is ever stopped.

        Raises:
            ValueError: a number out of bounds, without `sync`, or `min_fraction` alone.
        """
        if threshold is None:
            if min_fraction:
                raise ValueError(
                    "min_fraction: expected None without preemptive_threshold, which says when "
                    f"workers are stopped; got {min_fraction!r}"
                )
            return None
        if not sync:
            raise ValueError(
                f"preemptive_threshold: expected None without sync=True, got {threshold!r}; async "
                "collectors wait for nobody: use sync=True"
            )
        least = 0.0 if min_fraction is None else min_fraction
        return cls(
            check.check_fraction("preemptive_threshold", threshold),
            check.check_fraction("min_fraction", least),
        )

    def enough(self, workers: int) -> int:
        """How many of so many workers have to be done."""
        return math.ceil(self.threshold * workers - _ROUNDING)

    def min_steps(self, steps: int) -> int:
        """How many of so many steps a worker makes in any case."""
        return max(1, math.ceil(self.min_fraction * steps - _ROUNDING))


def _check_timeout(name: str, value: Any) -> float | None:
    return None if value is None else check.check_seconds(name, value)


def _check_compress(name: str, value: Any) -> bool:
    if value:
        import_lz4(name)
    return bool(value)


def _check_start_method(name: str, value: Any) -> str:
    method: str = check.check_choice(name, value, ("forkserver", "spawn"))
    return method


@dataclass(frozen=True)
class RemoteOptions:
    """How work is handed to workers elsewhere, and what happens when one fails.

    Attributes:
        sync: a batch is complete when all workers have delivered.
        built_by_workers: a factory makes the policy in each worker, there is none here.
        uneven: the rollouts of one batch may differ in their numbers of steps.
        padded: where they do, each takes up as much of the batch as the longest, however they are
            joined.
    """

    sync: bool
    built_by_workers: bool = False
    uneven: bool = False
    padded: bool = False
    joined: str | int | None = argument(
        None,
        check_joined,
        "how rollouts are joined; None where not sync. 'stack' where each is delivered by itself",
        name="cat_results",
        beside=("sync",),
        in_kwargs=True,
    )
    preemption: Preemption | None = made_of(
        Preemption.checked,
        "sync: when stragglers are stopped; None: they are waited for",
        preemptive_threshold=None,
        min_fraction=None,
        beside=("sync",),
    )
    timeout: float | None = argument(
        None,
        _check_timeout,
        "seconds without a step after which a worker is ended; None: it is waited for",
        name="worker_timeout",
    )
    ahead: int = argument(
        None,
        check_ahead,
        "rollouts per worker beyond the one being consumed",
        name="prefetch",
        beside=("sync",),
        in_kwargs=True,
    )
    update_each: bool = made_of(
        lambda *values: any(map(bool, values)),
        "workers get the policy's weights without being told",
        update_after_each_batch=False,
        update_at_each_batch=False,
    )
    update_interval: int = argument(
        None,
        check.check_count,
        "a worker is updated after so many batches at the latest; 0: never",
        name="max_weight_update_interval",
    )
    init_timeout: float = argument(
        120.0, check.check_seconds, "until a worker is built", name="worker_init_timeout"
    )
    max_restarts: int = argument(3, check.check_count, "of one worker", name="max_worker_restarts")
    restart_on_error: bool = flag(False, "replace a worker that raised, too")
    compress: bool = argument(
        False, _check_compress, "rollouts that travel to this process are compressed"
    )
    start_method: str = argument(
        "forkserver", _check_start_method, "how worker processes of one machine start"
    )

    @classmethod
    def checked(
        cls,
        given: Mapping[str, Any],
        *,
        sync: bool,
        built_by_workers: bool,
        apart: bool = False,
        shares: Sequence[int] = (),
    ) -> RemoteOptions:
        """Check what was given; the errors name the argument.

        Args:
            apart: a replay buffer gets each rollout by itself, whatever `cat_results` says.
            shares: of a batch, of each worker.
        """
        options = checked(cls, given, sync=sync, built_by_workers=built_by_workers)
        return replace(
            options,
            joined="stack" if apart and sync else options.joined,
            uneven=sync and (options.preemption is not None or len(set(shares)) > 1),
        )

    @property
    def ragged(self) -> bool:
        """Whether the rollouts of one batch may take up different numbers of steps."""
        return self.uneven and not self.padded

    @property
    def masked(self) -> bool:
        """Whether batches tell which of their cells have a frame, since some may have none."""
        return self.uneven and self.joined == "stack"
