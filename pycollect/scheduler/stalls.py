"""Workers from which nothing comes any more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pycollect.scheduler.records import WorkerRecord

CHECK_SECONDS = 0.5
"""How long whoever waits sleeps at the most before it looks what else has happened.

A worker or a server may hang, and another thread may have shut the collector down.
"""


@dataclass
class _Seen:
    incarnation: int
    steps: int
    since: float


class StallDetector:
    """Asks workers how many steps they made, and tells which make none any more.

    Args:
        timeout: seconds without a step; None: nobody ever stalls.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._seen: dict[int, _Seen] = {}
        self._looked = time.monotonic()

    @property
    def next_check(self) -> float:
        """How long to wait before the workers are looked at again, seconds."""
        return CHECK_SECONDS if self._timeout is None else min(CHECK_SECONDS, self._timeout / 4)

    def heard_of(self, worker: WorkerRecord) -> None:
        """A worker delivered something, or was replaced."""
        self._seen.pop(worker.index, None)

    def stalled(self, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Those of them that made no step for the time-out. Workers that start are left alone.

        Looks only now and then, so that it may be asked before every batch.
        """
        now = time.monotonic()
        if self._timeout is None or now - self._looked < self._timeout / 4:
            return []
        self._looked = now
        return [worker for worker in workers if not worker.starting and self._is_late(worker)]

    def _is_late(self, worker: WorkerRecord) -> bool:
        assert self._timeout is not None
        now = time.monotonic()
        steps = worker.handle.steps()
        seen = self._seen.get(worker.index)
        moved = seen is not None and steps is not None and steps != seen.steps
        if seen is None or moved or seen.incarnation != worker.incarnation:
            self._seen[worker.index] = _Seen(worker.incarnation, steps or 0, now)
            return False
        return now - seen.since >= self._timeout
