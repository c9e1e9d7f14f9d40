"""Whole episodes from a stream of batches, the same number of each environment."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from pycollect.batch.frame import MASK
from pycollect.trajectories.split import split_trajectories

_ROW = ("collector", "row")


class Episodes:
    """Keeps batches until each environment has ended its number of episodes.

    Episodes that end first are short. Taking them from any environment would underweight long ones.

    Args:
        wanted: Total number of episodes; each of P environments has ``ceil(wanted / P)``.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._batches: list[TensorDictBase] = []
        self._ended = torch.zeros(0, dtype=torch.int64, device="cpu")

    @property
    def are_enough(self) -> bool:
        """Whether each environment has ended its number of episodes."""
        return bool(self._batches) and bool((self._ended >= self._quota).all())

    @property
    def _quota(self) -> int:
        return -(-self._wanted // len(self._ended))

    def add(self, td: TensorDictBase) -> None:
        """Add the next batch, [*P, T], of the same environments in the same order."""
        td = td.reshape(-1, td.shape[-1]) if td.ndim > 1 else td.unsqueeze(0)
        td.names = None
        if not self._batches:
            self._ended = torch.zeros(len(td), dtype=torch.int64, device="cpu")
        rows = torch.arange(len(td), device=td["next", "done"].device)
        td = td.copy().set(_ROW, rows.unsqueeze(1).expand(td.shape))
        self._batches.append(td)
        self._ended += td["next", "done"].flatten(2).any(-1).sum(1).cpu()

    def trajectories(self) -> TensorDictBase:
        """Return the episodes, ``[N, T_max]`` with ``("collector", "mask")``.

        They are ordered by environment, then by time.
        """
        split = split_trajectories(torch.cat(self._batches, 1))
        lengths = split[MASK].sum(1)
        last = lengths - 1
        every = torch.arange(len(split), device=last.device)
        complete = split["next", "done"].flatten(2).any(-1)[every, last]
        rows = torch.where(complete, split[_ROW][:, 0], -1)
        kept = [(rows == row).nonzero()[: self._quota, 0] for row in range(len(self._ended))]
        return split[torch.cat(kept)].exclude(_ROW)
