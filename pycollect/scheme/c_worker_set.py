"""The collection workers of one parent."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from pycollect.arguments import completed_by
from pycollect.checks import check_count, check_fraction
from pycollect.scheme.c_worker import CWorker
from pycollect.scheme.messages import CONTINUE, STOP, broadcast_message, withdraw_message
from pycollect.scheme.names import check_callable, nothing, share
from pycollect.scheme.protocols import (
    ActorFactory,
    AlgorithmFactory,
    StorageFactory,
    TestEnvsFactory,
    TrainEnvsFactory,
)
from pycollect.scheme.worker_set import WorkerSet, default_remote_config, lost
from pycollect.transport.ray.session import import_ray


@completed_by(WorkerSet)
@completed_by(CWorker)
class CWorkerSet(WorkerSet):
    """A local collection worker, and remote ones on Ray if there are two or more.

    With remote workers the local one has no environments: it holds the weights that they receive,
    and its algorithm and storage serve the learner.

    Attributes:
        worker_class: :class:`CWorker`.
        remote_config: Resources that each remote worker reserves.
        worker_params: Keyword arguments of the workers.
        num_workers: Number of remote workers; with 0 or 1 the local worker collects.
        fraction_samples: The argument.

    Args:
        num_workers: Number of remote workers; with 0 or 1 the local worker collects.
        total_parent_workers: Number of parents, each with its own set. If it is positive, the set
            of parent 0 does not collect (default: 0).
        ...: See CWorker and WorkerSet.
    """

    def __init__(
        self,
        num_workers: int,
        index_parent: int,
        algo_factory: AlgorithmFactory,
        actor_factory: ActorFactory,
        storage_factory: StorageFactory,
        local_device: Any = None,
        initial_weights: Any = None,
        fraction_samples: float = 1.0,
        total_parent_workers: int = 0,
        compress_data_to_send: bool = False,
        train_envs_factory: TrainEnvsFactory = nothing,
        test_envs_factory: TestEnvsFactory = nothing,
        worker_remote_config: Mapping[str, Any] = default_remote_config,
    ) -> None:
        factories = {
            "algo_factory": algo_factory,
            "actor_factory": actor_factory,
            "storage_factory": storage_factory,
            "train_envs_factory": train_envs_factory,
            "test_envs_factory": test_envs_factory,
        }
        for name, factory in factories.items():
            check_callable(name, factory)
        self.fraction_samples = check_fraction("fraction_samples", fraction_samples)
        self._key = f"worker_{index_parent}/{uuid.uuid4().hex}"
        self._updates: list[Any] = []  # calls of `set_weights` whose errors are not raised yet
        parents = check_count("total_parent_workers", total_parent_workers)
        super().__init__(
            CWorker,
            {
                "index_parent": index_parent,
                **factories,
                "fraction_samples": fraction_samples,
                "compress_data_to_send": compress_data_to_send,
            },
            index_parent,
            worker_remote_config,
            # The first of several parents only learns: its set has one worker, for the weights.
            0 if parents > 0 and index_parent == 0 else num_workers,
            local_device,
            initial_weights,
            total_parent_workers=parents,
        )

    def _local_params(self, params: dict[str, Any]) -> dict[str, Any]:
        only_learns = self._total_parents > 0 and self._index_parent == 0
        collects = self.num_workers <= 1 and not only_learns
        envs = () if collects else ("train_envs_factory", "test_envs_factory")
        return {name: value for name, value in params.items() if name not in envs}

    @classmethod
    @completed_by(CWorker)
    def create_factory(
        cls,
        num_workers: int,
        algo_factory: AlgorithmFactory,
        actor_factory: ActorFactory,
        storage_factory: StorageFactory,
        test_envs_factory: TestEnvsFactory,
        train_envs_factory: TrainEnvsFactory,
        total_parent_workers: int = 0,
        col_fraction_samples: float = 1.0,
        compress_data_to_send: bool = False,
        col_worker_resources: Mapping[str, Any] = default_remote_config,
    ) -> Callable[[Any, Any, int], CWorkerSet]:
        """Return a function that makes such a set in its parent's process.

        Args:
            num_workers: Number of remote workers; with 0 or 1 the local worker collects.
            test_envs_factory: Makes environments for evaluation, or returns ``None``; arguments as
                in :class:`CWorker`.
            train_envs_factory: Makes environments for collection, or returns ``None``; arguments as
                in :class:`CWorker`.
            total_parent_workers: Number of parents, each with its own set. If it is positive, the
                set of parent 0 does not collect (default: 0).
            col_fraction_samples: `fraction_samples` of the class (default: 1.0).
            ...: See CWorker.
            col_worker_resources: `worker_remote_config` of the class.

        Returns:
            ``collection_worker_set_factory(device, initial_weights, index_parent)``; `device` is
            the class's `local_device`.
        """

        def collection_worker_set_factory(
            device: Any, initial_weights: Any, index_parent: int
        ) -> CWorkerSet:
            """Make a set of collection workers for one parent."""
            return cls(
                num_workers=num_workers,
                index_parent=index_parent,
                algo_factory=algo_factory,
                actor_factory=actor_factory,
                storage_factory=storage_factory,
                local_device=device,
                initial_weights=initial_weights,
                fraction_samples=col_fraction_samples,
                total_parent_workers=total_parent_workers,
                compress_data_to_send=compress_data_to_send,
                train_envs_factory=train_envs_factory,
                test_envs_factory=test_envs_factory,
                worker_remote_config=col_worker_resources,
            )

        return collection_worker_set_factory

    def broadcast_weights(self) -> None:
        """Send the local worker's weights and version to the remote workers.

        They take them for their next rollouts. The weights are put into Ray's object store once,
        and the call does not wait for the workers. If a worker refuses the weights, the next
        `collect_data` raises its error.
        """
        if self._remote_workers:
            weights = import_ray().put(self._weights())
            self._updates = [worker.set_weights.remote(weights) for worker in self._remote_workers]

    def collect_data(self, fraction_workers: float = 1.0) -> list[Any]:
        """Collect one rollout from each collecting worker.

        Args:
            fraction_workers: Share of the workers, 0 to 1, that must finish before the others are
                asked to end their rollouts. They end as soon as they have `fraction_samples` of the
                steps. 1 waits for all (default: 1.0).

        Returns:
            The result of each worker's `collect_data`, in the order of workers.

        Raises:
            WorkerError: A worker died. An exception of a component is raised in Ray's form, and so
                is one of the last `broadcast_weights`; then no rollout has started.
        """
        fraction = check_fraction("fraction_workers", fraction_workers)
        updates, self._updates = self._updates, []
        self._got(updates)
        if not self._remote_workers:
            return [self._local_worker.collect_data()]
        enough = max(1, share(fraction, len(self._remote_workers)))
        if enough == len(self._remote_workers):
            return self._got([worker.collect_data.remote() for worker in self._remote_workers])
        broadcast_message(self._key, CONTINUE)
        try:
            calls = [
                worker.collect_data.remote(listen_to=[self._key]) for worker in self._remote_workers
            ]
            import_ray().wait(calls, num_returns=enough, fetch_local=False)
            broadcast_message(self._key, STOP)
            return self._got(calls)
        finally:
            withdraw_message(self._key)

    def _got(self, calls: list[Any]) -> list[Any]:
        ray = import_ray()
        results = []
        for index, call in enumerate(calls, 1):
            try:
                results.append(ray.get(call))
            except ray.exceptions.RayActorError as error:
                raise lost(index, error) from error
        return results
