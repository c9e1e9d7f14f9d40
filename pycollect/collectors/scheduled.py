"""What collectors share whose workers run elsewhere: who is there, and what they can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pycollect.collectors.adding import NewWorkers
from pycollect.collectors.set_up import SetUp
from pycollect.engines.protocol import Engine
from pycollect.scheduler.asking import Asking
from pycollect.scheduler.many_workers import ManyWorkers
from pycollect.scheduler.node_servers import NodePlan
from pycollect.scheduler.policy_process import ProcessPlan
from pycollect.scheduler.scheduler import Scheduler
from pycollect.stream.buffer_warnings import warn_of_slices
from pycollect.stream.collector import CollectorBase
from pycollect.stream.flow import Flow

if TYPE_CHECKING:
    from pycollect.inference.server import InferenceServer


class ScheduledCollector(CollectorBase, Asking, ManyWorkers):
    """A stream whose source is a scheduler of workers behind an engine.

    Args:
        set_up: all that it was given, checked.
        engine: is left when the collector is shut down, or could not be made.
        server: calls the policy for all workers, here or in a process; None: they do.
        nodes: how it is called for workers on other nodes; None: there, `server` does so, too.
    """

    _source: Scheduler
    _frames_divided_among = "workers, or of the environments of each"

    def __init__(
        self,
        set_up: SetUp,
        engine: Engine,
        server: InferenceServer | ProcessPlan | None = None,
        nodes: NodePlan | None = None,
    ) -> None:
        self._remote, self._template = set_up.remote, set_up.template
        options, first = set_up.options, set_up.plans[0].spec.options
        if options.replay_buffer is not None:  # it gets frames: rows of each batch are of another T
            options = replace(options, split_trajs=False)
        warn_of_slices(options, first.set_truncated)
        flow = Flow(options)
        policy, plans = set_up.policy, set_up.plans
        scheduler = Scheduler(flow, set_up.remote, plans, policy, engine, server, nodes)
        super().__init__(flow, scheduler, first.pre_collect_hook, first.post_collect_hook)

    def _add(self, new: NewWorkers) -> list[int]:
        """Start more workers, with the arguments of the others; return their ids."""
        plans = partial(new.plans, self._template, self._remote, self.policy)
        return self._source.members.add(plans)

    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Reset environments. Rollouts of their workers that are in flight are dropped.

        Args:
            reset_idx: for each worker whether its environments are reset; None: those of all.

        Raises:
            ValueError: not one for each worker.
            RuntimeError: some of a sync collector's workers, while it collects ahead: what the
                others have begun belongs to the same batches.
        """
        with self._flow.moving:
            self._flow.check_open()
            self._source.reset(reset_idx)

    def remove_collectors(self, worker_ids: int | Sequence[int]) -> None:
        """End workers. What they were asked for before is still delivered.

        Sync: from the next batch on that was not asked for yet the others collect their share,
        too. The ids are not given again.

        Args:
            worker_ids: one, or several, as `stats` tells them.

        Raises:
            ValueError: an unknown id, or no worker would be left.
        """
        self._source.members.remove(worker_ids)

    def stop_remote_collectors(self) -> None:
        """End all workers; what is in flight is lost. `add_collectors` can bring new ones."""
        self._source.members.end_all()

    @property
    def remote_collectors(self) -> list[Any]:
        """The workers in their order, as their library knows them: processes, or actor handles."""
        return [worker.process.native for worker in self._workers]
