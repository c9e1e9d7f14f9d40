"""Interrupt this process at chosen points of pycollect's code, to find unsafe ones."""

from __future__ import annotations

import dis
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pycollect

Point = tuple[CodeType, int]
"""A function, and the offset of an instruction in it."""

_PACKAGE = str(Path(pycollect.__file__).parent)


class InterruptPoints:
    """Sends SIGINT to this process at a point of pycollect's code.

    Python calls signal handlers at the start of a function, at the end of a loop's pass, and after
    a call, unless it called a Python function directly. These are the points.

    Attributes:
        passed: How often each point was passed while traced.
    """

    def __init__(self) -> None:
        self.passed: Counter[Point] = Counter()
        self._of: dict[CodeType, set[int]] = {}
        self._returned: FrameType | None = None  # to which a function that it called returns
        self._due: Point | None = None
        self._left = 0

    def interrupt(self, point: Point, time: int) -> None:
        """Send one interrupt when this point is passed for that time, counted from 1."""
        self._due, self._left = point, time

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Trace this thread."""
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = frame.f_code.co_filename.startswith(_PACKAGE)
        frame.f_trace_lines = False
        return self._event

    def _event(self, frame: FrameType, event: str, argument: Any) -> Any:
        code, offset = frame.f_code, frame.f_lasti
        if event == "return":
            is_special = code.co_name.startswith("__")  # the interpreter calls it
            self._returned = None if is_special else frame.f_back
        elif event == "opcode":
            after_call, self._returned = self._returned is frame, None
            if not after_call and offset in self._points(code):
                self._pass((code, offset))
        return self._event

    def _pass(self, point: Point) -> None:
        self.passed[point] += 1
        if point == self._due:
            self._left -= 1
            if self._left == 0:
                self._due = None
                signal.raise_signal(signal.SIGINT)

    def _points(self, code: CodeType) -> set[int]:
        if code not in self._of:
            found, before = set(), "RESUME"
            for own in dis.get_instructions(code):
                if before == "RESUME" or before.startswith("CALL") or own.opname == "JUMP_BACKWARD":
                    found.add(own.offset)
                before = own.opname
            self._of[code] = found
        return self._of[code]
