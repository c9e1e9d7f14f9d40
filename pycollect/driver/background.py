"""Collect in a background thread, share the stream between threads, and end with the program."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from pycollect.errors import without_frames

_ends: dict[threading.Thread, Callable[[], None]] = {}


def end_all() -> None:
    """End the threads that still run when the program ends."""
    for end in list(_ends.values()):
        end()


class Background:
    """Calls a function again and again in a thread of its own, until it returns False.

    What the function raises ends the thread; it is shown by ``threading.excepthook``, and kept for
    `check`. The function is held only while it runs: it may be its owner's method. Any thread may
    call the methods.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()  # held by whoever starts or stops the thread
        self._stopping = threading.Event()  # of the present thread alone
        self._thread: threading.Thread | None = None
        self._over = False
        self._error: BaseException | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the thread."""
        return self._thread is threading.current_thread()

    def start(self, step: Callable[[], bool], at_exit: Callable[[], None]) -> None:
        """Go on with that function. Nothing happens if it runs already, or after `end`.

        Args:
            at_exit: called where the program ends while it runs; it is to call `end`.
        """
        if self.is_current:
            return
        with self._changing:
            if not self.running and not self._over:
                self._stopping = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(step, self._stopping), name="pycollect", daemon=True
                )
                _ends[self._thread] = at_exit
                self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Wait for the running call, and make no more calls; return whether one was running.

        Raises:
            TimeoutError: The call takes longer than `timeout` seconds. The background continues.
        """
        if self.is_current:
            return False
        with self._changing:
            was_running = self.running
            self._stopping.set()
            if self._thread is not None:
                self._thread.join(timeout)
                if self._thread.is_alive():
                    self._stopping.clear()
                    raise TimeoutError(
                        f"pause: the batch in progress took longer than {timeout} s; the collector "
                        "was not paused, so call pause() again"
                    )
            self._thread = None
            return was_running

    def end(self) -> None:
        """As `stop`; it is never started again."""
        self._over = True
        self.stop()

    def check(self) -> None:
        """Raise the exception of the function, once."""
        error, self._error = self._error, None
        if error is not None:
            raise without_frames(error)

    def _run(self, step: Callable[[], bool], stopping: threading.Event) -> None:
        try:
            while not stopping.is_set() and step():
                pass
        except BaseException as error:  # threading ignores a SystemExit
            self._error = without_frames(error)
            raise
        finally:
            del _ends[threading.current_thread()]


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
