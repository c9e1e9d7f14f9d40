"""How long workers may take to start; time in which a busy machine held them up is not counted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from pycollect.scheduler.records import WorkerRecord


class StartTimer:
    """Finds workers that take too long to start.

    The time of a worker is the time since its start, less the time for which its process was ready
    to run and had no CPU. A working process is therefore waited for however busy the machine is; a
    process that hangs is late after the same time as on an idle machine.

    Args:
        limit: Seconds that a worker may take.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def late(self, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
        """Return the late ones of these unbuilt workers."""
        # The delay is read from files, so the clock goes first.
        return [
            worker
            for worker in workers
            if _passed(worker) >= self._limit and _passed(worker) - _delay(worker) >= self._limit
        ]

    def check(self, workers: Sequence[WorkerRecord]) -> None:
        """Raise ValueError if one of these unbuilt workers is late."""
        late = self.late(workers)
        if late:
            raise ValueError(
                f"worker_init_timeout: workers {[worker.index for worker in late]} did not start "
                f"within {self._limit:g} s{_not_counted(max(map(_delay, late)))}. "
                "Increase it, free memory and other resources, or put the program's script, which "
                'workers import, under if __name__ == "__main__":'
            )

    def overdue(self, worker: WorkerRecord) -> str:
        """Return the reason for giving up a late replacement."""
        return (
            f"{worker.plan.spec.name} was restarted, but not built within {self._limit:g} s "
            f"(worker_init_timeout){_not_counted(_delay(worker))}; its environment or policy takes "
            "longer to build, or hangs"
        )


def _passed(worker: WorkerRecord) -> float:
    return time.monotonic() - worker.started


def _delay(worker: WorkerRecord) -> float:
    return 0.0 if worker.starting is None else worker.starting.cpu_delay


def _not_counted(seconds: float) -> str:
    if seconds < 1:
        return ""
    return f", not counting {seconds:.0f} s in which other programs used the CPU"
