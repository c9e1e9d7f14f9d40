"""A thread that moves a stream on by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Calls a function again and again in a thread of its own, until it returns False.

    What the function raises ends the thread; it is shown by ``threading.excepthook``. The function
    is held only while it runs: it may be its owner's method.
    """

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, step: Callable[[], bool]) -> None:
        """Go on with that function. Nothing happens if it runs already."""
        if not self.running:
            self._stopping.clear()
            self._thread = threading.Thread(
                target=self._run, args=(step,), name="pycollect", daemon=True
            )
            self._thread.start()

    def stop(self) -> bool:
        """Wait for the call that runs, and make no more. Whether it was running."""
        if self._thread is None or self._thread is threading.current_thread():
            return False
        was_running = self.running
        self._stopping.set()
        self._thread.join()
        self._thread = None
        return was_running

    def _run(self, step: Callable[[], bool]) -> None:
        while not self._stopping.is_set() and step():
            pass
