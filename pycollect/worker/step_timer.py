"""Where a worker's time goes, from the times of a sample of its steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

# Steps from one timed step to the next, in turn: no common period with episodes of fixed length.
# A timed step takes a few microseconds longer: of a step of 15 that is half a percent.
_GAPS = (37, 61, 43, 83, 47, 67)


class WorkerSeconds(NamedTuple):
    """Wall time of a worker since its first rollout began.

    Attributes:
        env: stepping and resetting environments.
        policy: choosing actions.
        record: writing into slabs, and what else a rollout takes.
        idle: between rollouts.
    """

    env: float = 0.0
    policy: float = 0.0
    record: float = 0.0
    idle: float = 0.0

    def report(self) -> dict[str, float]:
        """By name, JSON-able."""
        return self._asdict()


class StepTimer:
    """Measures whole rollouts, and splits their time as the sampled steps' is split.

    Reading the clock at every step would cost more than recording it does.

    Attributes:
        env: seconds of the sampled steps, likewise `policy` and `record`.
    """

    def __init__(self) -> None:
        self.env = self.policy = self.record = 0.0
        self._gaps = itertools.cycle(_GAPS)
        self._until = 1  # plain steps before the next timed one; the first ever is like no other
        self._rollouts = 0.0
        self._idle = 0.0
        self._began = 0.0
        self._ended: float | None = None

    def begin(self) -> None:
        """A rollout begins."""
        self._began = time.perf_counter()
        if self._ended is not None:
            self._idle += self._began - self._ended

    def end(self) -> None:
        """The rollout has ended, in whatever way."""
        self._ended = time.perf_counter()
        self._rollouts += self._ended - self._began

    def stretches(self, steps: int) -> Iterator[tuple[int, bool]]:
        """Cut a rollout: (so many plain steps, whether a timed one follows), again and again."""
        while steps > self._until:
            yield self._until, True
            steps -= self._until + 1
            self._until = next(self._gaps)
        self._until -= steps
        yield steps, False

    @property
    def seconds(self) -> WorkerSeconds:
        """The split so far; its parts add up to the time since the first rollout began."""
        sampled = self.env + self.policy + self.record
        scale = self._rollouts / sampled if sampled else 0.0
        env, policy = self.env * scale, self.policy * scale
        return WorkerSeconds(env, policy, self._rollouts - env - policy, self._idle)
