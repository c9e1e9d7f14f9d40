"""How work is handed to workers elsewhere: the options, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pycollect import checks as check


@dataclass(frozen=True)
class RemoteOptions:
    """How work is handed to workers elsewhere, and what happens when one fails.

    Attributes:
        sync: a batch is complete when all workers have delivered.
        joined: how their rollouts are joined; None where not sync. "stack" where each of them is
            delivered apart from the others.
        uneven: the rollouts of one batch may differ in their numbers of steps.
        padded: where they do, each takes up as much of the batch as the longest, however they are
            joined.
        preemption: sync: when stragglers are stopped; None: they are waited for.
        prefetch: rollouts per worker beyond the one being consumed.
        update_each: workers get the policy's weights without being told.
        update_interval: a worker is updated after so many batches at the latest; 0: never.
        built_by_workers: a factory makes the policy in each worker, there is none here.
        timeout: seconds without a step after which a worker is ended; None: it is waited for.
    """

    sync: bool
    joined: str | int | None
    uneven: bool
    preemption: Preemption | None
    prefetch: int
    update_each: bool
    update_interval: int
    built_by_workers: bool
    init_timeout: float
    timeout: float | None
    max_restarts: int
    restart_on_error: bool
    padded: bool = False

    @classmethod
    def checked(
        cls,
        *,
        sync: bool,
        cat_results: Any,
        apart: bool = False,
        shares: Sequence[int] = (),
        preemptive_threshold: Any = None,
        min_fraction: Any = None,
        prefetch: Any,
        update_each: Any,
        max_weight_update_interval: Any,
        built_by_workers: bool,
        worker_init_timeout: Any,
        worker_timeout: Any,
        max_worker_restarts: Any,
        restart_on_error: Any,
    ) -> RemoteOptions:
        """Check each; the errors name the argument.

        Args:
            apart: a replay buffer gets each rollout by itself, whatever `cat_results` says.
        """
        joined = check_cat_results(cat_results, sync)
        preemption = Preemption.checked(preemptive_threshold, min_fraction, sync)
        timeout = worker_timeout
        if timeout is not None:
            timeout = check.check_seconds("worker_timeout", timeout)
        return cls(
            sync=sync,
            joined="stack" if apart and sync else joined,
            uneven=sync and (preemption is not None or len(set(shares)) > 1),
            preemption=preemption,
            prefetch=check_prefetch(prefetch, sync),
            update_each=bool(update_each),
            update_interval=check.check_count(
                "max_weight_update_interval", max_weight_update_interval
            ),
            built_by_workers=built_by_workers,
            init_timeout=check.check_seconds("worker_init_timeout", worker_init_timeout),
            timeout=timeout,
            max_restarts=check.check_count("max_worker_restarts", max_worker_restarts),
            restart_on_error=bool(restart_on_error),
        )

    @property
    def ragged(self) -> bool:
        """Whether the rollouts of one batch may take up different numbers of steps."""
        return self.uneven and not self.padded

    @property
    def masked(self) -> bool:
        """Whether batches tell which of their cells have a frame, since some may have none."""
        return self.uneven and self.joined == "stack"


def check_cat_results(value: Any, sync: bool) -> str | int | None:
    """How sync results are joined, "stack" for None; None where they are not.

    There "stack" is taken, without effect: programs choose the class by a flag.
    """
    if not sync:
        if value not in (None, "stack"):
            raise ValueError(
                f"cat_results: expected None or 'stack' where workers are not sync, got {value!r}"
            )
        return None
    choice: str | int = check.check_choice(
        "cat_results", "stack" if value is None else value, ("stack", 0, -1)
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


def check_prefetch(value: Any, sync: bool) -> int:
    """Rollouts per worker beyond the one being consumed: by default 2, and 0 where sync."""
    if value is None:
        return 0 if sync else 2
    number = check.check_integer("prefetch", value)
    if number < 0:
        raise ValueError(f"prefetch: expected an int >= 0, got {number}")
    return number


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
            _check_fraction("preemptive_threshold", threshold),
            _check_fraction("min_fraction", least),
        )

    def enough(self, workers: int) -> int:
        """How many of so many workers have to be done."""
        return math.ceil(self.threshold * workers - _ROUNDING)

    def min_steps(self, steps: int) -> int:
        """How many of so many steps a worker makes in any case."""
        return max(1, math.ceil(self.min_fraction * steps - _ROUNDING))


def _check_fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a number from 0 to 1, or None, got {value!r}")
    return float(value)
