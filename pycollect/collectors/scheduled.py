"""Base of all collectors with workers in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pycollect.collectors.set_up import NewWorkers, SetUp
from pycollect.compat.many_workers import Asking, ManyWorkers
from pycollect.compat.torchrl import TorchRLCollector
from pycollect.engines.protocol import Engine
from pycollect.scheduler.node_servers import NodePlan
from pycollect.scheduler.policy_process import ProcessPlan
from pycollect.scheduler.scheduler import Scheduler
from pycollect.stream.buffer_warnings import warn_of_slices
from pycollect.stream.flow import Flow

if TYPE_CHECKING:
    from pycollect.inference.server import InferenceServer


class ScheduledCollector(TorchRLCollector, Asking, ManyWorkers):
    """A stream of batches from a scheduler, which drives workers through an engine.

    Args:
        set_up: The checked arguments.
        engine: Closed when the collector is shut down or cannot be made.
        server: Inference server in this process or in another one. ``None`` if workers have
            policies.
        nodes: How to start inference actors on other nodes. ``None`` if `server` serves their
            workers.
    """

    _source: Scheduler
    _frames_divided_among = "workers and their environments"

    def __init__(
        self,
        set_up: SetUp,
        engine: Engine,
        server: InferenceServer | ProcessPlan | None = None,
        nodes: NodePlan | None = None,
    ) -> None:
        self._remote, self._template = set_up.remote, set_up.template
        options, first = set_up.options, set_up.plans[0].spec.options
        if options.replay_buffer is not None:  # rows of different batches would differ in length
            options = replace(options, split_trajs=False)
        warn_of_slices(options, first.set_truncated)
        flow = Flow(options)
        policy, plans = set_up.policy, set_up.plans
        scheduler = Scheduler(flow, set_up.remote, plans, policy, engine, server, nodes)
        super().__init__(
            flow, scheduler, set_up.weights, first.pre_collect_hook, first.post_collect_hook
        )

    def _add(self, new: NewWorkers) -> list[int]:
        """Start more workers with the arguments of the others; return their ids."""
        plans = partial(new.plans, self._template, self._remote, self.policy)
        return self._source.members.add(plans)

    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Reset environments, and drop their workers' rollouts in flight.

        Args:
            reset_idx: For each worker, whether to reset its environments. Defaults to ``None``: all
                workers.

        Raises:
            ValueError: `reset_idx` does not have one entry per worker.
            RuntimeError: Only some workers of a sync collector would be reset while `prefetch`
                rollouts are in flight. The others' rollouts belong to the same batches.
        """
        with self._flow.between_rollouts("reset"):
            self._flow.check_open()
            self._source.reset(reset_idx)

    def remove_collectors(self, worker_ids: int | Sequence[int]) -> None:
        """End workers, after they have delivered the rollouts that were already requested.

        A sync collector divides frames among the remaining workers, from the first batch that was
        not requested yet. Ids are never reused.

        Args:
            worker_ids: One or several ids, as in `stats()`.

        Raises:
            ValueError: An id is unknown, or no worker would remain.
        """
        self._source.members.remove(worker_ids)

    def stop_remote_collectors(self) -> None:
        """End all workers and lose rollouts in flight; `add_collectors` can start new workers."""
        self._source.members.end_all()

    @property
    def remote_collectors(self) -> list[Any]:
        """Native handles of the workers, in order: processes or Ray actor handles."""
        return [worker.process.native for worker in self._workers]
