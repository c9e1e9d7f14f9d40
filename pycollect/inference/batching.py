"""Which clients share a call of the policy, and how long a call waits for further requests."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pycollect._core import Memory
from pycollect.inference.client import JoinReply, JoinRequest, are_equal
from pycollect.inference.group import PolicyGroup, ServedPolicy
from pycollect.inference.options import InferenceOptions, ServerSettings

_GAIN = 0.1  # weight of a new measurement in a mean
_SHORTEST_CALL = 2e-4  # seconds; below it, predicting takes longer than it can gain
_SLACK = 0.1  # a request that is due is expected within this part of its client's step


class Wait(NamedTuple):
    """How long a call should wait."""

    requests: int = 0  # number of further requests to wait for; 0 to call the policy now
    seconds: float = 0.0  # maximum time to wait for them


@dataclass
class _Client:
    """A client's rhythm."""

    asked: float = 0.0
    answered: float | None = None  # time of the last answer; ``None`` before the first
    step: float | None = None  # mean time from an answer to the next request

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
        """Return how long a call waits for requests of `others`, until it serves `most`."""
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


@dataclass(eq=False)
class Client:
    """A worker, or a group of its environments, from the server's point of view."""

    number: int  # number of its slot
    part: int  # index of the group of the worker's environments
    scheduler: int  # index of its BatchScheduler; a reference would create a cycle
    place: int  # its index in that scheduler
    group: PolicyGroup | None = None  # PolicyGroup in which it has a row, once it has joined
    kept: Memory | None = None  # memory of a long reply, kept until the next one


class InferenceBatch(NamedTuple):
    """The clients of one call of the policy."""

    group: PolicyGroup  # PolicyGroup in which all of them have a row
    places: list[int]  # their indices in the scheduler
    numbers: list[int]  # numbers of their slots


class BatchScheduler:
    """Decides which clients are served together, in one call of the policy or in a few.

    At first, `clients` are expected. `timing`, or else the options, decide how long a call waits.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        options: InferenceOptions,
        clients: int,
        timing: CallTiming | None = None,
    ) -> None:
        self._policy, self._options = policy, options
        self._timing = timing
        self._until = 0.0  # with timing, the time at which requests no longer wait
        self._expected = clients  # number of clients that have not joined yet
        self._groups: list[PolicyGroup] = []
        self._held_since: float | None = None  # time since which requests wait for others
        self._called: tuple[Sequence[Client], list[InferenceBatch]] = ([], [])  # the last batches

    def refresh(self) -> None:
        for group in self._groups:
            group.refresh()

    def join(self, client: Client, joining: JoinRequest) -> JoinReply:
        """Give a client a row in a group of clients with the same needs."""
        needs, place = joining.needs, client.place
        self._called = ([], [])
        if client.group is not None and not are_equal(client.group.needs, needs):
            client.group.leave(place)
        fitting = (group for group in self._groups if are_equal(group.needs, needs))
        group = next((other for other in fitting if other.has_room(place)), None)
        if group is None:
            first = pickle.loads(joining.first)
            group = PolicyGroup(self._policy, needs, max(self._expected, 1), first)
            self._groups.append(group)
        if client.group is None:
            self._expected -= 1
        client.group = group
        return group.join(place)

    @property
    def max_wait(self) -> float | None:
        """Seconds until waiting requests are looked at again; ``None`` without a limit."""
        if self._held_since is None:
            return None
        timeout = self._options.server_timeout
        limits = [] if timeout is None else [self._held_since + timeout]
        if self._timing is not None:
            limits.append(self._until)
        return max(min(limits) - time.monotonic(), 0.0) if limits else None

    def lacking(self, asking: Sequence[Client], pending: int, others: Sequence[Client] = ()) -> int:
        """Return how many more requests this batch needs, at least; 0 if it can run now.

        The clients `asking` have a request; `pending` workers have sent one or may do so. If the
        timing decides, `others` are further clients that have joined.
        """
        if self._timing is not None:
            return self._worth_waiting_for(self._timing, asking, others)
        least = self._options.min_batch_size
        if least is None:  # then all clients of a scheduler are of one part
            return max(pending - len(asking), 0)
        workers = max(Counter(client.part for client in asking).values(), default=0)
        groups = (client.group for client in asking if client.group is not None)
        envs = sum(group.needs.env.num_envs for group in groups)
        return int(workers < pending and envs < least)

    def _worth_waiting_for(
        self, timing: CallTiming, asking: Sequence[Client], others: Sequence[Client]
    ) -> int:
        """Return for how many requests the batch should wait, and set the time limit."""
        groups = {id(client.group): client.group for client in asking if others}
        if len(groups) != 1:  # no worker to wait for, no request, or several calls
            return 0
        (group,) = groups.values()
        assert group is not None, "slot: expected a client that has joined"
        most = self._options.max_batch_size
        now = time.monotonic()
        wait = timing.wait(
            len(asking),
            [client.number for client in others if client.group is group],
            None if most is None else most // group.needs.env.num_envs,
            now,
        )
        self._until = now + wait.seconds
        return wait.requests

    def holds_back(self, lacking: int) -> bool:
        """Return whether the requests wait for this number of lacking ones."""
        if not lacking:
            self._held_since = None
            return False
        now, timeout = time.monotonic(), self._options.server_timeout
        if self._held_since is None:
            self._held_since = now
        if timeout is None or now < self._held_since + timeout:
            return True
        self._held_since = None
        return False

    def awaited(self, lacking: int, pending: int) -> int:
        """Return how many more requests must arrive before the server checks again, at least.

        Call it after `holds_back`.
        """
        options = self._options
        if self._timing is not None:
            return max(lacking, 1)
        if options.min_batch_size is not None:
            return 1  # one more request may be enough
        if options.server_timeout is not None and self._held_since is None:
            return 1  # the timeout starts when the next request is seen
        return lacking or pending  # served clients send new requests

    def calls(self, asking: Sequence[Client]) -> Sequence[InferenceBatch]:
        """Divide the requests into batches; reuse the last division if the clients are the same."""
        if asking != self._called[0]:
            self._called = (asking, list(self._calls(asking)))
        return self._called[1]

    def _calls(self, asking: Sequence[Client]) -> Iterator[InferenceBatch]:
        most = self._options.max_batch_size
        for group in {id(client.group): client.group for client in asking}.values():
            assert group is not None, "slot: expected a client that has joined"
            clients = [client for client in asking if client.group is group]
            count = len(clients) if most is None else max(most // group.needs.env.num_envs, 1)
            for begin in range(0, len(clients), count):
                chunk = clients[begin : begin + count]
                yield InferenceBatch(group, [c.place for c in chunk], [c.number for c in chunk])


def schedulers_for(
    settings: ServerSettings, policy: ServedPolicy, timing: CallTiming | None
) -> list[BatchScheduler]:
    """Return one BatchScheduler, or one per environment group if a call waits for all workers.

    With one per group, the first groups of all workers are served while their second groups step,
    and a seed determines the random draws. If calls do not wait for all workers, the groups can
    share calls.

    Two schedulers cannot deadlock: a worker that waits for its first group has sent requests for
    both groups, and a worker that waits for its second group has sent that request. If all workers
    wait, the requests at the second scheduler are complete.
    """
    options, parts = settings.options, settings.groups
    schedulers = parts if options.min_batch_size is None else 1
    clients = settings.workers * parts // schedulers
    return [BatchScheduler(policy, options, clients, timing) for _ in range(schedulers)]
