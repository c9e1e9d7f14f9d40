"""The step loop of a rollout, for one group of environments or two alternating groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pycollect.envs.base import Arrays, BoolArray
from pycollect.worker.report import StepTimer

STOPPED = -1
"""The recorder's result for the last step if no environment has to be reset."""


class Calls(NamedTuple):
    """The functions of a step.

    Attributes:
        act: Calls the policy on the current observation.
        take: Keeps the policy's outputs, and returns the environments' part of them.
        step: Steps the environments.
        record: Writes the result of `step`; returns how many environments have to be reset. In the
            last step of a rollout, returns ``STOPPED`` minus this number.
        done: Flags of the environments that have to be reset.
        reset_done: Resets these environments.
        record_reset: Writes their first observations.
        whole: Does all except `act` at once, for environments that support it. Takes the outputs of
            `act`, and returns the result of `record`.
        request: Starts the call of a remote policy for which `act` waits.
        overlapped: `step` in two parts, start and wait, for environments that step in other threads
            or processes.
    """

    act: Callable[[], tuple[Any, ...]]
    take: Callable[[tuple[Any, ...]], Arrays]
    step: Callable[[Arrays], Sequence[Any]]
    record: Callable[..., int]
    done: BoolArray
    reset_done: Callable[..., Arrays]
    record_reset: Callable[..., None]
    whole: Callable[[tuple[Any, ...]], int] | None = None
    request: Callable[[], None] = lambda: None  # a policy in this process needs no request
    overlapped: tuple[Callable[[Arrays], None], Callable[[], Sequence[Any]]] | None = None


def roll(calls: Calls, timer: StepTimer, steps: int) -> None:
    """Make a number of steps, or fewer if the rollout is stopped."""
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
    """Make one step, and add the time of its parts to the timer."""
    clock = time.perf_counter
    start = clock()
    values = calls.act()
    acted = clock()
    result = calls.step(calls.take(values))
    stepped = clock()
    resets = calls.record(result)
    end = recorded = clock()
    if resets and resets != STOPPED:
        observation = calls.reset_done(calls.done)
        end = clock()
        calls.record_reset(observation)
    timer.policy += acted - start
    timer.env += stepped - acted + end - recorded
    timer.record += recorded - stepped
    return resets


Phase = Callable[[], Any]


class StepPhases(NamedTuple):
    """The phases of one group's step.

    Attributes:
        request: Starts the call of a remote policy; does nothing for other policies.
        choose: Calls the policy, or waits for the remote call, and passes the actions to the
            environments. Those in other threads or processes then start to step.
        finish: Makes the step or waits for its end, records it, and resets ended environments.
    """

    request: Phase
    choose: Phase
    finish: Phase

    @classmethod
    def of(cls, calls: Calls) -> StepPhases:
        """Return the phases that consist of these calls."""
        act, take, record, done = calls.act, calls.take, calls.record, calls.done
        reset_done, record_reset = calls.reset_done, calls.record_reset
        if calls.whole is not None:
            outputs: list[Any] = []
            whole = calls.whole
            return cls(calls.request, lambda: outputs.append(act()), lambda: whole(outputs.pop()))
        send, receive = _split_step(calls)

        def choose() -> None:
            send(take(act()))

        def finish() -> None:
            if record(receive()):
                record_reset(reset_done(done))

        return cls(calls.request, choose, finish)


def _split_step(calls: Calls) -> tuple[Callable[[Any], Any], Callable[[], Sequence[Any]]]:
    """Return functions that start a step and wait for it.

    If the environments step in this thread, the second function makes the whole step.
    """
    if calls.overlapped is not None:
        return calls.overlapped
    actions: list[Any] = []
    step = calls.step
    return actions.append, lambda: step(actions.pop())


class PhaseSchedule(NamedTuple):
    """The order of the phases of two alternating groups."""

    first: Sequence[Phase]  # phases until each group has started its first step
    repeat: Sequence[Phase]  # phases that finish one step of each group and start the next
    last: Sequence[Phase]  # phases that finish the started steps

    @classmethod
    def of(
        cls, groups: Sequence[StepPhases], remote_envs: bool, remote_policy: bool
    ) -> PhaseSchedule:
        """Return the schedule that starts remote environments and policies the earliest."""
        a, b = groups
        if not remote_envs:  # the policy is called for one group while the other steps here
            return cls(
                [a.request, b.request],
                [a.choose, a.finish, a.request, b.choose, b.finish, b.request],
                [a.choose, a.finish, b.choose, b.finish],
            )
        if not remote_policy:  # one group steps while the policy is called here for the other
            return cls(
                [a.choose, b.choose], [a.finish, a.choose, b.finish, b.choose], [a.finish, b.finish]
            )
        return cls(
            [a.request, b.request, a.choose],
            [b.choose, a.finish, a.request, a.choose, b.finish, b.request],
            [b.choose, a.finish, b.finish],
        )


def roll_alternating(
    calls: Sequence[Calls],
    timer: StepTimer,
    steps: int,
    is_stopped: Callable[[], bool],
    *,
    remote_envs: bool,
    remote_policy: bool,
) -> None:
    """Make a number of steps of each of two groups, or fewer if the rollout is stopped."""
    plain, timed = (
        PhaseSchedule.of([StepPhases.of(group) for group in each], remote_envs, remote_policy)
        for each in (calls, [timed_calls(group, timer) for group in calls])
    )
    _run(plain.first)
    _run_rounds(plain.repeat, timed.repeat, timer, steps - 1, is_stopped)
    _run(plain.last)


def _run_rounds(
    repeat: Sequence[Phase],
    timed: Sequence[Phase],
    timer: StepTimer,
    rounds: int,
    ends: Callable[[], bool],
) -> None:
    for plain, then_timed in timer.stretches(rounds):
        for _ in range(plain):
            if ends():
                return
            for phase in repeat:
                phase()
        if then_timed:
            if ends():
                return
            _run(timed)


def _run(phases: Sequence[Phase]) -> None:
    for phase in phases:
        phase()


def timed_calls(calls: Calls, timer: StepTimer) -> Calls:
    """Return calls that add their time to the timer."""

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
