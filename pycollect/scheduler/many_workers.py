"""Properties of collectors with several workers, under TorchRL's names."""

from __future__ import annotations

from typing import Any

import torch

from pycollect.devices import Devices
from pycollect.scheduler.options import RemoteOptions
from pycollect.scheduler.records import WorkerRecord
from pycollect.scheduler.scheduler import Scheduler
from pycollect.worker.names import WorkerNames
from pycollect.worker.options import WorkerOptions

Places = tuple[torch.device | None, ...]


class ManyWorkers(WorkerNames):
    """The present workers and the arguments of each, in the order of their ids."""

    _remote: RemoteOptions
    _source: Scheduler

    @property
    def _workers(self) -> list[WorkerRecord]:
        return self._source.group.present

    @property
    def _worker_options(self) -> WorkerOptions:
        return self._source.group.in_order[0].plan.spec.options

    @property
    def num_workers(self) -> int:
        """Number of present workers."""
        return len(self._workers)

    @property
    def cat_results(self) -> str | int | None:
        """How rollouts are joined; ``None`` if they are not joined."""
        return self._remote.joined

    @property
    def preemptive_threshold(self) -> float:
        """Share of the workers that a batch waits for, 0 to 1; 1.0 means all of them."""
        preemption = self._remote.preemption
        return 1.0 if preemption is None else preemption.threshold

    @property
    def update_at_each_batch(self) -> bool:
        """Whether workers automatically get the policy's weights for each batch."""
        return self._remote.update_each

    @property
    def num_sub_threads(self) -> int | None:
        """Number of torch threads in each worker."""
        return self._worker_options.num_threads

    @property
    def create_env_fn(self) -> list[Any]:
        """Entry of `create_env_fn` of each worker."""
        return [worker.plan.spec.entry for worker in self._workers]

    @property
    def create_env_kwargs(self) -> list[Any]:
        """Environment keyword arguments of each worker."""
        return [worker.plan.spec.env_kwargs or {} for worker in self._workers]

    @property
    def storing_device(self) -> Places:
        """Value of ``td.device`` of each worker's batches."""
        return tuple(own.reported for own in self._devices_of_each)

    @property
    def env_device(self) -> Places:
        """Requested device of each worker's environments, or ``None``."""
        return tuple(own.env_device for own in self._devices_of_each)

    @property
    def policy_device(self) -> Places:
        """Requested device of each worker's policy, or ``None``."""
        return tuple(own.policy_device for own in self._devices_of_each)

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        """Return the number of frames in one rollout of a worker.

        Args:
            worker_idx: Id of the worker. Defaults to ``None``: the first worker.

        Returns:
            P * T, an int.

        Raises:
            ValueError: No worker has that id.
        """
        index = self._source.group.in_order[0].index if worker_idx is None else worker_idx
        for worker in self._workers:
            if worker.index == index:
                return worker.info.frames
        known = [worker.index for worker in self._workers]
        raise ValueError(f"worker_idx: expected one of {known}, got {worker_idx!r}")

    @property
    def _devices_of_each(self) -> list[Devices]:
        return [worker.plan.spec.options.devices for worker in self._workers]
