"""Processes that run workers: what an engine offers, how a process ended, and its CPU time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pycollect.errors import WorkerDied
from pycollect.transport.descendants import children_of, kill_orphans, kill_tree
from pycollect.transport.messages import Rollout, RolloutRequest, WorkerInfo, WorkerSpec
from pycollect.transport.shared_value import Shareable, SharedValue
from pycollect.transport.waiting import Waited

_NANOSECONDS = 1e9


def seconds_without_cpu(pid: int) -> float:
    """Seconds for which the main thread of that process, or of one below it, waited for a CPU.

    Of several processes the one that waited longest: whoever started them waits for that one. 0.0
    where the system does not tell, or there is no such process. Does not wait.
    """
    return max(_waited(pid), *(seconds_without_cpu(child) for child in children_of(pid)), 0.0)


def _waited(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / _NANOSECONDS
    return 0.0


class OtherProcess:
    """A process of this machine, which leads a group of its own.

    Raises:
        OSError: the system does not permit it, or has not the call.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._poll: select.poll | None = None  # None: it was gone already
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            weakref.finalize(self, os.close, descriptor)
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLIN)

    @property
    def is_gone(self) -> bool:
        """Whether none of its threads runs any more. Does not wait."""
        return self.wait_gone(0.0)

    def wait_gone(self, seconds: float | None) -> bool:
        """Wait until it is gone, for that time at most; return whether it is."""
        if self._poll is None:
            return True
        return bool(self._poll.poll(None if seconds is None else seconds * 1000))

    def kill_all(self) -> None:
        """Kill the process, its group and all its descendants, and wait for the process.

        Its number is no other process's as long as one of its group is there.
        """
        if not self.is_gone:
            kill_tree(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait_gone(None)
        kill_orphans()


def has_pidfd() -> bool:
    """Whether there are such descriptors: not before Linux 5.3, and not where it is forbidden."""
    try:
        OtherProcess(os.getpid())
    except (OSError, AttributeError):
        return False
    return True


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a worker's process.

    Attributes:
        line: One line that describes the end.
        account: Everything that is known about the end.
        error: Exception that reported the end, or ``None`` if it is being raised right now: a
            stored one would keep its own frames alive.
    """

    line: str
    account: str
    error: BaseException | None = None

    def death_of(self, spec: WorkerSpec) -> WorkerDied:
        """Return the error for the worker that ran in the process."""
        text = f"{spec.name} died: {self.line}"
        death = WorkerDied(text, spec.index, spec.incarnation, self.account)
        death.__cause__ = self.error
        return death


class WorkerProcess(Waited, Protocol):
    """The driver's end of a worker's process, from its start to its end."""

    @property
    def native(self) -> Any:
        """The process as its library knows it: multiprocessing's own, or an actor's handle."""

    def recent_log(self) -> str:
        """The last lines that its process logged, as far as they can be had."""


class StartingWorker(WorkerProcess, Protocol):
    """A worker that was started. Its first answer says that it is built."""

    @property
    def cpu_delay(self) -> float:
        """Seconds for which it was ready to run and had no CPU; 0.0 where that is not known.

        Does not wait.
        """

    def built(self) -> tuple[WorkerInfo, WorkerHandle]:
        """What the worker is, and the handle through which it is asked from now on. Waits.

        Raises WorkerDied where its process is gone, or what was raised while it was built.
        """


class WorkerHandle(WorkerProcess, Protocol):
    """The driver's end of a worker that is built: what was asked of it, oldest first.

    It may be the same object as the StartingWorker. Rows of a request that was dropped stay in use
    until the worker has answered it.

    Whatever waits for the worker raises WorkerDied where its process is gone; what the worker
    raised itself is raised as it was.
    """

    @property
    def in_place(self) -> bool:
        """Whether it shares memory with this process, and writes into the rows of its requests."""

    @property
    def transport(self) -> str:
        """What carries its rollouts, in words."""

    def submit(self, request: RolloutRequest) -> None:
        """Queue one rollout; weights that were assigned since the last one travel with it."""

    def stop(self) -> None:
        """The oldest rollout is to end after its current step. Does not wait; may come again."""

    def assign(self, serial: int, version: int, weights: SharedValue, acknowledge: bool) -> Any:
        """Give the worker weights for the next rollout that it starts, also one that is queued.

        Args:
            serial: grows with every call; of two that arrive, the higher one counts.
            version: the policy version that rollouts with these weights carry.
            weights: packed.
            acknowledge: send them now in any case.

        Returns:
            A call to wait for with `answer`, or None if nothing was sent now.
        """

    def set_hooks(self, hooks: Mapping[str, tuple[int, SharedValue]]) -> None:
        """Give the worker hooks for the next rollout that it starts, also one that is queued.

        Args:
            hooks: by name, a serial number that grows, and the hook, pickled.
        """

    def rollout(self) -> Rollout:
        """The oldest rollout, which stays the oldest until `pop`. Waits."""

    def pop(self) -> None:
        """The oldest rollout is done with."""

    def drop_rollouts(self) -> None:
        """Forget the rollouts that were not read."""

    def request(self, method: str, *arguments: Any) -> Any:
        """Queue a call of one of RemoteWorker's methods behind what is queued already."""

    def await_answer(self, call: Any, seconds: float) -> bool:
        """Sleep until a call of `request` has an answer, or can have none; return whether it is so.

        It ends after that time.
        """

    def answer(self, call: Any) -> Any:
        """What a call of `request` or `assign` returned. Waits."""

    def steps(self) -> int | None:
        """Steps of its life so far, None if that is not known now. Does not wait."""


H = TypeVar("H", bound=Waited)


class Engine(Protocol):
    """Starts workers and waits for them."""

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError that names a resource of which there is too little for these workers."""

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if that many bytes of rollouts in flight cannot be held.

        Args:
            in_place: of workers that write in place, or of those that do not.
        """

    def put(self, value: Shareable) -> SharedValue:
        """A value for several of these workers."""

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> StartingWorker:
        """Start a worker, which builds its environments at once.

        Args:
            policy: the pickled policy or its factory.
        """

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """

    def wait_closed(self, handles: Sequence[Waited], timeout: float | None = None) -> None:
        """Let workers close their environments, then end those that are still there.

        Args:
            timeout: seconds that they have for it; None: a time after which nobody closes any more.
        """

    def leave(self) -> None:
        """Give up what the engine itself holds. Idempotent."""


class NodePolicies(Protocol):
    """Knows what stands for the policy in workers on other nodes than this process's."""

    def policy_at(self, node: str, spec: WorkerSpec, options: Mapping[str, Any]) -> bytes | None:
        """What stands for it in that worker, which has come to that node, pickled; None: not yet.

        Does not wait: whoever asks does so again and again.

        Args:
            node: its engine's id of it.
            options: of that worker's process.

        Raises:
            WorkerDied: who was to call the policy there has ended.
        """


class NodeEngine(Engine, Protocol):
    """Starts who calls a policy for the workers of a node, beside the engine of the workers."""

    def serve_by(self, policies: NodePolicies) -> None:
        """Have workers on other nodes ask there for their policy. It does not hold it."""

    def options_on(self, node: str, of_worker: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of one on a node, for workers with these."""
