"""The protocol of a source of batches, and a batch on its way to the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from pycollect._core import Slab
from pycollect.data.devices import CPU
from pycollect.data.extras import Extras
from pycollect.data.frame import BatchLeaves
from pycollect.data.layout import Key
from pycollect.data.weights import Weights
from pycollect.driver.state import CollectorState, WorkerState
from pycollect.worker.report import Episode


@dataclass(frozen=True)
class Batch:
    """A batch of rollouts before delivery.

    Attributes:
        slab: Memory of the tensors.
        tensors: Tensors in the slab, by key.
        shape: Batch dimensions, time last.
        leaves: Entries of a frame.
        frames_of: Number of collected frames of each worker, in the order of their rows.
            Uncollected cells are not counted.
        versions: Oldest policy version that acted in the rollout of each worker.
        episodes: Episodes that ended in this batch.
        extras: Extras in the shape of the batch, or ``None``.
        device: Device to deliver the batch to.
        reported_device: Value of ``td.device``; ``None`` if no device was requested.
        on_device: Tensors on the environments' device, outside the slab, by key.
        joined: How rollouts are joined: "stack", 0 or -1; ``None`` for a single rollout.
        parts: If rollouts are concatenated, the size of each rollout along that dimension.
        sources: For workers with several processes, the processes that follow each other along time
            in the worker's rollout, by worker.
        stacked: Whether the first dimension of each worker's rollout is its processes.
    """

    slab: Slab
    tensors: dict[Key, torch.Tensor]
    shape: Sequence[int]
    leaves: BatchLeaves
    frames_of: Mapping[int, int] = field(default_factory=dict)
    versions: Mapping[int, int] = field(default_factory=dict)
    episodes: Sequence[Episode] = ()
    extras: Extras | None = None
    device: torch.device = CPU
    reported_device: torch.device | None = None
    on_device: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    joined: str | int | None = None
    parts: Sequence[int] = ()
    sources: Mapping[int, Sequence[int]] = field(default_factory=dict)
    stacked: bool = False


class PolicyWeights(Protocol):
    """The policy's weights, and their updates."""

    def current(self) -> Weights:
        """Return the weights as far as this process knows them."""

    def check(self, weights: Weights) -> None:
        """Raise ValueError unless the weights of a state fit the policies of all workers."""

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Send weights from a source, or from a dict by worker, to workers.

        Args:
            source: Source of the weights; ``None`` sends the policy's own weights.
            worker_ids: Ids of the workers; ``None`` means all.
            wait: Whether to wait until the workers have received the weights.
        """

    def receive(self, source: Any) -> None:
        """Take weights from a source, for example a weight-sync scheme."""

    def one_version(self) -> AbstractContextManager[None]:
        """Count all updates within the context as one policy version."""

    def due(self) -> Sequence[int]:
        """Return the ids of the workers that must get the policy's weights automatically now."""

    def push(self, worker_ids: Sequence[int]) -> None:
        """Send the policy's weights to these workers if the weights have changed."""


class WorkerStreams(Protocol):
    """Random streams of the workers. Its methods are called while no rollout is in flight."""

    def seed(self, root: int, static: bool) -> int:
        """Seed and reset everything; return the next seed of the chain."""

    def states(self) -> dict[int, WorkerState]:
        """Return the state of each present worker at the end of its last delivered rollout."""

    def check(self, states: Mapping[int, WorkerState]) -> None:
        """Raise ValueError unless these states fit the workers."""

    def resume(self, state: CollectorState) -> None:
        """Restore the weights, policy version and generators of the workers, and reset them."""


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
    def weights(self) -> PolicyWeights:
        """Weights of the policy."""

    @property
    def streams(self) -> WorkerStreams:
        """Random streams of the workers."""

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
