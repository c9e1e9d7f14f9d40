"""What is known of one worker, whichever incarnation of it is there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pycollect.engines.messages import RolloutRequest, WorkerInfo, WorkerSpec
from pycollect.engines.protocol import StartingWorker, WorkerHandle, WorkerProcess
from pycollect.worker.generators import GeneratorState, TeamState, derived_seeds
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
    def generators(self) -> GeneratorState | TeamState | None:
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
        self, generators: GeneratorState | TeamState, entropy: int, moment: int
    ) -> tuple[Any, ...]:
        """The call that makes it go on with generators that stood so."""
        return ("resume", generators, self.seeds(entropy, moment))
