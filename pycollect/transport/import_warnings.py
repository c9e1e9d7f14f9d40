"""Hide warnings that other packages raise while a worker process imports them.

The driver imports the same packages and has shown these warnings already. To show them in workers
too, set `pycollect.filter_warnings_subprocess` to False before the collector is made.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pycollect

_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = Path(sysconfig.get_path("stdlib"))
_IMPORTING = "<frozen importlib._bootstrap>"


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
    while frame is not None and frame.f_code.co_filename != _IMPORTING:
        frame = frame.f_back
    return frame is not None


def _is_installed(file: Path) -> bool:
    """Return whether a file belongs to an installed package or to Python, not to the program."""
    return not _INSTALLED.isdisjoint(file.parts) or file.is_relative_to(_STANDARD)
