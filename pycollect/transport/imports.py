"""Imports in a worker process: their warnings are hidden, and they must not start workers.

A worker imports the modules of its environments and its policy. If such a module starts workers
when it is imported, each of those would start workers of its own, without end.

The driver imports the same packages and has shown their import warnings already. To show them in
workers too, set `pycollect.filter_warnings_subprocess` to False before the collector is made.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import process
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import pycollect

_IMPORT = "<frozen importlib._bootstrap>"
"""File name of the stack frames of an import statement."""

_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = Path(sysconfig.get_path("stdlib"))


def filters_import_warnings() -> bool:
    """Return whether workers that start now are to hide import warnings."""
    return bool(pycollect.filter_warnings_subprocess)


def filter_import_warnings(hide: bool) -> None:
    """Hide import warnings in this worker process and its own workers from now on, or show them."""
    pycollect.filter_warnings_subprocess = hide
    show = warnings.showwarning
    if hide and not isinstance(show, _Filter):
        warnings.showwarning = _Filter(show)
    elif not hide and isinstance(show, _Filter):
        warnings.showwarning = show.show_other


class _Filter:
    """Shows all warnings except import warnings.

    Python's own filters run first, so a warning that they turn into an error never gets here.

    Attributes:
        show_other: Shows a warning.
    """

    def __init__(self, show_other: Callable[..., None]) -> None:
        self.show_other = show_other

    def __call__(self, *arguments: Any, **named: Any) -> None:
        if not _is_of_an_import(sys._getframe(1)):
            self.show_other(*arguments, **named)


def _is_of_an_import(frame: FrameType | None) -> bool:
    """Return whether an installed package raised the warning while a module was imported."""
    while frame is not None and frame.f_globals.get("__name__") == "warnings":
        frame = frame.f_back
    if frame is None or not _is_installed(Path(frame.f_code.co_filename)):
        return False
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame is not None


def _is_installed(file: Path) -> bool:
    """Return whether a file belongs to an installed package or to Python, not to the program."""
    return not _INSTALLED.isdisjoint(file.parts) or file.is_relative_to(_STANDARD)


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
        importing |= frame.f_code.co_filename == _IMPORT or name == _SCRIPT
        if importing and (is_worker or name in _UNPICKLING):
            raise RuntimeError(_refusal(f"module {imported!r}"))
        frame = frame.f_back  # type: ignore[assignment] # None at the bottom of the stack


def _refusal(origin: str) -> str:
    return (
        f"{origin} would start workers in each worker process that imports it; move that code "
        'into a function, or put it under if __name__ == "__main__":'
    )
