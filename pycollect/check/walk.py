"""Random steps of an environment, as a collector makes them; records of them, and comparisons."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from pycollect.check.calls import Budget, CallFailed, calling
from pycollect.check.report import WARNING, Draft
from pycollect.check.values import Space, copied, is_close, is_equal
from pycollect.envs.base import observation_of, reset_env, step_values
from pycollect.envs.random_actions import make_sampler
from pycollect.envs.single import make_act
from pycollect.envs.spaces import describe
from pycollect.transport.process import waited

_SLOW = 10.0  # times the median
_SLOW_RESET = 1e-3  # seconds; episodes may be so short that quick resets take most of the time
_PREEMPTED = 0.02  # seconds for which another process may have had the CPU
_SHORTEST = 1e-9  # seconds; the time without CPU may be as long as the step
KEPT = 150
"""Number of transitions of a walk that are kept for comparisons."""
RECENT = 8
"""Number of calls within which an environment may use a buffer again."""


@dataclass
class Visit:
    """The result of one call of `reset` or `step`.

    Attributes:
        where: The call, for messages: "reset()" or "step 3".
        observation, info: As the environment returned them.
        values: The values of a step: reward, terminated, truncated. Empty after a reset.
        before: The result of the call before, if any.
        kept: A copy of the observation from right after the call.
    """

    where: str
    observation: Any
    info: Any
    values: tuple[Any, ...] = ()
    before: Visit | None = None
    kept: Any = None

    @property
    def ended(self) -> bool:
        return bool(self.values) and (bool(self.values[1]) or bool(self.values[2]))

    @property
    def overwritten(self) -> str:
        """A text if the call changed the observation that the call before had returned, else ""."""
        before = self.before
        if before is None or is_equal(before.observation, before.kept):
            return ""
        return f"{self.where} changed the observation that {before.where} had returned"


def change_of_oldest(recent: Sequence[Visit]) -> str:
    """Return a text if the observation of the oldest of RECENT calls has changed, else ""."""
    if len(recent) < RECENT or is_equal(recent[0].observation, recent[0].kept):
        return ""
    where = recent[0].where
    return f"one of the next {RECENT} calls changed the observation that {where} had returned"


@dataclass
class Walk:
    """Record of a number of steps.

    Attributes:
        kept: Copies of the first results: observation, then reward and flags of a step.
        ends: Flags (terminated, truncated) of each end.
        limits: For each end, `TimeLimit.truncated` of its info.
    """

    kept: list[tuple[Any, ...]] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    reset_seconds: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    ends: list[tuple[bool, bool]] = field(default_factory=list)
    limits: list[bool] = field(default_factory=list)
    last: Visit | None = None


@dataclass
class Checked:
    """An environment under check; the longest part of the check takes `seconds`."""

    env: Any
    report: Draft
    seconds: float
    walk: Walk = field(default_factory=Walk, kw_only=True)


Observer = Callable[[Visit], None]


class Actions:
    """Draws actions like a collector without a policy, except actions that `step` refused."""

    def __init__(self, space: Space, refused: Sequence[int] = ()) -> None:
        self._space = space
        self._sampler = make_sampler(space, 1, batched=False)
        self._act = make_act(space)
        self._refused = refused

    def draw(self, rng: np.random.Generator, mask: Any = None) -> Any:
        """Return an action as a collector passes it to `step`."""
        space = self._space
        if not isinstance(space, spaces.Discrete) or (mask is None and not self._refused):
            return self.of_leaves([leaf[0] for leaf in self._sampler(1, rng)])
        allowed = np.ones(int(space.n), np.bool_) if mask is None else np.asarray(mask, np.bool_)
        values = space.start + np.flatnonzero(allowed)
        values = values[~np.isin(values, self._refused)]
        return (values if len(values) else [space.start])[rng.integers(max(1, len(values)))]

    def of_leaves(self, leaves: Sequence[Any]) -> Any:
        arrays = [np.asarray(leaf) for leaf in leaves]
        return self._act(arrays[0] if len(arrays) == 1 else arrays)


def mask_of(visit: Visit, space: Space) -> Any:
    """Return the action mask of an info or an observation, or ``None``."""
    if not isinstance(space, spaces.Discrete):
        return None
    for part in (visit.info, visit.observation):
        for name in ("action_mask", "mask", "action_masks"):
            mask = part.get(name) if isinstance(part, Mapping) else None
            if mask is not None and np.shape(mask) == (space.n,) and np.any(mask):
                return mask
    return None


def reset(env: Any, seed: int | None = None) -> Visit:
    """Reset an environment; raise `CallFailed` if it raises."""
    where = "reset()" if seed is None else f"reset(seed={seed})"
    with calling(where):
        result = reset_env(env, seed)
    observation = interface(observation_of, result)
    return Visit(where, observation, result[1], kept=copied(observation))


def interface(read: Callable[[Any], Any], result: Any) -> Any:
    """Return ``read(result)``; raise `CallFailed` if the result has the wrong form."""
    try:
        return read(result)
    except (TypeError, ValueError) as error:
        raise CallFailed("interface", str(error), "") from error


def step(
    env: Any, action: Any, where: str, before: Visit | None, walk: Walk, noun: str = "action"
) -> Visit:
    """Make and time a step; raise `CallFailed` if it raises or returns another form.

    `noun` is the name of the action in messages; for `where` and `before` see `Visit`.
    """
    with calling(f"{where} with the {noun} {action!r}"):
        result = timed(walk.step_seconds, lambda: env.step(action))
    observation, *values, info = interface(step_values, result)
    if before is not None:
        before.before = None
    return Visit(where, observation, info, tuple(values), before, copied(observation))


def take(
    env: Any,
    actions: Actions,
    seed: int | None,
    steps: int,
    budget: Budget,
    observers: Sequence[Observer] = (),
    walk: Walk | None = None,
) -> Walk:
    """Reset with a seed and make steps, with resets without a seed after each end.

    The actions are the same in each call. Observers get the result of each call before the next
    one. A given `walk` keeps also the calls before an error.
    """
    walk, rng = Walk() if walk is None else walk, np.random.default_rng(1)
    _visit(walk, timed(walk.reset_seconds, lambda: reset(env, seed)), observers)
    length = 0
    for count in range(1, steps + 1):
        assert walk.last is not None
        before = walk.last
        action = actions.draw(rng, mask_of(before, env.action_space))
        visit = step(env, action, f"step {count}", before, walk)
        length += 1
        if len(walk.kept) <= KEPT:
            walk.actions.append(action)
        _visit(walk, visit, observers)
        if _is_end(walk, visit, length):
            length = 0
            if not budget.is_left:
                break
            again = timed(walk.reset_seconds, lambda: reset(env))
            again.before = visit
            _visit(walk, again, observers)
        if not budget.is_left:
            break
    return walk


def _is_end(walk: Walk, visit: Visit, length: int) -> bool:
    for name, flag in zip(("terminated", "truncated"), visit.values[1:], strict=True):
        if np.ndim(flag) or not hasattr(flag, "__bool__"):
            text = f"{visit.where} returned {name}={describe(flag)} instead of a bool"
            raise CallFailed("flag-type", text, "")
    if not visit.ended:
        return False
    walk.ends.append((bool(visit.values[1]), bool(visit.values[2])))
    walk.lengths.append(length)
    info = visit.info if isinstance(visit.info, Mapping) else {}
    walk.limits.append(bool(info.get("TimeLimit.truncated", False)))
    return True


def _visit(walk: Walk, visit: Visit, observers: Sequence[Observer]) -> None:
    walk.last = visit
    if len(walk.kept) <= KEPT:
        walk.kept.append((visit.kept, *map(copied, visit.values)))
    for observe in observers:
        observe(visit)


def timed(seconds: list[float], call: Callable[[], Any]) -> Any:
    """Return the result of a call, and append its duration to a list.

    The duration excludes time in which the thread was ready to run but had no CPU.
    """
    before, began = waited("thread-self"), time.perf_counter()
    result = call()
    duration = time.perf_counter() - began
    seconds.append(max(0.0, duration - (waited("thread-self") - before)))
    return result


def compare(report: Draft, walks: tuple[Walk, Walk], name: str, before: dict[str, Any]) -> None:
    """Report the first result of the second walk, in `name`, that differs from the first walk's."""
    pairs = list(zip(walks[0].kept, walks[1].kept, strict=False))
    different = next((i for i, (a, b) in enumerate(pairs) if not is_close(a, b)), None)
    if different is None:
        if not all(is_equal(a, b) for a, b in pairs):
            report.add(
                "non-deterministic",
                f"the same seed and actions gave slightly different values in {name}",
                WARNING,
            )
        return
    drawn = [
        generator for generator, state in global_generators().items() if before[generator] != state
    ]
    why = f" It draws from the global generator {' and '.join(drawn)}." if drawn else ""
    if different == 0:
        text = f"reset() with the same seed returned another observation in {name}.{why}"
        report.add("ignored-seed", text)
        return
    names = ("observation", "reward", "terminated", "truncated")
    parts = zip(names, *pairs[different], strict=False)
    part = next((one for one, a, b in parts if not is_close(a, b)), "kind of result")
    report.add(
        "non-deterministic",
        f"after a reset with the same seed, and with the same actions, call {different} of step or "
        f"reset returned another {part} in {name}.{why}",
    )


def global_generators() -> dict[str, Any]:
    """Return hashes of the states of the global random generators."""
    state = np.random.get_state()
    return {
        "np.random": (state[1].tobytes(), state[2]) if isinstance(state, tuple) else state,
        "random": hash(random.getstate()),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def check_times(subject: Checked) -> None:
    """Steps take about equally long, and resets little of the time."""
    steps, resets = subject.walk.step_seconds, subject.walk.reset_seconds[1:]
    report = subject.report
    if not steps:
        return
    middle, total = max(median(steps), _SHORTEST), max(sum(steps), _SHORTEST)
    report.frames = max(1, min(report.frames, int(subject.seconds / 3 / middle)))
    slow = [seconds for seconds in steps if seconds > max(_SLOW * middle, _PREEMPTED)]
    share = sum(slow) / total
    report.facts["steps"] = f"{len(steps)}, and {len(subject.walk.ends)} ends of episodes"
    report.facts["time per step"] = (
        f"median {_time(middle)}, 99 % below {_time(float(np.quantile(steps, 0.99)))}, longest "
        f"{_time(max(steps))}"
    )
    if resets:
        report.facts["time per reset"] = f"median {_time(median(resets))}"
    if len(steps) >= 100 and len(slow) > 1 and share > 0.3:
        report.add(
            "slow-steps",
            f"{len(slow)} of {len(steps)} steps took more than {_SLOW:g} times the median of "
            f"{_time(middle)}, and together {share:.0%} of the time",
            WARNING,
        )
    if len(resets) > 1 and sum(resets) > max(total, 0.1) and median(resets) > _SLOW_RESET:
        report.add(
            "slow-reset",
            f"{len(resets)} resets took {_time(sum(resets))}, and all {len(steps)} steps together "
            f"{_time(total)}",
            WARNING,
        )


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
