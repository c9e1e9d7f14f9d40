"""A team: several processes that are one worker to whoever asks; a multi class in a Ray actor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycollect._core import Placement, RolloutControl, Slab, join_rollouts
from pycollect.data.extras import Extras, pickled_extras
from pycollect.data.weights import NO_WEIGHTS, WeightForm, Weights
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions, StreamOptions
from pycollect.driver.records import WorkerPlan, WorkerRecord
from pycollect.driver.scheduler import Scheduler
from pycollect.driver.source import Batch
from pycollect.driver.workers import check_alike
from pycollect.errors import WorkerError
from pycollect.transport.messages import WorkerInfo, WorkerSpec
from pycollect.transport.processes.engine import ProcessEngine
from pycollect.transport.waiting import POLL_SECONDS
from pycollect.worker.generators import GeneratorState, TeamState
from pycollect.worker.report import Packed, RolloutReport, WorkerSeconds

_TOLD = ("worker_died", "worker_timeout", "env_error")  # losses that whoever asks is to know


@dataclass(frozen=True)
class TeamMaker:
    """Makes the team of a worker in the worker's process.

    Attributes:
        options: how its processes collect.
    """

    options: RemoteOptions

    def __call__(self, spec: WorkerSpec, policy: bytes) -> Team:
        """The team of that spec, with a pickled policy or factory."""
        return Team(spec, policy, self.options)


@dataclass(frozen=True)
class TeamEnvs:
    """The environments of a team, as those of one worker."""

    num_envs: int
    num_seeds: int
    batch_size: tuple[int, ...]


class Team:
    """Has the methods of a Worker. Its processes are replaced by themselves when they die.

    With "sync" processes a rollout is a batch of all of them: W processes are a dimension of their
    environments, [W, T] or [W, P, T], or, joined with 0 or -1, are in one with another dimension.
    Else it is that of the process that is ready first, [T] or [P, T]. A rollout that is stopped is
    as large; the cells to which a process did not come are uncollected, wherever they are.

    Args:
        spec: its `entry` has one entry for each.
        policy: pickled, or its factory; nothing here looks into it.
        options: how they collect.

    Raises:
        SharedMemoryError: processes cannot share memory here.
        ValueError: they are not alike, also where they are not sync.
    """

    # Hooks run in the processes.
    post_collect_hook: Callable[[Any], Any] | None = None
    version = 0

    def __init__(self, spec: WorkerSpec, policy: bytes, options: RemoteOptions) -> None:
        self.index, self.incarnation = spec.index, spec.incarnation
        self._options = options
        self._size = len(spec.entry)
        self._sequence = 0
        self._fresh: Weights | None = None
        self._version = 0
        self._told: dict[str, int] = {}
        own = replace(spec.options, frames=self._share(spec.options.frames))
        kwargs = spec.env_kwargs
        plans = [
            WorkerPlan(
                WorkerSpec(
                    process,
                    entry,
                    kwargs[process] if isinstance(kwargs, list) else kwargs,
                    own,
                    builds_policy=spec.builds_policy,
                    hides_gpus=spec.hides_gpus,
                ),
                policy,
                {},
            )
            for process, entry in enumerate(spec.entry)
        ]
        self._processes = _Processes(self._options, plans)
        try:
            self._learn()
        except BaseException:
            self.close()
            raise

    def _share(self, frames: int) -> int:
        """Frames of one process's rollout where the team's is to have so many."""
        return -(-frames // self._size) if self._options.sync else frames

    def _learn(self) -> None:
        """What the team looks like, from what its processes do."""
        infos = self._processes.infos
        check_alike(infos)
        first = infos[0]
        *envs, self.steps = self._processes.shape
        self.env = TeamEnvs(
            num_envs=math.prod(envs),
            num_seeds=sum(info.num_seeds for info in infos.values()),
            batch_size=tuple(envs),
        )
        self.leaves = first.leaves
        self.weights: WeightForm = first.weights
        self.device = first.device
        self.bounded = all(info.bounded for info in infos.values())
        self.placement = Placement(self.leaves.layout(), 1, self.env.num_envs, self.steps)

    @property
    def processes(self) -> int:
        """How many there are."""
        return self._size

    @property
    def stacked(self) -> bool:
        """Whether these are stacked in a rollout, each a part of its own."""
        return self._options.joined == "stack"

    @property
    def scheduler(self) -> Scheduler:
        """What drives the processes."""
        return self._processes.scheduler

    @property
    def batch_shape(self) -> list[int]:
        """The batch dimensions of a rollout."""
        return [*self.env.batch_size, self.steps]

    @property
    def stepped(self) -> int:
        """Grows as long as something is done: with each step, and while processes are awaited."""
        return self._processes.activity

    def collect(
        self,
        slab: Slab,
        row: int,
        policy_version: int,
        random: bool = False,
        control: RolloutControl | None = None,
    ) -> RolloutReport:
        """One rollout into that row of a slab, see :meth:`Worker.collect`.

        Raises:
            WorkerError: a process died too often.
        """
        if self._fresh is not None or policy_version != self._version:
            self._processes.push(self._fresh or NO_WEIGHTS, policy_version)
            self._fresh, self._version = None, policy_version
        try:
            batch = self._processes.rollout(random, control or RolloutControl())
        except WorkerError as error:
            text = f"a process of worker {self.index} failed: {error}"
            raise WorkerError(text, self.index, self.incarnation, error.remote_traceback) from error
        header = join_rollouts(slab, row, batch.slab, self.index, self.incarnation, self._sequence)
        self._sequence += 1
        reports = [own.report for own in self._processes.present if own.report is not None]
        return RolloutReport(
            header.frames,
            header.policy_version,
            list(batch.episodes),
            _mean([report.seconds for report in reports]),
            sum(report.stepped for report in reports),
            tuple(sorted({name for report in reports for name in report.slow_paths})),
            self._extras(batch.extras),
            sources=self._sources(batch),
            lost=self._new_losses(),
            restarts=self._processes.restarts,
        )

    def _extras(self, extras: Extras | None) -> Packed[Extras] | None:
        if extras is None:
            return None
        size = self.env.num_envs, self.steps
        return Packed({key: c.reshape(size) for key, c in extras.items()}, pickled_extras)

    def _sources(self, batch: Batch) -> tuple[int, ...]:
        """Whose rollouts follow each other along time; 0 where all are side by side."""
        if not self._options.sync:
            return tuple(batch.frames_of)
        return tuple(range(self._size)) if self._processes.in_time else (0,)

    def _new_losses(self) -> dict[str, int]:
        lost = self._processes.lost
        new = {reason: lost.get(reason, 0) - self._told.get(reason, 0) for reason in _TOLD}
        self._told = lost
        return {reason: frames for reason, frames in new.items() if frames}

    def load_weights(self, weights: Weights) -> None:
        """New weights for the rollouts that start from the next `collect` on."""
        self._fresh = weights

    def set_hook(self, name: str, hook: Any) -> None:
        """A hook for all processes, from their next rollout to start on."""
        self._processes.scheduler.set_hook(name, hook)

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """Seed everything anew and reset all environments.

        Process w draws as worker w of a collector would that was seeded with `root` and this
        worker's id together.

        Args:
            seeds: of the environments, in the order of the processes.
        """
        self._processes.begin(
            {
                process: ("set_seed", own, root << 32 | self.index)
                for process, own in self._of_each(seeds).items()
            }
        )

    def resume(self, state: GeneratorState | TeamState, seeds: Sequence[int]) -> None:
        """Go on with generators that stood so, after a reset."""
        assert isinstance(state, TeamState)
        own = self._of_each(seeds)
        self._processes.begin(
            {
                process: ("resume", part, own[process])
                for process, part in enumerate(state.processes)
            }
        )

    def _of_each(self, seeds: Sequence[int]) -> dict[int, list[int]]:
        rest = list(seeds)
        result = {}
        for process, info in self._processes.infos.items():
            result[process], rest = rest[: info.num_seeds], rest[info.num_seeds :]
        return result

    def reset(self) -> None:
        """Reset all environments; open trajectories end there."""
        self._processes.scheduler.reset(None)

    def generator_state(self) -> TeamState | None:
        """Where the processes' generators stood; None if one of them has not said it yet."""
        states = [process.generators for process in self._processes.present]
        known = tuple(state for state in states if isinstance(state, GeneratorState))
        return TeamState(known) if len(known) == len(states) else None

    def set_share(self, frames: int) -> None:
        """Collect that many frames per rollout from now on."""
        self._processes.resize(self._share(frames))
        self._learn()

    def close(self) -> None:
        """End the processes, which close their environments. Idempotent."""
        self._processes.close()


class _Engine(ProcessEngine):
    """Lets whoever waits for the team see that it is alive, and stop it, while it waits itself.

    Args:
        all_stop: of all processes the team awaits a rollout; else of one, the first in the line.
        start_method: see :class:`ProcessEngine`.
    """

    def __init__(self, all_stop: bool, start_method: str) -> None:
        super().__init__(start_method)
        self.all_stop = all_stop
        self.control = RolloutControl()
        self.beats = 0

    def wait_any(self, handles: Sequence[Any], timeout: float) -> Any:
        """See :class:`ProcessEngine`."""
        deadline = time.monotonic() + timeout
        while True:
            self.beats += 1
            self.control.count_step()
            if self.control.is_stopped:
                for handle in handles if self.all_stop else handles[:1]:
                    handle.stop()
            left = deadline - time.monotonic()
            ready = super().wait_any(handles, min(left, POLL_SECONDS))
            if ready is not None or left <= POLL_SECONDS:
                return ready


class _TeamFlow(Flow):
    """The accounts of a team's processes, whose actions are random where the team's are to be."""

    is_random = False


class _Processes:
    """A team's processes. Their batches are handed over as they were assembled."""

    def __init__(self, options: RemoteOptions, plans: Sequence[WorkerPlan]) -> None:
        self._flow = _TeamFlow(StreamOptions(frames_per_batch=1))
        self._engine = _Engine(options.sync, options.start_method)
        self.scheduler = Scheduler(self._flow, options, plans, None, self._engine)
        try:
            self.scheduler.start()
        except BaseException:
            self.close()
            raise

    @property
    def present(self) -> list[WorkerRecord]:
        """What is known of each process."""
        return self.scheduler.group.present

    @property
    def infos(self) -> dict[int, WorkerInfo]:
        """What each process turned out to be."""
        return self.scheduler.group.infos

    @property
    def shape(self) -> list[int]:
        """The batch dimensions of a batch."""
        return self.scheduler.assembly.shape(list(self.infos.values()))

    @property
    def in_time(self) -> bool:
        """Whether processes follow each other along time in a batch."""
        return self.scheduler.assembly.along_time(self.infos[0])

    @property
    def activity(self) -> int:
        """Changes as long as anything happens."""
        return self._engine.beats + sum(process.handle.steps() or 0 for process in self.present)

    @property
    def lost(self) -> dict[str, int]:
        """Frames that were asked for and never came, by reason."""
        reasons: dict[str, int] = self._flow.ledger.report()["total"]["reasons"]
        return reasons

    @property
    def restarts(self) -> int:
        """How often a process was replaced."""
        return sum(process.incarnation for process in self.present)

    def rollout(self, random: bool, control: RolloutControl) -> Batch:
        """The next batch.

        Args:
            random: what is asked of processes from now on has random actions. Where they are not
                sync, some was asked for before.
            control: told of steps, and asked whether to stop.
        """
        flow = self._flow
        flow.is_random, self._engine.control = random, control
        if flow.unclaimed is None:
            self.scheduler.collect()
        batch = flow.unclaimed
        assert batch is not None
        flow.claim()
        for process, frames in batch.frames_of.items():
            flow.ledger.deliver(process, frames)
        flow.statistics.count_batch(sum(batch.frames_of.values()))
        return batch

    def push(self, weights: Weights, version: int) -> None:
        """Weights for the rollouts that start from now on."""
        self._flow.version.number = version
        self.scheduler.group.weights.send(weights, self.present, version)

    def begin(self, calls: Mapping[int, tuple[Any, ...]]) -> None:
        """Drop what is in flight, and begin anew with a call of each process."""
        self._flow.drop("set_seed")
        self.scheduler.drop()
        for process in self.present:
            process.report = None
        self.scheduler.awaiting.begin_all(calls)

    def resize(self, frames: int) -> None:
        """Collect that many frames per rollout of each process."""
        if self._flow.ledger.in_flight:  # nobody has asked for it yet; what follows has no gap
            self.scheduler.reset(None)
        self.scheduler.awaiting.resized(frames)

    def close(self) -> None:
        """End them. Idempotent."""
        self._flow.closed = True
        self._flow.ledger.lose_in_flight("shutdown")
        self.scheduler.close()


def _mean(seconds: Sequence[WorkerSeconds]) -> WorkerSeconds:
    return WorkerSeconds(*[sum(phase) / len(seconds) for phase in zip(*seconds, strict=True)])
