"""Predict from measurements whether a call of the policy should wait for further requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_GAIN = 0.1  # weight of a new measurement in a mean
_SHORTEST_CALL = 2e-4  # seconds; below it, predicting takes longer than it can gain
_SLACK = 0.1  # a request that is due is expected within this part of its client's step


class Wait(NamedTuple):
    """How long a call should wait.

    Attributes:
        requests: Number of further requests to wait for; 0 to call the policy now.
        seconds: Maximum time to wait for them.
    """

    requests: int = 0
    seconds: float = 0.0


@dataclass
class _Client:
    """A client's rhythm.

    Attributes:
        asked: Time of its last request.
        answered: Time of the last answer; ``None`` before the first.
        step: Mean time from an answer to the next request; ``None`` before the first.
    """

    asked: float = 0.0
    answered: float | None = None
    step: float | None = None

    def seconds_left(self, now: float) -> float | None:
        """Return the time until its next request; ``None`` if it is unknown or long overdue."""
        if self.answered is None or self.step is None or now > self.answered + 2 * self.step:
            return None
        return max(self.answered + self.step - now, _SLACK * self.step)


class CallTiming:
    """Measures calls of the policy and the time between a client's requests.

    Waiting for a request delays the requests that are there, but saves a call for the late one. A
    call waits if that lowers the sum of the times at which all of them are answered. So if the
    policy is slow, equally fast workers are served together, and no call waits for a slow worker.

    Attributes:
        is_slow: Whether the last call was so slow that a wait may pay. Otherwise the times of
            requests are not needed.
    """

    def __init__(self) -> None:
        self.is_slow = True
        self._calls: dict[int, float | None] = {}  # mean seconds, by number of clients
        self._clients: dict[int, _Client] = {}

    def saw(self, client: int, asked_at: float) -> None:
        """Note a client's request and when it was made. It may be seen several times."""
        own = self._clients.setdefault(client, _Client())
        if asked_at != own.asked:
            own.asked = asked_at
            if own.answered is not None:
                own.step = _mean(own.step, max(asked_at - own.answered, 0.0))

    def called(self, clients: Sequence[int], began: float, ended: float) -> None:
        """Note that a call of the policy has answered these clients."""
        count = len(clients)
        seconds = None  # the first call with that number binds, compiles or captures the policy
        if count in self._calls:
            seconds = _mean(self._calls[count], ended - began)
        self._calls[count] = seconds
        self.is_slow = seconds is None or seconds >= _SHORTEST_CALL
        if self.is_slow:
            for client in clients:
                self._clients.setdefault(client, _Client()).answered = ended

    def wait(self, asking: int, others: Iterable[int], most: int | None, now: float) -> Wait:
        """Return how long a call should wait for further requests.

        Args:
            asking: Number of clients with a request, at least 1.
            others: Clients that may send one.
            most: Maximum number of clients in a call. ``None`` means no limit.
            now: The present time.
        """
        alone = self._seconds_of(asking)
        if alone < _SHORTEST_CALL:
            return Wait()
        clients = [self._clients.get(other, _Client()) for other in others]
        left = sorted(wait for own in clients if (wait := own.seconds_left(now)) is not None)
        best, gain = Wait(), 0.0
        for late, wait in enumerate(left[: None if most is None else max(most - asking, 0)], 1):
            apart = asking * alone + late * (max(alone, wait) + self._seconds_of(late))
            together = (asking + late) * (wait + self._seconds_of(asking + late))
            if apart - together > gain:
                best, gain = Wait(late, wait), apart - together
        return best

    def _seconds_of(self, clients: int) -> float:
        """Return how long a call for that many clients takes; 0.0 before a call was measured.

        It takes no longer than one for more clients, which may have been measured later.
        """
        known = {count: seconds for count, seconds in self._calls.items() if seconds is not None}
        larger = [seconds for count, seconds in known.items() if count >= clients]
        return min(larger) if larger else known[max(known)] if known else 0.0


def _mean(before: float | None, new: float) -> float:
    """Return a moving mean that one long delay, such as a pause of the learner, hardly changes."""
    if before is None:
        return new
    return before + _GAIN * (min(new, 2 * before) - before)
