"""The steps of a rollout: act, step, record, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pycollect.envs.base import Arrays, BoolArray
from pycollect.worker.step_timer import StepTimer

STOPPED = -1
"""What the recorder says of a last step after which no environment is reset."""


def _nothing() -> None:
    """The policy is called here."""


class Calls(NamedTuple):
    """What a step consists of.

    Attributes:
        act: calls the policy on the current observation.
        take: keeps what it returned, and gives the environments' part of it.
        step: steps the environments.
        record: writes their result; says how many are to be reset.
        done: which.
        reset_done: resets them.
        record_reset: writes what they show then.
        whole: all of that but `act` at once, given what it returned, where the environments can be
            stepped so; says what `record` does.
        ask: begins the call that `act` waits for, where the policy is called elsewhere.
        overlapped: `step` in two parts, where the environments step elsewhere: begun, awaited.
    """

    act: Callable[[], tuple[Any, ...]]
    take: Callable[[tuple[Any, ...]], Arrays]
    step: Callable[[Arrays], Sequence[Any]]
    record: Callable[..., int]
    done: BoolArray
    reset_done: Callable[..., Arrays]
    record_reset: Callable[..., None]
    whole: Callable[[tuple[Any, ...]], int] | None = None
    ask: Callable[[], None] = _nothing
    overlapped: tuple[Callable[[Arrays], None], Callable[[], Sequence[Any]]] | None = None


def roll(calls: Calls, timer: StepTimer, steps: int) -> None:
    """Make so many steps, or fewer where the rollout is stopped."""
    act, take, step, record, done, reset_done, record_reset, whole, *_ = calls
    for plain, then_timed in timer.stretches(steps):
        if whole is not None:
            for _ in range(plain):
                if whole(act()) < 0:
                    return
        else:
            for _ in range(plain):
                resets = record(step(take(act())))
                if resets:
                    if resets != STOPPED:
                        record_reset(reset_done(done))
                    if resets < 0:
                        return
        if then_timed and _timed_step(calls, timer) < 0:
            return


def _timed_step(calls: Calls, timer: StepTimer) -> int:
    """One step as all others, with a look at the clock between its parts."""
    clock = time.perf_counter
    start = clock()
    values = calls.act()
    chosen = clock()
    result = calls.step(calls.take(values))
    stepped = clock()
    resets = calls.record(result)
    end = recorded = clock()
    if resets and resets != STOPPED:
        observation = calls.reset_done(calls.done)
        end = clock()
        calls.record_reset(observation)
    timer.policy += chosen - start
    timer.env += stepped - chosen + end - recorded
    timer.record += recorded - stepped
    return resets
