"""Keep pace with the learner: bounds of the policy lag, and of frames per update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pycollect.data.weights import PolicyVersion
from pycollect.driver.flow import Flow

_UPDATES_REMEMBERED = 8


class Pace(NamedTuple):
    """How the learner alternates between batches and weight updates."""

    batches: int = 1  # minimum number of batches that it takes between two updates, at least 1
    versions: int = 1  # maximum number of policy versions that it then counts at once, at least 1


def first_too_late(slacks: Iterable[int], before_update: int, pace: Pace) -> int | None:
    """Return the slack of a rollout that may become too old, or ``None`` if all can be delivered.

    Rollouts are delivered one per batch, in the order of their slacks: by how many policy versions
    each may still fall behind. The learner takes `before_update` batches before its next update,
    and keeps `pace` after that.
    """
    for position, slack in enumerate(sorted(slacks)):
        if position >= before_update + slack // pace.versions * pace.batches:
            return slack
    return None


class PolicyLagLimit:
    """Admits rollouts so that none is delivered more than `limit` policy versions late.

    It assumes that the learner keeps the pace of its last updates. Until it has seen two of them,
    it assumes an update after every batch.
    """

    def __init__(self, limit: int, version: PolicyVersion) -> None:
        self._limit, self._version = limit, version
        self._first, self._seen = version.first, version.number
        self._since_update = 0  # batches
        self._gaps: deque[int] = deque(maxlen=_UPDATES_REMEMBERED)
        self._jumps: deque[int] = deque(maxlen=_UPDATES_REMEMBERED)

    def look(self) -> None:
        """Note whether there was an update; call this before each batch."""
        number, first = self._version.number, self._version.first
        if number == self._seen and first == self._first:
            return
        if first == self._first:  # else another run continues
            if self._jumps:
                self._gaps.append(self._since_update)
            self._jumps.append(number - self._seen)
        self._first, self._seen, self._since_update = first, number, 0

    def delivered(self) -> None:
        """Count a batch that the learner gets now."""
        self._since_update += 1

    @property
    def pace(self) -> Pace:
        return Pace(max(1, min(self._gaps, default=1)), max(self._jumps, default=1))

    def may_start(self, versions: Sequence[int], learner_waits: bool, at_once: int) -> bool:
        """Return whether another rollout may start with the current weights.

        Args:
            versions: Policy versions of the rollouts that were requested and not delivered yet.
            learner_waits: No update comes before the next batch is delivered.
            at_once: Number of rollouts that workers can make at the same time.
        """
        slacks = self._slacks(versions)
        if learner_waits and not self._jumps and len(slacks) < min(self._since_update, at_once):
            return True  # the learner does not train yet
        first = self._before_update(1 if learner_waits else 0)
        return first_too_late([*slacks, self._limit], first, self.pace) is None

    def most_recent_due(self, versions: Sequence[int]) -> int | None:
        """Return the newest version that may be delivered next; ``None`` if any may."""
        after = max(self._before_update(1) - 1, 0)
        slack = first_too_late(self._slacks(versions), after, self.pace)
        return None if slack is None else self._version.number - (self._limit - slack)

    def _before_update(self, least: int) -> int:
        return max(self.pace.batches - self._since_update, least)

    def _slacks(self, versions: Sequence[int]) -> list[int]:
        """Return the slack of each rollout that is not too old already."""
        slacks = (self._limit - self._version.lag(version) for version in versions)
        return [slack for slack in slacks if slack >= 0]


class Pacing:
    """Limits the frames of a stream by the number of updates, and calls `wake` after each."""

    def __init__(self, flow: Flow, wake: Callable[[], None]) -> None:
        self._flow, self._wake = flow, wake
        self._updates = 0
        self._first: tuple[int, int] | None = None  # frames and updates when it began

    def count_update(self) -> None:
        self._updates += 1
        self._wake()

    def notify(self) -> None:
        """Check again whether more frames are allowed, because the stream has changed."""
        if self._flow.options.max_frames_per_update is not None:
            self._wake()

    def begin(self) -> None:
        """Count frames and updates from now on, unless that has begun."""
        if self._first is None:
            self._first = self._flow.frames_collected, self._updates

    def restart(self) -> None:
        """Count anew, because the stream continues another run."""
        if self._first is not None:
            self._first = None
            self.begin()
            self._wake()

    def allows(self, batch: int) -> bool:
        """Return whether a batch of that many frames may be collected, or the stream has ended."""
        flow, limit = self._flow, self._flow.options.max_frames_per_update
        if limit is None or flow.has_ended:
            return True
        if flow.queue is not None and not flow.written_before + flow.ledger.delivered:
            return True  # no trajectory is complete yet, so the learner cannot begin
        assert self._first is not None
        frames, updates = self._first
        warm_up = max(flow.options.init_random_frames - flow.written_before - frames, 0)
        allowed = frames + warm_up + max(limit, batch) + limit * (self._updates - updates)
        return flow.frames_collected + batch <= allowed
