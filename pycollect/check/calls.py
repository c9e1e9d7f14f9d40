"""Calls of the environment: time limits, the user's line of an exception, and started processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

from pycollect.check.report import Draft
from pycollect.errors import WorkerError

_AGAIN_SECONDS = 5.0  # between two interrupts of a call that goes on
CALL_SECONDS = 60.0
"""Time after which a call of the environment is interrupted."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_STANDARD = sysconfig.get_path("stdlib")
_LIBRARIES = tuple(
    f"{os.sep}{name}{os.sep}"
    for name in (
        *("gymnasium", "numpy", "torch", "tensordict", "torchrl", "cloudpickle"),
        *("pygame", "pandas", "scipy", "mujoco", "cv2", "PIL", "matplotlib", "networkx", "jax"),
    )
)


class Budget:
    """Time until a part of the check should stop."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def is_left(self) -> bool:
        return time.monotonic() < self._end


class CallFailed(Exception):
    """A call of the environment raised, or did not return in time."""

    def __init__(self, code: str, message: str, place: str, refusal: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal  # message of an error that this package raised, else ""
        self.code = code  # "crashes", "hangs" or "interface"
        self.place = place

    def report(self, report: Draft) -> None:
        """Add it to a report, once for each line. A refusal may follow from another error."""
        if self.refusal:
            if report.ok:
                report.add("refused", self.refusal)
        elif not self.place or self.place not in report.places:
            report.places.add(self.place)
            report.add(self.code, str(self), about=self.place)
        report.note_end(self.place)


class _TooLongError(BaseException):
    """Raised by the alarm; not an Exception, so that an environment does not catch it."""


@contextmanager
def calling(call: str, calls: int = 1) -> Iterator[None]:
    """Raise `CallFailed` if the block raises, or takes longer than `calls` calls may take."""
    try:
        with _limited(calls * CALL_SECONDS):
            yield
    except _TooLongError as error:
        place = place_of(error)
        limit = calls * CALL_SECONDS
        text = f"{call} did not return within {limit:g} s; it was interrupted at {place}"
        raise CallFailed("hangs", text, place) from None
    except CallFailed:
        raise
    except (Exception, SystemExit) as error:
        place = place_of(error)
        said = " ".join(str(error).split()) or "without a message"
        said = said if len(said) <= 300 else f"{said[:297]}..."
        text = f"{call} raised {type(error).__name__}: {said} ({place})"
        by_wrapper = "gymnasium/wrappers/" in place and "values to unpack" in said
        code = "interface" if by_wrapper else "crashes"
        raise CallFailed(code, text, place, _refusal(error)) from error


def _refusal(error: BaseException) -> str:
    frames = _frames_of(error)
    ours = frames and frames[-1][0].startswith(_PACKAGE)
    is_refusal = ours and isinstance(error, TypeError | ValueError)
    return str(error).replace("create_env_fn: ", "") if is_refusal else ""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Interrupt the block after some time; only the main thread can do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again, in case the environment catches the exception.
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def place_of(error: BaseException) -> str:
    """Return "file:line" of the innermost line that belongs to the user or the environment."""
    return _innermost(_frames_of(error))


def _frames_of(error: BaseException) -> list[tuple[str, int]]:
    """Return file and line of each frame, the innermost last, also of frames in a worker."""
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error.__cause__, WorkerError):
        remote = re.findall(r'File "(.+?)", line (\d+)', error.__cause__.remote_traceback)
        frames += [(file, int(line)) for file, line in remote]
    return frames


def place_here() -> str:
    """Return "file:line" of the innermost calling line of the user or the environment."""
    frames = traceback.walk_stack(sys._getframe(1))
    return _innermost([(frame.f_code.co_filename, line) for frame, line in frames][::-1])


def _innermost(frames: list[tuple[str, int]]) -> str:
    frames = [frame for frame in frames if not frame[0].startswith((_PACKAGE, "<frozen"))] or frames
    users = [frame for frame in frames if _is_users(frame[0])]
    if not frames:
        return "code without a traceback"
    file, line = (users or frames)[-1]
    inside = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if inside.startswith(os.pardir) else inside}:{line}"


def _is_users(file: str) -> bool:
    in_packages = f"{os.sep}site-packages{os.sep}" in file
    if file.startswith(_STANDARD) and not in_packages:
        return False
    return not any(name in file for name in _LIBRARIES)


def run(checks: Sequence[Callable[[Any], None]], subject: Any, report: Draft) -> None:
    """Call each check; an error in one does not keep the others from running."""
    for check in checks:
        try:
            check(subject)
        except CallFailed as failed:
            failed.report(report)
            if failed.code == "hangs":
                report.skip("everything after that", "a call did not return")
                return
        except Exception as error:
            about = (check.__doc__ or check.__name__).partition(".")[0]
            report.skip(about, f"{type(error).__name__}: {error}")


def named(env: Any) -> str:
    """Return a short name of an environment: its id, or its class."""
    spec = getattr(env, "spec", None)
    return str(getattr(spec, "id", "") or type(getattr(env, "unwrapped", env)).__name__)


_END_SECONDS = 1.0


class Start(NamedTuple):
    """A process or thread that was started."""

    kind: str  # "a process", "a thread" or "a fork"
    place: str  # the user's line, as "file:line"
    started: Any  # the process or thread; ``None`` for a fork

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
    with ExitStack() as patches:
        for kind, owner, name in _STARTERS:
            noting = _noting(kind, getattr(owner, name), starts)
            patches.enter_context(patch.object(owner, name, noting))
        yield starts


def still_running(starts: list[Start]) -> list[Start]:
    """Return the started processes that do not end within a second."""
    end = time.monotonic() + _END_SECONDS
    while (running := [start for start in starts if start.is_running]) and time.monotonic() < end:
        time.sleep(0.01)
    return running


def _noting(kind: str, function: Any, starts: list[Start]) -> Any:
    def note(*args: Any, **kwargs: Any) -> Any:
        place = place_here()
        result = function(*args, **kwargs)
        starts.append(Start(kind, place, args[0] if args else None))
        return result

    return note
