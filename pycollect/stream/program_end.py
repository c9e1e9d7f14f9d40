"""The end of a program while threads of it collect: they stop before the interpreter is taken down.

A daemon thread that comes back from the core into an interpreter that is being taken down aborts
the program.
"""

from __future__ import annotations

import atexit
import time
from typing import Protocol
from weakref import WeakSet

from pycollect.stream.background import end_all
from pycollect.stream.fair_lock import FairLock, keep_others_out

_PATIENCE = 5.0  # seconds; an environment may hang in a step


class Moved(Protocol):
    """A stream that threads move on."""

    moving: FairLock

    def close(self) -> None:
        """Have a thread that moves it on stop at the next step."""

    def __hash__(self) -> int: ...


_streams: WeakSet[Moved] = WeakSet()


def stop_at_exit(stream: Moved) -> None:
    """Stop threads that collect from this stream when the program ends.

    The exit handler is registered anew for each stream, so that it runs before Ray's.
    """
    _streams.add(stream)
    atexit.unregister(_stop)
    atexit.register(_stop)


def _stop() -> None:
    streams = [stream for stream in _streams if stream.moving.is_here]
    if not streams:  # a fork
        return
    end_all()
    keep_others_out()
    busy = [stream for stream in streams if stream.moving.is_busy]
    for stream in busy:
        stream.close()
    deadline = time.monotonic() + _PATIENCE
    for stream in busy:
        stream.moving.wait_free(max(deadline - time.monotonic(), 0.0))
