"""DeviceRecorder: record the entries that remain on the environments' device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycollect._core import Recorder, RolloutControl, Slab
from pycollect.data.frame import BatchLeaves
from pycollect.data.layout import Key, dotted, is_delivered, torch_dtype
from pycollect.data.tensordicts import rows_like
from pycollect.envs.base import Arrays, BoolArray, EnvBatch
from pycollect.policy.states import PolicyState


class DeviceRecorder:
    """Record rollouts of environments whose observations remain on their device.

    Observations, states and outputs of the policy are copied to new tensors of each rollout. The
    copies are queued on the device's current stream, and no step waits for them. The Recorder
    records flags, rewards, ids and counts on the host. The class has its methods.

    Args:
        current: Current observation by key, [*frame], or [P, *frame] for a batch. This class
            updates the entries of `env.spec.device_keys`.
        states: States of the policy, on the device. This class updates them.
    """

    def __init__(
        self,
        recorder: Recorder,
        env: EnvBatch,
        leaves: BatchLeaves,
        current: Mapping[Key, torch.Tensor],
        states: Sequence[PolicyState],
    ) -> None:
        self._host = recorder
        self._device = env.spec.device
        self._lead = env.spec.rows
        self._size = env.spec.batch_size
        self._leaves = leaves
        self._recorded = {leaf.key for leaf in leaves.all}
        staying = env.spec.device_keys
        keys = [leaf.key for leaf in (*env.spec.observation, *env.spec.step_only)]
        self._observed = [(at, key, current[key]) for at, key in enumerate(keys) if key in staying]
        self._host_places = [at for at, key in enumerate(keys) if key not in staying]
        self._states = states
        self._outputs = frozenset(leaf.key for leaf in leaves.outputs)
        self._taken: tuple[Any, ...] = ()
        self._step = 0
        self._buffers: dict[Key, torch.Tensor] = {}
        self.done: BoolArray = recorder.done

    def restart(self, observation: Arrays) -> None:
        self._host.restart(self._host_part(observation))
        for place, _, current in self._observed:
            current.copy_(observation[place])
        for state in self._states:
            state.current.copy_(state.initial)

    def begin(
        self, slab: Slab, row: int, policy_version: int, control: RolloutControl, steps: int
    ) -> None:
        self._host.begin(slab, row, policy_version, control, steps)
        self._step = 0
        self._buffers = {}
        carried = [(key, current) for _, key, current in self._observed]
        carried += [(state.leaf.key, state.current) for state in self._states]
        for key, current in carried:
            for place in (key, ("next", *key)):
                self._allocate(place, current.dtype, current.shape[len(self._lead) :], steps)
        for leaf in self._leaves.outputs:
            self._allocate(leaf.key, torch_dtype(leaf.dtype), leaf.shape, steps)

    def _allocate(self, key: Key, dtype: torch.dtype, frame: Sequence[int], steps: int) -> None:
        if key in self._recorded and is_delivered(key):
            shape = (*self._lead, steps, *frame)
            self._buffers[key] = torch.empty(shape, dtype=dtype, device=self._device)

    def take(self, values: tuple[Any, ...]) -> None:
        """Keep the policy's outputs for `record`; the caller passes actions to the environment."""
        self._taken = values

    def record(self, result: Sequence[Any]) -> int:
        observation, reward, terminated, truncated = result
        leaves = self._leaves.outputs
        outputs = self._taken[: len(leaves)]
        states = self._taken[len(leaves) : len(leaves) + len(self._states)]
        for leaf, value in zip(leaves, outputs, strict=True):
            self._write(leaf.key, torch.as_tensor(value))
        for place, key, current in self._observed:
            self._advance(key, current, observation[place])
        for state, value in zip(self._states, states, strict=True):
            self._advance(state.leaf.key, state.current, torch.as_tensor(value))
        self._step += 1
        rest = self._host_part(observation)
        return self._host.step(rest, reward, terminated, truncated, ())

    def _advance(self, key: Key, current: torch.Tensor, value: torch.Tensor) -> None:
        """Record the current and the next value, and make the next value the current one."""
        _check(("next", *key), value, current)
        if key not in self._outputs:  # the policy may write the root entry itself
            self._write(key, current)
        self._write(("next", *key), value)
        current.copy_(value)

    def _write(self, key: Key, value: torch.Tensor) -> None:
        buffer = self._buffers.get(key)
        if buffer is not None:
            cell = buffer.select(len(self._lead), self._step)
            _check(key, value, cell)
            cell.copy_(value, non_blocking=True)

    def reset(self, observation: Arrays) -> None:
        ended = torch.from_numpy(self.done).to(self._device)
        for place, _, current in self._observed:
            self._set_first(current, observation[place], ended)
        for state in self._states:
            self._set_first(state.current, state.initial, ended)
        self._host.reset(self._host_part(observation))

    def _set_first(self, current: torch.Tensor, first: torch.Tensor, ended: torch.Tensor) -> None:
        if self._lead:
            first = torch.where(rows_like(ended, current), first, current)
        current.copy_(first)

    def take_tensors(self) -> dict[Key, torch.Tensor]:
        """Return the entries of the last rollout on the device, [*batch, T, *frame] by key.

        T is the number of steps that the rollout has.
        """
        buffers, self._buffers = self._buffers, {}
        first = len(self._lead)
        return {
            key: buffer.narrow(first, 0, self._step).view(*self._size, self._step, *frame)
            for key, buffer in buffers.items()
            for frame in [buffer.shape[first + 1 :]]
        }

    def abandon(self) -> None:
        self._host.abandon()

    def _host_part(self, observation: Arrays) -> tuple[Any, ...]:
        return tuple(observation[place] for place in self._host_places)


def _check(key: Key, value: torch.Tensor, like: torch.Tensor) -> None:
    if value.shape != like.shape or value.dtype is not like.dtype:
        raise ValueError(
            f"{dotted(key)}: expected {like.dtype} of shape {list(like.shape)}, got "
            f"{value.dtype} of shape {list(value.shape)}"
        )
