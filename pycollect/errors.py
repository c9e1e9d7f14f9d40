"""Errors of workers and limits as the caller sees them, and which warnings the caller sees."""

from __future__ import annotations

import errno
import inspect
import os
import resource
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import pycollect


class WorkerError(RuntimeError):
    """A failure in a worker.

    An exception of an environment or a policy is raised with its own type, and has a WorkerError as
    its ``__cause__``. WorkerError itself is raised if a worker died, or if the exception's type
    cannot be rebuilt in this process.

    Attributes:
        worker: Id of the worker.
        incarnation: Number of earlier workers with that id.
        remote_traceback: Traceback in the worker, or a description of its end.
    """

    def __init__(self, message: str, worker: int, incarnation: int, remote_traceback: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.incarnation = incarnation
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[type[WorkerError], tuple[str, int, int, str]]:
        return type(self), (str(self.args[0]), self.worker, self.incarnation, self.remote_traceback)


class WorkerDied(WorkerError):
    """The worker's process has ended, or was ended because it no longer responded."""


class LimitError(OSError):
    """The operating system or a cluster refuses more. Nothing is lost; the caller may try again."""


_NO_THREAD = "can't start new thread"  # Python's error text; it carries no error number
_REACHED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


@contextmanager
def limits_named(operation: str) -> Iterator[None]:
    """Raise a LimitError if the block, the `operation` in words, fails because of a limit.

    Other errors pass unchanged.
    """
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        number = _limit_number(error)
        if number is None:
            raise
        text = f"{operation} failed: {_limit_text(number)}, then call again; {error}"
        raise LimitError(number, text) from error


def _limit_number(error: BaseException) -> int | None:
    """Return the error number of a limit, or ``None``; the core and torch report it as text."""
    if isinstance(error, OSError):
        return error.errno if error.errno in _REACHED else None
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if _NO_THREAD in str(error):
        return errno.EAGAIN
    return next((number for number in _REACHED if os.strerror(number) in str(error)), None)


def _limit_text(number: int) -> str:
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


_E = TypeVar("_E", bound=BaseException)


def without_frames(error: _E) -> _E:
    """Return a copy of an exception, its causes and its contexts without their tracebacks.

    A traceback holds its frames and all their callers, and so every slab in a local variable. If
    one of these frames can reach the exception, the slabs stay lent until garbage is collected.
    So code that keeps an exception after its handler keeps a copy, and raises another copy.
    """
    return cast(_E, _copy_of(error, {}))


def _copy_of(error: BaseException, copies: dict[int, BaseException]) -> BaseException:
    if id(error) not in copies:
        own = copies[id(error)] = _bare(error)
        for name in ("__cause__", "__context__"):
            linked = getattr(error, name)
            if linked is not None:
                BaseException.__setattr__(own, name, _copy_of(linked, copies))
        BaseException.__setattr__(own, "__suppress_context__", error.__suppress_context__)
    return copies[id(error)]


def _bare(error: BaseException) -> BaseException:
    """Return a copy without traceback, cause and context; a RuntimeError if it cannot be copied."""
    try:
        return from_parts(*parts_of(error))
    except Exception:
        return RuntimeError(described(error))


def described(error: BaseException) -> str:
    """Return class name and text of an exception; its `__str__` may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} without a text: its __str__ raised an exception"


Parts = tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]


def parts_of(error: BaseException) -> Parts:
    """Return class, arguments and attributes of an exception, for `from_parts`."""
    _, arguments, *state = _builtin(type(error)).__reduce__(error)
    return type(error), arguments, dict(*state)


def from_parts(kind: type[BaseException], arguments: Any, state: Any) -> BaseException:
    """Make an exception without calling its own `__init__`, which may need other arguments."""
    base = _builtin(kind)
    own: BaseException = base.__new__(kind, *arguments)
    base.__init__(own, *arguments)
    for name, value in state.items():  # a class may refuse to set its attributes
        BaseException.__setattr__(own, name, value)
    return own


def has_own_reduce(kind: type[BaseException]) -> bool:
    """Return whether a class of exceptions defines how its instances are pickled."""
    names = ("__reduce__", "__reduce_ex__", "__setstate__")
    return any(getattr(kind, name) is not getattr(_builtin(kind), name) for name in names)


def _builtin(kind: Any) -> Any:
    while kind.__module__ != "builtins":
        kind = kind.__base__
    return kind


_PACKAGE = str(Path(__file__).parent)


def not_the_end(error: StopIteration) -> RuntimeError:
    """Return the error that replaces a StopIteration raised by user code within ``next()``.

    A StopIteration would end the caller's loop as if all frames were delivered. Generators replace
    it in the same way (PEP 479).
    """
    cause = error.__cause__
    if isinstance(cause, WorkerError):
        name, text = f"worker {cause.worker}, ", cause.remote_traceback
    else:
        name, text = "", "".join(traceback.format_exception(error))
    frames = [line.strip() for line in text.splitlines() if line.lstrip().startswith('File "')]
    own = [frame for frame in frames if _PACKAGE not in frame] or frames
    place = own[-1] if own else "code without a traceback"
    failure = RuntimeError(
        f"StopIteration was raised while a batch was collected, in {name}{place}; catch it "
        "there, or end the episode when an iterator is exhausted"
    )
    failure.__cause__ = error
    return failure


_kept: list[str] | None = None  # collected warnings, in a process that no user sees


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Collect warnings instead of showing them; the driver shows them later."""
    global _kept
    before, _kept = _kept, []
    try:
        yield _kept
    finally:
        _kept = before


def warn_user(message: str) -> None:
    """Raise a UserWarning at the innermost line outside of this package."""
    if _kept is not None:
        _kept.append(message)
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in (__name__.partition(".")[0], "multiprocessing")


IMPORT_FILE = "<frozen importlib._bootstrap>"
"""File name of the stack frames of an import statement."""

_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = Path(sysconfig.get_path("stdlib"))


def filters_import_warnings() -> bool:
    """Return whether workers that start now hide import warnings."""
    return bool(pycollect.filter_warnings_subprocess)


def filter_import_warnings(hide: bool) -> None:
    """Hide import warnings in this worker process and its own workers from now on, or show them.

    The driver imports the same packages and has shown their import warnings already.
    """
    pycollect.filter_warnings_subprocess = hide
    show = warnings.showwarning
    if hide and not isinstance(show, _ImportFilter):
        warnings.showwarning = _ImportFilter(show)
    elif not hide and isinstance(show, _ImportFilter):
        warnings.showwarning = show.show_other


class _ImportFilter:
    """Shows all warnings except import warnings.

    Python's own filters run first, so a warning that they turn into an error never gets here.
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
    while frame is not None and frame.f_code.co_filename != IMPORT_FILE:
        frame = frame.f_back
    return frame is not None


def _is_installed(file: Path) -> bool:
    """Return whether a file belongs to an installed package or to Python, not to the program."""
    return not _INSTALLED.isdisjoint(file.parts) or file.is_relative_to(_STANDARD)


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
        if before is not None and _is_handler_of(frame, before):
            return True
        step, before = step.tb_next, frame
    return False


def _is_handler_of(handler: FrameType, interrupted: FrameType) -> bool:
    """Return whether a call has an int and then the interrupted frame among its arguments."""
    code, values = handler.f_code, handler.f_locals
    arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        arguments += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return any(
        isinstance(number, int) and frame is interrupted for number, frame in pairwise(arguments)
    )
