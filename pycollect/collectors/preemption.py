"""When the stragglers of a sync collector are stopped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
