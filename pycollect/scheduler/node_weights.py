"""Weights on their way to who calls the policy on other nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from pycollect.batch.weights import Weights
from pycollect.errors import WorkerDied
from pycollect.scheduler.records import WorkerRecord
from pycollect.scheduler.weight_sender import WeightSender

Newest = Callable[[], "tuple[Weights, int] | None"]
"""The weights that a server is to have when it begins, and their version; None: its own."""


class NodeWeights:
    """Sends weights to servers, packed once for all of them. Any thread may do so."""

    def __init__(self, sender: WeightSender, newest: Newest) -> None:
        self._sender, self._newest = sender, newest
        self._sending = threading.Lock()

    @property
    def given(self) -> Weights:
        """Those that were sent last; none before the first time."""
        return self._sender.newest

    def give(
        self, servers: Sequence[WorkerRecord], weights: Weights, version: int, wait: bool
    ) -> None:
        """Give servers weights; with `wait` those that live have them then."""
        with self._sending:
            sent = self._sender.send(weights, servers, version, wait)
        for server, call in sent if wait else ():
            with suppress(WorkerDied):
                server.handle.answer(call)

    def begin(self, server: WorkerRecord) -> None:
        """Give a server that has just been built the newest, if there are any."""
        newest = self._newest()
        if newest is not None:
            self.give([server], *newest, wait=False)
