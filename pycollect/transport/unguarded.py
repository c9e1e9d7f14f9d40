"""Refuse to start workers from a module that a worker process imports.

A worker imports the modules of its environments and its policy. If such a module starts workers
when it is imported, each of those would start workers of its own, without end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process
from weakref import WeakSet

_IMPORT = "<frozen importlib._bootstrap>"
"""File name of the stack frames of an import statement."""

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
