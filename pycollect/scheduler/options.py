"""How work is handed to workers in other processes: the options, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycollect import checks as check
from pycollect.arguments import argument, checked, flag, made_of
from pycollect.batch.compression import import_lz4


def check_joined(name: str, value: Any, sync: bool) -> str | int | None:
    """Return how sync rollouts are joined, "stack" for None; return None if async.

    Async collectors accept "stack" without effect, because programs choose the class by a flag.
    """
    if not sync:
        if value not in (None, "stack"):
            raise ValueError(
                f"{name}: expected None or 'stack' for an async collector, got {value!r}"
            )
        return None
    choice: str | int = check.check_choice(
        name, "stack" if value is None else value, ("stack", 0, -1)
    )
    return choice


def check_uneven(joined: str | int | None, uneven: bool, batched: bool) -> None:
    """Raise ValueError if rollouts of different lengths cannot be joined."""
    if uneven and batched and joined == 0:
        raise ValueError(
            "cat_results: expected 'stack' or -1, got 0; rollouts of several environments may "
            "differ in length with preemptive_threshold or a list of frames_per_batch"
        )


def check_ahead(name: str, value: Any, sync: bool) -> int:
    """Return the number of rollouts per worker beyond the batch being consumed."""
    if value is None:
        return 0 if sync else 2
    return check.check_not_negative(name, value)


_ROUNDING = 1e-9  # 0.7 * 10 is a little more than 7


@dataclass(frozen=True)
class Preemption:
    """Once enough workers are done, the others stop after their current step.

    Attributes:
        threshold: Share of the workers that must be done, 0 to 1.
        min_fraction: Share of its steps that every worker makes.
    """

    threshold: float
    min_fraction: float = 0.0

    @classmethod
    def checked(cls, threshold: Any, min_fraction: Any, sync: bool) -> Preemption | None:
        """Check both arguments; return None without preemption.

        Raises:
            ValueError: A number is out of range, the collector is async, or only `min_fraction` is
                given.
        """
        if threshold is None:
            if min_fraction:
                raise ValueError(
                    "min_fraction: expected None without preemptive_threshold, got "
                    f"{min_fraction!r}; pass both or neither"
                )
            return None
        if not sync:
            raise ValueError(
                f"preemptive_threshold: expected None for an async collector, got {threshold!r}; "
                "async collectors never wait for slow workers"
            )
        least = 0.0 if min_fraction is None else min_fraction
        return cls(
            check.check_fraction("preemptive_threshold", threshold),
            check.check_fraction("min_fraction", least),
        )

    def enough(self, workers: int) -> int:
        """Return how many of `workers` must be done."""
        return math.ceil(self.threshold * workers - _ROUNDING)

    def min_steps(self, steps: int) -> int:
        """Return how many of `steps` every worker makes."""
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
    """How work is handed to workers in other processes, and the response to failures.

    Attributes:
        sync: A batch is complete when all workers have delivered.
        built_by_workers: A factory makes the policy in each worker; this process has none.
        uneven: The rollouts of a batch may have different numbers of steps.
        padded: If they have, each takes as much space in the batch as the longest.
    """

    sync: bool
    built_by_workers: bool = False
    uneven: bool = False
    padded: bool = False
    joined: str | int | None = argument(
        None,
        check_joined,
        "How rollouts are joined; None if async. 'stack' if each is delivered separately.",
        name="cat_results",
        beside=("sync",),
        in_kwargs=True,
    )
    preemption: Preemption | None = made_of(
        Preemption.checked,
        "If sync, when slow workers are stopped; None waits for them.",
        preemptive_threshold=None,
        min_fraction=None,
        beside=("sync",),
    )
    timeout: float | None = argument(
        None,
        _check_timeout,
        "Seconds without a step after which a worker is ended; None for no limit.",
        name="worker_timeout",
    )
    ahead: int = argument(
        None,
        check_ahead,
        "Number of rollouts per worker beyond the batch being consumed.",
        name="prefetch",
        beside=("sync",),
        in_kwargs=True,
    )
    update_each: bool = made_of(
        lambda *values: any(map(bool, values)),
        "Whether workers get the policy's weights for each batch.",
        update_after_each_batch=False,
        update_at_each_batch=False,
    )
    update_interval: int = argument(
        None,
        check.check_count,
        "Maximum number of a worker's batches between weight updates; 0 for no limit.",
        name="max_weight_update_interval",
    )
    init_timeout: float = argument(
        120.0, check.check_seconds, "Seconds to build a worker.", name="worker_init_timeout"
    )
    max_restarts: int = argument(
        3, check.check_count, "Number of replacements of a worker.", name="max_worker_restarts"
    )
    restart_on_error: bool = flag(False, "Whether a worker that raised is replaced.")
    compress: bool = argument(
        False, _check_compress, "Whether rollouts from other nodes are compressed."
    )
    start_method: str = argument("forkserver", _check_start_method, "How worker processes start.")

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
        """Check the arguments; errors start with an argument's name.

        Args:
            apart: A replay buffer gets each rollout separately, whatever `cat_results` is.
            shares: Share of a batch of each worker.
        """
        options = checked(cls, given, sync=sync, built_by_workers=built_by_workers)
        return replace(
            options,
            joined="stack" if apart and sync else options.joined,
            uneven=sync and (options.preemption is not None or len(set(shares)) > 1),
        )

    @property
    def ragged(self) -> bool:
        """Whether the rollouts of a batch may take different numbers of steps in it."""
        return self.uneven and not self.padded

    @property
    def masked(self) -> bool:
        """Whether batches record which cells hold a frame, because some may not."""
        return self.uneven and self.joined == "stack"
