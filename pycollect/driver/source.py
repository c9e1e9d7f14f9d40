"""The protocol of a source of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDictBase

from pycollect.driver.in_process import OwnStreams
from pycollect.driver.policy_place import PolicyPlace
from pycollect.driver.random_streams import GroupStreams


class Source(Protocol):
    """Produces batches, with one worker in this process or with workers in other processes.

    It writes to the Flow that was passed to its constructor, and has no reference to a collector.
    """

    @property
    def policy(self) -> Any:
        """The caller's policy; ``None`` for random actions, or if the workers built the policy."""

    @property
    def is_remote(self) -> bool:
        """Whether the workers are in other processes."""

    @property
    def place(self) -> PolicyPlace:
        """Where the policy is called, and how it gets new weights."""

    @property
    def streams(self) -> OwnStreams | GroupStreams:
        """Random streams of the workers, for use while no rollout is in flight."""

    @property
    def batch_frames(self) -> int:
        """Number of frames in a full batch."""

    @property
    def policy_lag(self) -> dict[int, int]:
        """Policy versions by which each worker's last delivered rollout was behind, 0 before it."""

    def start(self) -> None:
        """Prepare for collection, and check the environments."""

    def collect(self) -> None:
        """Produce the next batch and store it as the flow's `unclaimed`; its frames stay in flight.

        An interrupt discards an incomplete batch. Changes that must agree with each other are made
        in an uninterruptible block, which also sets `unclaimed`.
        """

    def before_delivery(self, td: TensorDictBase) -> None:
        """Call the hooks for a batch that is about to be delivered."""

    def drop(self) -> None:
        """Forget the rollouts that were requested from workers."""

    def end_trajectories(self, workers: Iterable[int]) -> None:
        """Give later frames of these workers new trajectory ids, because a rollout was dropped."""

    def set_hook(
        self, name: str, hook: Callable[..., Any] | None, workers: Sequence[int] | None = None
    ) -> None:
        """Call this hook from the next rollout on.

        A worker process closes its copy of a hook that has a method `close`.

        Args:
            name: Name of the hook.
            hook: Function to call, or ``None`` to remove the hook.
            workers: Ids of the workers that call it. Defaults to ``None``: all, also later ones.
        """

    def call(self, function: Callable[..., Any], calls: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call a function in workers, between two of their rollouts.

        Args:
            function: Called with the worker, and with the arguments for that worker.
            calls: Arguments by worker id.

        Returns:
            The results, in the order of workers.
        """

    def report(self) -> dict[str, Any]:
        """Return the entries of `stats` that describe this source and the stream."""

    def check_close_env(self, close_env: bool) -> None:
        """Raise RuntimeError if `close_env` is false but environments end with the collector."""

    def close(self, timeout: float | None, close_env: bool) -> None:
        """End the workers and close the environments. Idempotent."""
