"""TorchRL's names of a collector with several workers, and its requests to them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import cloudpickle
import torch

from pycollect.arguments import completed_by, exposes
from pycollect.compat.one_worker import (
    Paths,
    View,
    WorkerNames,
    WorkerView,
    calls,
    mapped,
    resolved,
)
from pycollect.data.devices import Devices
from pycollect.driver.nest import Nest
from pycollect.driver.options import RemoteOptions
from pycollect.driver.records import WorkerRecord
from pycollect.driver.scheduler import Scheduler
from pycollect.transport.host import SingleWorker
from pycollect.transport.messages import Hosted
from pycollect.worker.options import POST, WorkerOptions

Question = tuple[str, Sequence[Any], Mapping[str, Any]]
"""A method of a worker's view by name, its positional and its keyword arguments."""

Places = tuple[torch.device | None, ...]


@exposes(RemoteOptions, "_remote")
class ManyWorkers(WorkerNames):
    """The present workers and the arguments of each, in the order of their ids."""

    cat_results: str | int | None
    update_at_each_batch: bool
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
    def preemptive_threshold(self) -> float:
        """Share of the workers that a batch waits for, 0 to 1; 1.0 means all of them."""
        preemption = self._remote.preemption
        return 1.0 if preemption is None else preemption.threshold

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
        return [worker.plan.spec.env_kwargs for worker in self._workers]

    @property
    def storing_device(self) -> Places:
        """Value of ``td.device`` of each worker's batches."""
        return tuple(devices.reported for devices in self._devices_of_each)

    @property
    def env_device(self) -> Places:
        """Requested device of each worker's environments, or ``None``."""
        return tuple(devices.env_device for devices in self._devices_of_each)

    @property
    def policy_device(self) -> Places:
        """Requested device of each worker's policy, or ``None``."""
        return tuple(devices.policy_device for devices in self._devices_of_each)

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


class Asking(Paths):
    """Methods that send a request to workers, which reply after their current rollouts.

    Requests lose no rollouts. An exception in a worker is raised here with the same type, after all
    workers have replied. If a worker dies meanwhile, it is replaced and the caller gets a
    WorkerError.
    """

    _source: Scheduler

    def getattr_env(self, attr: str) -> Any:
        """Return a copy of an attribute of the first worker's environment.

        Args:
            attr: Name of the attribute.

        Returns:
            The attribute, pickled in the worker and unpickled here.

        Raises:
            AttributeError: The attribute does not exist.
            TypeError: It cannot be pickled.
            WorkerError: The worker died.
            TimeoutError: The worker did not reply within `worker_timeout`.
        """
        return self._ask_first("getattr_env", attr)

    @completed_by(getattr_env)
    def getattr_policy(self, attr: str) -> Any:
        """Return a copy of an attribute of the first worker's policy.

        Args:
            ...: See getattr_env.
        """
        return self._ask_first("getattr_policy", attr)

    def get_distant_attr(self, attr: str) -> list[Any]:
        """Return a copy of the object at a path in each worker.

        Args:
            attr: Path of names and indices that starts at the worker, such as "env.action_spec" or
                "policy.module[0]". "replay_buffer" is the collector's, because no worker has one.

        Returns:
            Copies, in the order of workers; the objects themselves if they are in the replay
            buffer.

        Raises:
            AttributeError: No object exists at that path.
            TypeError: It cannot be pickled.
            WorkerError: A worker died.
            TimeoutError: A worker did not reply within `worker_timeout`.
        """
        workers = self._source.group.in_order
        if _is_of_the_buffer(attr):
            return [resolved(self, attr) for _ in workers]
        question: Question = ("get_distant_attr", (attr,), {})
        return self._ask({worker.index: question for worker in workers})

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method in each worker.

        Args:
            method_name: Path of the method in a worker, such as "env.close" or "get_distant_attr".
                Methods of "replay_buffer" are called here, once per worker.
            list_of_args, list_of_kwargs: Arguments and keyword arguments, one entry per worker.
                ``None`` means no arguments (default: ``None``).

        Returns:
            Copies of the return values, in the order of workers.

        Raises:
            ValueError: A list does not have one entry per worker.
            AttributeError: The method does not exist, or only the collector may call it.
        """
        workers = self._source.group.in_order
        each = calls(list_of_args, list_of_kwargs, len(workers))
        if _is_of_the_buffer(method_name):
            return mapped(self, method_name, each)
        if method_name == "update_policy_weights_":  # the collector updates each worker itself
            update = resolved(self, method_name)
            return [
                update(*args, **{**kwargs, "worker_ids": worker.index})
                for worker, (args, kwargs) in zip(workers, each, strict=True)
            ]
        return self._ask(
            {
                worker.index: ("cascade_execute", (method_name, *args), kwargs)
                for worker, (args, kwargs) in zip(workers, each, strict=True)
            }
        )

    def fake_tensordict(self) -> Any:
        """Refused, because only in-process collectors have environments in this process.

        Raises:
            NotImplementedError: Always. Call ``Collector(...).fake_tensordict()`` with one of the
                environments; it returns zeros with the shape of one worker's rollout.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.fake_tensordict: the environments run in other processes; call "
            "fake_tensordict() of a Collector with one of the environments"
        )

    def _ask_first(self, method: str, attr: str) -> Any:
        first, *_ = self._source.group.in_order
        return self._ask({first.index: (method, (attr,), {})})[0]

    def _ask(self, questions: Mapping[int, Question]) -> list[Any]:
        return self._source.call(answer, questions)


def _is_of_the_buffer(path: Any) -> bool:
    """Return whether a path leads into the replay buffer, which only the collector has."""
    return isinstance(path, str) and re.match(r"replay_buffer\b", path) is not None


def answer(worker: Hosted, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a method of the view of a worker. This runs in the worker."""
    view = NestView(worker) if isinstance(worker, Nest) else WorkerView(cast(SingleWorker, worker))
    value = getattr(view, method)(*args, **kwargs)
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        asked = ", ".join(map(repr, args))
        raise TypeError(
            f"{method}({asked}): returned a {type(value).__name__} that cannot be pickled: {error}"
        ) from error
    return value


class NestView(Asking, View):
    """The view of a worker with several processes, each of which replies."""

    def __init__(self, nest: Nest) -> None:
        self._source = nest.scheduler
        self.policy_version = nest.version
        self.worker_idx = nest.index
        self.num_workers = nest.size

    def get_policy_version(self) -> int:
        """Return the version of the weights that the processes have from their next rollout on."""
        return self.policy_version

    def set_post_collect_hook(self, hook: Any) -> None:
        """Set the hook in all processes of the worker."""
        self._source.set_hook(POST, hook)

    def stats(self) -> dict[str, Any]:
        """Return the sum of the processes' counts."""
        return {"frames": sum(stats["frames"] for stats in self.map_fn("stats"))}
