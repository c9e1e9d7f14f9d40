"""TorchRL environments. The only package that imports TorchRL, and only once one was passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl.envs import SerialEnv

from pycollect.envs.base import EnvBatch

from .adapter import TorchRLEnv
from .gym import unwrapped
from .limits import has_time_limit
from .serial import apart

__all__ = ["make_torchrl_batch", "make_torchrl_env"]


def make_torchrl_env(env: Any) -> EnvBatch:
    """One `torchrl.envs.EnvBase` as an EnvBatch: by what is inside of it where that is the same.

    Raises:
        NotImplementedError: it is not on the CPU.
        ValueError: a key that belongs to the collector.
    """
    batch = unwrapped(env) or apart(env) or TorchRLEnv(env)
    batch.time_limit = has_time_limit(env)
    return batch


def make_torchrl_batch(envs: Sequence[Any]) -> EnvBatch:
    """Several `EnvBase` as TorchRL's SerialEnv of them: [P, ...]."""
    return make_torchrl_env(SerialEnv(len(envs), [lambda env=env: env for env in envs]))
