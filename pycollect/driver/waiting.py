"""Waiting for workers, and for what they answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from pycollect._core import SharedMemoryError, Uninterrupted
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.policy_server import DIED
from pycollect.driver.policy_servers import PolicyServers
from pycollect.driver.records import StallDetector, WorkerRecord
from pycollect.driver.workers import WorkerGroup
from pycollect.errors import WorkerDied, WorkerError, is_interrupt, warn_user, without_frames
from pycollect.transport.messages import Rollout

_SILENCE_SECONDS = 60.0


class Awaiting:
    """Whoever waits does so here. A worker that died or stalled meanwhile is replaced.

    Args:
        servers: those who call the policy for them, which are replaced, too.
    """

    def __init__(
        self,
        flow: Flow,
        group: WorkerGroup,
        options: RemoteOptions,
        servers: PolicyServers,
    ) -> None:
        self._flow, self._group, self._options = flow, group, options
        self._servers = servers
        self._stalls = StallDetector(options.timeout)

    def any_of(self, waiting: Sequence[WorkerRecord]) -> WorkerRecord:
        """One of them whose oldest call has an answer. Says who is awaited when it takes long."""
        silence = _Silence(waiting)
        with self._flow.statistics.timed("idle"):
            while True:
                self._flow.check_not_closed()
                self._look_after_servers()
                for worker in self._stalls.stalled(waiting):
                    # Who is done makes no step until it is served, however long that takes.
                    if worker.handle.has_answer:
                        self._stalls.heard_of(worker)
                    else:
                        self._give_up(worker)
                ready = self._group.wait_any(waiting, self._stalls.next_check)
                self._flow.check_not_closed()  # a policy called here may have shut it down
                if ready is not None:
                    return ready
                silence.look()

    def one_now(self, waiting: Sequence[WorkerRecord]) -> WorkerRecord | None:
        """One of those that are built whose answer is there already."""
        built = [worker for worker in waiting if not worker.starting]
        return self._group.wait_any(built, 0.0) if built else None

    def built(self, worker: WorkerRecord) -> None:
        """Until it is, or was already."""
        while worker.starting:
            self.any_of([worker])
            self.rollout_of(worker)

    def rollout_of(self, worker: WorkerRecord) -> Rollout | None:
        """The worker's oldest rollout; None where it only started, or is being replaced."""
        self._stalls.heard_of(worker)
        try:
            if worker.starting:
                self._group.welcome(worker)
                return None
            with self._flow.statistics.timed("transport"):
                return worker.handle.rollout()
        except WorkerDied as death:
            self._group.replace(worker, death, "worker_died")
        except Exception as error:
            if is_interrupt(error):
                raise
            if self._is_servers_fault(worker, error):
                return None  # it is replaced with its server, before anything is waited for
            if not self._options.restart_on_error:
                self._flow.ledger.lose(worker.index, worker.frames_in_flight, "env_error")
                raise
            text = f"worker {worker.index} raised {type(error).__name__}: {error}"
            self._group.replace(worker, _end_of(worker, text, error), "env_error")
        return None

    def _is_servers_fault(self, worker: WorkerRecord, error: Exception) -> bool:
        """Whether a worker could not be built as its server, and its memory, was gone just then."""
        starting = worker.starting is not None
        return starting and isinstance(error, SharedMemoryError) and self._servers.have_lost(worker)

    def _give_up(self, worker: WorkerRecord) -> None:
        """End a worker from which nothing comes any more, and replace it."""
        text = f"worker {worker.index} made no step for {self._options.timeout} s (worker_timeout)"
        self._group.replace(worker, _end_of(worker, text), "worker_timeout")

    def _look_after_servers(self) -> bool:
        """Where one is gone, so is what its workers had from it: they are replaced.

        Returns:
            Whether it was so.
        """
        dead = self._servers.dead()
        for server, death in dead:
            theirs = self._servers.served_by(server, self._group.present)
            server.replace(death)
            for worker in theirs:
                worker.process.kill()
            with Uninterrupted():  # each of them once
                for worker in theirs:
                    self._group.replace(worker, death, DIED)
                server.replaced()
        return bool(dead)

    def call(self, function: Callable[..., Any], calls: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call a function in these workers; return the results in the order of their ids.

        An exception of one of them is raised here with the same type, once all have answered.
        """
        pickled = {index: cloudpickle.dumps((function, own)) for index, own in calls.items()}
        return [cloudpickle.loads(answer) for answer in self._answers(pickled)]

    def _answers(self, questions: Mapping[int, bytes]) -> list[bytes]:
        with self._flow.between_rollouts("workers"):
            self._flow.check_open()
            workers = [own for own in self._group.in_order if own.index in questions]
            for worker in workers:
                self.built(worker)
            asked = [(own, own.handle.request("run", questions[own.index])) for own in workers]
            answers, failures = [], []
            for worker, call in asked:
                try:
                    answers.append(self._answer_of(worker, call))
                except Exception as error:
                    if is_interrupt(error):
                        raise
                    failures.append(without_frames(error))
            if failures:
                raise without_frames(failures[0])
            return answers

    def _answer_of(self, worker: WorkerRecord, call: Any) -> bytes:
        if not self._has_answered(worker, call):
            raise self._replaced(worker)
        try:
            answer: bytes = worker.handle.answer(call)
            return answer
        except WorkerDied as death:
            self._group.replace(worker, death, "worker_died")
            raise WorkerError(
                f"{death}, before it answered a call; it is being replaced",
                death.worker,
                death.incarnation,
                death.remote_traceback,
            ) from death

    def _replaced(self, worker: WorkerRecord) -> Exception:
        """Return the error for a worker that was replaced before it answered a call."""
        if self._servers.have_failed(worker.failure):
            text = f"worker {worker.index} was replaced before it answered a call: {worker.failure}"
            return WorkerError(text, worker.index, worker.incarnation - 1, "")
        return TimeoutError(
            f"worker {worker.index} did not answer a call within {self._options.timeout} s "
            "(worker_timeout); it is being replaced"
        )

    def _has_answered(self, worker: WorkerRecord, call: Any) -> bool:
        """Wait for a call's answer, or its worker's end; False: it is replaced already."""
        if worker.starting:  # with all others, as their policy's server died meanwhile
            return False
        self._stalls.heard_of(worker)
        silence = _Silence([worker])
        while not worker.handle.await_answer(call, self._stalls.next_check):
            self._flow.check_not_closed()
            if self._look_after_servers() and worker.starting:
                return False
            if self._stalls.stalled([worker]):
                self._give_up(worker)
                return False
            silence.look()
        return True

    def call_all(self, calls: Mapping[int, tuple[Any, ...]]) -> None:
        """Queue these calls for workers that are built, and wait for all of them.

        A worker that starts, or takes the place of one of them meanwhile, is asked for its
        `initial_call` once it is built.
        """
        asked = [
            (worker, worker.handle.request(*calls[worker.index]))
            for worker in self._group.present
            if worker.index in calls and not worker.starting
        ]
        for worker, call in asked:
            self._answer_if_any(worker, call)

    def _answer_if_any(self, worker: WorkerRecord, call: Any) -> Any:
        """What it answers; None also where it stalled or died, and is replaced."""
        if not self._has_answered(worker, call):
            return None
        try:
            return worker.handle.answer(call)
        except WorkerDied as death:
            self._group.replace(worker, death, "worker_died")
            return None

    def begin_all(self, calls: Mapping[int, tuple[Any, ...]]) -> None:
        """As `call_all`, for all; a worker that replaces one of them is asked for the same."""
        for worker in self._group.present:
            worker.initial_call = calls[worker.index]
        self.call_all(calls)

    def resized(self, frames: int) -> None:
        """Every worker collects that many frames per rollout from now on; nothing is in flight."""
        present = self._group.present
        for worker in present:
            self.built(worker)
            worker.share(frames)
        calls = [(worker, worker.handle.request("resize", frames)) for worker in present]
        for worker, call in calls:
            info = self._answer_if_any(worker, call)
            if info is not None:
                worker.info = info
            self.built(worker)


class _Silence:
    """Warns once about the awaited workers if no rollout arrives for a long time."""

    def __init__(self, workers: Sequence[WorkerRecord]) -> None:
        self._workers = workers
        self._since = time.monotonic()
        self._warned = False

    def look(self) -> None:
        """Warn if it is time to; call this while nothing has arrived."""
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
