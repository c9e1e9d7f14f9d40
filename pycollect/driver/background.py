"""Collect in a background thread, and share a stream between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

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

        `at_exit`, which must call `end`, is called if the program ends while the thread runs. If
        `is_due` returns false, `step` is not called now, and the thread sleeps until `wake`.
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
