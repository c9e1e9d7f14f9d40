"""What a collector asks of whoever runs its workers elsewhere: Ray, or processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pycollect.engines.messages import Rollout, RolloutRequest, WorkerInfo, WorkerSpec
from pycollect.engines.shared_value import Shareable, SharedValue
from pycollect.engines.waiting import Waited


class WorkerProcess(Waited, Protocol):
    """The driver's end of a worker's process, from its start to its end."""

    @property
    def native(self) -> Any:
        """The process as its library knows it: multiprocessing's own, or an actor's handle."""

    def last_words(self) -> str:
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
