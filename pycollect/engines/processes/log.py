"""What a worker process writes to its standard error: shown by its driver, the end of it kept."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
from multiprocessing import reduction
from typing import Any

from pycollect.engines.processes.unnamed import unnamed_file

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
