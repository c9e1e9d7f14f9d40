"""Waiting rules of central inference, from `pycollect.inference.batching`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from pycollect.inference.batching import BatchScheduler, Client, Wait
from pycollect.inference.group import PolicyGroup, ServedPolicy
from pycollect.inference.options import InferenceOptions

ENVS = 4  # per worker
OWING = 5


def table(timing: Any = None, **options: Any) -> BatchScheduler:
    """Return the scheduler of eight workers."""
    policy = ServedPolicy(None, torch.device("cpu"), explicit=False)
    return BatchScheduler(policy, InferenceOptions(**{"central": True, **options}), 8, timing)


def asking(count: int) -> list[Client]:
    """Return this many clients."""
    group = cast(
        PolicyGroup, SimpleNamespace(needs=SimpleNamespace(env=SimpleNamespace(num_envs=ENVS)))
    )
    return [Client(number, 0, 0, number, group) for number in range(count)]


class Advice:
    """A timing that always gives the same advice, and keeps the numbers that it was asked about."""

    def __init__(self, wait: Wait) -> None:
        self.given, self.asked = wait, list[Any]()

    def wait(self, asking: int, others: list[int], most: int | None, now: float) -> Wait:
        self.asked = [asking, others, most]
        return self.given


def test_the_timing_decides_without_a_minimum_size() -> None:
    options = {"min_batch_size": 1, "max_batch_size": 3 * ENVS, "server_timeout": None}
    clients = asking(8)
    timing = Advice(Wait(2, 60.0))
    own = table(timing, **options)
    assert own.lacking([], OWING, clients) == 0
    assert own.lacking(clients[:2], OWING, clients[2:]) == 2
    assert timing.asked == [2, [2, 3, 4, 5, 6, 7], 3]
    assert own.holds_back(2)
    assert own.awaited(2, OWING) == 2
    assert 0 < cast(float, own.max_wait) <= 60
    timing.given = Wait()
    assert not own.holds_back(own.lacking(clients[:2], OWING, clients[2:]))
    assert own.awaited(0, OWING) == 1
    other = asking(1)  # of a group with other needs, which needs a call of its own
    timing.given = Wait(2, 60.0)
    assert own.lacking([clients[0], other[0]], OWING, clients[1:]) == 0


def test_a_timeout_limits_the_wait_that_a_timing_advises() -> None:
    options = {"min_batch_size": 1, "max_batch_size": None, "server_timeout": 0.0}
    own = table(Advice(Wait(2, 60.0)), **options)
    clients = asking(3)
    assert own.lacking(clients[:1], OWING, clients[1:]) == 2
    assert not own.holds_back(2)
