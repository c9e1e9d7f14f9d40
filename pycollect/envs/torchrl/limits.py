"""Whether a TorchRL environment ends its episodes by itself after a number of steps."""

from __future__ import annotations

from typing import Any

from torchrl.envs import GymWrapper, SerialEnv, StepCounter, TransformedEnv

from pycollect.envs import time_limit


def has_time_limit(env: Any) -> bool:
    """A `StepCounter` with `max_steps`, or the Gymnasium env inside; False where it is not known.

    Batched envs answer unknown attributes by asking all of theirs, so none are tried on them.
    """
    while isinstance(env, TransformedEnv):
        transforms = env.transform if hasattr(env.transform, "__iter__") else [env.transform]
        if any(isinstance(t, StepCounter) and t.max_steps for t in transforms):
            return True
        env = env.base_env
    if isinstance(env, SerialEnv):
        inner = vars(env).get("_envs") or []
        return bool(inner) and all(map(has_time_limit, inner))
    return isinstance(env, GymWrapper) and time_limit.has_time_limit(env._env)
