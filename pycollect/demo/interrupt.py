"""Ctrl-C as a request: stop at the next clean point, not in the middle of a call."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """Handles SIGINT within a `with` block, in the main thread.

    The first Ctrl-C sets `requested`, which is checked between batches. A second one raises
    KeyboardInterrupt, but only if that is safe: an exception in a half-started Ray would leave
    processes behind. After a request, SIGINT stays ignored after the exit, because the program is
    about to end.
    """

    def __init__(self) -> None:
        self.requested = False
        self._may_raise = False

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._may_raise = False
        signal.signal(signal.SIGINT, signal.SIG_IGN if self.requested else self._previous)

    @contextmanager
    def insistence(self) -> Iterator[None]:
        """Let a second Ctrl-C raise KeyboardInterrupt within."""
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    def _note(self, *_: Any) -> None:
        if self.requested and self._may_raise:
            raise KeyboardInterrupt
        if not self.requested:
            print("\nstopping when this step is complete ...", file=sys.stderr, flush=True)
        self.requested = True
