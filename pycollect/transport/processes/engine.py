"""Start worker processes on this machine, reach them through mailboxes, and end them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process, util
from typing import Any
from weakref import WeakSet

from pycollect._core import Bell, Mailbox, SharedMemoryError, shared_memory_why_not
from pycollect.errors import warn_user
from pycollect.transport.messages import WorkerSpec, pickled_for_child
from pycollect.transport.process import H
from pycollect.transport.processes.child import (
    Child,
    ChildMonitor,
    Inherited,
    SpawnedChild,
    WorkerLog,
    check_spawned,
)
from pycollect.transport.processes.fork_server import ForkServerError
from pycollect.transport.processes.forked import ForkedChild, ForkedProcess
from pycollect.transport.processes.handle import MailboxHandle
from pycollect.transport.processes.serve import MAX_REQUESTS, serve
from pycollect.transport.shared_value import Shareable, SharedValue
from pycollect.transport.unguarded import check_not_importing
from pycollect.transport.waiting import AnswerWaiter, AwaitedWorker, SharedBell, check_available

_started: WeakSet[Any] = WeakSet()  # as multiprocessing's objects


def _forget_started() -> None:
    """Have multiprocessing not join them in a fork: they are children of its parent."""
    process._children.difference_update(_started)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_started)

_TRIES = 2  # a template that was idle may end while it is asked

_reported: set[str] = set()  # reasons for which this program's workers were not forked


def start_child(
    target: Callable[..., None], args: tuple[Any, ...], name: str, start_method: str
) -> tuple[Child, WorkerLog]:
    """Start a process; return it, and its standard error.

    Args:
        target: its main function; it gets the arguments, and the descriptor of that file.
        start_method: "forkserver": a fork of this program's template, and as with "spawn" where
            there can be none; "spawn": a new interpreter.

    Raises:
        ValueError: a new interpreter could not import the program, which is no file.
        RuntimeError: this process is a worker that imports a module.
    """
    check_not_importing()
    log = WorkerLog()
    what: dict[str, Any] = {
        "target": target,
        "args": (*args, Inherited(log.fileno())),
        "name": name,
        "daemon": False,  # a daemon may not have processes of its own, but environments do
    }
    try:
        child = _child(what, start_method)
        _started.add(child.native)
        return child, log
    except BaseException:
        log.close()
        raise


def _child(what: dict[str, Any], start_method: str) -> Child:
    reason = ""
    for _ in range(_TRIES if start_method == "forkserver" else 0):
        forked = ForkedProcess(**what)
        try:
            forked.start()
        except ForkServerError as error:
            reason = str(error)
            continue
        return ForkedChild(forked)
    check_spawned(what["name"])
    if reason:
        _report_spawning(reason)
    spawned = multiprocessing.get_context("spawn").Process(**what)
    spawned.start()
    return SpawnedChild(spawned)


def _report_spawning(reason: str) -> None:
    """Warn that workers are spawned, once for each reason."""
    if reason in _reported:
        return
    _reported.add(reason)
    warn_user(
        "start_method: workers are spawned instead of forked, so each spends seconds on imports "
        f"and needs its own memory for them: {reason}. Remove the cause, or pass "
        "start_method='spawn' to silence this warning."
    )


class ProcessEngine:
    """Starts worker processes and waits for them. They end with this process, whatever ends it.

    Args:
        start_method: how they start, see :func:`start_child`.
        bell: that they ring, and on which is waited for them; None: one of its own.

    Raises:
        SharedMemoryError: processes cannot share memory here.
    """

    def __init__(self, start_method: str = "forkserver", bell: SharedBell | None = None) -> None:
        if why_not := shared_memory_why_not():
            raise SharedMemoryError(why_not)
        self._start_method = start_method
        self._bell: SharedBell = Bell() if bell is None else bell
        self._waiter = AnswerWaiter(self._bell)
        self._handles: list[MailboxHandle] = []
        # Before multiprocessing, at exit, waits for processes that nobody has ended.
        self._leave = util.Finalize(self, _kill_all, (self._handles,), exitpriority=100)

    def leave(self) -> None:
        """End all processes that are left. Idempotent."""
        self._leave()

    @property
    def pending(self) -> int:
        """How many workers that are built were asked for something and have not answered yet."""
        return sum(handle.has_pending_requests for handle in self._handles)

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Processes share what there is."""

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if that many bytes of rollouts in flight cannot be held."""
        check_available(needed)

    def put(self, value: Shareable) -> SharedValue:
        """A value for several of these workers."""
        return SharedValue(value)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> MailboxHandle:
        """Start the process of one worker, which builds its environments at once.

        Args:
            policy: the pickled policy or its factory.
            options: none are known.
        """
        mailbox = Mailbox(MAX_REQUESTS)
        pickled, inherited = pickled_for_child(spec)
        arguments = (mailbox.address, self._bell.address, os.getpid(), inherited)
        name = f"pycollect-{spec.name}".replace(" ", "-")
        monitor = ChildMonitor(*start_child(serve, arguments, name, self._start_method))
        try:
            handle = MailboxHandle(spec, pickled, policy, mailbox, self._bell, monitor)
        except BaseException:
            monitor.kill()
            raise
        self._handles[:] = [*(other for other in self._handles if not other.ended), handle]
        return handle

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """
        return self._waiter.wait_any(handles, timeout)

    def wait_closed(self, handles: Sequence[AwaitedWorker], timeout: float | None = None) -> None:
        """Let workers close their environments, then end those that are still there."""
        self._waiter.wait_closed(handles, timeout)


def _kill_all(handles: Sequence[MailboxHandle]) -> None:
    for handle in handles:
        handle.kill()
