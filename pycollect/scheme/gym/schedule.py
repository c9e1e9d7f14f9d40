"""What an algorithm says of how often it collects, learns and is tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Schedule:
    """See :class:`pycollect.scheme.protocols.Algorithm`."""

    start_steps: int = 0
    update_every: int | None = None
    num_epochs: int = 1
    num_mini_batch: int = 1
    test_every: int = 1
    num_test_episodes: int = 0

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set one of its attributes."""
        setattr(self, parameter_name, new_parameter_value)
