"""The end of a rollout on a device: trajectory ids, finished episodes, and the batch's leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from pycollect.data.devices import Event, accelerator
from pycollect.data.frame import MASK, TRAJ_IDS, BatchLeaves
from pycollect.data.layout import Key, is_delivered
from pycollect.data.tensordicts import rows_like
from pycollect.envs.base import EnvSpec
from pycollect.worker.report import Episode

# Episodes per rollout that are fetched with everything else; more need a second copy.
_EPISODES_PER_ENV, _FEW_EPISODES = 2, 256
_VALUES = 3  # of an episode: index of its last frame in [T * P], return, length


class RolloutCounts(NamedTuple):
    """The numbers of a rollout that the host needs."""

    frames: int  # number of frames, without dummy steps
    episodes: list[Episode]  # episodes that ended, by time, then by environment
    flags: list[bool]  # values of the flags passed to `DeviceTrajectories.number`


class Rollout(NamedTuple):
    """The flags and rewards of a rollout."""

    done: torch.Tensor  # whether an episode ends with the frame, bool [T, P]
    rewards: torch.Tensor  # rewards, float32 [T, P]
    valid: torch.Tensor | None  # whether a cell is no dummy step, bool [T, P]; ``None``: all

    def among(self, cells: torch.Tensor) -> torch.Tensor:
        """Return the cells (bool [T, P]) that have frames."""
        return cells if self.valid is None else cells & self.valid


class PendingCounts(NamedTuple):
    """The numbers of a rollout while they are copied to the host."""

    numbers: torch.Tensor  # the numbers on the device, float64: see `DeviceTrajectories.number`
    fetched: torch.Tensor  # the first of them on the host, valid after `ready`
    ready: Event  # the end of the copy


class DeviceTrajectories:
    """Number trajectories, and add up the rewards of episodes, across rollouts.

    New trajectories get their ids by environment, then by time. The host waits once per rollout,
    for one copy.

    Args:
        envs: Number of environments P.
        device: Device of the flags and rewards.
        asked: Number of further flags that are copied to the host.
    """

    def __init__(self, envs: int, device: torch.device, asked: int) -> None:
        self._envs, self._accelerator = envs, accelerator(device)
        self._counts = 3 + asked
        self.count = 0  # number of trajectories so far; ids count from 0
        # Whether the next frame of an environment is the first of a trajectory.
        self.fresh = torch.ones(envs, dtype=torch.bool, device=device)
        self._ids = torch.full((envs,), -1, dtype=torch.int64, device=device)
        # Return and length of the open episodes.
        self._open = torch.zeros(2, envs, dtype=torch.float64, device=device)
        self._rows = torch.arange(envs, device=device)
        self._next_id = torch.zeros((), dtype=torch.int64, device=device)

    def cut(self, rows: torch.Tensor | None = None) -> None:
        """End the open trajectories of `rows` (bool [P]), or of all environments."""
        if rows is None:
            rows = torch.ones_like(self.fresh)
        self.fresh |= rows
        self._open.masked_fill_(rows, 0)

    def number(
        self, rollout: Rollout, asked: Iterable[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Number the trajectories of a rollout, without waiting; `asked` are flags, bool [].

        Returns:
            Trajectory ids, int64 [T, P], -1 in dummy steps; whether a frame is the first of its
            trajectory, bool [T, P]; the argument of `fetch`: how many episodes have ended, the
            number of trajectories so far, the number of frames, the flags, then three values of
            each episode. It is one float64 tensor, for one copy; integers are exact up to 2^53.
        """
        done = rollout.done
        begins = self._begins(rollout)
        episode = begins.cumsum(0)  # from 1 in this rollout; 0 for an episode that began before it
        ids = self._numbers(rollout, episode)
        frames = self._next_id.new_full((), done.numel())
        if rollout.valid is not None:
            frames = rollout.valid.sum()
        counts = torch.stack([done.sum(), self._next_id, frames, *asked])
        return ids, begins, torch.cat([counts, self._episodes(rollout, episode).flatten()])

    def fetch(self, numbers: torch.Tensor) -> PendingCounts:
        """Start to copy the numbers of a rollout to the host; nothing may overwrite them."""
        most = self._counts + _VALUES * max(_EPISODES_PER_ENV * self._envs, _FEW_EPISODES)
        first = numbers[:most]
        fetched = self._accelerator.pinned(first.shape, first.dtype)
        fetched.copy_(first, non_blocking=True)
        return PendingCounts(numbers, fetched, self._accelerator.mark(soon=True))

    def wait(self, pending: PendingCounts) -> RolloutCounts:
        """Wait for the copy; return the numbers of the rollout."""
        pending.ready.synchronize()
        size = self._counts
        ended, self.count, frames, *flags = map(int, pending.fetched[:size].tolist())
        end = size + _VALUES * ended
        source = pending.fetched if end <= len(pending.fetched) else pending.numbers
        places, returns, lengths = source[size:end].cpu().view(-1, _VALUES).unbind(1)
        rows = places.long() % self._envs
        episodes = zip(rows.tolist(), returns.tolist(), lengths.long().tolist(), strict=True)
        return RolloutCounts(frames, list(episodes), list(map(bool, flags)))

    def _begins(self, rollout: Rollout) -> torch.Tensor:
        """Return which frames begin a trajectory; a dummy step may come between two of them."""
        ended = rollout.done if rollout.valid is None else rollout.done | ~rollout.valid
        begins = torch.cat([self.fresh[None], ended[:-1]])
        self.fresh.copy_(ended[-1])
        return rollout.among(begins)

    def _numbers(self, rollout: Rollout, episode: torch.Tensor) -> torch.Tensor:
        new = episode[-1]
        first = new.cumsum(0) - new + (self._next_id - 1)
        self._next_id += new.sum()
        ids = torch.where(episode > 0, episode + first, self._ids)
        self._ids.copy_(ids[-1])
        return ids if rollout.valid is None else ids.masked_fill_(~rollout.valid, -1)

    def _episodes(self, rollout: Rollout, episode: torch.Tensor) -> torch.Tensor:
        """Add up the rewards of each episode; keep the sums of open episodes.

        Returns:
            The values of the episodes that ended, by time, then by environment, float64 [T * P, 3].
            The host does not know yet how many rows have a meaning.
        """
        values = torch.ones(2, *episode.shape, dtype=torch.float64, device=episode.device)
        values[0].copy_(rollout.rewards)
        if rollout.valid is not None:
            values = torch.where(rollout.valid, values, 0.0)
        per_row = len(episode) + 1
        sums = values.new_zeros(2, self._envs, per_row)
        sums[:, :, 0] = self._open
        cells = (episode + self._rows * per_row).flatten()
        sums = sums.flatten(1).index_add_(1, cells, values.flatten(1))
        self._open.copy_(sums[:, cells[-self._envs :]]).masked_fill_(self.fresh, 0)
        done = rollout.done.flatten()
        at = torch.nonzero_static(done, size=len(done), fill_value=0).squeeze(1)
        return torch.cat([at.double().unsqueeze(0), sums[:, cells[at]]]).t()


REWARD, DONE, TERMINATED, TRUNCATED = (
    ("next", name) for name in ("reward", "done", "terminated", "truncated")
)
_VERSION: Key = ("collector", "policy_version")
_STEP_COUNT: Key = ("step_count",)


class DeviceBatches:
    """Makes batches, [P, T, *frame] for each leaf, from the memory of rollouts, [T, P, *frame].

    Args:
        set_truncated: Flag the last frame of every environment in every rollout.
    """

    def __init__(self, leaves: BatchLeaves, spec: EnvSpec, set_truncated: bool) -> None:
        self._leaves, self._envs, self._set_truncated = leaves, spec.num_envs, set_truncated
        self._no_flag = torch.zeros((), dtype=torch.bool, device=spec.device)
        # Of the next batches, on the device.
        self.policy_version = torch.zeros((), dtype=torch.int64, device=spec.device)
        self._constants = {MASK: ~self._no_flag, _VERSION: self.policy_version}

    def batch_of(
        self, memory: Mapping[Key, torch.Tensor], valid: torch.Tensor | None
    ) -> dict[Key, torch.Tensor]:
        """Return the leaves by key, perhaps as views of the `memory` [T, P, *frame]."""
        batch = dict(memory)
        if _STEP_COUNT in batch:
            batch["next", "step_count"] = batch[_STEP_COUNT] + 1
        if self._set_truncated:
            _flag_last_frames(batch, valid)
        shape = self._envs, len(batch[DONE])
        result: dict[Key, torch.Tensor] = {}
        for leaf in self._leaves.all:
            if not is_delivered(leaf.key):
                continue
            if leaf.key in batch:
                values = batch[leaf.key].transpose(0, 1)
            else:
                values = self._constants.get(leaf.key, self._no_flag).expand(*shape, *leaf.shape)
            if leaf.shape == (1,) and values.ndim == 2:
                values = values.unsqueeze(-1)
            if valid is not None:  # dummy steps are not frames
                empty = -1 if leaf.key == TRAJ_IDS else 0
                values = values.masked_fill(~rows_like(valid.t(), values), empty)
            result[leaf.key] = values
        return result


def _flag_last_frames(batch: dict[Key, torch.Tensor], valid: torch.Tensor | None) -> None:
    for key in (DONE, TRUNCATED):
        batch[key] = batch[key].clone()
    if valid is None:
        batch[DONE][-1] = batch[TRUNCATED][-1] = True
        return
    for key in (DONE, TRUNCATED):
        batch[key][-1] |= valid[-1]
        if len(valid) > 1:  # the frame before a dummy step
            batch[key][-2] |= ~valid[-1]
