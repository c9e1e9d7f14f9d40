"""Watches for processes and threads that an environment starts."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple
from unittest.mock import patch

from pycollect.check.calls import place_here

_END_SECONDS = 1.0


class Start(NamedTuple):
    """A process or thread that was started.

    Attributes:
        kind: "a process", "a thread" or "a fork".
        place: The user's line, as "file:line".
        started: The process or thread; ``None`` for a fork.
    """

    kind: str
    place: str
    started: Any

    @property
    def is_running(self) -> bool:
        """Whether it is a process that still runs. Forks count as not running."""
        if isinstance(self.started, subprocess.Popen):
            return self.started.poll() is None
        is_process = isinstance(self.started, BaseProcess)
        return is_process and self.started in multiprocessing.active_children()


_STARTERS: tuple[tuple[str, Any, str], ...] = (
    ("a process", BaseProcess, "start"),
    ("a process", subprocess.Popen, "__init__"),
    ("a thread", threading.Thread, "start"),
    ("a fork", os, "fork"),
)


@contextmanager
def watched_starts() -> Iterator[list[Start]]:
    """Collect the starts within the block in a list; threads of C code are not seen."""
    starts: list[Start] = []
    patches = [
        patch.object(own, name, _noting(kind, getattr(own, name), starts))
        for kind, own, name in _STARTERS
    ]
    for one in patches:
        one.start()
    try:
        yield starts
    finally:
        for one in patches:
            one.stop()


def still_running(starts: list[Start]) -> list[Start]:
    """Return the started processes that do not end within a second."""
    end = time.monotonic() + _END_SECONDS
    while (running := [own for own in starts if own.is_running]) and time.monotonic() < end:
        time.sleep(0.01)
    return running


def _noting(kind: str, function: Any, starts: list[Start]) -> Any:
    def note(*args: Any, **kwargs: Any) -> Any:
        place = place_here()
        result = function(*args, **kwargs)
        starts.append(Start(kind, place, args[0] if args else None))
        return result

    return note
