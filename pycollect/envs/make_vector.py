"""Choose the EnvBatch of a vector environment, by its autoreset mode and by probes.

A probe steps the environment with random actions, because some silently ignore `reset_mask`.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from pycollect.data.devices import CPU
from pycollect.data.frame import ONE_REWARD
from pycollect.envs.arrays import NumpyVectorEnv, TensorsFoundError
from pycollect.envs.base import BoolArray, EnvBatch, is_wrapped
from pycollect.envs.spaces import Array
from pycollect.envs.tensors import TensorVectorEnv
from pycollect.envs.vector import SameStepEnvBatch, VectorEnvBatch, check_reset_step
from pycollect.envs.vector_api import Leaves, VectorApi, rows_differ


class Autoreset(enum.Enum):
    """When a vector environment resets a row that ended; values of Gymnasium's AutoresetMode."""

    NEXT_STEP = "nextstep"
    SAME_STEP = "samestep"
    DISABLED = "disabled"


def parse_autoreset(value: Any, argument: str) -> Autoreset | None:
    """Return the mode for `value`: None, Gymnasium's enum, or its name or value in any case."""
    if value is None:
        return None
    text = value.name if isinstance(value, enum.Enum) else value
    if isinstance(text, str):
        with contextlib.suppress(ValueError):
            return Autoreset(text.replace("_", "").replace("-", "").lower())
    raise ValueError(
        f"{argument}: expected NEXT_STEP, SAME_STEP or DISABLED (a gymnasium.vector.AutoresetMode "
        f"or its name), got {value!r}"
    )


def declared_autoreset(env: Any) -> Autoreset | None:
    """Return the mode that the environment declares, or ``None``.

    The attribute `autoreset_mode` has precedence over `metadata`, because the environment acts on
    the attribute. The `metadata` that all subclasses of VectorEnv share is ignored, because ale_py
    writes the mode of the newest AtariVectorEnv into it.
    """
    base = getattr(env, "unwrapped", env)
    metadata = getattr(env, "metadata", None)
    shared = metadata is VectorEnv.metadata
    from_metadata = None if shared or not metadata else metadata.get("autoreset_mode")
    for value in (getattr(env, "autoreset_mode", None), from_metadata):
        if value is not None:
            return parse_autoreset(value, f"metadata['autoreset_mode'] of {env}")
    return parse_autoreset(getattr(base, "autoreset_mode", None), f"autoreset_mode of {env}")


KEEP_STEPS = 16
"""Maximum number of steps of `probe_keeps_rows`."""

RESUME_STEPS = 256
"""Maximum number of steps of `probe_resumes`, which must see two episodes end."""

_TRIALS = 3


def make_vector_env(
    env: Any, *, autoreset_mode: Any, final_observation: str | None, as_arrays: bool
) -> EnvBatch:
    """Return the EnvBatch of a vector environment, which owns it, according to its autoreset mode.

    A bare SyncVectorEnv is switched to DISABLED. A wrapped one is not, because wrappers may depend
    on the mode that it had when they were made; a masked reset right after the end has the same
    effect. Other environments are stepped with random actions to probe them, and then reset.

    Arguments are as for `make_env_batch`. With `as_arrays`, an environment on a device copies every
    step to the host.
    """
    mode = _read_mode(env, autoreset_mode)
    final_is_unknown = final_observation is not None
    try:
        return _make_batch(env, mode, final_is_unknown)
    except TensorsFoundError as found:
        arrays = NumpyVectorEnv(env, found.observation)
    batch = _make_batch(arrays, mode, final_is_unknown)
    # On the CPU, arrays share the tensors' memory, and the Recorder is faster than torch.
    needs_arrays = as_arrays or batch.spec.extras or batch.spec.reward != ONE_REWARD
    if needs_arrays or arrays.device == CPU:
        return batch
    return TensorVectorEnv(arrays, batch)


def _make_batch(env: Any, mode: Autoreset, final_is_unknown: bool) -> VectorEnvBatch:
    api = VectorApi(env)
    if _switch_to_disabled(env):
        return VectorEnvBatch(api)
    if mode is Autoreset.NEXT_STEP:
        can_reset = _resets_rows_after_done(api)
        return VectorEnvBatch(
            api, skips_after_done=not can_reset, steps_rows=can_reset and api.steps_rows
        )
    known = _is_known(env)
    keeps = probe_keeps_rows(api)
    api.reset()
    if mode is Autoreset.SAME_STEP:
        can_reset = keeps is Finding.CONFIRMED or (known and keeps is Finding.UNCONFIRMED)
        return SameStepEnvBatch(api, can_reset=can_reset, final_is_unknown=final_is_unknown)
    if keeps is Finding.VIOLATED:
        raise ValueError(
            f"create_env_fn: {env} has the autoreset mode DISABLED, but its reset with "
            f"options={{'reset_mask': ...}} raises or resets other rows. Use another mode, or "
            "correct its reset"
        )
    return VectorEnvBatch(api)


def _read_mode(env: Any, argument: Any) -> Autoreset:
    declared, requested = declared_autoreset(env), parse_autoreset(argument, "autoreset_mode")
    if declared is None and requested is None:
        raise ValueError(
            "autoreset_mode: expected NEXT_STEP, SAME_STEP or DISABLED, got None; the mode is "
            f"required because {env} has no metadata['autoreset_mode']"
        )
    if declared is not None and requested is not None and declared is not requested:
        raise ValueError(
            f"autoreset_mode: expected None or {declared.name}, the mode that {env} declares, got "
            f"{requested.name}"
        )
    return declared or requested  # type: ignore[return-value]


def _switch_to_disabled(env: Any) -> bool:
    """Switch a bare SyncVectorEnv to DISABLED; return ``False`` for any other environment."""
    kind = type(env)
    if not isinstance(env, SyncVectorEnv) or not hasattr(env, "autoreset_mode"):
        return False
    if kind.step is not SyncVectorEnv.step or kind.reset is not SyncVectorEnv.reset:
        return False
    env.autoreset_mode = type(env.autoreset_mode)["DISABLED"]
    return True


def _is_known(env: Any) -> bool:
    """Return whether the class is known to honor masks, even right after the end of an episode.

    This decides only if the probe is inconclusive.
    """
    kind = type(env)
    if kind is SyncVectorEnv:
        return hasattr(env, "autoreset_mode")  # versions without it ignore masks
    if kind is AsyncVectorEnv:
        # Without shared memory, a worker still resets itself after a requested reset.
        return bool(env.shared_memory) and env.worker is None
    if (kind.__module__, kind.__name__) == ("ale_py.vector_env", "AtariVectorEnv"):
        return True
    return any(base.__module__.partition(".")[0] == "envpool" for base in kind.__mro__)


def _resets_rows_after_done(api: VectorApi) -> bool:
    """Return whether a NEXT_STEP environment honors masks right after the end of an episode."""
    keeps = probe_keeps_rows(api)
    if _is_known(getattr(api.env, "unwrapped", api.env)) and keeps is not Finding.VIOLATED:
        resets = keeps is Finding.CONFIRMED or not is_wrapped(api.env)
    else:
        resets = keeps is Finding.CONFIRMED and probe_resumes(api) is Finding.CONFIRMED
        api.reset_clears = resets or probe_resumes(api, whole=True) is Finding.CONFIRMED
    api.reset()
    return resets


class Finding(enum.Enum):
    """Result of a probe."""

    CONFIRMED = "confirmed"
    UNCONFIRMED = "unconfirmed"
    VIOLATED = "violated"


def _random_steps(api: VectorApi) -> Iterator[tuple[Leaves, Array, BoolArray]]:
    """Yield copies of (observation, sum of each row's rewards, done) of the same random steps.

    The probe passes no seed, so that an environment that was seeded when it was made stays
    reproducible.
    """
    for action in api.random_actions():
        observation, reward, terminated, truncated, _ = api.step(action)
        yield _copy(observation), reward.reshape(len(reward), -1).sum(1), terminated | truncated


def probe_keeps_rows(api: VectorApi) -> Finding:
    """Probe whether a masked reset resets the rows of the mask and keeps the other rows.

    Three masked resets confirm it if all other rows keep every bit, and at least one of them had
    moved on from its reset observation. Takes at most `KEEP_STEPS` steps; reset the environment
    afterwards.
    """
    count = api.num_envs
    if count == 1:
        return Finding.CONFIRMED  # a mask that resets anything resets everything
    rows = np.arange(count)
    masks = (rows == 0, rows == count - 1, rows % 2 == 0)
    fresh = _copy(api.reset())
    trials, changed = 0, False
    for before, _, done in islice(_random_steps(api), KEEP_STEPS):
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
            np.where(mask.reshape(count, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(after, fresh, strict=True)
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

    Without `whole`, masked resets are probed, which must keep the other rows. Raises ValueError if
    they are confirmed, but a dummy step ended an episode.
    """
    api.reset()
    none = np.zeros(api.num_envs, np.bool_)
    # Reset row 0 at a different time, because episodes of a fixed length end all at once.
    extra = none if whole or api.num_envs == 1 else np.arange(api.num_envs) == 0
    dummy, ended = none, none
    dummy_rewards: set[float] = set()
    dummy_ended = False
    for _, reward, done in islice(_random_steps(api), RESUME_STEPS):
        dummy_rewards.update(reward[dummy].tolist())
        dummy_ended = dummy_ended or bool(done[dummy].any())
        real = done | ~np.isin(reward, [0.0, *dummy_rewards])
        if (ended & real).any():
            if not whole:  # otherwise the EnvBatch checks the first dummy step itself
                check_reset_step(api.env, dummy_ended, any(dummy_rewards))
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
