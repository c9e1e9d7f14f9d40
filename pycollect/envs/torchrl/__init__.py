"""TorchRL environments. The only package that imports TorchRL, and only once one was passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl.envs import GymLikeEnv, SerialEnv, TransformedEnv

from pycollect.data.devices import CPU, Devices
from pycollect.envs.base import EnvBatch
from pycollect.envs.torchrl.adapter import TorchRLEnv, has_time_limit
from pycollect.envs.torchrl.gym import unwrapped
from pycollect.envs.torchrl.serial import apart

__all__ = ["inside", "make_torchrl_batch", "make_torchrl_env"]


def make_torchrl_env(env: Any, devices: Devices | None = None) -> EnvBatch:
    """One `torchrl.envs.EnvBase` as an EnvBatch: by what is inside of it where that is the same.

    Args:
        devices: its own goes before `device`, but not before `env_device`.

    Raises:
        ValueError: a key that belongs to the collector, or a device that is not here.
    """
    env = _moved(env, devices or Devices())
    device = env.device or CPU
    known = unwrapped(env) or (apart(env) if device.type == "cpu" else None)
    batch = TorchRLEnv(env) if known is None else known
    batch.original = env
    batch.device = device
    batch.specs = env
    batch.time_limit = has_time_limit(env)
    return batch


def make_torchrl_batch(envs: Sequence[Any], devices: Devices | None = None) -> EnvBatch:
    """Several `EnvBase` as TorchRL's SerialEnv of them: [P, ...]."""
    serial = SerialEnv(len(envs), [lambda env=env: env for env in envs])
    return make_torchrl_env(serial, devices)


def inside(env: Any) -> list[Any]:
    """Return the environments that `env` wraps, or steps one by one; none if it does neither."""
    if isinstance(env, TransformedEnv):
        return [env.base_env]
    if isinstance(env, SerialEnv):
        if env.is_closed:
            env.start()
        return list(env._envs)
    return [env._env] if isinstance(env, GymLikeEnv) else []


def _moved(env: Any, devices: Devices) -> Any:
    target = devices.env or (devices.default if env.device is None else None)
    if target is None or target == env.device or (env.device is None and target == CPU):
        return env
    return env.to(target)
