"""DeviceRecorder: records what stays on a device, beside the Recorder of what comes to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycollect._core import Recorder, RolloutControl, RolloutHeader, Slab
from pycollect.batch import BatchLeaves
from pycollect.envs.base import Arrays, BoolArray, EnvBatch
from pycollect.layout import Key, dotted, is_delivered, torch_dtype


class DeviceRecorder:
    """A Recorder of environments whose observations stay on their device.

    Observations and a policy's outputs are copied there, by the device's current stream, into
    tensors of each rollout's own; no step waits for them. Flags, rewards, ids, counts and a
    policy's states are the Recorder's, on the host.

    Args:
        recorder: of everything else, over a layout without these leaves.
        leaves: of a batch.
        current: the current observation by key, [*frame], or [P, *frame] where batched; those that
            stay are kept up to date here.
        staying: the keys of the observations that stay.
    """

    def __init__(
        self,
        recorder: Recorder,
        env: EnvBatch,
        leaves: BatchLeaves,
        current: Mapping[Key, torch.Tensor],
        staying: frozenset[Key],
    ) -> None:
        self._host = recorder
        self._device = env.device
        self._lead = (env.num_envs,) if env.batched else ()
        self._size = env.batch_size
        self._leaves = leaves
        given = [leaf.key for leaf in (*env.observation, *env.step_only)]
        self._observed = [(at, key, current[key]) for at, key in enumerate(given) if key in staying]
        self._elsewhere = [at for at, key in enumerate(given) if key not in staying]
        self._outputs = len(leaves.outputs)
        self._values = self._outputs + len(leaves.states)
        self._taken: tuple[Any, ...] = ()
        self._step = 0
        self._rooms: dict[Key, torch.Tensor] = {}
        self.done: BoolArray = recorder.done

    @property
    def frames(self) -> int:
        """See :class:`Recorder`."""
        return self._host.frames

    def restart(self, observation: Arrays) -> None:
        """See :class:`Recorder`."""
        self._host.restart(self._for_the_host(observation))
        for place, _, current in self._observed:
            current.copy_(observation[place])

    def begin(
        self, slab: Slab, row: int, policy_version: int, control: RolloutControl, steps: int
    ) -> None:
        """See :class:`Recorder`; the rollout is not to be stopped before its last step."""
        self._host.begin(slab, row, policy_version, control, steps)
        self._step = 0
        self._rooms = {}
        for _, key, current in self._observed:
            for place in (key,) if self._leaves.compact else (key, ("next", *key)):
                self._make_room(place, current.dtype, current.shape[len(self._lead) :], steps)
        for leaf in self._leaves.outputs:
            self._make_room(leaf.key, torch_dtype(leaf.dtype), leaf.shape, steps)

    def _make_room(self, key: Key, dtype: torch.dtype, frame: Sequence[int], steps: int) -> None:
        shape = (*self._lead, steps, *frame)
        self._rooms[key] = torch.empty(shape, dtype=dtype, device=self._device)

    def take(self, values: tuple[Any, ...]) -> None:
        """See :class:`Recorder`; the env is given tensors by whoever steps it."""
        self._taken = values

    def record(self, result: Sequence[Any]) -> int:
        """See :class:`Recorder`."""
        observation, reward, terminated, truncated = result
        outputs, states = self._taken[: self._outputs], self._taken[self._outputs : self._values]
        for place, key, current in self._observed:
            self._write(key, current)
            self._write(("next", *key), observation[place])
            current.copy_(observation[place])
        for leaf, value in zip(self._leaves.outputs, outputs, strict=True):
            self._write(leaf.key, torch.as_tensor(value))
        self._step += 1
        on_host = tuple(state.cpu() for state in states)
        rest = self._for_the_host(observation)
        return self._host.step(rest, reward, terminated, truncated, (), on_host)

    def _write(self, key: Key, value: torch.Tensor) -> None:
        room = self._rooms.get(key)
        if room is None:
            return
        cell = room.select(len(self._lead), self._step)
        if value.shape != cell.shape or value.dtype is not cell.dtype:
            raise ValueError(
                f"{dotted(key)}: expected {cell.dtype} of shape {list(cell.shape)}, got "
                f"{value.dtype} of shape {list(value.shape)}"
            )
        cell.copy_(value, non_blocking=True)

    def reset(self, observation: Arrays) -> None:
        """See :class:`Recorder`."""
        ended = torch.from_numpy(self.done).to(self._device)
        for place, _, current in self._observed:
            value = observation[place]
            if self._lead:
                rows = ended.view(-1, *[1] * (current.ndim - 1))
                value = torch.where(rows, value, current)
            current.copy_(value)
        self._host.reset(self._for_the_host(observation))

    def finish(self, worker: int, incarnation: int, sequence: int) -> RolloutHeader:
        """See :class:`Recorder`."""
        return self._host.finish(worker, incarnation, sequence)

    def take_tensors(self) -> dict[Key, torch.Tensor]:
        """What was recorded on the device by the last rollout, [*batch, T, *frame] by key."""
        rooms, self._rooms = self._rooms, {}
        first = len(self._lead)
        return {
            key: room.view(*self._size, *room.shape[first:])
            for key, room in rooms.items()
            if is_delivered(key)
        }

    def abandon(self) -> None:
        """See :class:`Recorder`."""
        self._host.abandon()

    def take_episodes(self) -> list[tuple[int, float, int]]:
        """See :class:`Recorder`."""
        return self._host.take_episodes()

    def _for_the_host(self, observation: Arrays) -> tuple[Any, ...]:
        return tuple(observation[place] for place in self._elsewhere)
