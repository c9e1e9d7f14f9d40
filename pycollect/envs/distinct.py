"""One environment cannot take two places of a batch: stepping one place would step the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .entry import is_env, is_torchrl_env
from .spaces import describe
from .vector_api import is_vector_env


def check_distinct(envs: Sequence[Any]) -> None:
    """Check that no two places of a batch are the same environment.

    Wrappers around one environment count as that environment. Environments inside a vector
    environment are compared, too, unless they are in other processes.

    Args:
        envs: Environments of one worker.

    Raises:
        ValueError: Some are the same; the message has their numbers, counted from 0 in this order.
    """
    inner = [own for env in envs for own in _inside(env)]
    places: dict[int, list[int]] = {}
    for place, env in enumerate(inner):
        places.setdefault(id(env), []).append(place)
    same = next((own for own in places.values() if len(own) > 1), None)
    if same is not None:
        raise ValueError(
            f"create_env_fn: environments {same} are the same object, "
            f"{describe(inner[same[0]])}; create a new environment in each call"
        )


def _inside(env: Any) -> list[Any]:
    """Return the unwrapped environment, or those inside a vector environment."""
    within: Any
    if is_torchrl_env(env):
        from .torchrl import inside

        within = inside(env)
    else:
        env = getattr(env, "unwrapped", env)
        within = getattr(env, "envs", None) if is_vector_env(env) else None
    if isinstance(within, (list, tuple)) and within and all(map(is_env, within)):
        return [own for each in within for own in _inside(each)]
    return [env]
