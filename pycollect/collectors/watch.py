"""Who has not made a step for too long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pycollect.collectors.workforce import Member


@dataclass
class _Seen:
    incarnation: int
    steps: int
    since: float


class Watch:
    """Asks workers how many steps they made, and tells which make none any more.

    Args:
        timeout: seconds without a step; None: nobody is ever overdue.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._seen: dict[int, _Seen] = {}
        self._looked = time.monotonic()

    def patience(self, most: float) -> float:
        """How long to wait before the workers are looked at again, seconds."""
        return most if self._timeout is None else min(most, self._timeout / 4)

    def heard_of(self, member: Member) -> None:
        """A worker delivered something, or was replaced."""
        self._seen.pop(member.index, None)

    def overdue(self, members: Sequence[Member]) -> list[Member]:
        """Those of them that made no step for the time-out. Workers that start are left alone.

        Looks only now and then, so that it may be asked before every batch.
        """
        now = time.monotonic()
        if self._timeout is None or now - self._looked < self._timeout / 4:
            return []
        self._looked = now
        return [member for member in members if not member.starting and self._is_late(member)]

    def _is_late(self, member: Member) -> bool:
        assert self._timeout is not None
        now = time.monotonic()
        steps = member.handle.steps()
        seen = self._seen.get(member.index)
        moved = seen is not None and steps is not None and steps != seen.steps
        if seen is None or moved or seen.incarnation != member.handle.incarnation:
            self._seen[member.index] = _Seen(member.handle.incarnation, steps or 0, now)
            return False
        return now - seen.since >= self._timeout
