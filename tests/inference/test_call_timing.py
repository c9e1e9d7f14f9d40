"""How long a call of the policy waits for further requests: `pycollect.inference.batching`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycollect.inference.batching import CallTiming, Wait

CLIENTS = 8


def measured(call: Callable[[int], float], steps: Sequence[float]) -> CallTiming:
    """Return the measurements of calls of these durations, and of clients with these steps."""
    timing, now = CallTiming(), 100.0
    for count in range(1, len(steps) + 1):
        for _ in range(3):
            for client in range(count):
                timing.saw(client, now + steps[client])
            now += max(steps)
            timing.called(range(count), now, now + call(count))
            now += call(count)
    return timing


def waits(timing: CallTiming, steps: Sequence[float], asking: int, passed: float) -> Wait:
    """Return the wait of the first clients' requests, that long after all were answered."""
    ended = timing._clients[0].answered
    assert ended is not None
    return timing.wait(asking, range(asking, len(steps)), None, ended + passed)


def test_equal_workers_share_the_calls_of_a_slow_policy() -> None:
    steps = [0.001] * CLIENTS
    timing = measured(lambda count: 0.005, steps)
    for asking in range(1, CLIENTS):
        assert waits(timing, steps, asking, 0.001).requests == CLIENTS - asking
    assert waits(timing, steps, CLIENTS, 0.001) == Wait()


def test_no_call_waits_if_the_policy_is_fast_or_its_time_grows_with_the_batch() -> None:
    steps = [0.001] * CLIENTS
    for call in (lambda count: 1e-5, lambda count: 0.002 * count):
        timing = measured(call, steps)
        assert waits(timing, steps, CLIENTS // 2, 0.0) == Wait()


def test_no_call_waits_for_a_slow_worker() -> None:
    steps = [0.001] * (CLIENTS - 1) + [0.05]
    timing = measured(lambda count: 0.005, steps)
    assert waits(timing, steps, CLIENTS - 1, 0.001) == Wait()
    wait = waits(timing, steps, 3, 0.0)
    assert wait.requests == CLIENTS - 4
    assert wait.seconds == pytest.approx(0.001)


def test_a_worker_that_is_long_overdue_is_not_waited_for() -> None:
    """It may have finished its rollout, or be dead."""
    steps = [0.001] * CLIENTS
    timing = measured(lambda count: 0.005, steps)
    assert waits(timing, steps, 1, 0.0019).requests == CLIENTS - 1
    assert waits(timing, steps, 1, 0.0021) == Wait()


def test_a_pause_of_the_learner_hardly_changes_the_expected_step() -> None:
    steps = [0.001] * CLIENTS
    timing = measured(lambda count: 0.005, steps)
    ended = timing._clients[0].answered
    assert ended is not None
    for client in range(CLIENTS):
        timing.saw(client, ended + 10.0)
    timing.called(range(CLIENTS), ended + 10.0, ended + 10.005)
    assert waits(timing, steps, 1, 0.0).seconds < 0.0015


def test_a_call_has_a_maximum_size() -> None:
    steps = [0.001] * CLIENTS
    timing = measured(lambda count: 0.005, steps)
    ended = timing._clients[0].answered
    assert ended is not None
    assert timing.wait(2, range(2, CLIENTS), 4, ended + 0.001).requests == 2
    assert timing.wait(4, range(4, CLIENTS), 4, ended + 0.001) == Wait()


@given(
    st.lists(st.floats(1e-4, 0.1), min_size=1, max_size=6),
    st.floats(1e-4, 0.1),
    st.floats(0.0, 0.3),
    st.data(),
)
def test_every_wait_ends(
    steps: list[float], call: float, passed: float, data: st.DataObject
) -> None:
    """No request waits longer than twice the longest step after the last answer."""
    timing = measured(lambda count: call, steps)
    asking = data.draw(st.integers(1, len(steps)))
    wait = waits(timing, steps, asking, passed)
    assert 0 <= wait.requests <= len(steps) - asking
    assert wait.seconds >= 0
    if passed > 2.01 * max(steps):
        assert wait == Wait()
