"""Number trajectories and find finished episodes of rollouts with flags on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from pycollect.data.devices import accelerator
from pycollect.data.upload import Fetch
from pycollect.worker.report import Episode

# Episodes per rollout that are fetched with everything else; more need a second copy.
_EPISODES_PER_ENV, _FEW_EPISODES = 2, 256


class RolloutCounts(NamedTuple):
    """The numbers of a rollout that the host needs.

    Attributes:
        frames: Number of frames, without dummy steps.
        episodes: Episodes that ended, by time, then by environment.
        flags: Values of the flags passed to `DeviceTrajectories.number`.
    """

    frames: int
    episodes: list[Episode]
    flags: list[bool]


class Rollout(NamedTuple):
    """The flags and rewards of a rollout.

    Attributes:
        done: Whether an episode ends with the frame, bool [T, P].
        rewards: Rewards, float32 [T, P].
        valid: Whether a cell is a frame and not a dummy step, bool [T, P]. ``None`` if no cell is a
            dummy step.
    """

    done: torch.Tensor
    rewards: torch.Tensor
    valid: torch.Tensor | None

    def among(self, cells: torch.Tensor) -> torch.Tensor:
        """Return the cells (bool [T, P]) that have frames."""
        return cells if self.valid is None else cells & self.valid


class PendingCounts(NamedTuple):
    """The numbers of a rollout while they are copied to the host.

    Attributes:
        fetch: Copies them.
        fetched: Their memory on the host, valid after a wait for `fetch`.
        done: Whether an episode ends with the frame, bool [T, P].
        sums: Index of each frame's episode, int64 [T, P], and the returns and lengths of all
            episodes by index.
    """

    fetch: Fetch
    fetched: tuple[torch.Tensor, ...]
    done: torch.Tensor
    sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DeviceTrajectories:
    """Number trajectories, and add up the rewards of episodes, across rollouts.

    New trajectories get their ids by environment, then by time. The host waits once per rollout,
    for one copy.

    Args:
        envs: Number of environments P.
        device: Device of the flags and rewards.

    Attributes:
        count: Number of trajectories so far; ids count from 0.
        fresh: Whether the next frame of an environment is the first of a trajectory, bool [P].
    """

    def __init__(self, envs: int, device: torch.device) -> None:
        self._envs = envs
        # A CUDA graph always copies to the same host memory, so other rollouts use another Fetch.
        self._fetch, self._captured_fetch = (Fetch(accelerator(device), device) for _ in "12")
        self.count = 0
        self.fresh = torch.ones(envs, dtype=torch.bool, device=device)
        self._ids = torch.full((envs,), -1, dtype=torch.int64, device=device)
        self._returns = torch.zeros(envs, dtype=torch.float64, device=device)
        self._lengths = torch.zeros(envs, dtype=torch.int64, device=device)
        self._rows = torch.arange(envs, device=device)
        self._next_id = torch.zeros((), dtype=torch.int64, device=device)

    def cut(self, rows: torch.Tensor | None = None) -> None:
        """End the open trajectories of `rows` (bool [P]), or of all environments."""
        if rows is None:
            rows = torch.ones_like(self.fresh)
        self.fresh |= rows
        self._returns.masked_fill_(rows, 0)
        self._lengths.masked_fill_(rows, 0)

    def number(
        self, rollout: Rollout, asked: Iterable[torch.Tensor], captured: bool
    ) -> tuple[torch.Tensor, torch.Tensor, PendingCounts]:
        """Number the trajectories of a rollout, without waiting.

        Args:
            rollout: Its flags and rewards.
            asked: Further flags to copy to the host, bool [] each.
            captured: Whether a CUDA graph may repeat this call.

        Returns:
            Trajectory ids, int64 [T, P], -1 in dummy steps; whether a frame is the first of its
            trajectory, bool [T, P]; the argument of `wait_for_counts`.
        """
        done = rollout.done
        begins = self._begins(rollout)
        episode = begins.cumsum(0)  # from 1 in this rollout; 0 for an episode that began before it
        ids = self._numbers(rollout, episode)
        frames = done.new_full((), done.numel(), dtype=torch.int64)
        if rollout.valid is not None:
            frames = rollout.valid.sum()
        counts = torch.stack([done.sum(), self._next_id, frames, *asked])
        sums = self._sums(rollout, episode)
        fetch = self._captured_fetch if captured else self._fetch
        fetched = fetch.start([*_episodes(self._first_ends(done), sums), counts])
        return ids, begins, PendingCounts(fetch, fetched, done, sums)

    def _first_ends(self, done: torch.Tensor) -> torch.Tensor:
        """Return the cells with which episodes end, as indices into [T * P].

        The number of indices is fixed, because the host would have to wait to know how many
        episodes ended.
        """
        most = min(done.numel(), max(_EPISODES_PER_ENV * self._envs, _FEW_EPISODES))
        return torch.nonzero_static(done.flatten(), size=most, fill_value=0).squeeze(1)

    def wait_for_counts(self, pending: PendingCounts) -> RolloutCounts:
        """Wait for the device; return the numbers of the last rollout."""
        pending.fetch.wait()
        *fetched, counts = pending.fetched
        ended, self.count, frames, *flags = counts.tolist()
        if ended > len(fetched[0]):
            at = pending.done.flatten().nonzero().squeeze(1)
            fetched = [values.cpu() for values in _episodes(at, pending.sums)]
        places, returns, lengths = (values[:ended].tolist() for values in fetched)
        rows = [place % self._envs for place in places]
        episodes = list(zip(rows, returns, lengths, strict=True))
        return RolloutCounts(frames, episodes, list(map(bool, flags)))

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

    def _sums(
        self, rollout: Rollout, episode: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add up the rewards of each episode; keep the sums of open episodes."""
        rewards, valid = rollout.rewards.double(), rollout.valid
        if valid is not None:
            rewards = torch.where(valid, rewards, 0.0)
        steps = torch.ones_like(episode) if valid is None else valid.long()
        per_row = len(episode) + 1
        cells = episode + self._rows * per_row
        sums = []
        for carried, values in ((self._returns, rewards), (self._lengths, steps)):
            total = torch.zeros(self._envs, per_row, dtype=values.dtype, device=values.device)
            total[:, 0] = carried
            total = total.flatten().index_add_(0, cells.flatten(), values.flatten())
            carried.copy_(total[cells[-1]]).masked_fill_(self.fresh, 0)
            sums.append(total)
        return cells, sums[0], sums[1]


def _episodes(
    at: torch.Tensor, sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the indices of last frames, and the returns and lengths of their episodes."""
    cells, returns, lengths = sums
    ended = cells.flatten()[at]
    return at, returns[ended], lengths[ended]
