"""What environments tell of the episodes that end, and the return of each."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pycollect.scheme.names import TRAIN_REWARD
from pycollect.scheme.protocols import Infos

_RECENT = 100  # as many as other libraries average


class EpisodeReturns:
    """Sums the rewards of P environments, episode by episode."""

    def __init__(self) -> None:
        self._running: Tensor | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def restart(self) -> None:
        """All environments were reset."""
        self._running = None

    def add(self, reward: Tensor, ended: Sequence[int]) -> None:
        """One step: rewards ``[P, 1]``, and which environments' episodes have ended."""
        running = reward.clone() if self._running is None else self._running + reward
        if ended:
            self._recent.extend(running[ended, 0].tolist())
            running[ended] = 0.0
        self._running = running

    @property
    def mean(self) -> float:
        """Of the last 100 episodes; nan before one has ended."""
        return float(np.mean(self._recent)) if self._recent else float("nan")


class EpisodeInfos:
    """Collects the numbers that environments tell of episodes that have ended."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[float]] = defaultdict(list)

    def add(self, infos: Infos, ended: Sequence[int]) -> None:
        """One step: its infos, and which environments' episodes have ended."""
        if isinstance(infos, Mapping):
            for name, values in infos.items():
                if ended and isinstance(values, np.ndarray):
                    self._numbers[_named(name)].extend(values[list(ended)])
            return
        for place in ended:
            for name, value in infos[place].get("episode", {}).items():
                if isinstance(value, (float, int, np.number)):
                    self._numbers[_named(name)].append(float(value))

    def means(self) -> dict[str, Any]:
        """The mean of each number over the episodes that have ended."""
        return {name: np.mean(values) for name, values in self._numbers.items()}


def _named(name: str) -> str:
    return TRAIN_REWARD if name == "r" else name
