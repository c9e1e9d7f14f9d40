"""The workers of a collector: started, watched, replaced when they die, ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pycollect._core import Leaf
from pycollect.batch.extras import Extra
from pycollect.batch.layout import dotted
from pycollect.engines.messages import Order, RolloutNote, WorkerInfo, WorkerSpec
from pycollect.engines.protocol import Engine, StartingWorker, WorkerHandle, WorkerProcess
from pycollect.engines.shared_value import SharedValue
from pycollect.errors import WorkerDied, WorkerError

_BATCHES_REMEMBERED = 100  # a death is forgotten after so many delivered batches


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker is made from, as often as it has to be.

    Attributes:
        policy: the pickled policy or factory.
        options: of the engine, for the worker's process.
    """

    spec: WorkerSpec
    policy: bytes
    options: Mapping[str, Any]


@dataclass
class Member:
    """What the driver knows of one worker, whichever incarnation of it is there.

    Attributes:
        starting: what was started and not heard of yet, while its orders wait here; else None.
        handle, info: of what is built; while another starts in its place, of the dead one.
        orders: of rollouts that were asked for and not taken off, oldest first.
        beginning: what is asked of it before its first rollout: a method and its arguments.
        since_update: batches that it delivered since it last got weights.
        deaths: after how many delivered batches.
        leaving: it is asked for nothing more.
    """

    plan: WorkerPlan
    starting: StartingWorker | None
    handle: WorkerHandle = field(init=False)
    info: WorkerInfo = field(init=False)
    orders: deque[Order] = field(default_factory=deque)
    beginning: tuple[Any, ...] | None = None
    note: RolloutNote | None = None
    version: int = 0
    frames: int = 0
    since_update: int = 0
    deaths: list[int] = field(default_factory=list)
    leaving: bool = False

    @property
    def index(self) -> int:
        """The worker's id."""
        return self.plan.spec.index

    @property
    def incarnation(self) -> int:
        """How often it was replaced."""
        return self.plan.spec.incarnation

    @property
    def process(self) -> WorkerProcess:
        """Its process, whether or not the worker is built there."""
        return self.starting or self.handle

    @property
    def in_place(self) -> bool:
        """Whether it writes into the batch's own rows; while it starts: as it did before."""
        return self.handle.in_place

    def share(self, frames: int) -> None:
        """It is to collect that many per rollout, also whoever takes its place."""
        spec = self.plan.spec
        spec = replace(spec, options=replace(spec.options, frames=frames))
        self.plan = replace(self.plan, spec=spec)

    def order(self, order: Order) -> None:
        """Ask for one more rollout."""
        self.orders.append(order)
        if not self.starting:
            self.handle.submit(order)

    def drop(self) -> None:
        """Forget the rollouts that were asked for."""
        self.orders.clear()
        if not self.starting:
            self.handle.drop_rollouts()


class Workforce:
    """All workers of a collector, by id.

    Args:
        init_timeout: seconds until a worker must have built its environments.
        max_restarts: how often one worker is replaced; see `replace`.
    """

    def __init__(self, engine: Engine, init_timeout: float, max_restarts: int) -> None:
        self._engine = engine
        self._init_timeout = init_timeout
        self._max_restarts = max_restarts
        self._policies: dict[bytes, SharedValue] = {}
        self.members: list[Member] = []
        self.former: list[Member] = []

    def start(self, plans: Sequence[WorkerPlan]) -> list[Member]:
        """Start new workers and wait until they are built."""
        everyone = [*(member.plan for member in self.members), *plans]
        self._engine.check_resources([plan.options for plan in everyone])
        members = [Member(plan, self._started(plan)) for plan in plans]
        self.members = [*self.members, *members]
        self._await(members)
        for member in members:
            try:
                self.welcome(member)
            except WorkerDied as death:
                raise _with_words(death, str(death), member.process.last_words()) from death
        return members

    def _started(self, plan: WorkerPlan) -> StartingWorker:
        if plan.policy not in self._policies:
            self._policies[plan.policy] = self._engine.put(plan.policy)
        return self._engine.start(plan.spec, self._policies[plan.policy], plan.options)

    def _await(self, members: Sequence[Member]) -> None:
        deadline = time.monotonic() + self._init_timeout
        waiting = list(members)
        while waiting:
            ready = self.wait_any(waiting, max(deadline - time.monotonic(), 0.0))
            if ready is None:
                raise ValueError(
                    f"worker_init_timeout: workers {[member.index for member in waiting]} did not "
                    f"start within {self._init_timeout:.0f} s; their CPU, memory or other "
                    "resources are in use, or their environments take longer to build"
                )
            waiting = [member for member in waiting if member is not ready]

    def wait_any(self, members: Sequence[Member], timeout: float) -> Member | None:
        """One that is built, has answered its oldest call, or has died; None: none in that time."""
        processes = [member.process for member in members]
        ready = self._engine.wait_any(processes, timeout)
        return None if ready is None else members[processes.index(ready)]

    def welcome(self, member: Member) -> None:
        """A worker that was started is built: from now on it is asked through its handle."""
        assert member.starting is not None
        member.info, member.handle = member.starting.built()
        member.starting = None

    def replace(self, member: Member, cause: WorkerDied, batches: int) -> None:
        """Start a worker anew from its factories, in the place of one that died.

        Args:
            batches: delivered so far. A death is forgotten after 100 more.

        Raises:
            WorkerError: it died too often; with its id, the cause and its last log lines.
        """
        words = member.process.last_words()
        member.process.kill()
        recent = [death for death in member.deaths if death > batches - _BATCHES_REMEMBERED]
        member.deaths = [*recent, batches]
        if len(member.deaths) > self._max_restarts:
            text = f"{cause}; it was replaced {len(recent)} times (max_worker_restarts)"
            raise _with_words(cause, text, words) from cause
        spec = replace(member.plan.spec, incarnation=member.incarnation + 1)
        member.plan = replace(member.plan, spec=spec)
        member.starting = self._started(member.plan)

    def release(self, member: Member) -> None:
        """A worker is not one of the present ones any more."""
        # A list of its own: another thread may be going through the old one.
        self.members = [other for other in self.members if other is not member]
        self.former.append(member)

    def close(self, timeout: float | None = None) -> None:
        """End all workers. They have that many seconds to close their environments."""
        members = [*self.members, *self.former]
        self._engine.wait_closed([member.process for member in members], timeout)
        for member in members:
            member.orders.clear()


def _with_words(death: WorkerDied, text: str, words: str) -> WorkerError:
    """The error that tells the caller of a death, with what the worker logged last."""
    return WorkerError(
        f"{text}\nits last log lines:\n{words}" if words else text,
        death.worker,
        death.incarnation,
        death.remote_traceback,
    )


def check_alike(infos: Mapping[int, WorkerInfo]) -> None:
    """Raise ValueError if workers of a sync collector deliver different things."""
    (first, reference), *others = infos.items()
    for index, info in others:
        if info.batch_size != reference.batch_size:
            raise ValueError(
                "create_env_fn: expected environments alike in all workers of a sync collector; "
                f"worker {first} has the batch size {list(reference.batch_size)}, "
                f"worker {index} {list(info.batch_size)}"
            )
        ours: tuple[Leaf | Extra, ...] = (
            *reference.leaves.layout().leaves,
            *reference.leaves.extras,
        )
        theirs: tuple[Leaf | Extra, ...] = (*info.leaves.layout().leaves, *info.leaves.extras)
        if ours != theirs:
            odd = [leaf for leaf in [*ours, *theirs] if (leaf in ours) != (leaf in theirs)]
            raise ValueError(
                "create_env_fn: expected the same keys, dtypes and shapes from all workers of a "
                f"sync collector; worker {index} differs from worker {first} in "
                f"{sorted({dotted(leaf.key) for leaf in odd})}"
            )


@dataclass
class _Seen:
    incarnation: int
    steps: int
    since: float


class Watch:
    """Asks workers how many steps they made, and tells which make none any more.

    Args:
        timeout: seconds without a step; None: nobody is ever overdue.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._seen: dict[int, _Seen] = {}
        self._looked = time.monotonic()

    def patience(self, most: float) -> float:
        """How long to wait before the workers are looked at again, seconds."""
        return most if self._timeout is None else min(most, self._timeout / 4)

    def heard_of(self, member: Member) -> None:
        """A worker delivered something, or was replaced."""
        self._seen.pop(member.index, None)

    def overdue(self, members: Sequence[Member]) -> list[Member]:
        """Those of them that made no step for the time-out. Workers that start are left alone.

        Looks only now and then, so that it may be asked before every batch.
        """
        now = time.monotonic()
        if self._timeout is None or now - self._looked < self._timeout / 4:
            return []
        self._looked = now
        return [member for member in members if not member.starting and self._is_late(member)]

    def _is_late(self, member: Member) -> bool:
        assert self._timeout is not None
        now = time.monotonic()
        steps = member.handle.steps()
        seen = self._seen.get(member.index)
        moved = seen is not None and steps is not None and steps != seen.steps
        if seen is None or moved or seen.incarnation != member.incarnation:
            self._seen[member.index] = _Seen(member.incarnation, steps or 0, now)
            return False
        return now - seen.since >= self._timeout
