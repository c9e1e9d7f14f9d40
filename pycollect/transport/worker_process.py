"""A worker's process: it ends with its driver and starts no workers while it imports.

A worker imports the modules of its environments and its policy. If such a module starts workers
when it is imported, each of those would start workers of its own, without end.

A worker adopts descendants that detach themselves, so that all of them stay below it while it
lives. If it dies, its fork server adopts them. Workers without a fork server leave orphans; the
driver finds those by an environment variable that programs inherit.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process, util
from typing import NamedTuple
from weakref import WeakSet

from pycollect._core import end_with_process, kill_descendants
from pycollect.errors import IMPORT_FILE

_MARK = "PYCOLLECT_WORKER"
_KILL_SECONDS = 2.0  # give up on a process that is blocked in the kernel
_PAUSE = 0.002
_CHUNK = 1 << 16


class _Stat(NamedTuple):
    """Some fields of /proc/<pid>/stat."""

    state: str
    parent: int
    ticks: int
    start: str


def begin_worker(driver: int) -> None:
    """Make this process a worker that is killed with its descendants when the driver ends.

    Raises:
        RuntimeError: The driver does not exist, or no thread can start to watch it.
    """
    end_with_process(driver)
    os.environ[_MARK] = f"{_identity(driver)}.{_identity(os.getpid())}"


def end_worker() -> None:
    """End this process and its descendants, after the worker has closed everything.

    Skips the teardown of the interpreter, which takes a second once torch is imported.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kill_descendants()
    _remove_semaphores()
    os._exit(0)


def _remove_semaphores() -> None:
    """Remove the semaphores of this process's locks, as `multiprocessing` does when it ends one.

    Otherwise Python's resource tracker removes them when the program ends, with a warning.
    """
    synchronize = sys.modules.get("multiprocessing.synchronize")
    cleanup = synchronize and synchronize.SemLock._cleanup
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if cleanup and finalizer._callback == cleanup:
            with suppress(OSError):
                finalizer()


def end_fork_of(process: int) -> None:
    """End this process if it is a fork of `process`, with the current exception's exit code."""
    if os.getpid() != process:
        error = sys.exc_info()[1]
        code = error.code if isinstance(error, SystemExit) else error and 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def log_to(descriptor: int) -> None:
    """Use the file of a WorkerLog as standard error, and write tracebacks of crashes there."""
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(2)


def kill_orphans() -> None:
    """Kill the descendants of this process's dead workers."""
    deadline = time.monotonic() + _KILL_SECONDS
    with suppress(OSError):  # no file descriptor is free: the next call finds the orphans
        while [pid for pid in _pids() if _kill_orphan(pid)] and time.monotonic() < deadline:
            time.sleep(_PAUSE)


def _kill_orphan(pid: int) -> bool:
    """Kill a process if it descends from a dead worker; return whether it does."""
    if not _is_orphan(pid):
        return False
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if _is_orphan(pid):  # the pid may have been reused before the descriptor was opened
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    return True


def _is_orphan(pid: int) -> bool:
    mark = f"{_MARK}={_identity(os.getpid())}.".encode()
    variables = b"\0" + _read(f"/proc/{pid}/environ")
    _, found, rest = variables.partition(b"\0" + mark)
    worker, _, start = rest.partition(b"\0")[0].decode(errors="replace").partition(".")
    if not found or not worker.isdecimal():
        return False
    stat = _stat(int(worker))
    return stat is None or stat.start != start or stat.state in "ZX"


def kill_tree(pid: int) -> None:
    """Kill a process of this machine, all its descendants and the process groups they lead.

    Each process is stopped first, so that it starts no more. The caller must know that the process
    id has not been reused.
    """
    refused = (ProcessLookupError, PermissionError)  # the process is gone or another user's
    with suppress(*refused):
        os.kill(pid, signal.SIGSTOP)
    for child in children_of(pid):
        kill_tree(child)
    with suppress(*refused):
        kill = os.killpg if os.getpgid(pid) == pid else os.kill
        kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children, including zombies."""
    with suppress(OSError):
        stats = {other: _stat(other) for other in _pids()}
        return [other for other, stat in stats.items() if stat is not None and stat.parent == pid]
    return []


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process in clock ticks, or 0 if it cannot be read."""
    stat = _stat(pid)
    return stat.ticks if stat else 0


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _stat(pid: int) -> _Stat | None:
    """Return some fields of a process, or ``None`` if it does not exist."""
    fields = _read(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")[2].split()
    if not fields:
        return None
    return _Stat(fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), fields[19])


def _identity(pid: int) -> str:
    """Return a process's id and start time, a combination that is never reused."""
    stat = _stat(pid)
    return f"{pid}.{stat.start if stat else ''}"


def _read(path: str) -> bytes:
    """Return the contents of a file, or b"" if it is gone or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        data = b""
        while chunk := os.read(descriptor, _CHUNK):
            data += chunk
        return data
    except OSError:
        return b""
    finally:
        os.close(descriptor)


_UNPICKLING = ("ray._private.serialization", "ray._private.function_manager", "submitit.core.utils")
"""Modules that unpickle the arguments of an actor, or of a job, before this package runs there."""

_SCRIPT = "__mp_main__"
"""Name under which multiprocessing imports the program's script in a new process."""

_is_worker = False
_builder: threading.Thread | None = None  # the thread that builds this worker now
_importers: WeakSet[threading.Thread] = WeakSet()
"""Threads that imported modules started before this worker was built."""


def become_worker() -> None:
    """Refuse to start workers in this process while it imports a module."""
    global _is_worker
    _is_worker = True


@contextmanager
def building() -> Iterator[None]:
    """Mark threads that modules start in this block: they must never start workers."""
    global _builder
    _builder = threading.current_thread()
    try:
        yield
    finally:
        _importers.update(other for other in threading.enumerate() if other is not _builder)
        _builder = None


def check_not_importing() -> None:
    """Raise RuntimeError if a worker imports a module in this thread, or an import started it.

    Environments, policies and hooks may start workers once their module is imported.
    """
    is_worker = _is_worker or hasattr(process.current_process(), "_inheriting")
    thread = threading.current_thread()
    if _is_worker and (thread in _importers or (_builder is not None and thread is not _builder)):
        raise RuntimeError(_refusal(f"a module that started the thread {thread.name!r}"))
    imported, importing = "", False
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not importing and frame.f_code.co_name == "<module>":
            imported = name
        importing |= frame.f_code.co_filename == IMPORT_FILE or name == _SCRIPT
        if importing and (is_worker or name in _UNPICKLING):
            raise RuntimeError(_refusal(f"module {imported!r}"))
        frame = frame.f_back  # type: ignore[assignment] # None at the bottom of the stack


def _refusal(origin: str) -> str:
    return (
        f"{origin} would start workers in each worker process that imports it; move that code "
        'into a function, or put it under if __name__ == "__main__":'
    )
