"""Where batches come from: the protocol of a source, and a batch on its way to the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """Rollouts that became a batch, before it is delivered.

    Attributes:
        slab: in which the tensors lie.
        shape: the batch dimensions, time last.
        leaves: what a frame consists of.
        frames_of: collected frames of each worker, in the order of their rows; uncollected cells
            are not counted.
        extras: of that shape each; None where there are none.
        place: where it is to lie.
        reported: what ``td.device`` says; None: nobody asked for a device.
        on_device: tensors that lie in no slab but on the environments' device, by key.
        how: rollouts are joined: "stack", 0 or -1; None: it is one rollout.
        parts: where they are joined by a number, how much of that dimension is each one's.
        sources: of workers with processes of their own, which of these follow each other along time
            in the worker's part.
        stacked: the first dimension of each worker's rollout is that of its own processes.
    """

    slab: Slab
    tensors: dict[Key, torch.Tensor]
    shape: Sequence[int]
    leaves: BatchLeaves
    frames_of: Mapping[int, int] = field(default_factory=dict)
    episodes: Sequence[Episode] = ()
    extras: Extras | None = None
    place: torch.device = CPU
    reported: torch.device | None = None
    on_device: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    how: str | int | None = None
    parts: Sequence[int] = ()
    sources: Mapping[int, Sequence[int]] = field(default_factory=dict)
    stacked: bool = False


class PolicyWeights(Protocol):
    """The policy's weights where they are collected with."""

    def current(self) -> Weights:
        """As far as they are known here."""

    def check(self, weights: Weights) -> None:
        """Raise ValueError unless a state's weights fit all workers' policies."""

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Give these workers weights from a source, or by worker; None: the policy's."""

    def receive(self, source: Any) -> None:
        """Take weights from a source, whatever brought them."""

    def one_version(self) -> AbstractContextManager[None]:
        """What is given within is one update, whatever the number of workers."""

    def due(self) -> Sequence[int]:
        """The workers that are to get the policy's weights now, without being told."""

    def push(self, worker_ids: Sequence[int]) -> None:
        """Give them to these, if they have changed."""


class WorkerStreams(Protocol):
    """Random streams of the workers: seeded, told, resumed. Nothing is in flight meanwhile."""

    def seed(self, root: int, static: bool) -> int:
        """Seed and reset everything; return the next seed of the chain."""

    def states(self) -> dict[int, WorkerState]:
        """Of each present worker, at the end of its last delivered rollout."""

    def check(self, states: Mapping[int, WorkerState]) -> None:
        """Raise ValueError unless these states fit the workers."""

    def resume(self, state: CollectorState) -> None:
        """Give workers weights, version and generators; reset."""


class Source(Protocol):
    """Where a collector's batches come from: a worker in this process, or many elsewhere.

    It writes into the Flow that it was made with, and has no collector.
    """

    @property
    def policy(self) -> Any:
        """The caller's, None for random actions, or where workers built it."""

    @property
    def elsewhere(self) -> bool:
        """Whether its workers are in other processes."""

    @property
    def weights(self) -> PolicyWeights:
        """The policy's."""

    @property
    def streams(self) -> WorkerStreams:
        """Of random numbers."""

    @property
    def batch_frames(self) -> int:
        """Frames of a full batch."""

    @property
    def policy_lag(self) -> dict[int, int]:
        """Per worker: by how many versions its last delivered rollout was behind, 0 before it."""

    def start(self) -> None:
        """Get ready to collect, and check what the environments turned out to be."""

    def collect(self) -> None:
        """Produce the next batch, as the flow's `unclaimed`. Its frames are in flight till then.

        An interrupt gives up what is not complete. From then on it does not count any more: whoever
        changes what must agree does so uninterrupted, and `unclaimed` is a part of that.
        """

    def before_delivery(self, td: TensorDictBase) -> None:
        """A batch is about to be given away."""

    def drop(self) -> None:
        """Forget the rollouts that workers were asked for."""

    def set_hook(
        self, name: str, hook: Callable[..., Any] | None, workers: Sequence[int] | None = None
    ) -> None:
        """Call this hook from the next rollout on.

        A worker process closes its copy of a hook that has a method `close`.

        Args:
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
        """What `stats` tells of it and of the stream's statistics."""

    def check_close_env(self, close_env: bool) -> None:
        """Raise RuntimeError where environments cannot outlive their collector."""

    def close(self, timeout: float | None, close_env: bool) -> None:
        """End workers, and close environments. Idempotent."""
