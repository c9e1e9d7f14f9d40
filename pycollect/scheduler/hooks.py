"""Hooks on their way to the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from pycollect.engines.shared_value import SharedValue
from pycollect.scheduler.records import WorkerRecord

_Sent = dict[str, tuple[int, SharedValue]]


class HookSender:
    """Sends hooks to workers, and remembers the newest for those that are to come.

    Args:
        put: of the engine: makes bytes a value for several workers.
    """

    def __init__(self, put: Callable[[bytes], SharedValue]) -> None:
        self._put = put
        self._serial = 0
        self._of_all: _Sent = {}
        self._of_one: dict[int, _Sent] = {}  # what a worker was given alone, by its id

    def send(
        self, name: str, hook: Any, workers: Sequence[WorkerRecord], alone: bool = False
    ) -> None:
        """Give a hook to workers.

        Args:
            alone: to these only; else also to those that are to come.

        Raises:
            TypeError: The hook cannot be pickled.
        """
        try:
            pickled = cloudpickle.dumps(hook)
        except Exception as error:
            raise TypeError(
                f"{name}: cannot be pickled to be sent to the workers: {error}"
            ) from error
        self._serial += 1
        sent = {name: (self._serial, self._put(pickled))}
        if not alone:
            self._of_all.update(sent)
        for worker in workers:
            if alone:
                self._of_one.setdefault(worker.index, {}).update(sent)
            else:
                self._of_one.get(worker.index, {}).pop(name, None)
            if not worker.starting:
                worker.handle.set_hooks(sent)

    def give(self, worker: WorkerRecord) -> None:
        """Give a new worker what the one before it had, or all others have."""
        newest = {**self._of_all, **self._of_one.get(worker.index, {})}
        if newest:
            worker.handle.set_hooks(newest)
