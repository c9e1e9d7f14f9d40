"""A worker process that this process started: its start, its log and its end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import tempfile
from abc import abstractmethod
from multiprocessing import reduction, spawn
from typing import Any

from pycollect.transport.process import ProcessEnd, WorkerProcess, seconds_without_cpu
from pycollect.transport.worker_process import kill_orphans, kill_tree

_SCRIPT = "init_main_from_path"
"""Key of the script's path in multiprocessing's preparation data."""


def preparation(name: str) -> dict[str, Any]:
    """Return multiprocessing's preparation data for a process, without a script that is no file."""
    prepared = spawn.get_preparation_data(name)
    if _stream_of(prepared):
        del prepared[_SCRIPT]
    return prepared


def check_spawned(name: str) -> None:
    """Refuse a program whose script new interpreters cannot import."""
    if stream := _stream_of(spawn.get_preparation_data(name)):
        raise ValueError(
            "start_method: spawned workers import the program's script, but it was read from the "
            f"stream {os.path.basename(stream)}; write the program to a file"
        )


def _stream_of(prepared: dict[str, Any]) -> str:
    """Return the name of the stream that the script was read from, or "" if it is a file."""
    path: str = prepared.get(_SCRIPT, "")
    return "" if not path or os.path.isfile(path) else path


_FORBIDDEN = (errno.ENOSYS, errno.EPERM, errno.EACCES)  # memfd_create is missing or forbidden


def unnamed_file(name: str) -> int:
    """Open a new file that is freed with its last descriptor; return the descriptor."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


_KEPT_BYTES = 2000  # at the end of the log
_CHUNK = 1 << 16
_MAX_COPIED_BYTES = 1 << 20  # copied to the terminal and not yet freed
_PUNCH_HOLE, _KEEP_SIZE = 0x02, 0x01  # flags of fallocate, linux/falloc.h


class WorkerLog:
    """An unnamed file that serves as a worker's standard error.

    A process that writes to a pipe waits for the reader, and a thread in the worker would lose its
    output in a crash. A file has neither problem. Memory of output that was shown is freed.
    """

    def __init__(self) -> None:
        self._file = unnamed_file("pycollect-worker-stderr")
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)  # other processes may reopen the file
        self._copied = self._freed = 0
        self._end = b""

    def fileno(self) -> int:
        return self._file

    def show(self) -> None:
        """Copy new output to this process's standard error. Cheap if there is none."""
        if self._file < 0:
            return
        while os.fstat(self._file).st_size > self._copied:
            chunk = os.pread(self._file, _CHUNK, self._copied)
            self._copied += len(chunk)
            self._end = (self._end + chunk)[-_KEPT_BYTES:]
            with contextlib.suppress(OSError):  # standard error is closed, or its terminal is gone
                while chunk:
                    chunk = chunk[os.write(2, chunk) :]
        if self._copied - self._freed > _MAX_COPIED_BYTES:
            self._freed = self._copied
            length = ctypes.c_long(self._copied)
            libc = ctypes.CDLL(None)
            libc.fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_long(0), length)

    def end(self) -> str:
        """Return the last lines so far."""
        self.show()
        return self._end.decode(errors="replace")

    def close(self) -> None:
        """Show the rest and close the file. `end` still works. Idempotent."""
        self.show()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Inherited:
    """A descriptor that is duplicated into a process which gets it as an argument.

    Unlike a path below /proc, it needs no permission to inspect this process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self._descriptor),)


def _detached(duplicate: Any) -> int:
    descriptor: int = duplicate.detach()
    return descriptor


class ChildProcess(WorkerProcess):
    """A child of this process that runs a worker, forked or spawned; see `WorkerProcess`."""

    def __init__(self, native: Any, log: WorkerLog) -> None:
        self.native = native
        self._log = log

    @property
    @abstractmethod
    def _has_ended(self) -> bool:
        """Whether the process has ended. Does not wait."""

    @abstractmethod
    def _exit_code(self) -> int | None:
        """Return multiprocessing's ``exitcode``, or ``None`` if it is unknown."""

    @abstractmethod
    def _kill_group(self) -> None:
        """Kill the process and its group, unless its pid may have been reused."""

    @property
    def is_over(self) -> bool:
        """Whether the process has ended. It stays unreaped until `kill`, so its pid is not reused.

        Also shows new output of the process, because a waiting driver polls this property.
        """
        self._log.show()
        return self._has_ended

    @property
    def cpu_delay(self) -> float:
        return seconds_without_cpu(self.native.pid)

    def end(self) -> ProcessEnd:
        pid, code = self.native.pid, self._exit_code()
        if code is None:
            end = f"its process {pid} is gone"
        elif code < 0:
            end = f"its process {pid} was ended by {signal.Signals(-code).name}"
        else:
            end = f"its process {pid} ended with exit code {code}"
        return ProcessEnd(end, end)

    def recent_log(self) -> str:
        return self._log.end()

    def kill(self) -> None:
        """End the process and all processes that its environments started, and reap it."""
        if not self._has_ended:
            kill_tree(self.native.pid)
        self._kill_group()
        self.native.join()
        self.native.close()
        kill_orphans()
        self._log.close()


def kill_group(pid: int, is_unreaped: bool) -> None:
    """Kill a child and the group that it leads or is about to lead.

    A pid is not reused until the process is reaped, nor while its group has members.
    """
    ways = [os.killpg, os.kill]  # the child may not lead a group yet
    if not is_unreaped:
        if _exists(pid):  # the pid was reused
            return
        ways = [os.killpg]
    for send in ways:
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)


def _exists(pid: int) -> bool:
    """Return whether a process with that pid exists."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


class SpawnedChild(ChildProcess):
    """A spawned child process."""

    @property
    def _has_ended(self) -> bool:
        try:
            return self._end() is not None
        except ChildProcessError:  # the process was reaped elsewhere
            return True

    def _exit_code(self) -> int | None:
        try:
            end = self._end()
        except ChildProcessError:  # multiprocessing reaps all its processes when it starts one
            code: int | None = self.native.exitcode
            return code
        if end is None:
            return None
        status: int = end.si_status
        return status if end.si_code == os.CLD_EXITED else -status

    def _kill_group(self) -> None:
        try:
            self._end()
            kill_group(self.native.pid, is_unreaped=True)
        except ChildProcessError:
            kill_group(self.native.pid, is_unreaped=False)

    def _end(self) -> Any:
        """Return how the process ended, without reaping it, or ``None`` while it runs."""
        return os.waitid(os.P_PID, self.native.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
