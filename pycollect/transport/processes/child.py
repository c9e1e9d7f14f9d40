"""A worker process that this one started: its start, its log and its end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import os
import signal
import tempfile
from multiprocessing import reduction, spawn
from typing import Any, Protocol

from pycollect.transport.descendants import kill_orphans, kill_tree
from pycollect.transport.process import ProcessEnd, seconds_without_cpu

_SCRIPT = "init_main_from_path"
"""What multiprocessing calls its path."""


def preparation(name: str) -> dict[str, Any]:
    """What a spawned process of that name begins with; a script that is no file is left out."""
    prepared = spawn.get_preparation_data(name)
    if _stream(prepared):
        del prepared[_SCRIPT]
    return prepared


def check_spawned(name: str) -> None:
    """Refuse a program whose script new interpreters cannot import.

    Raises:
        ValueError: The script was read from a stream.
    """
    if stream := _stream(spawn.get_preparation_data(name)):
        raise ValueError(
            "start_method: spawned workers import the program's script, but it was read from the "
            f"stream {os.path.basename(stream)}; write the program to a file"
        )


def _stream(prepared: dict[str, Any]) -> str:
    """The name of the stream that the script was read from; empty where it was none."""
    path: str = prepared.get(_SCRIPT, "")
    return "" if not path or os.path.isfile(path) else path


_FORBIDDEN = (errno.ENOSYS, errno.EPERM, errno.EACCES)


def unnamed_file(name: str) -> int:
    """Open a new file that ends with its last descriptor; return the descriptor.

    Args:
        name: Name under ``/proc/<pid>/fd``, for debugging.

    Raises:
        OSError: No descriptor or no memory is free.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


_KEPT = 2000  # bytes of the end
_CHUNK = 1 << 16
_HELD = 1 << 20  # bytes that were shown and are still in memory
_PUNCH_HOLE, _KEEP_SIZE = 0x02, 0x01  # of fallocate, linux/falloc.h


class WorkerLog:
    """A file without a name that is a worker's standard error.

    A pipe would do as well, but whoever writes into one waits for its reader, and a crash leaves
    nothing behind in a thread of the worker's own. What was shown is given back to the system.
    """

    def __init__(self) -> None:
        self._file = unnamed_file("pycollect-worker-stderr")
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)  # others may open it again
        self._shown = self._freed = 0
        self._end = b""

    def fileno(self) -> int:
        """Its descriptor here."""
        return self._file

    def show(self) -> None:
        """Write what is new to this process's standard error. Cheap where nothing is."""
        if self._file < 0:
            return
        while os.fstat(self._file).st_size > self._shown:
            chunk = os.pread(self._file, _CHUNK, self._shown)
            self._shown += len(chunk)
            self._end = (self._end + chunk)[-_KEPT:]
            with contextlib.suppress(OSError):  # closed, or a terminal that is gone
                while chunk:
                    chunk = chunk[os.write(2, chunk) :]
        if self._shown - self._freed > _HELD:
            self._freed = self._shown
            length = ctypes.c_long(self._shown)
            libc = ctypes.CDLL(None)
            libc.fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_long(0), length)

    def end(self) -> str:
        """The last lines so far."""
        self.show()
        return self._end.decode(errors="replace")

    def close(self) -> None:
        """Show the rest and give the file up; `end` still tells it. Idempotent."""
        self.show()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Inherited:
    """A descriptor that a process of multiprocessing, having it as an argument, gets as its own.

    Unlike a path into /proc, it needs no right to look into this process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self._descriptor),)


def _detached(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


def log_to(descriptor: int) -> None:
    """Have a WorkerLog as this process's standard error, and faults say where they happened."""
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(2)


class Child(Protocol):
    """A process of multiprocessing's, however it was started."""

    @property
    def native(self) -> Any:
        """Multiprocessing's own."""

    @property
    def is_over(self) -> bool:
        """Whether it is gone. Does not wait."""

    def exit_code(self) -> int | None:
        """How it ended: as multiprocessing's ``exitcode``; None if that is not known."""

    def kill(self) -> None:
        """End the process and its group, and take note of its end."""


class ChildMonitor:
    """Watches a child of this process, and ends it.

    Args:
        log: its standard error.
    """

    def __init__(self, child: Child, log: WorkerLog) -> None:
        self._child = child
        self._log = log

    @property
    def native(self) -> Any:
        """Multiprocessing's own."""
        return self._child.native

    @property
    def is_over(self) -> bool:
        """Whether the process is gone; it stays there for `kill` to be sure of its group.

        Whoever waits for it asks every now and then: what it wrote until then is shown, too.
        """
        self._log.show()
        return self._child.is_over

    @property
    def cpu_delay(self) -> float:
        """Seconds for which it, or what it has started, was ready to run and had no CPU."""
        return seconds_without_cpu(self.native.pid)

    def end(self) -> ProcessEnd:
        """How it ended; no more is known."""
        pid, code = self.native.pid, self._child.exit_code()
        if code is None:
            end = f"its process {pid} is gone"
        elif code < 0:
            end = f"its process {pid} was ended by {signal.Signals(-code).name}"
        else:
            end = f"its process {pid} ended with exit code {code}"
        return ProcessEnd(end, end)

    def recent_log(self) -> str:
        """The end of what it wrote to its standard error."""
        return self._log.end()

    def kill(self) -> None:
        """End the process and all that its environments started."""
        if not self._child.is_over:
            kill_tree(self.native.pid)
        self._child.kill()
        kill_orphans()
        self._log.close()


def kill_group(pid: int, is_unreaped: bool) -> None:
    """Kill a child and the group that it leads, or is to lead.

    Its number is nobody else's until its end was taken note of, and then as long as one of its
    group is left: that group has no leader.

    Args:
        is_unreaped: whether nobody has taken note of its end.
    """
    ways = [os.killpg, os.kill]  # it may not lead one yet
    if not is_unreaped:
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


class SpawnedChild:
    """Watches a process that was spawned, and ends it.

    Args:
        native: multiprocessing's, started.
    """

    def __init__(self, native: Any) -> None:
        self.native = native

    @property
    def is_over(self) -> bool:
        """Whether it is gone. Does not wait."""
        try:
            return self._end() is not None
        except ChildProcessError:  # somebody else has taken note of its end
            return True

    def exit_code(self) -> int | None:
        """How it ended."""
        try:
            end = self._end()
        except ChildProcessError:  # multiprocessing takes note of all ends when it starts a process
            code: int | None = self.native.exitcode
            return code
        if end is None:
            return None
        status: int = end.si_status
        return status if end.si_code == os.CLD_EXITED else -status

    def kill(self) -> None:
        """End the process and its group, and take note of its end."""
        try:
            self._end()
            kill_group(self.native.pid, is_unreaped=True)
        except ChildProcessError:
            kill_group(self.native.pid, is_unreaped=False)
        self.native.join()
        self.native.close()

    def _end(self) -> Any:
        """How it ended, None if it has not; nobody takes note of it by that.

        Raises:
            ChildProcessError: somebody has.
        """
        return os.waitid(os.P_PID, self.native.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
