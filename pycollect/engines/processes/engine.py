"""Worker processes on this machine: started, asked through mailboxes, awaited, ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from multiprocessing import util
from typing import Any

from pycollect._core import (
    Bell,
    Mailbox,
    Memory,
    SharedMemoryError,
    shared_memory_why_not,
)
from pycollect.engines.messages import WorkerSpec, pickled_for_child
from pycollect.engines.processes.handle import MailboxHandle
from pycollect.engines.processes.log import Inherited, WorkerLog
from pycollect.engines.processes.serve import QUESTIONS, serve
from pycollect.engines.processes.wire import share
from pycollect.engines.waiting import AnswerWaiter, check_available


class ProcessEngine:
    """Starts worker processes and waits for them. They end with this process, whatever ends it.

    Raises:
        SharedMemoryError: processes cannot share memory here.
    """

    def __init__(self) -> None:
        if why_not := shared_memory_why_not():
            raise SharedMemoryError(why_not)
        self._context = multiprocessing.get_context("spawn")
        self._bell = Bell()
        self._waiter = AnswerWaiter(self._bell)
        self._handles: list[MailboxHandle] = []
        # Before multiprocessing, at exit, waits for processes that nobody has ended.
        self._leave = util.Finalize(self, _kill_all, (self._handles,), exitpriority=100)

    def leave(self) -> None:
        """End all processes that are left. Idempotent."""
        self._leave()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Processes share what there is."""

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if that many bytes of rollouts in flight cannot be held."""
        check_available(needed)

    def put(self, value: Any) -> Memory:
        """Bytes, or an array of them, in shared memory."""
        return share(value)

    def start(self, spec: WorkerSpec, policy: Memory, options: Mapping[str, Any]) -> MailboxHandle:
        """Start the process of one worker, which builds its environments at once.

        Args:
            policy: the pickled policy or its factory, as `put` returned it.
            options: none are known.
        """
        mailbox, log = Mailbox(QUESTIONS), WorkerLog()
        pickled, inherited = pickled_for_child(spec)
        process = self._context.Process(
            target=serve,
            args=(
                mailbox.address,
                self._bell.address,
                os.getpid(),
                Inherited(log.fileno()),
                inherited,
            ),
            name=f"pycollect-worker-{spec.index}",
            daemon=False,  # a daemon may not have processes of its own, but environments do
        )
        process.start()
        life = ProcessLife(process, log)
        handle = MailboxHandle(spec, pickled, policy, mailbox, self._bell, life)
        self._handles[:] = [*(other for other in self._handles if not other.ended), handle]
        return handle

    def wait_any(self, handles: Sequence[MailboxHandle], timeout: float) -> MailboxHandle | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """
        return self._waiter.wait_any(handles, timeout)

    def wait_closed(self, handles: Sequence[MailboxHandle], timeout: float | None = None) -> None:
        """Let workers close their environments, then end those that are still there."""
        self._waiter.wait_closed([handle for handle in handles if handle.ask_close()], timeout)
        for handle in handles:
            handle.kill()


class ProcessLife:
    """A child of this process, as long as nobody has taken note of its end.

    Attributes:
        process: multiprocessing's.
    """

    def __init__(self, process: Any, log: WorkerLog) -> None:
        self.process = process
        self._log = log

    @property
    def is_over(self) -> bool:
        """Whether the process is gone; it stays there for `kill` to be sure of its group.

        Whoever waits for it asks every now and then: what it wrote until then is shown, too.
        """
        self._log.show()
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.process.pid, flags) is not None
        except ChildProcessError:  # somebody else has taken note of its end
            return True

    def end(self) -> tuple[str, str]:
        """How it ended, and the same again: no more is known."""
        end = _end_of(self.process)
        return end, end

    def last_words(self) -> str:
        """The end of what it wrote to its standard error."""
        return self._log.end()

    def kill(self) -> None:
        """End the process and all that its environments started."""
        _kill_group(self.process.pid)
        self.process.join()
        self.process.close()
        self._log.close()


def _end_of(process: Any) -> str:
    """How a child has ended."""
    pid = process.pid
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        code = None if end is None else end.si_status
        if end is not None and end.si_code != os.CLD_EXITED:
            code = -end.si_status
    except ChildProcessError:  # multiprocessing takes note of all ends when it starts a process
        code = process.exitcode
    if code is None:
        return f"its process {pid} is gone"
    if code < 0:
        return f"its process {pid} was ended by {signal.Signals(-code).name}"
    return f"its process {pid} ended with exit code {code}"


def _kill_group(pid: int) -> None:
    """Kill a child and the group that it leads.

    Its number is nobody else's until its end was taken note of, and then as long as one of its
    group is left: that group has no leader.
    """
    ways = [os.killpg, os.kill]  # it may not lead one yet
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        if _exists(pid):  # the number is another process's by now
            return
        ways = [os.killpg]
    for send in ways:
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)


def _exists(pid: int) -> bool:
    """Whether there is a process of that number."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def _kill_all(handles: Sequence[MailboxHandle]) -> None:
    for handle in handles:
        handle.kill()
