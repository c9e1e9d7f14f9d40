"""The pipe to a worker, as TorchRL's weight updaters know it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

_UPDATED = (None, "updated")


class WorkerPipe:
    """Takes weights for one worker: ``send((weights, "update"))``, which `recv` acknowledges.

    Args:
        give: gives the worker weights, in any form that `update_policy_weights_` takes.
    """

    def __init__(self, give: Callable[[Any], None]) -> None:
        self._give = give
        self._answers: deque[tuple[None, str]] = deque()

    def send(self, message: tuple[Any, str]) -> None:
        """Give the worker weights for its next rollout; ValueError for any other message."""
        if not isinstance(message, tuple) or len(message) != 2 or message[1] != "update":
            raise ValueError(f"message: expected (weights, 'update'), got {message!r}")
        self._give(message[0])
        self._answers.append(_UPDATED)

    def recv(self) -> tuple[None, str]:
        """(None, "updated") for each message; EOFError where nothing was sent."""
        if not self._answers:
            raise EOFError("no message to acknowledge; call send() first")
        return self._answers.popleft()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether there is an answer; none is ever waited for."""
        return bool(self._answers)
