"""Start worker processes on this machine, forked by the fork server or spawned, and end them."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import popen_forkserver, process, resource_tracker, util
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakSet

from pycollect._core import Bell, Mailbox, SharedMemoryError, shared_memory_why_not
from pycollect.errors import warn_user
from pycollect.transport.channel import MAX_REQUESTS, AnyBell
from pycollect.transport.engine import Engine
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.host import serve
from pycollect.transport.messages import WorkerSpec
from pycollect.transport.pickling import Shareable, SharedValue, pickled_for_child
from pycollect.transport.processes.child import (
    ChildProcess,
    Inherited,
    SpawnedChild,
    WorkerLog,
    check_spawned,
    kill_group,
    preparation,
    unnamed_file,
)
from pycollect.transport.processes.fork_server import ForkServerError, fork_servers
from pycollect.transport.worker_process import check_not_importing

_STREAMS = (1, 2)
_UNKNOWN = 255  # exit code that multiprocessing's own fork server uses


class _ForkedPopen(popen_forkserver.Popen):
    """Start a process through the fork server; its status socket reports the exit code.

    Otherwise it works like the Popen of multiprocessing's own fork server.
    """

    _fds: list[int]  # additional descriptors that the process gets

    def _launch(self, process: Any) -> None:
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as kept:
            state = _written(self._pickled(process), sent)
            parent, ours = os.pipe()  # multiprocessing in the child notices our end by it
            sent.callback(os.close, parent)
            kept.callback(os.close, ours)
            tracker = resource_tracker.getfd()
            assert tracker is not None  # getfd starts the tracker
            descriptors = [state, parent, *_STREAMS, tracker, *self._fds]
            with fork_servers.lock:
                self._fork_server = fork_servers.ready()
                self.pid, self._status = self._fork_server.fork(process.name, descriptors)
            kept.callback(self._status.close)
            self.sentinel = os.pidfd_open(self.pid)
            kept.callback(os.close, self.sentinel)
            self.finalizer = util.Finalize(self, kept.pop_all().close)

    def _pickled(self, process: Any) -> bytes:
        """Return everything that the fork reads, pickled."""
        prepared = preparation(process.name)
        file = io.BytesIO()
        pickle.dump(dict(os.environb), file)
        set_spawning_popen(self)
        try:
            ForkingPickler(file).dump(prepared)
            ForkingPickler(file).dump(process)
        finally:
            set_spawning_popen(None)
        return file.getvalue()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, or ``None`` while the process runs. Waits if `flag` is 0."""
        if self.returncode is None and self.is_over(None if flag == 0 else 0):
            self.returncode = _UNKNOWN
            with contextlib.suppress(ForkServerError):
                self.returncode = self._fork_server.read_number(self._status, socket.MSG_PEEK)
        return self.returncode

    def is_over(self, milliseconds: int | None) -> bool:
        """Return whether the process has ended, or ends within that time."""
        return bool(_polled(self.sentinel, select.POLLIN, milliseconds))

    @property
    def has_lost_fork_server(self) -> bool:
        """Whether the fork server is gone, so that the worker's pid may be reused after its end."""
        return bool(_polled(self._status.fileno(), 0, 0))


def _polled(descriptor: int, events: int, milliseconds: int | None) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(descriptor, events)
    return poll.poll(milliseconds)


def _written(data: bytes, sent: contextlib.ExitStack) -> int:
    """Write data to an unnamed file; return a descriptor at its beginning."""
    descriptor = unnamed_file("pycollect-worker-start")
    sent.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class ForkedProcess(BaseProcess):
    """A process of multiprocessing that starts as a fork of this program's fork server."""

    _Popen = _ForkedPopen
    _popen: _ForkedPopen | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Environments in the worker start their processes by the program's own start method.
        self._start_method = (
            multiprocessing.get_start_method(allow_none=True)
            or multiprocessing.get_all_start_methods()[0]
        )

    @property
    def popen(self) -> _ForkedPopen:
        assert self._popen is not None
        return self._popen


class ForkedChild(ChildProcess):
    """A forked child process."""

    native: ForkedProcess

    @property
    def _has_ended(self) -> bool:
        return self.native.popen.is_over(0)

    def _exit_code(self) -> int | None:
        code = self.native.exitcode
        return None if code == _UNKNOWN and self.native.popen.has_lost_fork_server else code

    def _kill_group(self) -> None:
        popen = self.native.popen
        kill_group(popen.pid, is_unreaped=not (self._has_ended and popen.has_lost_fork_server))


_started: WeakSet[Any] = WeakSet()  # process objects of multiprocessing


def _forget_started() -> None:
    """Keep multiprocessing from joining the workers in a fork, which is not their parent."""
    process._children.difference_update(_started)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_started)

_TRIES = 2  # an idle fork server may end during a request

_reported: set[str] = set()  # reasons for spawning that this program was warned about


def start_child(
    target: Callable[..., None], args: tuple[Any, ...], name: str, start_method: str
) -> ChildProcess:
    """Start a process; `target` gets `args` and the descriptor of its standard error.

    "forkserver" forks this program's fork server, and spawns if that is impossible. "spawn" starts
    a new interpreter.
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
        child = _child(options, log, start_method)
        _started.add(child.native)
        return child
    except BaseException:
        log.close()
        raise


def _child(options: dict[str, Any], log: WorkerLog, start_method: str) -> ChildProcess:
    reason = ""
    for _ in range(_TRIES if start_method == "forkserver" else 0):
        forked = ForkedProcess(**options)
        try:
            forked.start()
        except ForkServerError as error:
            reason = str(error)
            continue
        return ForkedChild(forked, log)
    check_spawned(options["name"])
    if reason:
        _report_spawning(reason)
    spawned = multiprocessing.get_context("spawn").Process(**options)
    spawned.start()
    return SpawnedChild(spawned, log)


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


class ProcessEngine(Engine):
    """Starts worker processes. They end with this process in any case.

    Args:
        bell: Bell that workers ring. ``None`` creates one (default: ``None``).

    Raises:
        SharedMemoryError: Processes cannot share memory on this system.
    """

    def __init__(self, start_method: str = "forkserver", bell: AnyBell | None = None) -> None:
        if why_not := shared_memory_why_not():
            raise SharedMemoryError(why_not)
        self._start_method = start_method
        self.bell = Bell() if bell is None else bell
        self._handles: list[WorkerHandle] = []
        # At exit, runs before multiprocessing joins the remaining processes.
        self._leave = util.Finalize(self, _kill_all, (self._handles,), exitpriority=100)

    def leave(self) -> None:
        self._leave()

    def put(self, value: Shareable) -> SharedValue:
        return SharedValue(value)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> WorkerHandle:
        mailbox = Mailbox(MAX_REQUESTS)
        pickled, inherited = pickled_for_child(spec)
        arguments = (mailbox.address, self.bell.address, os.getpid(), inherited)
        name = f"pycollect-{spec.name}".replace(" ", "-")
        process = start_child(serve, arguments, name, self._start_method)
        handle = WorkerHandle(spec, pickled, policy, mailbox, process, self.bell)
        self.bell.ring_when_gone(process.native.pid)
        self._handles[:] = [*(other for other in self._handles if not other.ended), handle]
        return handle


def _kill_all(handles: Sequence[WorkerHandle]) -> None:
    for handle in handles:
        handle.kill()
