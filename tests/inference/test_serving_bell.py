"""The driver serves requests while it waits for workers: its ServingBell."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from pycollect._core import Bell
from pycollect.inference.server import InferenceServer, ServingBell

LONG = 60.0
AWAITED = 2


class Served:
    """A server that runs a callback, as its workers would, on each look for requests."""

    max_wait, pending = None, 0

    def __init__(self, *then: Callable[[], None]) -> None:
        self.looks, self._then = 0, then

    def refresh(self) -> None:
        """Do nothing: no weights have changed."""

    def serve(self, pending: int) -> int:
        """Look for requests; return that two more are needed."""
        self.looks += 1
        if self.looks <= len(self._then):
            self._then[self.looks - 1]()
        return AWAITED


class Awake(Bell):
    """A bell that fails if the driver sleeps although a knock was not yet handled."""

    def wait_knock(self, heard: int, seconds: float, number: int = 1) -> bool:
        """Return at once, or fail."""
        assert number == AWAITED
        if self.knocks < heard + number:
            pytest.fail("the driver slept, though somebody had knocked or rung")
        return True


def serving(bell: Bell, server: Served) -> ServingBell:
    """Return this bell, served by this server."""
    return ServingBell(bell, cast(InferenceServer, cast(Any, server)))


def all_knock(bell: Bell) -> Callable[[], None]:
    """Return a callback that makes all awaited workers knock."""
    return partial(bell.knock, AWAITED)


def test_a_worker_that_knocked_before_the_wait_is_served_at_once() -> None:
    bell = Awake()
    server = Served(bell.ring)  # once served, the worker finishes its rollout
    bell.knock()
    own = serving(bell, server)
    assert own.wait_ring(own.count, LONG)
    assert server.looks == 1


def test_an_answer_at_any_moment_ends_the_wait() -> None:
    bell = Awake()
    own = serving(bell, server := Served())
    seen = own.count
    bell.ring()  # after the driver has looked for answers, before it waits
    assert own.wait_ring(seen, LONG)
    own = serving(bell, server := Served(all_knock(bell), all_knock(bell), bell.ring))
    assert own.wait_ring(own.count, LONG)
    assert server.looks == 3


def test_a_knock_does_not_end_the_wait() -> None:
    bell = Bell()
    own = serving(bell, server := Served(all_knock(bell), all_knock(bell)))
    assert not own.wait_ring(own.count, 0.05)
    assert server.looks >= 3


def test_too_few_knocks_do_not_wake_the_driver() -> None:
    bell = Bell()
    own = serving(bell, server := Served(bell.knock))
    assert not own.wait_ring(own.count, 0.05)
    assert server.looks == 2  # before its sleep, and after its timeout
