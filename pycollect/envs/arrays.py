"""Vector environments of torch tensors or DLPack arrays, stepped with numpy arrays."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from torch.utils.dlpack import from_dlpack

from pycollect.data.devices import CPU, indexed
from pycollect.envs.base import step_values


class TensorsFoundError(Exception):
    """A vector environment returned tensors instead of numpy arrays."""

    def __init__(self, observation: Any) -> None:
        super().__init__()
        self.observation = observation


def check_no_tensors(observation: Any) -> None:
    """Raise TensorsFoundError if an observation has tensors or DLPack arrays."""
    if _first_tensor(observation) is not None:
        raise TensorsFoundError(observation)


def _first_tensor(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((found for found in map(_first_tensor, value) if found is not None), None)
    return value if _is_tensor(value) else None


def _is_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic)


def as_tensor(value: Any) -> torch.Tensor:
    """Return an array as a torch tensor of the same memory, on its device."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if not _is_tensor(value):
        return torch.as_tensor(value)
    try:
        return from_dlpack(value)
    except (RuntimeError, TypeError, BufferError):  # DLPack had no bool before version 1.0
        if "bool" not in str(value.dtype):
            raise
        return from_dlpack(value.astype("uint8")).bool()


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nest with each array replaced by the function's result; lists become tuples."""
    if isinstance(value, Mapping):
        return {key: mapped(function, entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return tuple([mapped(function, entry) for entry in value])
    return function(value)


class NumpyVectorEnv:
    """A vector environment of tensors that takes and returns numpy arrays.

    On the CPU, arrays and tensors share their memory. Values on a device are copied to the host.
    All other attributes are the environment's.

    Args:
        observation: The observation of a reset, to learn the kind of its values.

    Attributes:
        device: Device of the environment's tensors.
        shares_memory: Whether they are torch tensors on the CPU.
        last_observation: The last observation as the environment returned it.
    """

    def __init__(self, env: Any, observation: Any) -> None:
        self._env = env
        self.last_observation = observation
        first = _first_tensor(observation)
        self.device = indexed(as_tensor(first).device)
        self._module = None if isinstance(first, torch.Tensor) else _module_of(first)
        self.shares_memory = self._module is None and self.device == CPU
        base = getattr(env, "unwrapped", env)
        self.unwrapped = self if base is env else base
        self._declares_rewards = any(
            hasattr(own, name)
            for own in (env, base)
            for name in ("reward_space", "single_reward_space")
        )
        # Wrappers that convert to tensors pass the mask to Gymnasium's environment unchanged.
        self._masks_are_arrays = isinstance(base, SyncVectorEnv | AsyncVectorEnv)
        self.reset = functools.wraps(env.reset)(lambda *args, **named: self._reset(*args, **named))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def __str__(self) -> str:
        return str(self._env)

    def to_native(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as the environment's kind of array."""
        return tensor if self._module is None else self._module.from_dlpack(tensor)

    def step_native(self, action: Any) -> Any:
        """Step with the environment's kind of arrays; return its five values."""
        result = step_values(self._env.step(action))
        self.last_observation = result[0]
        return result

    def step(self, action: Any) -> Any:
        """Step with numpy arrays; return the five values with numpy arrays."""
        return self.as_arrays(self.step_arrays(action))

    def step_arrays(self, action: Any) -> Any:
        """Step with numpy arrays; return the environment's five values."""
        if type(action) is np.ndarray and self.shares_memory:
            return self.step_native(torch.from_numpy(action))
        return self.step_native(mapped(self._from_array, action))

    def _from_array(self, array: Any) -> Any:
        return self.to_native(torch.from_numpy(array).to(self.device))

    def as_arrays(self, result: Any) -> Any:
        """Return the five values of a step with numpy arrays."""
        *values, info = result
        observation, reward, *flags = mapped(_array, values)
        info = mapped(_info_array, info)
        if not self._declares_rewards:
            reward = _flat(reward)
        return observation, reward, *map(_flat, flags), info

    def _reset(self, *args: Any, **named: Any) -> Any:
        options = named.get("options")
        if options is not None and not self._masks_are_arrays:
            mask = torch.from_numpy(np.array(options["reset_mask"])).to(self.device)
            named["options"] = {**options, "reset_mask": self.to_native(mask)}
        result = self._env.reset(*args, **named)
        if isinstance(result, tuple | list) and len(result) == 2:
            self.last_observation = result[0]
            return mapped(_array, result[0]), mapped(_info_array, result[1])
        return result


def _module_of(array: Any) -> Any:
    """Return the module with the function `from_dlpack` for arrays of this kind."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.partition(".")[0]]


def _flat(row: Any) -> Any:
    """Return rewards or flags [P, 1], or [] of one environment, as [P]."""
    if np.ndim(row) == 0:
        return np.reshape(row, 1)
    return row[:, 0] if np.ndim(row) == 2 and np.shape(row)[1] == 1 else row


def _array(value: Any) -> Any:
    if type(value) is torch.Tensor and value.dtype is not torch.bfloat16:  # the usual case
        return value.numpy(force=True)
    if not _is_tensor(value):
        return value
    tensor = as_tensor(value).to(CPU)
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _info_array(value: Any) -> Any:
    try:
        return _array(value)
    except (RuntimeError, TypeError):  # a sparse tensor, for example
        return value
