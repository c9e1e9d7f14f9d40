"""Hooks on their way to the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from pycollect.engines.shared_value import SharedValue
from pycollect.scheduler.workers import Member

_Sent = dict[str, tuple[int, SharedValue]]


class HookSender:
    """Sends hooks to workers, and remembers the newest for those that are to come.

    Args:
        put: of the engine: makes bytes a value for several workers.
    """

    def __init__(self, put: Callable[[bytes], SharedValue]) -> None:
        self._put = put
        self._edition = 0
        self._of_all: _Sent = {}
        self._of_one: dict[int, _Sent] = {}  # what a worker was given alone, by its id

    def send(self, name: str, hook: Any, members: Sequence[Member], alone: bool = False) -> None:
        """Give a hook to workers.

        Args:
            alone: to these only; else also to those that are to come.

        Raises:
            TypeError: it does not pickle.
        """
        try:
            pickled = cloudpickle.dumps(hook)
        except Exception as error:
            raise TypeError(
                f"{name}: expected a function that pickles, as it goes to the workers: {error}"
            ) from error
        self._edition += 1
        sent = {name: (self._edition, self._put(pickled))}
        if not alone:
            self._of_all.update(sent)
        for member in members:
            if alone:
                self._of_one.setdefault(member.index, {}).update(sent)
            else:
                self._of_one.get(member.index, {}).pop(name, None)
            if not member.starting:
                member.handle.set_hooks(sent)

    def give(self, member: Member) -> None:
        """Give a new worker what the one before it had, or all others have."""
        newest = {**self._of_all, **self._of_one.get(member.index, {})}
        if newest:
            member.handle.set_hooks(newest)
