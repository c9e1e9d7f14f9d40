"""The workers of a scheduler: started, replaced if they die, ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, Protocol

from pycollect._core import Leaf, Uninterrupted
from pycollect.data.extras import Extra
from pycollect.data.layout import dotted
from pycollect.driver.assembly import forget_ids
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.records import CHECK_SECONDS, StartTimer, WorkerPlan, WorkerRecord
from pycollect.driver.sending import HookSender, WeightSender
from pycollect.errors import LimitError, WorkerDied, WorkerError, warn_user, without_frames
from pycollect.transport.limits import limits_named
from pycollect.transport.messages import WorkerInfo
from pycollect.transport.process import Engine, StartingWorker
from pycollect.transport.shared_value import SharedValue


class NotStarted:
    """A StartingWorker without a process: it never answers and never dies.

    The worker group replaces it when it waits for the worker.
    """

    native: ClassVar[Any] = None
    cpu_delay: ClassVar[float] = 0.0
    has_answer: ClassVar[bool] = False
    is_dead: ClassVar[bool] = False
    is_closing: ClassVar[bool] = False

    def built(self) -> NoReturn:
        """Raise AssertionError, because no process was started."""
        raise AssertionError("built: expected a worker that was started")

    def recent_log(self) -> str:
        """Return no log lines."""
        return ""

    def ask_close(self) -> bool:
        """Return False: there is nothing to close."""
        return False

    def kill(self) -> None:
        """Do nothing."""


_LOGGER = logging.getLogger(__name__)
_BATCHES_REMEMBERED = 100  # a death is forgotten after so many delivered batches


class Servers(Protocol):
    """Those without whom workers do nothing."""

    def death(self) -> WorkerDied | None:
        """How one of them ended; None: all live."""

    def recent_log(self) -> str:
        """The last lines that this one logged, as far as they can be had."""

    def end_idle(self, workers: Sequence[WorkerRecord]) -> None:
        """End those whom none of these workers needs, which are all that there are."""


class WorkerGroup:
    """Who is there, by id, and what each was given: whoever takes a worker's place gets it, too.

    A death is told to the flow: ledger, trajectories and their ids.

    Args:
        servers: those who call the policy for them; None: nobody who can die without this process.

    Attributes:
        present: in the order in which they came.
        line: these; whoever was served longest ago first.
        former: those that were released.
        weights, hooks: what they were given.
    """

    def __init__(
        self,
        flow: Flow,
        engine: Engine,
        options: RemoteOptions,
        servers: Servers | None = None,
    ) -> None:
        self._flow, self._engine, self._options = flow, engine, options
        self._servers = servers
        self._start_timer = StartTimer(options.init_timeout)
        self._policies: dict[bytes, SharedValue] = {}
        self.weights = WeightSender(engine.put)
        self.hooks = HookSender(engine.put)
        self.present: list[WorkerRecord] = []
        self.line: list[WorkerRecord] = []
        self.former: list[WorkerRecord] = []

    @property
    def in_order(self) -> list[WorkerRecord]:
        """Present workers by id; raises RuntimeError if there are none."""
        if not self.present:
            raise RuntimeError("all workers were stopped; call add_collectors() first")
        return sorted(self.present, key=lambda worker: worker.index)

    def ids(self) -> list[int]:
        """Of those that are there."""
        return [worker.index for worker in self.present]

    @property
    def infos(self) -> dict[int, WorkerInfo]:
        """What each turned out to be."""
        return {worker.index: worker.info for worker in self.present}

    def of(self, indices: Sequence[int]) -> list[WorkerRecord]:
        """Those with these ids."""
        return [worker for worker in self.present if worker.index in indices]

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerRecord]:
        """Start new workers and wait until they are built; if one is not, none of them is here."""
        everyone = [*(worker.plan for worker in self.present), *plans]
        self._engine.check_resources([plan.options for plan in everyone])
        workers: list[WorkerRecord] = []
        try:
            for plan in plans:
                workers.append(self.begin(plan))
            self.await_built(workers)
        except BaseException:
            self._end_processes(workers)
            raise
        self.present = [*self.present, *workers]
        self.line = [*self.line, *workers]
        for text in dict.fromkeys(text for worker in workers for text in worker.info.warnings):
            warn_user(text)
        return workers

    def begin(self, plan: WorkerPlan) -> WorkerRecord:
        """Start one that is not present yet, and do not wait: once it is built, `take` it."""
        return WorkerRecord(plan, self._started(plan))

    def _started(self, plan: WorkerPlan) -> StartingWorker:
        with limits_named(f"the start of {plan.spec.name}"):
            if plan.policy not in self._policies:
                self._policies[plan.policy] = self._engine.put(plan.policy)
            return self._engine.start(plan.spec, self._policies[plan.policy], plan.options)

    def await_built(self, workers: Sequence[WorkerRecord]) -> None:
        """Wait until these are, which were started.

        Raises:
            ValueError: they take too long; or what is raised while they are built.
            WorkerError: one of them, or the server of their policy, died.
        """
        waiting = list(workers)
        while waiting:
            ready = self.wait_any(waiting, CHECK_SECONDS)
            if ready is not None:
                waiting = [worker for worker in waiting if worker is not ready]
            elif self._servers is not None and (death := self._servers.death()):
                raise _with_words(death, str(death), self._servers.recent_log()) from death
            else:
                self._start_timer.check(waiting)
        for worker in workers:
            try:
                _take_handle(worker)
            except WorkerDied as death:
                raise _with_words(death, str(death), worker.process.recent_log()) from death

    def wait_any(self, workers: Sequence[WorkerRecord], timeout: float) -> WorkerRecord | None:
        """One that is built, has answered its oldest call, or has died; None: none in that time.

        A replacement that is overdue counts as dead.
        """
        overdue = next((worker for worker in workers if self.is_overdue(worker)), None)
        if overdue is not None:
            return overdue
        processes = [worker.process for worker in workers]
        ready = self._engine.wait_any(processes, timeout)
        return None if ready is None else workers[processes.index(ready)]

    def is_overdue(self, worker: WorkerRecord) -> bool:
        """Whether this is a replacement that was not built within `worker_init_timeout`.

        A replacement whose start has failed is started now.

        Raises:
            OSError: It still cannot be started; with the limit that is reached.
        """
        starting = worker.starting
        if starting is None or worker.incarnation == 0:
            return False
        if isinstance(starting, NotStarted):
            with Uninterrupted():
                self._start_process(worker)
        elif self._start_timer.late([worker]) and not starting.has_answer:
            worker.overdue = self._start_timer.overdue(worker)
        return bool(worker.overdue)

    def replace(self, worker: WorkerRecord, death: WorkerDied, reason: str) -> None:
        """Start a worker anew; what was asked of the old one is lost, and asked of the new one.

        Raises:
            WorkerError: it died too often; with its id, the cause and its last log lines. Nothing
                more is asked of anybody then.
        """
        flow = self._flow
        # As text: whoever keeps the record would keep the exception's frames, and slabs by them.
        _LOGGER.warning("%s; %d frames in flight are lost", str(death), worker.frames_in_flight)
        worker.process.kill()  # it may wait for the end, and so is not in what follows
        with Uninterrupted():  # once, and whole: it would be lost twice
            flow.lose_worker(worker.index, worker.frames_in_flight, reason)
            forget_ids(flow.ids, worker.index, worker.info)
            self.restart(worker, death, reason)
            generators = worker.generators
            if generators is not None:
                moment = worker.incarnation
                worker.initial_call = worker.resumption(generators, flow.entropy, moment)
            flow.ledger.issue(worker.index, worker.frames_in_flight)

    def restart(self, worker: WorkerRecord, death: WorkerDied, reason: str) -> None:
        """Start its process anew, and nothing else; errors are those of `replace`."""
        worker.process.kill()
        worker.failure = f"{reason}: {death}"
        try:
            with Uninterrupted():
                self._start_anew(worker, death, self._flow.statistics.batches)
        except WorkerError as error:
            worker.requests.clear()
            self._flow.failing = self._flow.failing or without_frames(error)
            raise

    def _start_anew(self, worker: WorkerRecord, death: WorkerDied, batches: int) -> None:
        words = worker.process.recent_log()
        recent = worker.deaths
        if not worker.starting:  # it was built since its last death
            recent = [before for before in recent if before > batches - _BATCHES_REMEMBERED]
        worker.deaths = [*recent, batches]
        if len(worker.deaths) > self._options.max_restarts:
            text = f"{death}; it was replaced {len(recent)} times (max_worker_restarts)"
            raise _with_words(death, text, words) from death
        spec = replace(worker.plan.spec, incarnation=worker.incarnation + 1)
        worker.plan = replace(worker.plan, spec=spec)
        worker.starting = NotStarted()
        with suppress(OSError):  # `is_overdue` tries again, and raises
            self._start_process(worker)

    def _start_process(self, worker: WorkerRecord) -> None:
        worker.starting = self._started(worker.plan)
        worker.started, worker.overdue = time.monotonic(), ""

    def await_replaced(self, worker: WorkerRecord, reason: str) -> None:
        """Wait until a worker that was restarted is built; restart it if it dies before that.

        Raises:
            WorkerError: It died too often.
        """
        while worker.starting:
            self._flow.check_not_closed()
            if self.wait_any([worker], CHECK_SECONDS) is None:
                continue
            try:
                _take_handle(worker)
            except WorkerDied as death:
                self.restart(worker, death, reason)

    def welcome(self, worker: WorkerRecord) -> None:
        """Let a built replacement continue the work of its predecessor.

        Raises:
            WorkerDied: It is not built, or cannot be given what the old one had.
            Exception: Raised while it was built.
        """
        before = worker.info
        _take_handle(worker)
        if self._options.sync:
            check_alike({-1: before, worker.index: worker.info})
        try:
            self.give_all(worker)
            for request in worker.requests:
                worker.handle.submit(request)
        except LimitError as error:
            text = f"{worker.plan.spec.name} could not receive weights and requests: {error}"
            raise WorkerDied(text, worker.index, worker.incarnation, "") from error
        self._end_idle_servers()  # it may be on another node now

    def take(self, worker: WorkerRecord) -> None:
        """One that was begun, or restarted, is built: it is asked through its handle from now on.

        Raises:
            WorkerDied: it is not; or what is raised while it is built.
        """
        _take_handle(worker)
        self.give_all(worker)

    def give_all(self, worker: WorkerRecord) -> None:
        """Whoever took a worker's place gets what that one was given."""
        self.weights.give(worker)
        self.hooks.give(worker)
        if worker.initial_call is not None:
            worker.handle.request(*worker.initial_call)

    def serve_last(self, worker: WorkerRecord) -> None:
        """It was served: it goes to the end of the line, so that a fast one starves nobody."""
        self.line.remove(worker)
        self.line.append(worker)

    def release(self, worker: WorkerRecord) -> None:
        """A worker is not one of the present ones any more."""
        self._forget(worker)
        self.former.append(worker)

    def _forget(self, worker: WorkerRecord) -> None:
        # Lists of their own: another thread may be going through the old ones.
        self.present = [other for other in self.present if other is not worker]
        self.line = [other for other in self.line if other is not worker]

    def refuse(self, workers: Sequence[WorkerRecord]) -> None:
        """End workers that were started and do not fit: they never were here."""
        for worker in workers:
            self._forget(worker)
        self._end_processes(workers)

    def end(self, workers: Sequence[WorkerRecord]) -> None:
        """Release these, and wait until they are gone. What they have not delivered is lost."""
        for worker in workers:
            self._flow.lose_worker(worker.index, 0, "incomplete")
            self.release(worker)
        self._end_processes(workers)

    def _end_processes(self, workers: Sequence[WorkerRecord]) -> None:
        """End those of workers that are not present, and who served nobody else."""
        self._engine.wait_closed([worker.process for worker in workers])
        self._end_idle_servers()

    def _end_idle_servers(self) -> None:
        if self._servers is not None:
            self._servers.end_idle(self.present)

    def close(self, timeout: float | None = None) -> None:
        """End all workers. They have that many seconds to close their environments."""
        workers = [*self.present, *self.former]
        self._engine.wait_closed([worker.process for worker in workers], timeout)
        for worker in workers:
            worker.requests.clear()


def _take_handle(worker: WorkerRecord) -> None:
    """A worker that was started is built: from now on it is asked through its handle."""
    assert worker.starting is not None
    if worker.overdue:
        raise WorkerDied(worker.overdue, worker.index, worker.incarnation, "")
    worker.info, worker.handle = worker.starting.built()
    worker.starting = None


def _with_words(death: WorkerDied, text: str, words: str) -> WorkerError:
    """Return the error for a death, with the worker's last log lines."""
    return WorkerError(
        f"{text}\nits last log lines:\n{words}" if words else text,
        death.worker,
        death.incarnation,
        death.remote_traceback,
    )


def check_alike(infos: Mapping[int, WorkerInfo]) -> None:
    """Raise ValueError if rollouts of a sync collector's workers differ in form."""
    (first, reference), *others = infos.items()
    for index, info in others:
        if info.batch_size != reference.batch_size:
            raise ValueError(
                "create_env_fn: expected the same number of environments in all workers of a sync "
                f"collector; the batch size is {list(reference.batch_size)} in worker {first} and "
                f"{list(info.batch_size)} in worker {index}"
            )
        ours: tuple[Leaf | Extra, ...] = (
            *reference.leaves.layout().leaves,
            *reference.leaves.extras,
        )
        theirs: tuple[Leaf | Extra, ...] = (*info.leaves.layout().leaves, *info.leaves.extras)
        if ours != theirs:
            odd = [leaf for leaf in [*ours, *theirs] if (leaf in ours) != (leaf in theirs)]
            raise ValueError(
                "create_env_fn: expected the same keys, dtypes and shapes from all workers of a "
                f"sync collector; worker {index} differs from worker {first} in "
                f"{sorted({dotted(leaf.key) for leaf in odd})}"
            )
