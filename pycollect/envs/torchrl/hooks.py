"""What transforms do to a step once it was taken, beside what specs tell."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv

from pycollect._core import Leaf
from pycollect.batch.layout import Key, dtype_name

from .specs import as_key

_PLAIN = (Transform, Compose)


def has_hooks(env: Any) -> bool:
    """Whether anything follows a step and its `step_mdp`; a TransformedEnv always says so."""
    while type(env)._post_step_mdp_hooks is TransformedEnv._post_step_mdp_hooks:
        if any(_overrides(part, "_post_step_mdp_hooks") for part in env.transform.modules()):
            return True
        env = env.base_env
    return env._post_step_mdp_hooks is not None


def changed_by_hooks(
    env: Any, shown: tuple[Leaf, ...], others: Collection[Key]
) -> tuple[frozenset[Key], tuple[Leaf, ...]]:
    """What of an env's observations a recorded step has in a way of its own.

    A hook may change what is recorded of a step, the next root, or both. So each is recorded as it
    is found. What a step has is asked of `fake_tensordict`, by which TorchRL's collectors make room
    for a rollout; only where something rewrites the one or the other.

    Args:
        shown: the observations, without flags.
        others: keys of flags and rewards.

    Returns:
        The keys of those that are recorded at the root for themselves, and the leaves under "next".
    """
    if not (has_hooks(env) or _rewrites(env)):
        return frozenset(), ()
    following = env.fake_tensordict().get("next")
    entries = {as_key(name): value for name, value in following.items(True, True)}
    size = len(env.batch_size)
    leaves = tuple(
        Leaf(key, dtype_name(value.dtype), tuple(value.shape[size:]))
        for key, value in entries.items()
        if key not in others and isinstance(value, torch.Tensor)
    )
    return frozenset(leaf.key for leaf in shown), leaves


def _rewrites(env: Any) -> bool:
    while type(env).fake_tensordict is TransformedEnv.fake_tensordict:
        if any(_overrides(part, "transform_fake_tensordict") for part in env.transform.modules()):
            return True
        env = env.base_env
    return type(env).fake_tensordict is not EnvBase.fake_tensordict


def _overrides(part: Any, name: str) -> bool:
    own = getattr(part, name, getattr(Transform, name))
    return getattr(own, "__func__", own) not in [getattr(kind, name) for kind in _PLAIN]
