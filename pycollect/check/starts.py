"""Watches for processes and threads that an environment starts."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple
from unittest.mock import patch

from pycollect.check.calls import place_here


class Start(NamedTuple):
    """A process or thread that was started.

    Attributes:
        kind: "a process", "a thread" or "a fork".
        place: The user's line, as "file:line".
    """

    kind: str
    place: str


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


def _noting(kind: str, function: Any, starts: list[Start]) -> Any:
    def note(*args: Any, **kwargs: Any) -> Any:
        starts.append(Start(kind, place_here()))
        return function(*args, **kwargs)

    return note
