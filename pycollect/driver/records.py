"""Records of workers: their requests, their stalls, and the time that they take to start."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pycollect.transport.messages import RolloutRequest, WorkerInfo, WorkerSpec
from pycollect.transport.process import StartingWorker, WorkerHandle, WorkerProcess
from pycollect.worker.generators import GeneratorState, NestState, derived_seeds
from pycollect.worker.report import RolloutReport


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker is made from, as often as it has to be.

    Attributes:
        policy: the pickled policy or factory.
        options: of the engine, for the worker's process.
    """

    spec: WorkerSpec
    policy: bytes
    options: Mapping[str, Any]

    def named(self, index: int, role: str, options: Mapping[str, Any]) -> WorkerPlan:
        """The same for another one, by its id, what it is in words, and its engine's options."""
        return replace(self, spec=replace(self.spec, index=index, role=role), options=options)


@dataclass
class WorkerRecord:
    """What the driver knows of one worker.

    Attributes:
        starting: what was started and not heard of yet, while its requests wait here; else None.
        handle, info: of what is built; while another starts in its place, of the dead one.
        requests: of rollouts that were asked for and not taken off, oldest first.
        initial_call: what is asked of it before its first rollout: a method and its arguments.
        report: of the rollout that was delivered last; None before it, and after a seed.
        since_update: batches that it delivered since it last got weights.
        deaths: after how many delivered batches.
        failure: why the last one of them was replaced, in words; None if none was.
        leaving: it is asked for nothing more.
        started: when its process was started, by the monotonic clock.
        overdue: Reason for giving up the start; empty if it was not given up.
    """

    plan: WorkerPlan
    starting: StartingWorker | None
    handle: WorkerHandle = field(init=False)
    info: WorkerInfo = field(init=False)
    requests: deque[RolloutRequest] = field(default_factory=deque)
    initial_call: tuple[Any, ...] | None = None
    report: RolloutReport | None = None
    version: int = 0
    frames: int = 0
    since_update: int = 0
    deaths: list[int] = field(default_factory=list)
    failure: str | None = None
    leaving: bool = False
    started: float = field(default_factory=time.monotonic)
    overdue: str = ""

    @property
    def index(self) -> int:
        """The worker's id."""
        return self.plan.spec.index

    @property
    def incarnation(self) -> int:
        """How often it was replaced."""
        return self.plan.spec.incarnation

    @property
    def process(self) -> WorkerProcess:
        """Its process, whether or not the worker is built there."""
        return self.starting or self.handle

    @property
    def in_place(self) -> bool:
        """Whether it writes into the batch's own rows; while it starts: as it did before."""
        return self.handle.in_place

    @property
    def restarts(self) -> int:
        """How often it was replaced, or one of its own processes."""
        return self.incarnation + (self.report.restarts if self.report else 0)

    @property
    def generators(self) -> GeneratorState | NestState | None:
        """Where its own stood at the end of its last rollout; None if it has none."""
        packed = None if self.report is None else self.report.generators
        return None if packed is None else packed.value

    @property
    def place(self) -> torch.device:
        """Where its batches are to lie."""
        return self.plan.spec.options.devices.batch_device or self.info.device

    @property
    def reported_device(self) -> torch.device | None:
        """What ``td.device`` of its batches says."""
        return self.plan.spec.options.devices.reported

    @property
    def frames_in_flight(self) -> int:
        """Of the rollouts that it was asked for."""
        return len(self.requests) * self.info.frames

    def share(self, frames: int) -> None:
        """It is to collect that many per rollout, also whoever takes its place."""
        spec = self.plan.spec
        spec = replace(spec, options=replace(spec.options, frames=frames))
        self.plan = replace(self.plan, spec=spec)

    def ask_for(self, request: RolloutRequest) -> None:
        """Ask for one more rollout."""
        self.requests.append(request)
        if not self.starting:
            self.handle.submit(request)

    def drop(self) -> None:
        """Forget the rollouts that were asked for."""
        self.requests.clear()
        if not self.starting:
            self.handle.drop_rollouts()

    def seeds(self, entropy: int, moment: int) -> list[int]:
        """Of its environments, for a reset at some moment of a run."""
        return derived_seeds(self.info.num_seeds, entropy, moment, self.index)

    def resumption(
        self, generators: GeneratorState | NestState, entropy: int, moment: int
    ) -> tuple[Any, ...]:
        """The call that makes it go on with generators that stood so."""
        return ("resume", generators, self.seeds(entropy, moment))


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
