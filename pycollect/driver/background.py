"""Collect in a background thread, and share a stream between threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

from pycollect.errors import without_frames

_ends: dict[threading.Thread, Callable[[], None]] = {}


def end_all() -> None:
    """End all background threads at program exit."""
    for end in list(_ends.values()):
        end()


class Background:
    """Calls a function repeatedly in a background thread until the function returns False.

    An exception of the function ends the thread. It is shown by ``threading.excepthook`` and kept
    for `check`. The function is referenced only while it runs, so it may be a method of the owner.
    Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()  # held while the thread is started or stopped
        self._stopping = threading.Event()  # stops the current thread only
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self._over = False
        self._error: BaseException | None = None

    @property
    def running(self) -> bool:
        """Whether the background thread is running."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the background thread."""
        return self._thread is threading.current_thread()

    def wake(self) -> None:
        """Check again whether the function may be called."""
        self._woken.set()

    def start(
        self,
        step: Callable[[], bool],
        at_exit: Callable[[], None],
        is_due: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the thread; do nothing if it is running, or after `end`.

        Args:
            step: Function to call until it returns False.
            at_exit: Called if the program ends while the thread runs. It must call `end`.
            is_due: Returns whether `step` may be called now. If not, the thread sleeps until
                `wake`.
        """
        if self.is_current:
            return
        with self._changing:
            if not self.running and not self._over:
                self._stopping = threading.Event()
                self._thread = threading.Thread(
                    target=self._run,
                    args=(step, is_due, self._stopping),
                    name="pycollect",
                    daemon=True,
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
            self._woken.set()
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
        """Stop as `stop` does, and prevent any later start."""
        self._over = True
        self.stop()

    def check(self) -> None:
        """Raise the exception of the function, once."""
        error, self._error = self._error, None
        if error is not None:
            raise without_frames(error)

    def _run(
        self, step: Callable[[], bool], is_due: Callable[[], bool], stopping: threading.Event
    ) -> None:
        try:
            while True:
                self._woken.clear()  # before it looks: a later `wake` is not missed
                if stopping.is_set():
                    return
                if not is_due():
                    self._woken.wait()
                elif not step():
                    return
        except BaseException as error:  # threading ignores a SystemExit
            self._error = without_frames(error)
            raise
        finally:
            del _ends[threading.current_thread()]


_ending: int | None = None  # id of the thread that ends the program
_suspended: set[int] = set()  # ids of other threads, which then sleep forever
_locks: WeakSet[FairLock] = WeakSet()


def keep_others_out() -> None:
    """Suspend every thread except the calling one when it next enters or leaves a lock."""
    global _ending
    _ending = threading.get_ident()


def await_others(timeout: float) -> None:
    """Wait until other threads with a lock have left it or are suspended, for `timeout` seconds.

    A thread that runs code of torch while the interpreter ends would abort the process.
    """
    deadline = time.monotonic() + timeout
    for lock in [lock for lock in _locks if lock.is_own_process]:
        lock.wait_free(max(deadline - time.monotonic(), 0.0))


def _sleep_if_ending() -> None:
    me = threading.get_ident()
    if _ending is None or _ending == me:
        return
    _suspended.add(me)
    for lock in list(_locks):
        lock.wake_if_owned()
    threading.Event().wait()


class FairLock:
    """A reentrant lock that serves threads in the order of their arrival.

    With ``threading.RLock``, a thread that releases and reacquires the lock starves the others. Use
    it in a ``with`` statement, in the process that created it.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._queue: list[int] = []  # tickets; the first one holds the lock
        self._tickets = 0
        self._owner: int | None = None
        self._depth = 0
        _locks.add(self)

    @property
    def is_own_process(self) -> bool:
        """Whether this process created the lock, and is not a fork of that process."""
        return os.getpid() == self._process

    def check_own_process(self) -> None:
        """Raise RuntimeError in a fork of the process that created the lock."""
        if not self.is_own_process:
            raise RuntimeError(
                f"the collector belongs to process {self._process}, and this process is a fork of "
                "it; create a new collector in this process"
            )

    def __enter__(self) -> None:
        self.check_own_process()
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        with self._changed:
            ticket = self._tickets
            self._tickets += 1
            self._queue.append(ticket)
            try:
                while self._queue[0] != ticket:
                    self._changed.wait()
            except BaseException:  # interrupted: the next thread must not wait for this ticket
                self._queue.remove(ticket)
                self._changed.notify_all()
                raise
            self._owner, self._depth = me, 1
        if _ending is not None and _ending != me:
            self.__exit__(None)

    def enter_if_free(self) -> bool:
        """Enter if no thread holds the lock or waits for it; return whether it was entered."""
        self.check_own_process()
        with self._changed:
            if self._queue:
                return False
            self._queue.append(self._tickets)
            self._tickets += 1
            self._owner, self._depth = threading.get_ident(), 1
            return True

    def __exit__(self, raised: object, *_: object) -> None:
        if raised is None:
            self.check_own_process()  # a policy or hook may have forked and returned in the child
        self._depth -= 1
        if self._depth:
            return
        with self._changed:
            self._owner = None
            self._queue.pop(0)
            self._changed.notify_all()
        _sleep_if_ending()

    @property
    def is_busy(self) -> bool:
        """Whether a thread holds the lock."""
        return self._owner is not None

    def wait_free(self, timeout: float) -> None:
        """Wait until the lock is free, or its owner is suspended or ends the program."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._queue or self._owner in {*_suspended, _ending}, timeout
            )

    def wake_if_owned(self) -> None:
        """Let `wait_free` look again if the calling thread holds the lock."""
        if self._owner == threading.get_ident():
            with self._changed:
                self._changed.notify_all()
