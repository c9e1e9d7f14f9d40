"""How long workers may take to start; time in which a busy machine held them up is not counted."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pycollect.engines.waiting import LOOK_SECONDS
from pycollect.scheduler.records import WorkerRecord


class StartTimer:
    """Runs from its construction on, for workers that start together.

    What counts for a worker is the time that has passed less that for which its process was ready
    to run and had no CPU. So one that works is waited for however busy the machine is, and one that
    does nothing, or too much, is late after the same time as on an idle machine.

    Args:
        limit: seconds that a worker may take.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._began = time.monotonic()

    def left(self, workers: Sequence[WorkerRecord]) -> float:
        """Seconds until the first of them may be late."""
        passed = time.monotonic() - self._began
        left = min(self._limit - passed + _delay(worker) for worker in workers)
        return max(left, LOOK_SECONDS)

    def check(self, workers: Sequence[WorkerRecord]) -> None:
        """Raise ValueError if one of them is late: none of them was ready when it was looked."""
        passed = time.monotonic() - self._began
        late = [worker for worker in workers if passed - _delay(worker) >= self._limit]
        if late:
            without_cpu = max(map(_delay, late))
            raise ValueError(
                f"worker_init_timeout: workers {[worker.index for worker in late]} did not start "
                f"within {self._limit:g} s{_beside(without_cpu)}; memory or other resources are "
                "in use, their environments take longer to build, or the program's script, which "
                'they import, does its work outside of if __name__ == "__main__":'
            )


def _delay(worker: WorkerRecord) -> float:
    return 0.0 if worker.starting is None else worker.starting.cpu_delay


def _beside(seconds: float) -> str:
    if seconds < 1:
        return ""
    return f" (beside {seconds:.0f} s for which other programs had the CPU)"
