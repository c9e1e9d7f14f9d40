"""Ctrl-C as a request: work stops where it can stop cleanly, not in the middle of a call."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """Takes over SIGINT while it is entered; main thread only.

    The first Ctrl-C sets `requested`, to be looked at between batches. A second one raises
    KeyboardInterrupt where that is allowed: an exception out of a half-started Ray would leave
    processes behind. Once requested, SIGINT stays ignored after the exit, for the program is about
    to end.
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
        """Let a second Ctrl-C raise in here."""
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
