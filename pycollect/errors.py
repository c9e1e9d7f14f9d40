"""Errors of workers, as the caller sees them, and warnings that point at the caller's line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class WorkerError(RuntimeError):
    """What happened in a worker.

    It is the ``__cause__`` of an exception that an environment or a policy raised, and raised
    itself where a worker died or where the exception's type cannot be rebuilt.

    Attributes:
        worker: the worker's id.
        incarnation: how many workers of that id there were before it.
        remote_traceback: the traceback in the worker, or what is known of its end.
    """

    def __init__(self, message: str, worker: int, incarnation: int, remote_traceback: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.incarnation = incarnation
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[type[WorkerError], tuple[str, int, int, str]]:
        return type(self), (str(self.args[0]), self.worker, self.incarnation, self.remote_traceback)


class WorkerDied(WorkerError):
    """A worker's process is gone, or was ended because nothing came from it any more."""


_kept: list[str] | None = None  # warnings, while a process has no user to see them


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """What `warn_user` is told meanwhile, which it does not say: another process does."""
    global _kept
    before, _kept = _kept, []
    try:
        yield _kept
    finally:
        _kept = before


def warn_user(message: str) -> None:
    """A UserWarning at the innermost line outside of this package."""
    if _kept is not None:
        _kept.append(message)
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is KeyboardInterrupt, or the like, or from a signal handler.

    A handler of the program may raise any exception, such as the TimeoutError of a time limit.
    Python calls a handler with the signal's number and the interrupted frame. That frame precedes
    the handler's in the traceback.
    """
    if not isinstance(error, Exception):
        return True
    step, before = error.__traceback__, None
    while step is not None:
        frame = step.tb_frame
        if before is not None and _is_handler_of(frame.f_locals.values(), before):
            return True
        step, before = step.tb_next, frame
    return False


def _is_handler_of(values: Iterable[Any], interrupted: FrameType) -> bool:
    """Whether a handler's local variables, or its ``*args``, have the interrupted frame."""
    groups = [tuple(values)]
    groups += [value for value in groups[0] if isinstance(value, tuple)]
    return any(
        any(value is interrupted for value in group)
        and any(isinstance(value, int) for value in group)
        for group in groups
    )
