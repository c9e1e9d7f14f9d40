"""Wait for workers and the inference process, and replace them if they died or stalled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from pycollect._core import SharedMemoryError, Uninterrupted
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.policy_place import SERVER_DIED, PolicyPlace
from pycollect.driver.records import StallDetector, WorkerRecord
from pycollect.driver.workers import WorkerGroup, with_log
from pycollect.errors import (
    WorkerDied,
    WorkerError,
    described,
    is_interrupt,
    warn_user,
    without_frames,
)
from pycollect.transport.messages import Rollout

_SILENCE_SECONDS = 60.0


class WorkerWaiter:
    """Waits for workers; replaces dead or stalled workers, and their inference process."""

    def __init__(
        self, flow: Flow, group: WorkerGroup, options: RemoteOptions, place: PolicyPlace
    ) -> None:
        self._flow, self._group, self._options = flow, group, options
        self._place = place
        self._stalls = StallDetector(options.timeout)

    def any_of(self, waiting: Sequence[WorkerRecord]) -> WorkerRecord:
        """Wait until the oldest call of one of the workers is answered, and return the worker.

        Warn once if it takes long.
        """
        silence = _SilenceWarning(waiting)
        with self._flow.statistics.timed("idle"):
            while True:
                self._flow.check_not_closed()
                self._replace_dead_server()
                for worker in self._stalls.stalled(waiting):
                    # A worker with an unread answer makes no steps, but has not stalled.
                    if worker.handle.has_answer:
                        self._stalls.note_progress(worker)
                    else:
                        self._give_up(worker)
                ready = self._group.wait_any(waiting, self._stalls.next_check)
                self._flow.check_not_closed()  # a policy in this process may have shut it down
                if ready is not None:
                    return ready
                silence.look()

    def ready_now(self, waiting: Sequence[WorkerRecord]) -> WorkerRecord | None:
        """Return a built worker that has answered already, or ``None``."""
        built = [worker for worker in waiting if not worker.starting]
        return self._group.wait_any(built, 0.0) if built else None

    def await_built(self, worker: WorkerRecord) -> None:
        """Wait until the worker is built."""
        while worker.starting:
            self.any_of([worker])
            self.rollout_of(worker)

    def rollout_of(self, worker: WorkerRecord) -> Rollout | None:
        """Return the worker's oldest rollout; ``None`` if it only started, or is being replaced."""
        self._stalls.note_progress(worker)
        try:
            if worker.starting:
                self._group.finish_replacement(worker, self._place.initialize)
                return None
            with self._flow.statistics.timed("transport"):
                return worker.handle.rollout()
        except WorkerDied as death:
            self._group.replace(worker, death, "worker_died")
        except Exception as error:
            if is_interrupt(error):
                raise
            memory_gone = worker.starting and isinstance(error, SharedMemoryError)
            if memory_gone and self._place.has_died():
                return None  # the next wait replaces the worker together with its server
            if not self._options.restart_on_error:
                self._flow.ledger.lose(worker.index, worker.frames_in_flight, "env_error")
                raise
            text = f"worker {worker.index} raised {described(error)}"
            self._group.replace(worker, _end_of(worker, text, error), "env_error")
        return None

    def _give_up(self, worker: WorkerRecord) -> None:
        """End a stalled worker and replace it."""
        text = f"worker {worker.index} made no step for {self._options.timeout} s (worker_timeout)"
        self._group.replace(worker, _end_of(worker, text), "worker_timeout")

    def _replace_dead_server(self) -> bool:
        """Replace a dead inference process and its workers; return whether it was dead.

        The workers cannot continue, because the memory that they shared with it is gone.
        """
        death = self._place.death()
        if death is None:
            return False
        workers = [own for own in self._group.present if own.starting or own.in_place]
        self._place.replace(death)
        for worker in workers:
            worker.newest.kill()
        with Uninterrupted():  # each worker must be replaced exactly once
            for worker in workers:
                self._group.replace(worker, death, SERVER_DIED)
            self._place.replaced()
        return True

    def call(self, function: Callable[..., Any], calls: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call a function in these workers; return the results in the order of their ids.

        If a worker raises an exception, it is raised here with the same type after all have
        answered.
        """
        pickled = {index: cloudpickle.dumps((function, args)) for index, args in calls.items()}
        answers, failures = [], []
        with self._flow.moving:
            self._flow.check_not_collecting("workers")
            self._flow.check_open()
            workers = [worker for worker in self._group.in_order if worker.index in pickled]
            for worker in workers:
                self.await_built(worker)
            sent = [worker.handle.run_pickled(pickled[worker.index]) for worker in workers]
            for worker, call in zip(workers, sent, strict=True):
                try:
                    answers.append(self._answer_of(worker, call))
                except Exception as error:
                    if is_interrupt(error):
                        raise
                    failures.append(without_frames(error))
        if failures:
            raise without_frames(failures[0])
        return [cloudpickle.loads(answer) for answer in answers]

    def _answer_of(self, worker: WorkerRecord, call: Any) -> bytes:
        if not self._has_answered(worker, call):
            raise self._replaced(worker)
        try:
            answer: bytes = worker.handle.answer(call)
            return answer
        except WorkerDied as death:
            self._group.replace(worker, death, "worker_died")
            text = f"{death}, before it answered a call; it is being replaced"
            raise with_log(death, text) from death

    def _replaced(self, worker: WorkerRecord) -> Exception:
        """Return the error for a worker that was replaced before it answered a call."""
        if worker.failure and worker.failure == self._place.failure:
            text = f"worker {worker.index} was replaced before it answered a call: {worker.failure}"
            return WorkerError(text, worker.index, worker.incarnation - 1, "")
        return TimeoutError(
            f"worker {worker.index} did not answer a call within {self._options.timeout} s "
            "(worker_timeout); it is being replaced"
        )

    def _has_answered(self, worker: WorkerRecord, call: Any) -> bool:
        """Wait for a call's answer or the worker's death; return False if it was replaced."""
        if worker.starting:  # replaced with its inference server
            return False
        self._stalls.note_progress(worker)
        silence = _SilenceWarning([worker])
        while not worker.handle.await_answer(call, self._stalls.next_check):
            self._flow.check_not_closed()
            if self._replace_dead_server() and worker.starting:
                return False
            if self._stalls.stalled([worker]):
                self._give_up(worker)
                return False
            silence.look()
        return True

    def call_all(self, calls: Mapping[int, tuple[Any, ...]]) -> None:
        """Send these calls, which reset, to workers that are built, and wait for all answers.

        A worker that is starting, or that replaces another one meanwhile, gets its `initial_call`
        once it is built.
        """
        sent = []
        for worker in self._group.present:
            if worker.index in calls and not worker.starting:
                sent.append((worker, worker.handle.run(*calls[worker.index])))
                worker.must_reset = False
        for worker, call in sent:
            self._answer_if_any(worker, call)

    def _answer_if_any(self, worker: WorkerRecord, call: Any) -> Any:
        """Return the worker's answer, or ``None`` if the worker is being replaced."""
        if not self._has_answered(worker, call):
            return None
        try:
            return worker.handle.answer(call)
        except WorkerDied as death:
            self._group.replace(worker, death, "worker_died")
            return None

    def begin_all(self, calls: Mapping[int, tuple[Any, ...]]) -> None:
        """Send each worker, and each later replacement, a call; wait for all answers."""
        for worker in self._group.present:
            worker.initial_call = calls[worker.index]
        self.call_all(calls)

    def resize(self, frames: int) -> None:
        """Set the number of frames per rollout of every worker; nothing may be in flight."""
        present = self._group.present
        for worker in present:
            self.await_built(worker)
            worker.set_frames(frames)
        calls = [(worker, worker.handle.resize(frames)) for worker in present]
        for worker, call in calls:
            info = self._answer_if_any(worker, call)
            if info is not None:
                worker.info = info
            self.await_built(worker)


class _SilenceWarning:
    """Warns once about the awaited workers if no rollout arrives for a long time."""

    def __init__(self, workers: Sequence[WorkerRecord]) -> None:
        self._workers = workers
        self._since = time.monotonic()
        self._warned = False

    def look(self) -> None:
        """Warn if it is time; call this while nothing has arrived."""
        if not self._warned and time.monotonic() - self._since >= _SILENCE_SECONDS:
            self._warned = True
            indices = [worker.index for worker in self._workers]
            seconds = f"{_SILENCE_SECONDS:.0f} s"
            warn_user(f"no rollout arrived for {seconds}; still waiting for workers {indices}")


def _end_of(worker: WorkerRecord, text: str, cause: Exception | None = None) -> WorkerDied:
    """Return the error for a worker that the collector itself ends."""
    end = WorkerDied(text, worker.index, worker.incarnation, str(cause or ""))
    end.__cause__ = cause
    return end
