"""Hosts a worker that serves others, where it is asked by calls: it serves in a thread of its own.

Through a mailbox it would look for questions between two rounds, see `engines.processes.serve`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from pycollect.errors import result_of, without_frames
from pycollect.transport.host import RemoteWorker, end_fork_of
from pycollect.transport.hosted import ServingWorker
from pycollect.transport.messages import ErrorReport

Task = tuple["Future[Any]", Callable[[], Any]]


class ServingHost(RemoteWorker):
    """A ServingWorker behind calls from another process.

    One thread is for `build` and then `attend`, which serves until `close` is called in another
    one. What else is to run in the serving thread is handed to it there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._ending = threading.Event()
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._rounds = 0

    def attend(self) -> None:
        """Serve whoever asks, until `close`; at once at its end where nothing was built."""
        process, worker = os.getpid(), self._worker
        try:
            if isinstance(worker, ServingWorker):
                self._attend(worker)
        except BaseException as error:  # `steps` raises it
            self._failure = without_frames(error)
            raise
        finally:
            end_fork_of(process)
            self._is_over.set()
            self._refuse_tasks()

    def _attend(self, worker: ServingWorker) -> None:
        while not self._ending.is_set():
            worker.wait()
            self._do_tasks()
            self._take_weights(worker)
            worker.serve(self._version)
            self._rounds += 1

    def _taken_tasks(self) -> Iterator[Task]:
        """Those that wait, which nobody else has then."""
        with suppress(Empty):
            while True:
                yield self._tasks.get_nowait()

    def _do_tasks(self) -> None:
        for future, task in self._taken_tasks():
            try:
                answer = task()
            except Exception as error:  # carried to the driver, who raises it
                answer = ErrorReport.of(error)
            future.set_result(answer)

    def _refuse_tasks(self) -> None:
        for future, _ in self._taken_tasks():
            future.set_exception(self._failure or RuntimeError("the inference server is closed"))

    def _in_turn(self, task: Callable[[], Any]) -> Any:
        """What a task returns that is done between two rounds, or an ErrorReport. Waits.

        Raises what has ended `attend`, also while it waits, or RuntimeError where `close` has.
        """
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        if self._is_over.is_set():  # else it is set later, and the task is found after that
            self._refuse_tasks()
        return result_of(future)

    def set_seed(self, seeds: Sequence[int], root: int) -> ErrorReport | None:
        """What it draws follows from these from now on."""
        answer: ErrorReport | None = self._in_turn(lambda: self._built.set_seed(seeds, root))
        return answer

    def seat(self, worker: int) -> bytes | ErrorReport:
        """What stands for it in a worker that it is to serve, see :class:`ServingWorker`."""
        serving = self._worker
        assert isinstance(serving, ServingWorker), "seat: expected what serves workers"
        stand_in: bytes | ErrorReport = self._in_turn(lambda: serving.seat(worker))
        return stand_in

    def steps(self) -> int:
        """Rounds so far; what has ended them, if that was not `close`. May be asked at any time."""
        if self._failure is not None:
            raise without_frames(self._failure)
        return self._rounds

    def close(self) -> None:
        """End `attend`."""
        self._ending.set()
