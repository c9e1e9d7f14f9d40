"""The policy's version."""

from __future__ import annotations

from typing import Any


class PolicyVersion:
    """Counts updates of the weights.

    Args:
        tracker: counts beside it, as TorchRL's PolicyVersion does; None: nobody does.

    Attributes:
        number: 0 at first, or where the tracker stands.
    """

    def __init__(self, tracker: Any = None) -> None:
        self._tracker = tracker
        first = getattr(tracker, "version", 0)
        self.number = first if isinstance(first, int) else 0

    def count(self) -> None:
        """One more."""
        self.number += 1
        if self._tracker is not None:
            self._tracker.increment_version()
