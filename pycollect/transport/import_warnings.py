"""Worker processes keep to themselves what others' packages warn of while they are imported.

The caller's process, which imports the same, has said it already; each worker would say it again.
`pycollect.filter_warnings_subprocess` = False, before a collector is made, has them say it.
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


def are_filtered() -> bool:
    """Whether workers that are started now are to drop them."""
    return bool(pycollect.filter_warnings_subprocess)


def have_filtered(wanted: bool) -> None:
    """This process is a worker: drop them from now on, or do not; so do workers of its own."""
    pycollect.filter_warnings_subprocess = wanted
    shown = warnings.showwarning
    if wanted and not isinstance(shown, _Filter):
        warnings.showwarning = _Filter(shown)
    elif not wanted and isinstance(shown, _Filter):
        warnings.showwarning = shown.others


class _Filter:
    """Shows all other warnings. One that a filter of Python's makes an error never comes here.

    Attributes:
        others: shows them.
    """

    def __init__(self, others: Callable[..., None]) -> None:
        self.others = others

    def __call__(self, *arguments: Any, **named: Any) -> None:
        if not _is_of_an_import(sys._getframe(1)):
            self.others(*arguments, **named)


def _is_of_an_import(frame: FrameType | None) -> bool:
    """Whether somebody's package warns while a module is imported."""
    while frame is not None and frame.f_globals.get("__name__") == "warnings":
        frame = frame.f_back
    if frame is None or not _is_installed(Path(frame.f_code.co_filename)):
        return False
    while frame is not None and frame.f_code.co_filename != _IMPORTING:
        frame = frame.f_back
    return frame is not None


def _is_installed(file: Path) -> bool:
    """Whether it is no module of the user's own: one of a package, or of Python itself."""
    return not _INSTALLED.isdisjoint(file.parts) or file.is_relative_to(_STANDARD)
