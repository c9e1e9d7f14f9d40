"""SIGINT, which a terminal sends to all that a program has started: also to jobs of this machine.

There submitit's controller would end its job, and print where it was. Whoever pressed Ctrl-C means
the program, which ends its ranks itself, or goes on with them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_OWN = [signal.SIGINT]


@contextmanager
def unheard_by_children() -> Iterator[None]:
    """Processes that are started here, in this thread, have it blocked, and so have theirs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OWN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def heard_again() -> None:
    """In such a process's main thread: it is heard from now on; what came before is forgotten."""
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN)
    signal.signal(signal.SIGINT, usual)
