"""The lock of a stream, which a thread that moves it on shares with callers."""

from __future__ import annotations

import os
import threading

_ending: int | None = None  # the thread that ends the program


def keep_others_out() -> None:
    """Have all threads but the calling one sleep, from now on, when they enter or leave a lock."""
    global _ending
    _ending = threading.get_ident()


def _sleep_if_ending() -> None:
    if _ending is not None and _ending != threading.get_ident():
        threading.Event().wait()


class FairLock:
    """Reentrant. Unlike ``threading.RLock`` it lets nobody starve behind a thread that comes again.

    To be used in a ``with`` statement, by threads of the process that made it.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._line: list[int] = []  # tickets; whose is the first is in
        self._tickets = 0
        self._owner: int | None = None
        self._depth = 0

    @property
    def is_here(self) -> bool:
        """Whether this process made it, and is no fork of that process."""
        return os.getpid() == self._process

    def check_here(self) -> None:
        """Raise RuntimeError in a fork of the process that made the lock."""
        if not self.is_here:
            raise RuntimeError(
                f"the collector belongs to process {self._process}, and this process is a fork of "
                "it; create a new collector in this process"
            )

    def __enter__(self) -> None:
        self.check_here()
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        with self._changed:
            ticket = self._tickets
            self._tickets += 1
            self._line.append(ticket)
            try:
                while self._line[0] != ticket:
                    self._changed.wait()
            except BaseException:  # an interrupt: whoever is next must not wait for us
                self._line.remove(ticket)
                self._changed.notify_all()
                raise
            self._owner, self._depth = me, 1
        if _ending is not None and _ending != me:
            self.__exit__(None)

    def __exit__(self, raised: object, *_: object) -> None:
        if raised is None:
            self.check_here()  # a policy or a hook may have forked, and returned in the child
        self._depth -= 1
        if self._depth:
            return
        with self._changed:
            self._owner = None
            self._line.pop(0)
            self._changed.notify_all()
        _sleep_if_ending()

    @property
    def is_busy(self) -> bool:
        """Whether a thread holds the lock."""
        return self._owner is not None

    def wait_free(self, timeout: float) -> bool:
        """Wait until no thread holds the lock or waits for it; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._line, timeout)
