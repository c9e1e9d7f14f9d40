"""Start worker processes on this machine, connect to them through mailboxes, and end them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process, util
from typing import Any
from weakref import WeakSet

from pycollect._core import Bell, Mailbox, SharedMemoryError, shared_memory_why_not
from pycollect.errors import warn_user
from pycollect.transport.bells import AnyBell
from pycollect.transport.channel import MAX_REQUESTS
from pycollect.transport.engine import check_available
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.pickling import pickled_for_child
from pycollect.transport.processes.child import (
    Child,
    ChildProcess,
    Inherited,
    SpawnedChild,
    WorkerLog,
    check_spawned,
)
from pycollect.transport.processes.fork_server import ForkServerError
from pycollect.transport.processes.forked import ForkedChild, ForkedProcess
from pycollect.transport.processes.serve import serve
from pycollect.transport.shared_value import Shareable, SharedValue
from pycollect.transport.spec import WorkerSpec
from pycollect.transport.unguarded import check_not_importing

_started: WeakSet[Any] = WeakSet()  # process objects of multiprocessing


def _forget_started() -> None:
    """Keep multiprocessing from joining the workers in a fork, which is not their parent."""
    process._children.difference_update(_started)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_started)

_TRIES = 2  # an idle fork server may end during a request

_reported: set[str] = set()  # reasons for spawning that this program was warned about


def start_child(
    target: Callable[..., None], args: tuple[Any, ...], name: str, start_method: str
) -> tuple[Child, WorkerLog]:
    """Start a process; return it and its standard error.

    Args:
        target: Main function. It gets `args` and the descriptor of its standard error.
        args: Arguments of the main function.
        name: Name of the process.
        start_method: "forkserver" forks this program's fork server, and spawns if that is
            impossible. "spawn" starts a new interpreter.

    Raises:
        ValueError: A new interpreter cannot import the program, because it is no file.
        RuntimeError: This process is a worker that imports a module.
    """
    check_not_importing()
    log = WorkerLog()
    options: dict[str, Any] = {
        "target": target,
        "args": (*args, Inherited(log.fileno())),
        "name": name,
        "daemon": False,  # a daemon may not start processes, but environments do
    }
    try:
        child = _child(options, start_method)
        _started.add(child.native)
        return child, log
    except BaseException:
        log.close()
        raise


def _child(options: dict[str, Any], start_method: str) -> Child:
    reason = ""
    for _ in range(_TRIES if start_method == "forkserver" else 0):
        forked = ForkedProcess(**options)
        try:
            forked.start()
        except ForkServerError as error:
            reason = str(error)
            continue
        return ForkedChild(forked)
    check_spawned(options["name"])
    if reason:
        _report_spawning(reason)
    spawned = multiprocessing.get_context("spawn").Process(**options)
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
    """Starts worker processes. They end with this process in any case.

    Args:
        start_method: How processes start; see :func:`start_child`.
        bell: Bell that workers ring. ``None`` creates one (default: ``None``).

    Raises:
        SharedMemoryError: Processes cannot share memory on this system.
    """

    def __init__(self, start_method: str = "forkserver", bell: AnyBell | None = None) -> None:
        if why_not := shared_memory_why_not():
            raise SharedMemoryError(why_not)
        self._start_method = start_method
        self.bell: AnyBell = Bell() if bell is None else bell
        self._handles: list[WorkerHandle] = []
        # At exit, runs before multiprocessing joins the remaining processes.
        self._leave = util.Finalize(self, _kill_all, (self._handles,), exitpriority=100)

    def leave(self) -> None:
        """End all remaining processes. Idempotent."""
        self._leave()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Accept any number of workers: processes share the machine's resources."""

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if rollouts in flight of that many bytes do not fit into memory."""
        check_available(needed)

    def put(self, value: Shareable) -> SharedValue:
        """Return a value that several workers share."""
        return SharedValue(value)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> WorkerHandle:
        """Start the process of one worker, which builds its environments at once.

        Args:
            spec: Specification of the worker.
            policy: Pickled policy or policy factory.
            options: Ignored: processes have no options.
        """
        mailbox = Mailbox(MAX_REQUESTS)
        pickled, inherited = pickled_for_child(spec)
        arguments = (mailbox.address, self.bell.address, os.getpid(), inherited)
        name = f"pycollect-{spec.name}".replace(" ", "-")
        process = ChildProcess(*start_child(serve, arguments, name, self._start_method))
        try:
            handle = WorkerHandle(spec, pickled, policy, mailbox, process, self.bell)
        except BaseException:
            process.kill()
            raise
        self._handles[:] = [*(other for other in self._handles if not other.ended), handle]
        return handle


def _kill_all(handles: Sequence[WorkerHandle]) -> None:
    for handle in handles:
        handle.kill()
