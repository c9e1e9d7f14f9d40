"""start() and pause(): a replay buffer that fills by itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    STACK,
    Way,
    collecting,
    marked,
    parity_policy,
    wait_until,
)
from envs_for_tests import CountingEnv, EnvBrokeError, RaisingEnv
from test_ledger import check

from pycollect import SyncDataCollector
from pycollect.collectors.turnstile import Turnstile

T = 5


class Buffer(list[Any]):
    """Keeps batches whole."""

    def extend(self, td: Any) -> None:
        self.append(td)


WAYS = marked(IN_PROCESS, STACK, ASYNC[2], MULTI_STACK, MULTI_ASYNC[2])


@pytest.mark.parametrize("way", WAYS)
def test_it_fills_until_it_is_paused(way: Way) -> None:
    taken = Buffer()
    with collecting(
        way, lambda w: CountingEnv, parity_policy(), frames=T, replay_buffer=taken
    ) as collector:
        collector.start()
        collector.start()
        wait_until(lambda: len(taken) >= 3)
        with collector.pause():
            size = len(taken)
            state = collector.state_dict()
            assert state["batches"] == size == collector.stats()["batches"]
        wait_until(lambda: len(taken) > size)
        collector.set_seed(3)  # while it runs
        collector.update_policy_weights_()
        check(collector.ledger())
        collector.pause()
        size = len(taken)
        assert collector.next() is None
        assert len(taken) == size + 1
        collector.start()
        wait_until(lambda: len(taken) > size + 1)
    assert not [t for t in threading.enumerate() if t.name == "pycollect"]
    assert sum(td.numel() for td in taken) == collector.stats()["frames"]


def test_it_ends_with_the_frames() -> None:
    taken = Buffer()
    collector = SyncDataCollector(
        CountingEnv, None, frames_per_batch=T, total_frames=4 * T, replay_buffer=taken
    )
    collector.start()
    wait_until(lambda: len(taken) == 4)
    collector.pause()
    assert list(collector) == []
    collector.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_goes_wrong_there_is_raised_here() -> None:
    taken = Buffer()
    collector = SyncDataCollector(
        lambda: RaisingEnv(at=3 * T), None, frames_per_batch=T, replay_buffer=taken
    )
    collector.start()
    wait_until(lambda: not collector._background.running)
    with pytest.raises(EnvBrokeError):
        collector.next()
    with pytest.raises(EnvBrokeError):
        collector.start()
    assert len(taken) == 2
    collector.shutdown()


def test_it_needs_a_buffer() -> None:
    collector = SyncDataCollector(CountingEnv, None, frames_per_batch=T)
    with pytest.raises(RuntimeError, match="replay_buffer"):
        collector.start()
    with collector.pause():
        pass
    collector.shutdown()


def test_two_threads_share_one_stream() -> None:
    collector = SyncDataCollector(CountingEnv, None, frames_per_batch=T, total_frames=40 * T)
    batches: list[Any] = []
    threads = [threading.Thread(target=lambda: batches.extend(collector)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(batches) == 40
    assert check(collector.ledger())["delivered"] == 40 * T
    collector.shutdown()


def test_the_turnstile_lets_threads_in_as_they_came() -> None:
    turnstile, order = Turnstile(), []

    def enter(name: int) -> None:
        with turnstile, turnstile:
            order.append(name)

    threads = [threading.Thread(target=enter, args=(name,)) for name in range(5)]
    with turnstile:
        for place, thread in enumerate(threads):
            thread.start()
            wait_until(lambda place=place: len(turnstile._line) == place + 2)
    for thread in threads:
        thread.join()
    assert order == list(range(5))
