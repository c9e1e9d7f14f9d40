"""Workers that come and go while batches are collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pycollect.collectors import worker_arguments as parse
from pycollect.collectors.call_checks import check_open, check_worker_ids
from pycollect.collectors.collector_kwargs import merged_arguments
from pycollect.collectors.device_arguments import check_devices
from pycollect.collectors.engine import Engine
from pycollect.collectors.options import StreamOptions
from pycollect.collectors.remote import RemoteCollector
from pycollect.collectors.remote_options import RemoteOptions, check_uneven
from pycollect.collectors.worker_kind import WorkerKind
from pycollect.collectors.workforce import Member, WorkerPlan, check_alike
from pycollect.user_warning import warn_user
from pycollect.worker_devices import Devices

_SINGLE = WorkerKind()


@dataclass(frozen=True)
class Template:
    """What the workers of a collector are made of, but for their environments and the policy.

    Attributes:
        values: of WORKER_ARGUMENTS, as the collector was given them.
        passed: which of them the caller really gave, and which go before `collector_kwargs`.
        collector_kwargs: None, a dict, or one per worker.
        share: frames of one rollout of each.
        elsewhere: they may be on machines that have other devices.
        kind: what each of them runs.
    """

    values: Mapping[str, Any]
    passed: set[str]
    collector_kwargs: Any
    share: int
    elsewhere: bool = False
    kind: WorkerKind = _SINGLE

    def arguments(self, collector_kwargs: Any, workers: int) -> list[dict[str, Any]]:
        """Those of so many new workers; None: as the first ones, unless each had its own."""
        values = {name: parse.one_for_all(None, value) for name, value in self.values.items()}
        passed = {name for name in self.passed if values.get(name) is self.values.get(name)}
        kwargs = parse.one_for_all(collector_kwargs, self.collector_kwargs)
        return merged_arguments(values, passed, kwargs, workers, self.kind.arguments)


class ElasticCollector(RemoteCollector):
    """A RemoteCollector to which workers can be added, and from which they can be removed.

    Args:
        options, remote, plans, policy, engine: see :class:`RemoteCollector`.
        template: what new workers are made of.
    """

    def __init__(
        self,
        options: StreamOptions,
        remote: RemoteOptions,
        plans: Sequence[WorkerPlan],
        policy: Any,
        engine: Engine[Any],
        template: Template,
    ) -> None:
        self._template = template
        self._next_index = len(plans)
        super().__init__(options, remote, plans, policy, engine)

    def _recruit(
        self,
        create_env_fn: Any,
        num_envs: int,
        policy: Any,
        collector_kwargs: Any,
        options: Callable[[Sequence[Devices]], Sequence[Mapping[str, Any]]],
    ) -> list[int]:
        """Check what `add_collectors` was given, and add the workers.

        Args:
            options: gives those of the engine for workers with these devices, checked.
        """
        with self._stream:
            self._check_open()
            many = isinstance(create_env_fn, (list, tuple))
            kind = self._template.kind
            entries = kind.entries(create_env_fn, None if many else 1, num_envs, "num_envs")
            arguments = self._template.arguments(collector_kwargs, len(entries))
            elsewhere = self._template.elsewhere
            devices = [check_devices(own, elsewhere=elsewhere) for own in arguments]
            factory = any(own["policy_factory"] is not None for own in arguments)
            policy = self._policy if policy is None and not factory else policy
            if policy is None and self._remote.built_by_workers and not factory:
                raise ValueError(
                    "policy: expected one, or a policy_factory in collector_kwargs, as the "
                    "collector was made with one policy_factory for each worker"
                )
            sources, built_by_workers = parse.policy_sources(arguments, policy)
            plans = parse.worker_plans(
                entries,
                arguments,
                sources,
                built_by_workers,
                [self._template.share] * len(entries),
                options(devices),
                devices,
                self._next_index,
                self._remote.masked,
                elsewhere,
            )
            plans = kind.plans(plans, self._remote, arguments)
            self._next_index += len(plans)
            return self._add(plans)

    def _add(self, plans: Sequence[WorkerPlan]) -> list[int]:
        """Start workers; async they are asked at once, sync from the next batch on.

        Returns:
            Their ids.
        """
        present = {member.index: member.info for member in self._members}
        members = self._force.start(plans)
        try:
            infos = {member.index: member.info for member in members}
            if self._remote.sync:
                check_alike({**present, **infos})
            for info in infos.values():
                check_uneven(self._remote.joined, self._remote.uneven, bool(info.batch_size))
                self._check_environment(info.leaves, info.bounded)
            for member in members:
                if self._current_weights():
                    self._weights.check(self._current_weights(), [member])
            if not self._remote.sync:
                self._prepare_slabs()
        except BaseException:
            self._end_workers(members)
            raise
        for member in members:
            self._begin_with(member)
        self._line = [*self._line, *members]
        self._changed = self._remote.sync
        return [member.index for member in members]

    def _begin_with(self, member: Member) -> None:
        """A new worker has the newest weights and, where there is a seed, streams from it."""
        self._weights.give_newest(member)
        self._hook_sender.give(member)
        if self._seeded:
            seeds = self._seeds_for(member, self._statistics.batches)
            member.beginning = ("set_seed", seeds, self._entropy)
            member.handle.answer(member.handle.request(*member.beginning))

    def remove_collectors(self, worker_ids: int | Sequence[int]) -> None:
        """End workers. What they were asked for before is still delivered.

        Sync: from the next batch on that was not asked for yet the others collect their share,
        too. The ids are not given again.

        Raises:
            ValueError: an unknown id, or no worker would be left.
        """
        with self._stream:
            self._check_open()
            staying = [member.index for member in self._members if not member.leaving]
            ids = check_worker_ids(worker_ids, staying)
            if len(set(ids)) == len(staying):
                raise ValueError(
                    f"worker_ids: expected at least one worker to stay, got all of them: {ids}; "
                    "stop_remote_collectors() ends them all"
                )
            for member in self._members:
                member.leaving = member.leaving or member.index in ids
            self._changed = self._remote.sync or self._changed
            self._settle()

    def stop_remote_collectors(self) -> None:
        """End all workers; what is in flight is lost. `add_collectors` can bring new ones."""
        with self._stream:
            check_open(self._closed, None)
            self._drop_all("shutdown")
            self._end_workers(list(self._members))

    def _settle(self) -> None:
        """Let workers go that owe nothing any more; sync: all at once, between two rounds."""
        gone = [member for member in self._members if member.leaving and not member.orders]
        if self._remote.sync and any(member.orders for member in self._members):
            return
        if gone:
            self._end_workers(gone)
        if self._changed:
            self._changed = False
            self._share_out()
        elif gone:
            self._prepare_slabs()

    def _end_workers(self, members: Sequence[Member]) -> None:
        for member in members:
            self._cut_trajectories(member.index, "incomplete")
            self._force.release(member)
            if member in self._line:
                self._line.remove(member)
            if self._served is member:
                self._served = None
        self._engine.wait_closed([member.handle for member in members])

    def _share_out(self) -> None:
        """Every worker of a sync collector collects an equal share from now on."""
        members = self._members
        share = -(-self._options.frames_per_batch // len(members))
        calls = [(member, member.handle.request("resize", share)) for member in members]
        for member, call in calls:
            member.info = member.handle.answer(call)
        self._batch_frames = sum(member.info.frames for member in members)
        self._prepare_slabs()
        shape = self._assembly.shape([member.info for member in members])
        warn_user(f"{len(members)} workers from the next batch on: batches are of shape {shape}")
