"""A thread that moves a stream on by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
