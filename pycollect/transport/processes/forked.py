"""Workers that a template forks: to multiprocessing, processes of one more start method."""

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
_UNKNOWN = 255  # as multiprocessing's own fork server has it


class _ForkedPopen(popen_forkserver.Popen):
    """As that of multiprocessing's own fork server, but the worker's end is told on its line."""

    _fds: list[int]  # what the process is given beside its state

    def _launch(self, process: Any) -> None:
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            state = _written(self._pickled(process), given)
            parent, own = os.pipe()  # by which multiprocessing there knows of our end
            given.callback(os.close, parent)
            kept.callback(os.close, own)
            tracker = resource_tracker.getfd()
            assert tracker is not None  # it has been started by that
            descriptors = [state, parent, *_STREAMS, tracker, *self._fds]
            with fork_servers.asking:
                self._template = fork_servers.ready()
                self.pid, self._line = self._template.fork(process.name, descriptors)
            kept.callback(self._line.close)
            self.sentinel = os.pidfd_open(self.pid)
            kept.callback(os.close, self.sentinel)
            self.finalizer = util.Finalize(self, kept.pop_all().close)

    def _pickled(self, process: Any) -> bytes:
        """All that a template's fork reads."""
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
        """Its exit code, None if it runs; without the flag it is waited for."""
        if self.returncode is None and self.is_over(None if flag == 0 else 0):
            self.returncode = _UNKNOWN
            with contextlib.suppress(ForkServerError):
                self.returncode = self._template.read_number(self._line, socket.MSG_PEEK)
        return self.returncode

    def is_over(self, milliseconds: int | None) -> bool:
        """Whether it is gone, or is so after that time."""
        return bool(_polled(self.sentinel, select.POLLIN, milliseconds))

    @property
    def is_alone(self) -> bool:
        """Whether its template is gone: nobody keeps its number when it ends."""
        return bool(_polled(self._line.fileno(), 0, 0))


def _polled(descriptor: int, events: int, milliseconds: int | None) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(descriptor, events)
    return poll.poll(milliseconds)


def _written(data: bytes, given: contextlib.ExitStack) -> int:
    """The descriptor of a file without a name, to be read from its beginning."""
    descriptor = unnamed_file("pycollect-worker-start")
    given.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class ForkedProcess(BaseProcess):
    """A process of multiprocessing that starts as a fork of this program's template.

    Raises:
        ForkServerError: by `start`: there is none.
    """

    _Popen = _ForkedPopen
    _popen: _ForkedPopen | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of the processes that environments start: as this program starts its own.
        self._start_method = (
            multiprocessing.get_start_method(allow_none=True)
            or multiprocessing.get_all_start_methods()[0]
        )

    @property
    def popen(self) -> _ForkedPopen:
        """What multiprocessing asks of it, once it has started."""
        assert self._popen is not None
        return self._popen


class ForkedChild:
    """Watches a process that was forked, and ends it.

    Args:
        native: started.
    """

    def __init__(self, native: ForkedProcess) -> None:
        self.native = native

    @property
    def is_over(self) -> bool:
        """Whether it is gone. Does not wait."""
        return self.native.popen.is_over(0)

    def exit_code(self) -> int | None:
        """How it ended."""
        code = self.native.exitcode
        return None if code == _UNKNOWN and self.native.popen.is_alone else code

    def kill(self) -> None:
        """End the process and its group, and let go of it."""
        popen = self.native.popen
        kill_group(popen.pid, is_unreaped=not (self.is_over and popen.is_alone))
        self.native.join()
        self.native.close()
