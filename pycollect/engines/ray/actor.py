"""One actor, whichever way it is asked: its calls, its end, what it logged."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import weakref
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from pathlib import Path
from typing import Any

from pycollect.engines.waiting import Rung

_LOG_CHARACTERS = 2000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ACCOUNT_SECONDS = 2.0  # in which Ray tells how an actor's process ended
_KILL_SECONDS = 2.0  # in which Ray ends one


class ActorLife:
    """Of an actor on this node. Ray tells how it ended, its process whether it is gone.

    Args:
        serving: the actor's one long call.
    """

    def __init__(self, ray: Any, actor: Any, serving: Future[str]) -> None:
        self._ray = ray
        self._actor = actor
        self._serving = serving
        self._process: OtherProcess | None = None

    def watch(self, pid: int) -> None:
        """It has told the number of its process."""
        self._process = OtherProcess(pid)

    @property
    def refused(self) -> bool:
        """Whether it has said that it cannot share memory. Does not wait."""
        serving = self._serving
        return serving.done() and serving.exception() is None and serving.result() != ""

    @property
    def is_over(self) -> bool:
        """Whether the process is gone, or serves no more. Does not wait."""
        return self._serving.done() or (self._process is not None and self._process.is_gone)

    def end(self) -> tuple[str, str]:
        """How it ended, and all that Ray knows of it, for which it waits a little."""
        wait_futures([self._serving], _ACCOUNT_SECONDS)
        error = self._serving.exception() if self._serving.done() else None
        if error is not None:
            return end_of(error), str(error)
        number = "" if self._process is None else f" {self._process.pid}"
        end = f"its process{number} is gone"
        return end, end

    def last_words(self) -> str:
        """The end of what the process logged."""
        return log_lines(self._ray, self._process.pid) if self._process is not None else ""

    def kill(self) -> None:
        """End the actor and its process, and all that its environments started."""
        kill_actor(self._ray, self._actor)
        if self._process is None:  # not built, so that no memory was named to it
            return
        self._process.wait_gone(_KILL_SECONDS)
        self._process.kill_group()
        self._process.wait_gone(None)


def ringing(reference: Any, bell: Rung) -> Any:
    """A call's future, which rings once it is done, also where the actor has died."""
    future = reference.future()
    future.add_done_callback(lambda _: bell.ring())
    return future


def kill_actor(ray: Any, actor: Any) -> None:
    """End it, and do not wait."""
    with contextlib.suppress(Exception):  # it is gone already, or Ray is
        if ray.is_initialized():
            ray.kill(actor)


def log_lines(ray: Any, pid: int | None) -> str:
    """The end of what a process logged, if it ran on this machine."""
    with contextlib.suppress(Exception):  # the place of the logs is not part of Ray's API
        folder = Path(ray._private.worker._global_node.get_logs_dir_path())
        files = sorted(folder.glob(f"worker-*-{pid}.err"))
        return "".join(file.read_text(errors="replace") for file in files)[-_LOG_CHARACTERS:]
    return ""


def end_of(error: BaseException) -> str:
    """The line of Ray's text that says how a process ended: its exit, or an exception. The last."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class OtherProcess:
    """A process of this machine, which leads a group of its own.

    Raises:
        OSError: the system does not permit it, or has not the call.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._poll: select.poll | None = None  # None: it was gone already
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            weakref.finalize(self, os.close, descriptor)
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLIN)

    @property
    def is_gone(self) -> bool:
        """Whether none of its threads runs any more. Does not wait."""
        return self.wait_gone(0.0)

    def wait_gone(self, seconds: float | None) -> bool:
        """Wait until it is gone, for that time at most; return whether it is."""
        if self._poll is None:
            return True
        return bool(self._poll.poll(None if seconds is None else seconds * 1000))

    def kill_group(self) -> None:
        """Kill it and all of its group, also those that it left behind.

        Its number is no other process's as long as one of its group is there.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def has_pidfd() -> bool:
    """Whether there are such descriptors: not before Linux 5.3, and not where it is forbidden."""
    try:
        OtherProcess(os.getpid())
    except (OSError, AttributeError):
        return False
    return True
