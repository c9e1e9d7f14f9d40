"""The policy's version."""

from __future__ import annotations

from typing import Any


class PolicyVersion:
    """Counts updates of the weights.

    Args:
        tracker: Second counter to increment, such as TorchRL's PolicyVersion, or None.

    Attributes:
        number: Number of updates; it starts at the tracker's version, else at 0.
    """

    def __init__(self, tracker: Any = None) -> None:
        self._tracker = tracker
        first = getattr(tracker, "version", 0)
        self.number = first if isinstance(first, int) else 0

    def count(self) -> None:
        """Increment the version."""
        self.number += 1
        if self._tracker is not None:
            self._tracker.increment_version()
