"""Whoever waits for workers serves them meanwhile: `pycollect.inference.bell`."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pycollect._core import Bell
from pycollect.inference.bell import ServingBell
from pycollect.inference.server import InferenceServer

LONG = 60.0


class Asked:
    """A server whom a worker has asked, and who asked that worker."""

    patience = None

    def __init__(self) -> None:
        self.is_served, self.owing = False, 1

    def refresh(self) -> None:
        """Nothing has changed."""

    def serve(self, owing: int) -> None:
        """Answer the worker."""
        self.is_served = True


class Awake(Bell):
    """A bell on which the driver may sleep only once it has served."""

    def __init__(self, server: Asked) -> None:
        super().__init__()
        self._server = server

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Until the worker that was served has come to its rollout's end."""
        if not self._server.is_served:
            pytest.fail("the driver slept, though a worker had asked and rings no more")
        self._server.owing = 0
        return True


def test_who_asked_before_the_driver_looked_is_served_at_once() -> None:
    server = Asked()
    bell = Awake(server)
    bell.ring()  # by the worker as it asks, before the driver looks for answers
    serving = ServingBell(bell, cast(InferenceServer, cast(Any, server)))
    serving.watch(server)
    serving.wait_ring(serving.count, LONG)
    assert server.is_served
