"""The step loop of a rollout, for one group of environments or two in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pycollect.envs.base import Arrays, BoolArray
from pycollect.worker.report import StepTimer

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


Move = Callable[[], Any]


class Moves(NamedTuple):
    """A step of one group, in parts.

    Attributes:
        ask: begins a call of the policy elsewhere; nothing where it is called here.
        choose: calls the policy, or waits for that call, and gives the environments their actions,
            with which they step from then on where they do so elsewhere.
        finish: makes the step, or waits for its end; records it, and resets what is to be reset.
    """

    ask: Move
    choose: Move
    finish: Move

    @classmethod
    def of(cls, calls: Calls) -> Moves:
        """Those that consist of these calls."""
        act, take, record, done = calls.act, calls.take, calls.record, calls.done
        reset_done, record_reset = calls.reset_done, calls.record_reset
        if calls.whole is not None:
            chosen: list[Any] = []
            whole = calls.whole
            return cls(calls.ask, lambda: chosen.append(act()), lambda: whole(chosen.pop()))
        send, receive = _sending(calls)

        def choose() -> None:
            send(take(act()))

        def finish() -> None:
            if record(receive()):
                record_reset(reset_done(done))

        return cls(calls.ask, choose, finish)


def _sending(calls: Calls) -> tuple[Callable[[Any], Any], Callable[[], Sequence[Any]]]:
    """How a step is begun and ended; all of it is done at its end where the envs step here."""
    if calls.overlapped is not None:
        return calls.overlapped
    given: list[Any] = []
    step = calls.step
    return given.append, lambda: step(given.pop())


class Order(NamedTuple):
    """In which order two groups move.

    Attributes:
        first: until each group has a step on the way.
        turn: one step of each; then each has the next one on the way.
        last: these are ended.
    """

    first: Sequence[Move]
    turn: Sequence[Move]
    last: Sequence[Move]

    @classmethod
    def of(cls, groups: Sequence[Moves], envs_elsewhere: bool, remote_policy: bool) -> Order:
        """Whatever is elsewhere is begun as early as it can be."""
        a, b = groups
        if not envs_elsewhere:  # the policy is called for one while the other steps here
            return cls(
                [a.ask, b.ask],
                [a.choose, a.finish, a.ask, b.choose, b.finish, b.ask],
                [a.choose, a.finish, b.choose, b.finish],
            )
        if not remote_policy:  # one steps while the policy is called for the other here
            return cls(
                [a.choose, b.choose],
                [a.finish, a.choose, b.finish, b.choose],
                [a.finish, b.finish],
            )
        return cls(
            [a.ask, b.ask, a.choose],
            [b.choose, a.finish, a.ask, a.choose, b.finish, b.ask],
            [b.choose, a.finish, b.finish],
        )


def roll_in_turns(
    order: Order, timed: Order, timer: StepTimer, steps: int, ends: Callable[[], bool]
) -> None:
    """Make so many steps of each group, or fewer where the rollout is stopped.

    Args:
        timed: the same moves, which count their time.
        ends: whether the steps that are on the way are to be the last ones.
    """
    _move(order.first)
    _make_turns(order.turn, timed.turn, timer, steps - 1, ends)
    _move(order.last)


def _make_turns(
    turn: Sequence[Move],
    timed: Sequence[Move],
    timer: StepTimer,
    turns: int,
    ends: Callable[[], bool],
) -> None:
    for plain, then_timed in timer.stretches(turns):
        for _ in range(plain):
            if ends():
                return
            for move in turn:
                move()
        if then_timed:
            if ends():
                return
            _move(timed)


def _move(moves: Sequence[Move]) -> None:
    for move in moves:
        move()


def timed_calls(calls: Calls, timer: StepTimer) -> Calls:
    """The same calls, which add the time that they take to the timer's."""

    def of_env(call: Callable[..., Any]) -> Callable[..., Any]:
        return _adding(timer, "env", call)

    overlapped = calls.overlapped
    return calls._replace(
        act=_adding(timer, "policy", calls.act),
        step=of_env(calls.step),
        record=_adding(timer, "record", calls.record),
        reset_done=of_env(calls.reset_done),
        whole=None,
        overlapped=None if overlapped is None else (of_env(overlapped[0]), of_env(overlapped[1])),
    )


def _adding(timer: StepTimer, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    clock = time.perf_counter

    def timed(*arguments: Any) -> Any:
        begin = clock()
        result = call(*arguments)
        setattr(timer, name, getattr(timer, name) + clock() - begin)
        return result

    return timed
