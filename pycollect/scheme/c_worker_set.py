"""The workers that collect for one parent."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from pycollect.checks import check_count, check_fraction
from pycollect.engines.ray.session import import_ray
from pycollect.scheduler.options import Preemption
from pycollect.scheme.c_worker import CWorker
from pycollect.scheme.components import nothing
from pycollect.scheme.messages import CONTINUE, STOP, broadcast_message, withdraw_message
from pycollect.scheme.protocols import (
    ActorFactory,
    AlgorithmFactory,
    StorageFactory,
    TestEnvsFactory,
    TrainEnvsFactory,
)
from pycollect.scheme.worker_set import WorkerSet, default_remote_config, lost


class CWorkerSet(WorkerSet):
    """Collection workers of one kind: a local one, and remote ones where there are two or more.

    With remote workers the local one has no environments: it holds the weights that they get, and
    its algorithm and storage are for whoever learns.

    Attributes:
        worker_class: :class:`CWorker`.
        remote_config: what each remote worker reserves.
        worker_params: keyword arguments that they are made with.
        num_workers: how many remote ones are asked for; 0 or 1: the local one collects.
        fraction_samples: as told.

    Args:
        num_workers: how many remote ones; 0 or 1: the local one collects.
        index_parent: which gradient worker they collect for.
        algo_factory: as of :class:`CWorker`, and so for other factories.
        actor_factory: makes an actor.
        storage_factory: makes a storage.
        local_device: where the local worker computes: "cpu" or "cuda:number"; None: CUDA where it
            is available. Remote workers reserve a part of a GPU where it is one.
        initial_weights: as `CWorker.set_weights` takes them; None: the actor's own.
        fraction_samples: of a rollout's steps, at least so many are taken before it may end early.
        total_parent_workers: how many parents there are, each with a set of its own; where there
            are, the set of the first one, 0, does not collect.
        compress_data_to_send: `collect_data` returns its result packed.
        train_envs_factory: makes environments to collect from, or None.
        test_envs_factory: makes environments to evaluate in, or None.
        worker_remote_config: what each remote worker reserves, as `Worker.as_remote` takes it. What
            is left out is as in `default_remote_config`.

    Raises:
        ValueError: the cluster has less than what the workers reserve.
        WorkerError: a remote worker could not be made. Those that could are ended.
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
            if not callable(factory):
                raise TypeError(f"{name}: expected a callable, got {type(factory).__name__}")
        self.fraction_samples = check_fraction("fraction_samples", fraction_samples)
        self._key = f"worker_{index_parent}/{uuid.uuid4().hex}"
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
            # The first of several parents only updates: its set has one worker, for the weights.
            0 if parents > 0 and index_parent == 0 else num_workers,
            local_device,
            initial_weights,
            total_parent_workers=parents,
        )

    def _local_params(self, params: dict[str, Any]) -> dict[str, Any]:
        collects = self.num_workers <= 1 and not (
            self._total_parents > 0 and self._index_parent == 0
        )
        envs = () if collects else ("train_envs_factory", "test_envs_factory")
        return {name: value for name, value in params.items() if name not in envs}

    @classmethod
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
        """A function that makes such a set, to be called where its parent is.

        Args:
            num_workers: as of the class, and so for what has the same name.
            algo_factory: makes an algorithm.
            actor_factory: makes an actor.
            storage_factory: makes a storage.
            test_envs_factory: makes environments to evaluate in, or None.
            train_envs_factory: makes environments to collect from, or None.
            total_parent_workers: how many parents there are.
            col_fraction_samples: `fraction_samples`.
            compress_data_to_send: `collect_data` returns its result packed.
            col_worker_resources: `worker_remote_config`.

        Returns:
            ``collection_worker_set_factory(device, initial_weights, index_parent)``, where `device`
            is `local_device`.
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
        """Give the remote workers the local one's weights and version, for their next rollouts.

        They lie in Ray's object store once. It does not wait for the workers.
        """
        if self._remote_workers:
            weights = import_ray().put(self._weights())
            for worker in self._remote_workers:
                worker.set_weights.remote(weights)

    def collect_data(self, fraction_workers: float = 1.0) -> list[Any]:
        """One rollout of each worker that collects.

        Args:
            fraction_workers: once so many of the workers are done, 0 to 1, the others are told to
                end their rollouts, which they do as soon as they have `fraction_samples` of the
                steps. 1: all are waited for.

        Returns:
            What `collect_data` of each worker returned, in the order of workers.

        Raises:
            WorkerError: a worker died. What a component raises is raised as Ray does.
        """
        stragglers = Preemption(check_fraction("fraction_workers", fraction_workers), 0.0)
        if not self._remote_workers:
            return [self._local_worker.collect_data()]
        enough = max(1, stragglers.enough(len(self._remote_workers)))
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
