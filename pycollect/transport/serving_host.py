"""Host an inference server that is reached by remote calls; it serves in its own thread.

A server with a mailbox needs no such thread: it checks for requests between two rounds, see
`transport.processes.serve`.
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
from pycollect.transport.host import WorkerHost, end_fork_of
from pycollect.transport.hosted import HostedServer
from pycollect.transport.messages import ErrorReport

Task = tuple["Future[Any]", Callable[[], Any]]


class ServingHost(WorkerHost):
    """Serves an inference server to calls from another process.

    One thread calls `build` and then `attend`, which serves until another thread calls `close`.
    Other methods pass their work to the serving thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._ending = threading.Event()
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._rounds = 0

    def attend(self) -> None:
        """Serve clients until `close` is called. Return at once if nothing was built."""
        process, worker = os.getpid(), self._worker
        try:
            if isinstance(worker, HostedServer):
                self._attend(worker)
        except BaseException as error:  # `steps` raises it
            self._failure = without_frames(error)
            raise
        finally:
            end_fork_of(process)
            self._is_over.set()
            self._refuse_tasks()

    def _attend(self, worker: HostedServer) -> None:
        while not self._ending.is_set():
            worker.wait()
            self._do_tasks()
            self._take_weights(worker)
            worker.serve(self._version)
            self._rounds += 1

    def _taken_tasks(self) -> Iterator[Task]:
        """Take and yield the queued tasks."""
        with suppress(Empty):
            while True:
                yield self._tasks.get_nowait()

    def _do_tasks(self) -> None:
        for future, task in self._taken_tasks():
            try:
                answer = task()
            except Exception as error:  # the driver raises it
                answer = ErrorReport.of(error)
            future.set_result(answer)

    def _refuse_tasks(self) -> None:
        for future, _ in self._taken_tasks():
            future.set_exception(self._failure or RuntimeError("the inference server is closed"))

    def _run_between_rounds(self, task: Callable[[], Any]) -> Any:
        """Run a task between two rounds; wait for its result or its ErrorReport.

        Raises:
            RuntimeError: `close` was called.
            BaseException: The exception that ended `attend`, even while this waits.
        """
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        if self._is_over.is_set():  # if it is set later, `attend` refuses the task itself
            self._refuse_tasks()
        return result_of(future)

    def set_seed(self, seeds: Sequence[int], root: int) -> ErrorReport | None:
        """Derive all random numbers from these seeds from now on."""
        answer: ErrorReport | None = self._run_between_rounds(
            lambda: self._built.set_seed(seeds, root)
        )
        return answer

    def policy_client(self, worker: int) -> bytes | ErrorReport:
        """Return the pickled policy client for a worker; see :meth:`HostedServer.policy_client`."""
        serving = self._worker
        assert isinstance(serving, HostedServer), "policy_client: expected an inference server"
        client: bytes | ErrorReport = self._run_between_rounds(
            lambda: serving.policy_client(worker)
        )
        return client

    def steps(self) -> int:
        """Return the number of rounds so far. May be called at any time.

        Raises:
            BaseException: The exception that ended `attend`.
        """
        if self._failure is not None:
            raise without_frames(self._failure)
        return self._rounds

    def close(self) -> None:
        """End `attend`."""
        self._ending.set()
