"""Interrupt this process at chosen points of pycollect's code, to find what is not safe."""

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

    Python calls signal handlers at the start of a function, after a call and at the end of a
    loop's pass, so these are the points.

    Attributes:
        passed: How often each point was passed while traced.
    """

    def __init__(self) -> None:
        self.passed: Counter[Point] = Counter()
        self._of: dict[CodeType, set[int]] = {}
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
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, argument: Any) -> Any:
        point = frame.f_code, frame.f_lasti
        if event == "opcode" and point[1] in self._points(point[0]):
            self.passed[point] += 1
            if point == self._due:
                self._left -= 1
                if self._left == 0:
                    self._due = None
                    signal.raise_signal(signal.SIGINT)
        return self._instruction

    def _points(self, code: CodeType) -> set[int]:
        if code not in self._of:
            found, before = set(), "RESUME"
            for own in dis.get_instructions(code):
                if before == "RESUME" or before.startswith("CALL") or own.opname == "JUMP_BACKWARD":
                    found.add(own.offset)
                before = own.opname
            self._of[code] = found
        return self._of[code]
