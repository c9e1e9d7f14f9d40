"""TorchRL environments as EnvBatch; imported only after the user passes such an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchrl.envs import GymLikeEnv, SerialEnv, TransformedEnv
from torchrl.modules.utils.utils import _maybe_append_env_transforms_from_module

from pycollect.data.devices import CPU, Devices
from pycollect.envs.base import EnvBatch
from pycollect.envs.torchrl.adapter import TorchRLEnv, has_time_limit
from pycollect.envs.torchrl.gym import unwrapped
from pycollect.envs.torchrl.serial import split_serial

__all__ = ["inner_envs", "make_torchrl_batch", "make_torchrl_env", "with_policy_transforms"]


def make_torchrl_env(env: Any, devices: Devices | None = None) -> EnvBatch:
    """Make an EnvBatch of one `torchrl.envs.EnvBase`.

    If the results are equal, the Gymnasium environments inside it are stepped directly. The
    `env_device` has precedence over the environment's own device, which has precedence over
    `device`.
    """
    env = _moved(env, devices or Devices())
    device = env.device or CPU
    known = unwrapped(env) or (split_serial(env) if device.type == "cpu" else None)
    batch = TorchRLEnv(env) if known is None else known
    batch.original = batch.specs = env
    batch.spec, batch.time_limit = replace(batch.spec, device=device), has_time_limit(env)
    return batch


def make_torchrl_batch(envs: Sequence[Any], devices: Devices | None = None) -> EnvBatch:
    """Make an EnvBatch [P, ...] of several `EnvBase` with TorchRL's SerialEnv."""
    serial = SerialEnv(len(envs), [lambda env=env: env for env in envs])
    return make_torchrl_env(serial, devices)


def with_policy_transforms(env: Any, policy: Any) -> Any:
    """Return an `EnvBase` with the transforms that TorchRL's modules in the policy require.

    These are an InitTracker and the primers of recurrent states, unless the environment's specs
    already have their keys.
    """
    return _maybe_append_env_transforms_from_module(env, policy)


def inner_envs(env: Any) -> list[Any]:
    """Return the environments that `env` wraps or steps one by one, or an empty list."""
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
