"""Records of workers, and timers that detect workers that stall or start too slowly."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pycollect.data.generators import GeneratorState, NestState, derived_seeds
from pycollect.transport.engine import AnyHandle
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.messages import RolloutRequest, WorkerInfo, WorkerSpec, reset, resume
from pycollect.worker.report import RolloutReport


@dataclass(frozen=True)
class WorkerPlan:
    """Everything that a worker and its replacements are built from.

    If `policy` is a client of central inference, `copy` pickles the policy itself for a worker that
    shares no memory with the driver.
    """

    spec: WorkerSpec
    policy: bytes
    options: Mapping[str, Any]  # options of the engine for the worker's process
    copy: Callable[[], bytes] | None = None


@dataclass
class WorkerRecord:
    """The driver's view of one worker.

    While a replacement starts, `handle` and `info` are those of its predecessor.
    """

    plan: WorkerPlan  # plan that the worker was built from
    starting: AnyHandle | None  # handle while it is not built yet; ``None`` once it is built
    handle: WorkerHandle = field(init=False)  # handle of the built worker
    info: WorkerInfo = field(init=False)  # properties of the built worker
    requests: deque[RolloutRequest] = field(default_factory=deque)  # of no batch yet, oldest first
    initial_call: tuple[Any, ...] | None = None  # function and arguments to run before a rollout
    report: RolloutReport | None = None  # of the last rollout in a batch; ``None`` after seeding
    version: int = 0  # policy version of that rollout
    frames: int = 0  # number of frames that became part of a batch
    since_update: int = 0  # number of batches since the worker last received weights
    deaths: list[int] = field(default_factory=list)  # delivered batches at each recent death
    failure: str | None = None  # reason of the last replacement
    must_reset: bool = False  # before the next rollout, because rollouts were dropped
    leaving: bool = False  # whether no more rollouts are requested from the worker
    started: float = field(default_factory=time.monotonic)  # when the process was started
    overdue: str = ""  # reason for giving up the start; empty if it was not given up
    process_restarts: dict[int, int] = field(default_factory=dict)  # replaced, by incarnation

    @property
    def index(self) -> int:
        return self.plan.spec.index

    @property
    def incarnation(self) -> int:
        """Number of times that the worker was replaced."""
        return self.plan.spec.incarnation

    @property
    def newest(self) -> AnyHandle:
        """Handle of the worker, whether or not the worker is built."""
        return self.starting or self.handle

    @property
    def in_place(self) -> bool:
        """Whether the worker writes into the rows of the batch; while it starts, as before."""
        return self.handle.in_place

    @property
    def restarts(self) -> int:
        """Number of times that the worker, or one of its processes, was replaced."""
        return self.incarnation + sum(self.process_restarts.values())

    @property
    def generators(self) -> GeneratorState | NestState | None:
        """Random-generator states after the last rollout, or ``None``."""
        packed = None if self.report is None else self.report.generators
        return None if packed is None else packed.value

    @property
    def batch_device(self) -> torch.device:
        return self.plan.spec.options.devices.batch_device or self.info.device

    @property
    def reported_device(self) -> torch.device | None:
        """Value of ``td.device`` of the worker's batches."""
        return self.plan.spec.options.devices.reported

    @property
    def frames_in_flight(self) -> int:
        """Number of frames of the requested rollouts."""
        return len(self.requests) * self.info.frames

    def set_frames(self, frames: int) -> None:
        """Set the number of frames per rollout, also for replacements."""
        spec = self.plan.spec
        spec = replace(spec, options=replace(spec.options, frames=frames))
        self.plan = replace(self.plan, spec=spec)

    def request(self, request: RolloutRequest) -> None:
        """Request one more rollout."""
        self.requests.append(request)
        if self.starting:
            return
        if self.must_reset:
            self.handle.run(reset)  # if it fails, the rollout fails too
            self.must_reset = False
        self.handle.submit(request)

    def renew_requests(self, version: int) -> None:
        """Request the same rollouts again, with that policy version."""
        self.requests = deque(replace(request, version=version) for request in self.requests)

    def drop(self) -> None:
        """Forget the requested rollouts. Unless a call resets the worker, the next request does."""
        self.must_reset = not self.starting
        self.requests.clear()
        if not self.starting:
            self.handle.drop_rollouts()

    def seeds(self, entropy: int, moment: int) -> list[int]:
        """Return the seeds of the worker's environments for a reset at that moment of a run."""
        return derived_seeds(self.info.num_seeds, entropy, moment, self.index)

    def resumption(
        self, generators: GeneratorState | NestState, entropy: int, moment: int
    ) -> tuple[Any, ...]:
        """Return the call that lets the worker continue with these generator states."""
        return resume, generators, self.seeds(entropy, moment)


CHECK_SECONDS = 0.5
"""Maximum time between two checks for stalled workers, dead servers and a shutdown."""


@dataclass
class _Progress:
    incarnation: int
    steps: int
    since: float


class StallDetector:
    """Detects workers that no longer make steps."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._last: dict[int, _Progress] = {}
        self._checked = time.monotonic()

    @property
    def next_check(self) -> float:
        """Number of seconds until the workers must be checked again."""
        return CHECK_SECONDS if self._timeout is None else min(CHECK_SECONDS, self._timeout / 4)

    def note_progress(self, worker: WorkerRecord) -> None:
        """Record that a worker delivered something or was replaced."""
        self._last.pop(worker.index, None)

    def stalled(self, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Return the workers that made no step within the timeout; ignore starting workers.

        It is cheap to call before every batch, because it checks only a few times per timeout.
        """
        now = time.monotonic()
        if self._timeout is None or now - self._checked < self._timeout / 4:
            return []
        self._checked = now
        return [worker for worker in workers if not worker.starting and self._is_late(worker)]

    def _is_late(self, worker: WorkerRecord) -> bool:
        assert self._timeout is not None
        now = time.monotonic()
        steps = worker.handle.steps()
        last = self._last.get(worker.index)
        moved = last is not None and steps is not None and steps != last.steps
        if last is None or moved or last.incarnation != worker.incarnation:
            self._last[worker.index] = _Progress(worker.incarnation, steps or 0, now)
            return False
        return now - last.since >= self._timeout


class StartTimer:
    """Detects workers that take too long to start.

    The start time of a worker excludes the time in which its process was runnable but had no CPU.
    So a process that works is given enough time on a busy machine, and a process that hangs is late
    after the same time as on an idle machine.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def late(self, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
        """Return the workers among these unbuilt ones that are late."""
        # The clock is cheap; the delay is read from files.
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
                f"within {self._limit:g} s{_delay_note(max(map(_delay, late)))}. "
                "Increase it, free memory and other resources, or put the program's script, which "
                'workers import, under if __name__ == "__main__":'
            )

    def overdue(self, worker: WorkerRecord) -> str:
        """Return the reason for giving up a late replacement."""
        return (
            f"{worker.plan.spec.name} was restarted, but not built within {self._limit:g} s "
            f"(worker_init_timeout){_delay_note(_delay(worker))}; its environment or policy takes "
            "longer to build or hangs, or resources that it needs are missing"
        )


def _passed(worker: WorkerRecord) -> float:
    return time.monotonic() - worker.started


def _delay(worker: WorkerRecord) -> float:
    return 0.0 if worker.starting is None else worker.starting.cpu_delay


def _delay_note(seconds: float) -> str:
    if seconds < 1:
        return ""
    return f", not counting {seconds:.0f} s in which other programs used the CPU"
