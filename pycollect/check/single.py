"""Checks of one `gymnasium.Env`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium import spaces

from pycollect.check.calls import Budget, CallFailed, Start, calling, watched_starts
from pycollect.check.report import WARNING, Draft
from pycollect.check.values import is_equal, make_check, size_of
from pycollect.check.walk import (
    RECENT,
    Actions,
    Checked,
    Observer,
    Visit,
    Walk,
    change_of_oldest,
    check_times,
    compare,
    global_generators,
    mask_of,
    reset,
    step,
    take,
)
from pycollect.data.frame import ONE_REWARD
from pycollect.envs.base import EnvBatch
from pycollect.envs.gymnasium_support import has_time_limit
from pycollect.envs.spaces import describe

SEED = 0  # `if seed:` would ignore it
MAX_STEPS = 2_000
_MANY_STEPS = 1_000
_FEW_ACTIONS = 64
_REPEATED = 3  # different actions, each drawn within _DRAWN draws
_DRAWN = 20
_LIMITS = (
    "max_steps",
    "max_episode_steps",
    "_max_episode_steps",
    "_max_steps",
    "max_step",
    "episode_length",
    "horizon",
    "max_timesteps",
    "time_limit",
)


@dataclass
class Subject(Checked):
    """A single environment under check."""

    batch: EnvBatch
    second: Any  # another new instance; ``None`` if only an instance was passed
    seed: int | None = SEED  # of each walk; ``None`` if `reset` takes none
    actions: Actions = field(init=False)
    info_sizes: list[list[int]] = field(default_factory=list)  # after each call, for each episode

    def __post_init__(self) -> None:
        self.actions = Actions(self.env.action_space)


def check_seed_argument(subject: Subject) -> None:
    """`reset` takes a seed."""
    try:
        reset(subject.env, subject.seed)
    except CallFailed as failed:
        text = str(failed)
        if "cannot be seeded" not in text and "argument 'seed'" not in text:
            raise
        subject.seed = None
        subject.report.add("ignored-seed", "reset() has no parameter 'seed'")
        subject.report.places.add(failed.place)


def check_actions(subject: Subject) -> None:
    """`step` accepts the ends of the action space; one that it refuses is not used again."""
    space, failures, accepted = subject.env.action_space, dict[Any, CallFailed](), 0
    budget = Budget(subject.seconds / 5)
    for name, action in _ends_of(subject, space):
        if not budget.is_left:
            break
        visit = reset(subject.env, subject.seed)
        if mask_of(visit, space) is not None:
            subject.report.has_mask = True
            return
        try:
            with calling(f"step with the action {name}"):
                subject.env.step(action)
        except CallFailed as failed:
            if failed.code == "hangs":
                raise
            failures[name] = failed
        else:
            accepted += 1
    if failures and not accepted:
        raise next(iter(failures.values()))
    if failures:
        text = f"{next(iter(failures.values()))}; {space} contains it"
        if len(failures) > 1:
            text += f". {len(failures)} of {len(failures) + accepted} tried actions failed"
        subject.report.add("action-space", text)
        subject.report.places.update(failed.place for failed in failures.values())
        if isinstance(space, spaces.Discrete):
            subject.actions = Actions(space, [int(name) for name in failures])


def _ends_of(subject: Subject, space: Any) -> list[tuple[str, Any]]:
    """Return actions at the ends of a space, by name."""
    of_leaves = subject.actions.of_leaves
    if isinstance(space, spaces.Discrete) and space.n <= _FEW_ACTIONS:
        values = space.start + np.arange(space.n)
        return [(str(int(value)), of_leaves([value])) for value in values]
    if isinstance(space, spaces.MultiDiscrete):
        ends = {"of zeros": space.start, "of the highest values": space.start + space.nvec - 1}
        return [(k, of_leaves([np.asarray(v, space.dtype)])) for k, v in ends.items()]
    if isinstance(space, spaces.Box) and space.is_bounded():
        middle = (space.low / 2 + space.high / 2).astype(space.dtype)
        ends = {"in the middle of the space": middle, "low": space.low, "high": space.high}
        return [(name, of_leaves([np.array(value)])) for name, value in ends.items()]
    return []


def check_walk(subject: Subject) -> None:
    """Every result of `reset` and `step` fits the spaces and stays as it is; nothing is started."""
    fits, report = make_check(subject.env.observation_space), subject.report
    starts_by_step: list[tuple[str, Start]] = []
    recent = deque[Visit](maxlen=RECENT)
    with watched_starts() as starts:

        def observe(visit: Visit) -> None:
            starts_by_step.extend((visit.where, start) for start in starts)
            starts.clear()
            fits(visit.observation, visit.where.partition("(")[0], report)
            _check_values(visit, subject)
            change = visit.overwritten or change_of_oldest(recent)
            if change:
                report.add(
                    "reused-buffer",
                    f"{change}. Collectors copy each frame at once; a list of observations, or "
                    "final_obs of a SyncVectorEnv in SAME_STEP mode, has wrong values",
                )
            recent.append(visit)
            if not visit.values:
                subject.info_sizes.append([])
            subject.info_sizes[-1].append(size_of(visit.info))

        try:
            take(
                subject.env,
                subject.actions,
                subject.seed,
                MAX_STEPS,
                Budget(subject.seconds),
                [observe],
                subject.walk,
            )
        finally:
            _report_starts(starts_by_step, report)


def _check_values(visit: Visit, subject: Subject) -> None:
    """Reward and flags have types that can be recorded."""
    if not visit.values:
        return
    reward, *flags = visit.values
    report, declared = subject.report, subject.batch.spec.reward
    shape = () if declared == ONE_REWARD else declared.shape
    try:
        array = np.asarray(reward)
    except (TypeError, ValueError):
        array = None
    if array is None or array.dtype.kind not in "biuf" or array.shape != shape:
        expected = f"an array of shape {list(shape)}" if shape else "one number"
        text = f"{visit.where} returned the reward {describe(reward)} instead of {expected}"
        report.add("reward-type", text)
    elif not np.isfinite(array).all():
        report.add("not-finite", f"{visit.where} returned the reward {reward}", about="reward")
    for name, flag in zip(("terminated", "truncated"), flags, strict=True):
        if not isinstance(flag, bool | np.bool_):
            report.add(
                "flag-type",
                f"{visit.where} returned {name}={describe(flag)} instead of a bool",
                WARNING,
            )


def check_other_seed(subject: Subject) -> None:
    """`reset` does not seed the environment's generator with a constant."""
    env, states = subject.env.unwrapped, []
    if subject.seed is None or subject.report.has("ignored-seed"):
        return
    for seed in (1, 2):
        generator = getattr(env, "_np_random", None)
        if not isinstance(generator, np.random.Generator):
            return
        generator.random()  # only a reset that seeds the generator undoes this
        reset(subject.env, seed)
        states.append(env.np_random.bit_generator.state)
    if is_equal(*states):
        text = "reset(seed=1) and reset(seed=2) seeded self.np_random equally"
        subject.report.add("ignored-seed", text)


def check_same_seed(subject: Subject) -> None:
    """The same seed and actions give the same results, in this and in a new instance.

    So they do in an instance that is stepped in turn with another one, as in a list of callables.
    """
    if subject.seed is None or getattr(subject.env.spec, "nondeterministic", False):
        return
    steps = len(subject.walk.actions)

    def repeat(env: Any, name: str, observers: Sequence[Observer] = ()) -> None:
        budget, before = Budget(subject.seconds / 2), global_generators()
        walk = take(env, subject.actions, subject.seed, steps, budget, observers)
        compare(subject.report, (subject.walk, walk), name, before)

    repeat(subject.env, "the same instance")
    if subject.second is None:
        return
    repeat(subject.second, "a new instance")
    if not subject.report.has("ignored-seed", "non-deterministic"):
        name = "a new instance while the first one also made steps"
        repeat(subject.second, name, [_other_steps(subject)])


def _other_steps(subject: Subject) -> Observer:
    """Return a function that makes one step of the first instance."""
    env, rng = subject.env, np.random.default_rng(SEED + 1)
    last = reset(env)

    def observe(_: Visit) -> None:
        nonlocal last
        action = subject.actions.draw(rng, mask_of(last, env.action_space))
        last = step(env, action, "a step", None, Walk())
        if last.ended:
            last = reset(env)

    return observe


def check_changed_later(subject: Subject) -> None:
    """An observation stays as it is until the next call."""
    visit = subject.walk.last
    if visit is None or subject.report.has("reused-buffer"):
        return
    with calling("reading the environment's attributes"):
        repr(subject.env)
    if not is_equal(visit.observation, visit.kept):
        subject.report.add(
            "changed-later", f"the observation of {visit.where} changed after the call had returned"
        )


def _report_starts(starts: list[tuple[str, Start]], report: Draft) -> None:
    for kind in ("step", "reset"):
        of_kind = [(where, start) for where, start in starts if where.startswith(kind)]
        if not of_kind:
            continue
        where, start = of_kind[0]
        calls = len({where for where, _ in of_kind})
        report.add(
            "starts-process",
            f"{where} started {start.kind} at {start.place}"
            + (f", and so did {calls - 1} other calls" if calls > 1 else ""),
            WARNING if calls == 1 or kind == "reset" else "error",
        )


def check_flags(subject: Checked) -> None:
    """`terminated` and `truncated` have different meanings."""
    walk, report = subject.walk, subject.report
    ends, count = walk.ends, len(walk.ends)
    if any(
        limit and not truncated for limit, (_, truncated) in zip(walk.limits, ends, strict=True)
    ):
        report.add(
            "merged-flags", "info['TimeLimit.truncated'] was set at an end with truncated=False"
        )
    elif count > 1 and all(both == (True, True) for both in ends):
        report.add(
            "merged-flags",
            f"terminated and truncated were both True at all {count} ends of episodes",
        )
    elif count and all(both == (True, False) for both in ends):
        _report_longest(subject, max(walk.lengths), count)


def _report_longest(subject: Checked, length: int, count: int) -> None:
    longest = subject.walk.lengths.count(length)
    if longest < 3 or length < 2:
        return
    names = [name for name in _LIMITS if _attribute(subject.env, name) == length]
    may_be_limit = longest == count and length >= 10
    if not names and not (may_be_limit and _ends_there_anyway(subject, length)):
        return
    limit = f", which is its {names[0]}" if names else ""
    which = f"all {count}" if longest == count else f"{longest} of {count}"
    subject.report.add(
        "merged-flags",
        f"{which} episodes ended with terminated=True after exactly {length} steps{limit}",
        "error" if names else WARNING,
        "If that is a time limit, return truncated=True instead of terminated=True.",
    )


def _ends_there_anyway(subject: Checked, length: int) -> bool:
    """Return whether episodes in which one action is repeated have the same length."""
    if not isinstance(subject, Subject):
        return False
    rng, budget = np.random.default_rng(SEED), Budget(subject.seconds / 5)
    actions: list[Any] = []
    for action in (subject.actions.draw(rng) for _ in range(_DRAWN)):
        if not any(is_equal(action, other) for other in actions):
            actions.append(action)
    for action in actions[:_REPEATED]:
        reset(subject.env, subject.seed)
        for count in range(1, length + 1):
            with calling(f"step with the action {action!r}"):
                _, _, terminated, truncated, _ = subject.env.step(action)
            if not budget.is_left or bool(terminated or truncated) != (count == length):
                return False
    return True


def _attribute(env: Any, name: str) -> Any:
    value = getattr(getattr(env, "unwrapped", env), name, None)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def check_infos(subject: Subject) -> None:
    """Infos do not grow with the steps."""
    episodes = subject.info_sizes
    for values, what in (
        (max(episodes, key=len, default=[])[1:], "within an episode"),
        ([size for sizes in episodes for size in sizes], "over all episodes"),
    ):
        if len(values) < 20:
            continue
        quarters = [int(np.mean(part)) for part in np.array_split(values, 4)]
        grows = all(b > a for a, b in pairwise(quarters))
        if grows and quarters[3] > 2 * quarters[0] and quarters[3] - quarters[0] > len(values) / 8:
            subject.report.add(
                "growing-info",
                f"info grew {what}, from about {quarters[0]} values to {quarters[3]} in "
                f"{len(values)} steps",
            )
            return


def check_step_before_reset(subject: Subject) -> None:
    """A step before the first reset raises an error."""
    if subject.second is None:
        return
    action = subject.actions.draw(np.random.default_rng(SEED))
    try:
        with calling("step before reset"):
            subject.second.step(action)
    except CallFailed as failed:
        if failed.code == "hangs":
            raise
    else:
        subject.report.add("step-before-reset", "step() before reset() returned values", WARNING)


def check_ends(subject: Subject) -> None:
    """Episodes end."""
    steps = len(subject.walk.step_seconds)
    if not subject.walk.ends and not has_time_limit(subject.env) and steps >= _MANY_STEPS:
        subject.report.add("no-end", f"no episode ended within {steps} random steps", WARNING)


CHECKS = (
    check_seed_argument,
    check_actions,
    check_walk,
    check_changed_later,
    check_flags,
    check_step_before_reset,
    check_infos,
    check_ends,
    check_times,
    check_same_seed,
    check_other_seed,
)
