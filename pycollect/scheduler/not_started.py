"""Stands for the process of a replacement that could not be started yet."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn


class NotStarted:
    """A StartingWorker without a process: it never answers and never dies.

    The worker group replaces it when it waits for the worker.
    """

    native: ClassVar[Any] = None
    cpu_delay: ClassVar[float] = 0.0
    has_answer: ClassVar[bool] = False
    is_dead: ClassVar[bool] = False
    is_closing: ClassVar[bool] = False

    def built(self) -> NoReturn:
        """Raise AssertionError, because no process was started."""
        raise AssertionError("built: expected a worker that was started")

    def last_words(self) -> str:
        """Return no log lines."""
        return ""

    def ask_close(self) -> bool:
        """Return False: there is nothing to close."""
        return False

    def kill(self) -> None:
        """Do nothing."""
