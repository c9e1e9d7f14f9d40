"""Errors that name the operating system's limit that was reached."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from pycollect.errors import LimitError

_NO_THREAD = "can't start new thread"  # Python's error text; it carries no error number
_REACHED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


@contextmanager
def limits_named(operation: str) -> Iterator[None]:
    """Raise a LimitError that names the limit if the block fails because a limit is reached.

    Other errors pass unchanged.

    Args:
        operation: Noun phrase for the message.
    """
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        number = _number(error)
        if number is None:
            raise
        text = f"{operation} failed: {_limit(number)}, then call again; {error}"
        raise LimitError(number, text) from error


def _number(error: BaseException) -> int | None:
    """Return the error number of a limit, or ``None``; the core and torch report it as text."""
    if isinstance(error, OSError):
        return error.errno if error.errno in _REACHED else None
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if _NO_THREAD in str(error):
        return errno.EAGAIN
    return next((number for number in _REACHED if os.strerror(number) in str(error)), None)


def _limit(number: int) -> str:
    if number == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"RLIMIT_NOFILE: all {most} file descriptors of this process are in use; close files "
            "or raise the limit (ulimit -n)"
        )
    if number == errno.ENFILE:
        return "fs.file-max: all file descriptors of this system are in use; close files"
    if number == errno.EAGAIN:
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        allowed = "unlimited" if most == resource.RLIM_INFINITY else most
        return (
            f"RLIMIT_NPROC ({allowed}) or pids.max of the control group: no further process or "
            "thread can start; use fewer workers, end some processes or raise the limit (ulimit -u)"
        )
    return "memory: the system has run out; free some memory"
