"""Finds out whether a vector env honours `reset_mask`, which some accept and ignore in silence."""

from __future__ import annotations

import enum

import numpy as np

from pycollect.envs.base import BoolArray
from pycollect.envs.random_actions import ActionSampler
from pycollect.envs.spaces import Array
from pycollect.envs.vector_api import Leaves, VectorApi, rows_differ

KEEP_STEPS = 16
"""Steps within which `probe_keeps_rows` has to come to a result."""

RESUME_STEPS = 256
"""Steps within which `probe_resumes` must have seen two episodes end."""

_TRIALS = 3


class Finding(enum.Enum):
    """What a probe has shown."""

    SHOWN = "shown"
    UNSHOWN = "could not be shown"
    VIOLATED = "violated"


class _Driver:
    """Steps an env with random actions that are the same in every run.

    The generator is the probe's own, and no seed is given: an env that was seeded when it was made
    goes on in the same way in every run.
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
    """Whether a masked reset resets the rows of the mask and leaves the others as they are.

    Shown by three masked resets after which all other rows, one of which at least differed from its
    reset observation, were bit for bit what they were before. Takes at most `KEEP_STEPS` steps and
    leaves the env somewhere: reset it afterwards.
    """
    count = api.num_envs
    if count == 1:
        return Finding.SHOWN  # a mask that resets anything resets everything
    driver = _Driver(api)
    rows = np.arange(count)
    masks = (rows == 0, rows == count - 1, rows % 2 == 0)
    fresh = _copy(api.reset())
    shown, changed = 0, False
    for _ in range(KEEP_STEPS):
        before, _, done = driver.step()
        mask = masks[shown] | done
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
        shown += int(evidence)
        if shown == _TRIALS:
            return Finding.SHOWN if changed else Finding.UNSHOWN
    return Finding.UNSHOWN


def probe_resumes(api: VectorApi, whole: bool = False) -> Finding:
    """Whether the step after a reset that follows an episode's end is a real one.

    To be asked in NEXT_STEP mode: the env may still hold the reset of its own that it had in mind
    and swallow the step. A swallowed step is known by its reward; that of a dummy step is observed
    first, since wrappers change it. Shown by one reset whose next step has another reward, or ends
    an episode again. Takes at most `RESUME_STEPS` steps and leaves the env somewhere: reset it
    afterwards.

    Args:
        api: the env.
        whole: ask for resets of all rows; else for masked ones, of an env that keeps other rows.
    """
    driver = _Driver(api)
    api.reset()
    none = np.zeros(api.num_envs, np.bool_)
    # Takes row 0 out of step with the others: envs with a fixed length end all at once.
    extra = none if whole or api.num_envs == 1 else np.arange(api.num_envs) == 0
    dummy, ended = none, none
    dummy_rewards: set[float] = set()
    for _ in range(RESUME_STEPS):
        _, reward, done = driver.step()
        dummy_rewards.update(reward[dummy].tolist())
        real = done | ~np.isin(reward, [0.0, *dummy_rewards])
        if (ended & real).any():
            return Finding.SHOWN
        learn = done.any() and not dummy_rewards and not extra.any()
        mask = none if learn else done | extra | (whole and done.any())
        dummy = done if learn else none
        # A reset of all rows says nothing about a partial one.
        useful = whole or api.num_envs == 1 or not mask.all()
        ended = done if useful and not learn else none
        extra = none
        try:
            if mask.any():
                api.reset_rows(mask)
        except Exception:
            return Finding.VIOLATED
    return Finding.UNSHOWN


def _copy(leaves: Leaves) -> Leaves:
    return tuple(np.array(leaf, order="C") for leaf in leaves)


def _expand(mask: BoolArray, like: Array) -> BoolArray:
    return mask.reshape(len(mask), *[1] * (like.ndim - 1))
