"""What a collector asks of whoever runs its workers elsewhere: Ray, or processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pycollect.engines.messages import Order, Rollout, WorkerInfo, WorkerSpec


class WorkerHandle(Protocol):
    """The driver's end of one worker: what was asked of it and not read yet, oldest first.

    Whatever waits for the worker raises WorkerDied where its process is gone; what the worker
    raised itself is raised as it was.
    """

    index: int
    incarnation: int

    @property
    def in_place(self) -> bool:
        """Whether it shares memory with this process, and writes into the rows of its orders.

        Known once the worker is built.
        """

    def read_info(self) -> WorkerInfo:
        """The answer to the building of the worker, its first call. Waits."""

    def submit(self, order: Order) -> None:
        """Queue one rollout; weights that were assigned since the last one travel with it."""

    def stop(self) -> None:
        """The oldest rollout is to end after its current step. Does not wait; may come again."""

    def assign(self, edition: int, version: int, weights: Any, acknowledge: bool) -> Any:
        """Give the worker weights for the next rollout that it starts, also one that is queued.

        Args:
            edition: grows with every call; of two that arrive, the higher one counts.
            version: the policy version that rollouts with these weights carry.
            weights: what the engine's `put` returned.
            acknowledge: send them now in any case.

        Returns:
            A call to wait for with `answer`, or None if nothing was sent now.
        """

    def set_hooks(self, hooks: Mapping[str, tuple[int, Any]]) -> None:
        """Give the worker hooks for the next rollout that it starts, also one that is queued.

        Args:
            hooks: by name, an edition that grows, and the hook, pickled, as `put` returned it.
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

    def last_words(self) -> str:
        """The last lines that its process logged, as far as they can be had."""

    def kill(self) -> None:
        """End the worker's process. Where it shares memory with this one, it is gone then."""


H = TypeVar("H", bound=WorkerHandle)


class Engine(Protocol[H]):
    """Starts workers and waits for them."""

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError that names a resource of which there is too little for these workers."""

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if that many bytes of rollouts in flight cannot be held.

        Args:
            in_place: of workers that write in place, or of those that do not.
        """

    def put(self, value: Any) -> Any:
        """Something that stands for a value in calls of several workers."""

    def start(self, spec: WorkerSpec, policy: Any, options: Mapping[str, Any]) -> H:
        """Start a worker, which builds its environments at once.

        Args:
            policy: the pickled policy or its factory, as `put` returned it.
        """

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """

    def wait_closed(self, handles: Sequence[H], timeout: float | None = None) -> None:
        """Let workers close their environments, then end those that are still there.

        Args:
            timeout: seconds that they have for it; None: a time after which nobody closes any more.
        """

    def leave(self) -> None:
        """Give up what the engine itself holds. Idempotent."""
