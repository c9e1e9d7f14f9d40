"""Warnings that point at the line of the user's that led to them."""

from __future__ import annotations

import sys
import warnings


def warn_user(message: str) -> None:
    """A UserWarning at the innermost line outside of this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]
