"""Workers that come and go while batches are collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pycollect.checks import check_open, check_worker_ids
from pycollect.engines.protocol import Engine
from pycollect.errors import warn_user
from pycollect.scheduler.options import RemoteOptions, check_uneven
from pycollect.scheduler.scheduler import RemoteCollector
from pycollect.scheduler.workers import Member, WorkerPlan, check_alike
from pycollect.stream.options import StreamOptions


class ElasticCollector(RemoteCollector):
    """A RemoteCollector to which workers can be added, and from which they can be removed.

    Args:
        options, remote, plans, policy, engine: see :class:`RemoteCollector`.
    """

    def __init__(
        self,
        options: StreamOptions,
        remote: RemoteOptions,
        plans: Sequence[WorkerPlan],
        policy: Any,
        engine: Engine,
    ) -> None:
        self._next_index = len(plans)
        super().__init__(options, remote, plans, policy, engine)

    def _recruit(self, plans: Callable[[int], Sequence[WorkerPlan]]) -> list[int]:
        """Add workers; return their ids.

        Args:
            plans: makes theirs, for ids from that one on; it raises what is wrong with them.
        """
        with self._stream:
            self._check_open()
            made = plans(self._next_index)
            self._next_index += len(made)
            return self._add(made)

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
        self._engine.wait_closed([member.process for member in members])

    def _share_out(self) -> None:
        """Every worker of a sync collector collects an equal share from now on."""
        members = self._members
        share = -(-self._options.frames_per_batch // len(members))
        self._resize(share)
        self._batch_frames = sum(member.info.frames for member in members)
        self._prepare_slabs()
        shape = self._assembly.shape([member.info for member in members])
        warn_user(f"{len(members)} workers from the next batch on: batches are of shape {shape}")
