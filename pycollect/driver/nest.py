"""A nest: a worker that consists of several processes, for example in a Ray actor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pycollect._core import Bell, Placement, RolloutControl, Slab, join_rollouts
from pycollect.data.extras import Extras
from pycollect.data.generators import GeneratorState, NestState
from pycollect.data.weights import NO_WEIGHTS, Weights
from pycollect.driver.delivery import Batch
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions, StreamOptions
from pycollect.driver.records import WorkerPlan, WorkerRecord
from pycollect.driver.scheduler import Scheduler
from pycollect.driver.workers import check_alike
from pycollect.errors import WorkerError
from pycollect.transport.channel import POLL_SECONDS
from pycollect.transport.messages import WorkerInfo, WorkerSpec, resume, set_seed
from pycollect.transport.processes.engine import ProcessEngine
from pycollect.worker.report import Lazy, RolloutReport, WorkerSeconds, pickled_extras


class Nest:
    """Has the methods of a Worker, but collects with several processes, which it replaces itself.

    If the processes are sync, a rollout is a batch of all of them. Its shape is [W, T] or [W, P, T]
    for W processes, or one of its dimensions contains all processes if they are joined with 0 or
    -1. If they are async, a rollout is that of the process that is ready first, [T] or [P, T]. A
    rollout that is stopped has the same shape, with uncollected cells.

    Args:
        spec: Spec of the worker. Its `entry` has one entry per process.
        policy: The pickled policy or its factory, which is passed on without unpickling.
    """

    # The processes call the hooks.
    post_collect_hook: Callable[[Any], Any] | None = None
    serve = None  # no inference server
    version = 0

    def __init__(self, spec: WorkerSpec, policy: bytes, options: RemoteOptions) -> None:
        self.index, self.incarnation = spec.index, spec.incarnation
        self._options = options
        self.size = len(spec.entry)
        self._sequence = 0
        self._new_weights: Weights | None = None
        self._version = 0
        self._reported: Counter[str] = Counter()
        options_of_each = replace(spec.options, frames=self._share(spec.options.frames))
        kwargs = spec.env_kwargs
        plans = [
            WorkerPlan(
                WorkerSpec(
                    process,
                    entry,
                    kwargs[process] if isinstance(kwargs, list) else kwargs,
                    options_of_each,
                    builds_policy=spec.builds_policy,
                    hides_gpus=spec.hides_gpus,
                ),
                policy,
                {},
            )
            for process, entry in enumerate(spec.entry)
        ]
        self._flow = _NestFlow(StreamOptions(frames_per_batch=1))
        self._bell = _NestBell()
        engine = ProcessEngine(options.start_method, self._bell)
        self.scheduler = Scheduler(self._flow, options, plans, None, engine)
        self._bell.stop = self._stop
        try:
            self.scheduler.start()
            self._read_infos()
        except BaseException:
            self.close()
            raise

    def _share(self, frames: int) -> int:
        """Return the frames of one process's rollout if the nest's rollout has `frames`."""
        return -(-frames // self.size) if self._options.sync else frames

    def _read_infos(self) -> None:
        """Set the nest's properties from those of its processes."""
        check_alike(self._infos)
        infos = list(self._infos.values())
        *envs, steps = self.batch_shape = self.scheduler.assembly.shape(infos)
        self.batch_size, self.leaves = tuple(envs), infos[0].leaves
        self.placement = Placement(self.leaves.layout(), 1, math.prod(envs), steps)

    def info(self) -> WorkerInfo:
        infos = list(self._infos.values())
        return replace(
            infos[0],
            num_envs=self.placement.envs,
            num_seeds=sum(info.num_seeds for info in infos),
            batch_size=self.batch_size,
            steps=self.placement.steps,
            bounded=all(info.bounded for info in infos),
            processes=self.size,
            stacked=self._options.joined == "stack",
        )

    @property
    def _infos(self) -> dict[int, WorkerInfo]:
        return self.scheduler.group.infos

    @property
    def _present(self) -> list[WorkerRecord]:
        return self.scheduler.group.present

    @property
    def stepped(self) -> int:
        """A number that grows with each step, and while the nest waits for its processes."""
        return self._bell.beats + sum(process.handle.steps() or 0 for process in self._present)

    def collect(
        self,
        slab: Slab,
        row: int,
        policy_version: int,
        random: bool = False,
        control: RolloutControl | None = None,
    ) -> RolloutReport:
        """Collect one rollout into a row of a slab; see :meth:`Worker.collect`.

        Async processes may have requests from before, with other values of `random`.
        """
        if self._new_weights is not None or policy_version != self._version:
            self._flow.version.number = policy_version
            weights = self._new_weights or NO_WEIGHTS
            self.scheduler.group.weights.send(weights, self._present, policy_version)
            self._new_weights, self._version = None, policy_version
        self._flow.is_random = random
        try:
            batch = self._next_batch(control or RolloutControl())
        except WorkerError as error:
            text = f"a process of worker {self.index} failed: {error}"
            raise WorkerError(text, self.index, self.incarnation, error.remote_traceback) from error
        header = join_rollouts(slab, row, batch.slab, self.index, self.incarnation, self._sequence)
        self._sequence += 1
        reports = [process.report for process in self._present if process.report is not None]
        phases = zip(*(report.seconds for report in reports), strict=True)
        return RolloutReport(
            header.frames,
            header.policy_version,
            list(batch.episodes),
            WorkerSeconds(*[sum(phase) / len(reports) for phase in phases]),
            sum(report.stepped for report in reports),
            tuple(sorted({name for report in reports for name in report.slow_paths})),
            self._extras(batch.extras),
            sources=self._sources(batch),
            lost=self._new_losses(),
            restarts=sum(process.incarnation for process in self._present),
        )

    def _next_batch(self, control: RolloutControl) -> Batch:
        """Return the next batch of the processes. `control` counts steps, and may stop it."""
        flow = self._flow
        self._bell.control = control
        try:
            if flow.unclaimed is None:
                self.scheduler.collect()
        finally:
            self._bell.control = RolloutControl()  # a stop does not apply to later waits
        batch = flow.unclaimed
        assert batch is not None
        flow.claim()
        for process, frames in batch.frames_of.items():
            flow.ledger.deliver(process, frames)
        flow.statistics.count_batch(sum(batch.frames_of.values()))
        return batch

    def _stop(self) -> None:
        """Stop the rollouts that the next batch needs: of all processes if sync, else of one."""
        waiting = [own for own in self.scheduler.group.queue if own.requests and not own.starting]
        for process in waiting if self._options.sync else waiting[:1]:
            process.handle.stop()

    def _extras(self, extras: Extras | None) -> Lazy[Extras] | None:
        if extras is None:
            return None
        size = self.placement.envs, self.placement.steps
        return Lazy({key: c.reshape(size) for key, c in extras.items()}, pickled_extras)

    def _sources(self, batch: Batch) -> tuple[int, ...]:
        """Return the processes that follow each other along time; (0,) if they are stacked."""
        if not self._options.sync:
            return tuple(batch.frames_of)
        in_time = self.scheduler.assembly.along_time(self._infos[0])
        return tuple(range(self.size)) if in_time else (0,)

    def _new_losses(self) -> dict[str, int]:
        """Return the frames that processes have lost since the last call, by reason."""
        lost = Counter(self._flow.ledger.report()["total"]["reasons"])
        new = lost - self._reported
        self._reported = lost
        return new

    def load_weights(self, weights: Weights) -> None:
        self._new_weights = weights

    def set_hook(self, name: str, hook: Any) -> None:
        self.scheduler.set_hook(name, hook)

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """Seed everything and reset all environments.

        Process w draws the same numbers as worker w of a collector that is seeded with `root`
        combined with this worker's id.
        """
        each = self._split(seeds).items()
        self._begin({index: (set_seed, own, root << 32 | self.index) for index, own in each})

    def resume(self, state: GeneratorState | NestState, seeds: Sequence[int]) -> None:
        assert isinstance(state, NestState)
        split = self._split(seeds)
        self._begin(
            {index: (resume, own, split[index]) for index, own in enumerate(state.processes)}
        )
        self._new_losses()  # they are not reported, because the driver restores its ledger

    def _split(self, seeds: Sequence[int]) -> dict[int, list[int]]:
        rest = list(seeds)
        result = {}
        for process, info in self._infos.items():
            result[process], rest = rest[: info.num_seeds], rest[info.num_seeds :]
        return result

    def _begin(self, calls: Mapping[int, tuple[Any, ...]]) -> None:
        """Drop rollouts in flight, and start again with a call in each process."""
        self.scheduler.drop("set_seed")
        for process in self._present:
            process.report = None
        self.scheduler.waiter.begin_all(calls)

    def reset(self) -> None:
        self.scheduler.members.reset(None)

    def generator_state(self) -> NestState | None:
        states = [process.generators for process in self._present]
        known = tuple(state for state in states if isinstance(state, GeneratorState))
        return NestState(known) if len(known) == len(states) else None

    def set_share(self, frames: int) -> None:
        if self._flow.ledger.in_flight:  # prefetched rollouts have the old size; drop them
            self.scheduler.members.reset(None)
        self.scheduler.waiter.resize(self._share(frames))
        self._read_infos()

    def close(self) -> None:
        """End the processes, which close their environments. Idempotent."""
        self._bell.stop = lambda: None  # it refers to this object
        self._flow.closed = True
        self._flow.ledger.lose_in_flight("shutdown")
        self.scheduler.close()


class _NestBell:
    """A bell that shows the driver, while the nest waits for it, that the nest is alive.

    Attributes:
        control: Counts steps, and tells whether the driver stopped the rollout.
        beats: Number that grows while the nest waits.
        stop: Function that stops the rollouts that the nest waits for.
    """

    def __init__(self) -> None:
        self._bell = Bell()
        self.address, self.ring = self._bell.address, self._bell.ring
        self.ring_when_gone = self._bell.ring_when_gone
        self.control = RolloutControl()
        self.beats = 0
        self.stop: Callable[[], None] = lambda: None

    @property
    def count(self) -> int:
        return self._bell.count

    def wait_ring(self, seen: int, seconds: float) -> bool:
        self.beats += 1
        self.control.count_step()
        if self.control.is_stopped:
            self.stop()
        return self._bell.wait_ring(seen, min(seconds, POLL_SECONDS))


class _NestFlow(Flow):
    """Counters of a nest's processes; the driver decides whether their actions are random."""

    is_random = False
