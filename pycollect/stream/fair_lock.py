"""The lock of a stream, which a thread that moves it on shares with callers."""

from __future__ import annotations

import threading


class FairLock:
    """Reentrant. Unlike ``threading.RLock`` it lets nobody starve behind a thread that comes again.

    To be used in a ``with`` statement.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: list[int] = []  # tickets; whose is the first is in
        self._tickets = 0
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
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

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        with self._changed:
            self._owner = None
            self._line.pop(0)
            self._changed.notify_all()
