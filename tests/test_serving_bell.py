"""Whoever waits for workers serves them meanwhile: `pycollect.inference.bell`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from pycollect._core import Bell
from pycollect.inference.bell import ServingBell
from pycollect.inference.server import InferenceServer

LONG = 60.0


class Served:
    """A server whose workers do something each time that it has looked."""

    patience = None

    def __init__(self, *then: Callable[[], None]) -> None:
        self.looks, self._then = 0, then

    def refresh(self) -> None:
        """Nothing has changed."""

    def serve(self, owing: int) -> None:
        """Look."""
        self.looks += 1
        if self.looks <= len(self._then):
            self._then[self.looks - 1]()


class Awake(Bell):
    """A bell on which nobody sleeps who has not looked since it was heard last."""

    def wait_knock(self, heard: int, seconds: float) -> bool:
        """At once, or not at all."""
        if self.knocks == heard:
            pytest.fail("the driver slept, though somebody had knocked or rung")
        return True


def serving(bell: Bell, server: Served) -> ServingBell:
    """That bell, served by that server."""
    return ServingBell(bell, cast(InferenceServer, cast(Any, server)))


def test_who_knocked_before_the_driver_looked_is_served_at_once() -> None:
    bell = Awake()
    server = Served(bell.ring)  # the worker comes to its rollout's end once it is served
    bell.knock()
    own = serving(bell, server)
    assert own.wait_ring(own.count, LONG)
    assert server.looks == 1


def test_an_answer_ends_the_wait_whenever_it_comes() -> None:
    bell = Awake()
    own = serving(bell, server := Served())
    seen = own.count
    bell.ring()  # after the driver has looked for answers, before it waits
    assert own.wait_ring(seen, LONG)
    own = serving(bell, server := Served(bell.knock, bell.knock, bell.ring))
    assert own.wait_ring(own.count, LONG)
    assert server.looks == 3


def test_who_knocks_does_not_end_the_wait() -> None:
    bell = Bell()
    own = serving(bell, server := Served(bell.knock, bell.knock))
    assert not own.wait_ring(own.count, 0.05)
    assert server.looks >= 3
