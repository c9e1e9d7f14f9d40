"""Workers that the fork server forks, as processes of an extra multiprocessing start method."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import select
import socket
from multiprocessing import popen_forkserver, resource_tracker, util
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from pycollect.transport.processes.child import kill_group, preparation, unnamed_file
from pycollect.transport.processes.fork_server import ForkServerError, fork_servers

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
    """A process of multiprocessing that starts as a fork of this program's fork server.

    Raises:
        ForkServerError: By `start`, if there is no fork server.
    """

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
        """The Popen object of the started process."""
        assert self._popen is not None
        return self._popen


class ForkedChild:
    """A forked child process.

    Args:
        native: The started process.
    """

    def __init__(self, native: ForkedProcess) -> None:
        self.native = native

    @property
    def is_over(self) -> bool:
        """Whether the process has ended. Does not wait."""
        return self.native.popen.is_over(0)

    def exit_code(self) -> int | None:
        """Return multiprocessing's ``exitcode``, or ``None`` if it is unknown."""
        code = self.native.exitcode
        return None if code == _UNKNOWN and self.native.popen.has_lost_fork_server else code

    def kill(self) -> None:
        """Kill the process and its group, and release it."""
        popen = self.native.popen
        kill_group(popen.pid, is_unreaped=not (self.is_over and popen.has_lost_fork_server))
        self.native.join()
        self.native.close()
