"""Probe whether a vector environment honors `reset_mask`, which some silently ignore."""

from __future__ import annotations

import enum

import numpy as np

from pycollect.envs.base import BoolArray
from pycollect.envs.random_actions import ActionSampler
from pycollect.envs.spaces import Array
from pycollect.envs.vector_api import Leaves, VectorApi, rows_differ

KEEP_STEPS = 16
"""Maximum number of steps of `probe_keeps_rows`."""

RESUME_STEPS = 256
"""Maximum number of steps of `probe_resumes`, which must see two episodes end."""

_TRIALS = 3


class Finding(enum.Enum):
    """Result of a probe."""

    CONFIRMED = "confirmed"
    UNCONFIRMED = "unconfirmed"
    VIOLATED = "violated"


class _RandomStepper:
    """Steps a vector environment with random actions that are equal in every run.

    The probe has its own generator and passes no seed, so that an environment that was seeded when
    it was made stays reproducible.
    """

    def __init__(self, api: VectorApi) -> None:
        self._api = api
        self._sampler = ActionSampler(api.action_space, api.num_envs, batched=True)
        self._rng = np.random.default_rng(0)

    def step(self) -> tuple[Leaves, Array, BoolArray]:
        """Return copies of (observation, sum of each row's rewards, done)."""
        action = tuple(leaf[0] for leaf in self._sampler.draw(1, self._rng))
        observation, reward, terminated, truncated, _ = self._api.step(action)
        return _copy(observation), reward.reshape(len(reward), -1).sum(1), terminated | truncated


def probe_keeps_rows(api: VectorApi) -> Finding:
    """Probe whether a masked reset resets the rows of the mask and keeps the other rows.

    Three masked resets confirm it if all other rows keep every bit, and at least one of them had
    moved on from its reset observation. Takes at most `KEEP_STEPS` steps; reset the environment
    afterwards.
    """
    count = api.num_envs
    if count == 1:
        return Finding.CONFIRMED  # a mask that resets anything resets everything
    stepper = _RandomStepper(api)
    rows = np.arange(count)
    masks = (rows == 0, rows == count - 1, rows % 2 == 0)
    fresh = _copy(api.reset())
    trials, changed = 0, False
    for _ in range(KEEP_STEPS):
        before, _, done = stepper.step()
        mask = masks[trials] | done
        evidence = (~mask & rows_differ(before, fresh)).any()
        if not (evidence or done.any()):
            continue
        try:
            after = _copy(api.reset_rows(mask))
        except Exception:
            return Finding.VIOLATED
        differs = rows_differ(before, after)
        if (differs & ~mask).any() and not api.returns_only_reset_rows:
            return Finding.VIOLATED
        changed = changed or bool((differs & mask).any())
        fresh = tuple(
            np.where(_expand(mask, new), new, old) for new, old in zip(after, fresh, strict=True)
        )
        trials += int(evidence)
        if trials == _TRIALS:
            return Finding.CONFIRMED if changed else Finding.UNCONFIRMED
    return Finding.UNCONFIRMED


def probe_resumes(api: VectorApi, whole: bool = False) -> Finding:
    """Probe whether a NEXT_STEP environment makes a real step after a requested reset.

    After the end of an episode, such an environment may still have its own reset pending and
    replace the next step by it. The reward reveals such a dummy step; the probe first observes the
    reward of a dummy step, because wrappers change it. One reset confirms a real step if the next
    step has another reward, or ends an episode. Takes at most `RESUME_STEPS` steps; reset the
    environment afterwards.

    Args:
        api: The vector environment.
        whole: Probe resets of all rows. Otherwise masked resets, which must keep the other rows.
    """
    stepper = _RandomStepper(api)
    api.reset()
    none = np.zeros(api.num_envs, np.bool_)
    # Reset row 0 at a different time, because episodes of a fixed length end all at once.
    extra = none if whole or api.num_envs == 1 else np.arange(api.num_envs) == 0
    dummy, ended = none, none
    dummy_rewards: set[float] = set()
    for _ in range(RESUME_STEPS):
        _, reward, done = stepper.step()
        dummy_rewards.update(reward[dummy].tolist())
        real = done | ~np.isin(reward, [0.0, *dummy_rewards])
        if (ended & real).any():
            return Finding.CONFIRMED
        learn = done.any() and not dummy_rewards and not extra.any()
        mask = none if learn else done | extra | (whole and done.any())
        dummy = done if learn else none
        # A reset of all rows is no evidence for a partial one.
        useful = whole or api.num_envs == 1 or not mask.all()
        ended = done if useful and not learn else none
        extra = none
        try:
            if mask.any():
                api.reset_rows(mask)
        except Exception:
            return Finding.VIOLATED
    return Finding.UNCONFIRMED


def _copy(leaves: Leaves) -> Leaves:
    return tuple(np.array(leaf, order="C") for leaf in leaves)


def _expand(mask: BoolArray, like: Array) -> BoolArray:
    return mask.reshape(len(mask), *[1] * (like.ndim - 1))
