"""Whether an environment ends its episodes by itself after a number of steps that is known."""

from __future__ import annotations

import contextlib
from typing import Any


def has_time_limit(env: Any) -> bool:
    """Whether one can tell that no episode goes on for ever.

    Gymnasium's `spec.max_episode_steps` tells it, of all envs of a vector env, and EnvPool's
    `config`. False where it is not known.
    """
    if _of_spec(env) or _of_config(env):
        return True
    inner = getattr(env, "envs", None)
    if isinstance(inner, list | tuple) and inner:
        return all(map(has_time_limit, inner))
    with contextlib.suppress(Exception):  # a vector env of processes, or no such thing
        specs = env.get_attr("spec")
        return bool(specs) and all(getattr(s, "max_episode_steps", None) for s in specs)
    return False


def _of_spec(env: Any) -> bool:
    spec = getattr(env, "spec", None)
    return bool(getattr(spec, "max_episode_steps", None))


def _of_config(env: Any) -> bool:
    config = getattr(env, "config", None)
    return isinstance(config, dict) and bool(config.get("max_episode_steps"))
