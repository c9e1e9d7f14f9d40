"""What collectors share whose workers run elsewhere: asking, awaiting, replacing, delivering."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from pycollect._core import RolloutHeader, Uninterrupted
from pycollect.batch.upload import DeviceBatches
from pycollect.batch.weights import (
    Weights,
    check_same,
    load_weights,
    same_values,
    weights_from,
    weights_of,
)
from pycollect.checks import check_open, check_worker_ids, no_weights_given
from pycollect.engines.messages import Order, Rollout, RolloutNote
from pycollect.engines.protocol import Engine
from pycollect.errors import WorkerDied, WorkerError, warn_user
from pycollect.scheduler.asking import Asking, Call
from pycollect.scheduler.assembly import Assembly, Draft, forget_ids, in_flight_bytes
from pycollect.scheduler.hooks import HookSender
from pycollect.scheduler.many_workers import ManyWorkers
from pycollect.scheduler.options import RemoteOptions, check_uneven
from pycollect.scheduler.weights import WeightSender
from pycollect.scheduler.workers import Member, Watch, WorkerPlan, Workforce, check_alike
from pycollect.stream.buffer_warnings import warn_of_slices
from pycollect.stream.collector import CollectorBase
from pycollect.stream.options import StreamOptions, warn_of_rounding
from pycollect.stream.source import Batch
from pycollect.stream.state import CollectorState, WorkerState, check_generators
from pycollect.stream.statistics import count_slow_paths
from pycollect.stream.weight_calls import by_worker
from pycollect.stream.weight_ways import carried, only_carries
from pycollect.worker.generators import derived_seeds, seed_chain
from pycollect.worker.hooks import POST
from pycollect.worker.profiling import ProfileConfig, ProfilerHook

Placed: TypeAlias = tuple[RolloutHeader, RolloutNote]
"""A rollout in its row of a batch."""

Gift: TypeAlias = tuple[Weights, Sequence[Member]]
"""Weights, and the workers that they are for."""

_SILENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.5  # from one look at whether another thread shut the collector down to the next


class RemoteCollector(CollectorBase, Asking, ManyWorkers):
    """Schedules workers behind an engine. Subclasses check their arguments and choose the engine.

    Args:
        plans: one per worker.
        policy: the caller's, whose weights are sent; None: random actions, or built by workers.
        engine: is left when the collector is shut down, or could not be made.
    """

    def __init__(
        self,
        options: StreamOptions,
        remote: RemoteOptions,
        plans: Sequence[WorkerPlan],
        policy: Any,
        engine: Engine,
    ) -> None:
        first = plans[0].spec.options
        if options.replay_buffer is not None:  # it gets frames: rows of each batch are of another T
            options = replace(options, split_trajs=False)
        super().__init__(options, first.pre_collect_hook, first.post_collect_hook)
        warn_of_slices(options, first.set_truncated)
        self._remote = remote
        self._policy = policy
        self._first_weights = self._policy_now()
        self._engine = engine
        self._force = Workforce(engine, remote.init_timeout, remote.max_restarts)
        self._weights = WeightSender(engine.put)
        self._hook_sender = HookSender(engine.put)
        self._pushing = threading.Lock()  # the caller may update while a batch is collected
        depth = max(remote.ahead, 1)
        self._assembly = Assembly(remote.joined, depth, remote.uneven, remote.padded)
        self._watch = Watch(remote.timeout)
        self._line: list[Member] = []  # whoever was served longest ago first
        self._served: Member | None = None  # whose rollout was delivered last, async
        self._changed = False  # sync: the workers are not those that share the frames now
        self._failing: Exception | None = None  # to be raised once what is done was delivered
        self._overruled: Weights | None = None  # the policy's, when workers were given others
        self._shared_version: int | None = None  # 0: within an update that gave nothing yet
        try:
            self._start(plans)
            self._warn_of_rounding()
            if remote.built_by_workers and self._first_weights:  # the policy is here beside
                self._weights.check(self._first_weights, self._members)
                self._weights.send(self._first_weights, self._members, self._policy_version)
            self.register_scheme_receiver(self._ways.receivers)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, plans: Sequence[WorkerPlan]) -> None:
        self._line = self._force.start(plans)
        infos = {member.index: member.info for member in self._members}
        if self._remote.sync:
            check_alike(infos)
        for info in infos.values():
            check_uneven(self._remote.joined, self._remote.ragged, bool(info.batch_size))
            self._check_environment(info.leaves, info.bounded)
        for in_place in (True, False):
            own = {m.index: m.info for m in self._members if m.in_place is in_place}
            if own:
                needed = in_flight_bytes(own, self._remote.ahead + 1)
                self._engine.check_memory(needed, in_place)
        self._prepare_slabs()
        frames = [info.frames for info in infos.values()]
        self._batch_frames = sum(frames) if self._remote.sync else max(frames)

    def _prepare_slabs(self) -> None:
        """Make the slabs that the present workers will write; let those of others go."""
        infos = {member.index: member.info for member in self._members}
        in_place = [member.index for member in self._members if member.in_place]
        ways = {member.index: self._way_of(member) for member in self._members}
        self._assembly.prepare(infos, in_place, ways)

    def _way_of(self, member: Member) -> DeviceBatches | None:
        """The way of a worker's batches to their device; None: they stay on the host."""
        return self._uploads.way(places_of(member)[0])

    def _warn_of_rounding(self) -> None:
        warn_of_rounding(self._options.frames_per_batch, self._batch_frames)

    @property
    def _members(self) -> list[Member]:
        return self._force.members

    def _check_open(self) -> None:
        check_open(self._closed, self._failure or self._failing)

    # Collecting

    def _collect(self) -> None:
        with self._statistics.timed("transport"):
            self._settle()
            if not self._members:
                raise RuntimeError(
                    "all workers were stopped: add_collectors() before the next batch"
                )
            self._update_weights()
        if self._failing is None:
            self._top_up(max(self._remote.ahead, 1))
        if self._remote.sync:
            self._collect_round()
        else:
            self._collect_first()
        if self._failing is None:
            self._top_up(self._remote.ahead)

    def _settle(self) -> None:
        """Workers may come or go now."""

    def _collect_round(self) -> None:
        """A rollout of each as `_unclaimed`; its slabs are free for others when this returns."""
        members = [member for member in self._members if member.orders]
        with self._statistics.timed("assemble"):
            draft = self._draft(members)
        placed = self._await_round(members, draft)
        with Uninterrupted():
            self._unclaimed = self._joined(members, draft, placed)

    def _await_round(self, members: Sequence[Member], draft: Draft) -> list[Placed]:
        """The oldest rollout of each, in its row.

        Whatever can be made of the batch before is made then: the workers of a sync round wait for
        all that comes after.
        """
        rows = {member.index: row for row, member in enumerate(members)}
        waiting = list(members)
        placed: dict[int, Placed] = {}
        while waiting:
            self._stop_stragglers(waiting, len(members))
            member = self._await_any(waiting)
            rollout = self._receive(member)
            if rollout is None:
                continue
            waiting.remove(member)
            with self._statistics.timed("assemble"):
                header = self._assembly.place(draft, rows[member.index], rollout)
            placed[member.index] = (header, rollout.note)
        return [placed[index] for index in rows]

    def _joined(self, members: Sequence[Member], draft: Draft, placed: Sequence[Placed]) -> Batch:
        """The batch of rollouts that are in their rows, which are taken off."""
        with self._statistics.timed("assemble"):
            notes = {m.index: note for m, (_, note) in zip(members, placed, strict=True)}
            joined = self._assembly.join(draft, notes, self._ids)
        for member, (header, note) in zip(members, placed, strict=True):
            self._take_off(member, header, note)
        frames_of = {m.index: header.frames for m, (header, _) in zip(members, placed, strict=True)}
        episodes = [episode for note in notes.values() for episode in note.episodes]
        first = members[0]
        places, beside = places_of(first), first.info.beside
        return Batch(joined, frames_of, episodes, first.info.leaves, *places, beside=beside)

    def _stop_stragglers(self, waiting: Sequence[Member], workers: int) -> None:
        """Once enough of so many workers are done, the others end their rollouts."""
        preemption = self._remote.preemption
        if preemption is None or workers - len(waiting) < preemption.enough(workers):
            return
        for member in waiting:
            if not member.starting:
                member.handle.stop()

    def _collect_first(self) -> None:
        """The first rollout that is there, as `_collect_round`."""
        member, rollout = self._first_ready()
        with Uninterrupted():
            with self._statistics.timed("assemble"):
                draft = self._draft([member])
                header = self._assembly.place(draft, 0, rollout)
            self._unclaimed = self._joined([member], draft, [(header, rollout.note)])
            # Whoever was served goes to the end of the line, so that a fast worker starves nobody.
            self._line.remove(member)
            self._line.append(member)
            self._served = member

    def _draft(self, members: Sequence[Member]) -> Draft:
        """The batch of their oldest rollouts."""
        infos = [member.info for member in members]
        return self._assembly.draft(members[0].orders[0], infos, self._way_of(members[0]))

    def _first_ready(self) -> tuple[Member, Rollout]:
        """The first rollout that is there. One that failed is raised after those that are done."""
        while True:
            waiting = [member for member in self._line if member.orders or member.starting]
            if self._failing is None:
                member = self._await_any(waiting)
            else:
                present = [member for member in waiting if not member.starting]
                ready = self._force.wait_any(present, 0.0) if present else None
                if ready is None:
                    raise self._failing
                member = ready
            try:
                rollout = self._receive(member)
            except Exception as error:
                self._failing = self._failing or error
                self._line.remove(member)
                self._force.release(member)
                continue
            if rollout is not None:
                return member, rollout

    # Asking

    def _top_up(self, depth: int) -> None:
        """Queue rollouts until each worker has that many, one each in turn.

        Sync rounds are queued for all workers or for none.
        """
        with self._statistics.timed("transport"):
            self._ask_for_more(depth)

    def _ask_for_more(self, depth: int) -> None:
        self._settle()
        if self._changed:  # what was asked of the workers before they changed comes first
            return
        members = [member for member in self._members if not member.leaving]
        for level in range(1, depth + 1):
            lacking = [member for member in members if len(member.orders) < level]
            if not lacking:
                continue
            for group in [lacking] if self._remote.sync else [[member] for member in lacking]:
                if not self._more_needed:
                    return
                self._order(group)

    def _order(self, members: Sequence[Member]) -> None:
        """Queue one rollout of each, which are to become one batch."""
        random = self._is_random
        infos = {member.index: member.info for member in members}
        in_place = any(member.in_place for member in members)
        targets = self._assembly.targets(infos, in_place, self._way_of(members[0]))
        preemption = self._remote.preemption
        for member, target in zip(members, targets, strict=True):
            self._ledger.issue(member.index, member.info.frames)
            least = 1 if preemption is None else preemption.min_steps(member.info.steps)
            member.order(Order(random, target, least))

    @property
    def _more_needed(self) -> bool:
        total = self._options.total_frames
        if total is None:
            return True
        return self._ledger.delivered + self._ledger.in_flight + self._cut_frames < total

    # Awaiting

    def _await_any(self, waiting: Sequence[Member]) -> Member:
        """One of them whose oldest call has an answer. Says who is awaited when it takes long."""
        since = time.monotonic()
        warned = False
        with self._statistics.timed("idle"):
            while True:
                self._check_not_closed()
                for member in self._watch.overdue(waiting):
                    self._give_up(member)
                patience = self._watch.patience(_LOOK_SECONDS)
                ready = self._force.wait_any(waiting, patience)
                if ready is not None:
                    return ready
                if not warned and time.monotonic() - since >= _SILENCE_SECONDS:
                    warn_of_silence([member.index for member in waiting])
                    warned = True

    def _await_start(self, member: Member) -> None:
        """Until it is built, or was already."""
        while member.starting:
            self._await_any([member])
            self._receive(member)

    def _receive(self, member: Member) -> Rollout | None:
        """The worker's oldest rollout; None where it only started, or is being replaced."""
        self._watch.heard_of(member)
        try:
            if member.starting:
                self._welcome(member)
                return None
            with self._statistics.timed("transport"):
                return member.handle.rollout()
        except WorkerDied as death:
            self._replace(member, death, "worker_died")
        except Exception as error:
            if not self._remote.restart_on_error:
                self._lose(member, "env_error")
                raise
            text = f"worker {member.index} raised {type(error).__name__}: {error}"
            self._replace(member, _end_of(member, text, error), "env_error")
        return None

    def _give_up(self, member: Member) -> None:
        """End a worker from which nothing comes any more, and replace it."""
        text = f"worker {member.index} made no step for {self._remote.timeout} s (worker_timeout)"
        self._replace(member, _end_of(member, text), "worker_timeout")

    def _replace(self, member: Member, death: WorkerDied, reason: str) -> None:
        """Start a worker anew; what was asked of the old one is lost, and asked of the new one."""
        frames = member.info.frames
        self._lose(member, reason)
        self._cut_trajectories(member.index, reason)
        forget_ids(self._ids, member.index, member.info)
        self._force.replace(member, death, self._statistics.batches)
        generators = None if member.note is None else member.note.generators
        if generators is not None:
            member.beginning = self._resumption(member, generators, member.plan.spec.incarnation)
        for _ in member.orders:
            self._ledger.issue(member.index, frames)

    def _lose(self, member: Member, reason: str) -> None:
        self._ledger.lose(member.index, len(member.orders) * member.info.frames, reason)

    def _welcome(self, member: Member) -> None:
        """A replaced worker is there: it goes on where the old one was."""
        before = member.info
        self._force.welcome(member)
        if self._remote.sync:
            check_alike({-1: before, member.index: member.info})
        self._weights.give(member)
        self._hook_sender.give(member)
        if member.beginning is not None:
            member.handle.request(*member.beginning)
        for order in member.orders:
            member.handle.submit(order)

    def _take_off(self, member: Member, header: RolloutHeader, note: RolloutNote) -> None:
        """The worker's oldest rollout is part of a batch now."""
        member.handle.pop()
        member.orders.popleft()
        self._ledger.take_back(member.index, member.info.frames - header.frames)
        if note.team is not None:  # its processes were asked for these beside what is there
            for reason, frames in note.team.lost.items():
                self._ledger.issue(member.index, frames)
                self._ledger.lose(member.index, frames, reason)
        member.note = note
        member.version = header.policy_version
        member.frames += header.frames
        member.since_update += 1

    # What it is and does

    @property
    def policy_lag(self) -> dict[int, int]:
        """Per worker: by how many versions its last delivered rollout was behind, 0 before it."""
        return {m.index: self._policy_version - m.version if m.note else 0 for m in self._members}

    def _report_of_all(self) -> dict[str, Any]:
        """See :meth:`CollectorBase.stats`.

        "seconds" of the collector has the phases idle (waiting for rollouts), transport, assemble,
        deliver and user, which add up to "elapsed"; "seconds" of each worker has env, policy,
        record and idle, since its first rollout began. "transport" of a worker is "shared memory",
        where it writes into the batch itself, or "object store". "slow_paths" counts workers that
        go through one TensorDict per step, or have extras.
        """
        everyone = sorted([*self._members, *self._force.former], key=lambda m: m.index)
        notes = {member.index: note for member in everyone if (note := member.note)}
        report = self._statistics.report()
        return {
            **report,
            "frames_stepped": sum(note.stepped for note in notes.values()),
            "slow_paths": count_slow_paths(note.slow_paths for note in notes.values()),
            "workers": {
                member.index: {
                    "pid": member.info.pid,
                    "node": member.info.node,
                    "transport": "shared memory" if member.in_place else "object store",
                    "version": member.version,
                    "restarts": _restarts_of(member, note),
                    "frames": member.frames,
                    "seconds": note.seconds.report() if note else {},
                }
                for member in everyone
                for note in [notes.get(member.index)]
            },
            "workers_alive": 0 if self._closed else sum(not m.starting for m in self._members),
        }

    # Questions

    def _in_order(self) -> list[Member]:
        members = sorted(self._members, key=lambda member: member.index)
        if not members:
            raise RuntimeError("all workers were stopped: there is nobody to ask")
        return members

    def _answers(self, questions: Mapping[int, bytes]) -> list[bytes]:
        with self._stream:
            self._check_open()
            members = [member for member in self._in_order() if member.index in questions]
            for member in members:
                self._await_start(member)
            asked = [(m, m.handle.request("ask", questions[m.index])) for m in members]
            answers, failures = [], []
            for member, call in asked:
                try:
                    answers.append(self._answer_of(member, call))
                except Exception as error:
                    failures.append(error)
            if failures:
                raise failures[0]
            return answers

    def _answer_of(self, member: Member, call: Any) -> bytes:
        self._watch.heard_of(member)
        since, warned = time.monotonic(), False
        while not member.handle.await_answer(call, self._watch.patience(_LOOK_SECONDS)):
            self._check_not_closed()
            if self._watch.overdue([member]):
                self._give_up(member)
                raise TimeoutError(
                    f"worker {member.index}: expected an answer within worker_timeout "
                    f"({self._remote.timeout} s); it is replaced"
                )
            if not warned and time.monotonic() - since >= _SILENCE_SECONDS:
                warn_of_silence([member.index])
                warned = True
        try:
            answer: bytes = member.handle.answer(call)
            return answer
        except WorkerDied as death:
            self._replace(member, death, "worker_died")
            raise WorkerError(
                f"{death}, while it was asked; it is replaced",
                death.worker,
                death.incarnation,
                death.remote_traceback,
            ) from death

    # Seeds and state

    def _drop_rollouts(self) -> None:
        for member in self._members:
            member.drop()

    def _seed_workers(self, root: int, static: bool) -> int:
        self._settle()
        seeds: dict[int, list[int]] = {}
        following = root
        for member in sorted(self._members, key=lambda member: member.index):
            count = member.info.num_seeds
            seeds[member.index], following = seed_chain(following, count, static)
            member.note = None
        self._begin_all({index: ("set_seed", own, root) for index, own in seeds.items()})
        return following

    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Reset environments. Rollouts of their workers that are in flight are dropped.

        Args:
            reset_idx: for each worker whether its environments are reset; None: those of all.

        Raises:
            ValueError: not one for each worker.
            RuntimeError: some of a sync collector's workers, while it collects ahead: what the
                others have begun belongs to the same batches.
        """
        with self._stream:
            self._check_open()
            chosen = self._chosen(reset_idx)
            if len(chosen) == len(self._members):
                self._drop_all("reset")
                self._settle()
                chosen = self._chosen(None)
            elif self._remote.sync and self._ledger.in_flight:
                raise RuntimeError(
                    "reset_idx: expected all workers, as rollouts of all are in flight; use "
                    "prefetch=0 to reset some"
                )
            for member in chosen:
                self._lose(member, "reset")
                self._cut_trajectories(member.index, "reset")
                member.drop()
            self._ask_all({member.index: ("reset",) for member in chosen})

    def _chosen(self, flags: Sequence[bool] | None) -> list[Member]:
        if flags is None:
            return self._members
        members = self._in_order()
        if len(flags) != len(members):
            raise ValueError(
                f"reset_idx: expected one flag per worker ({len(members)}), got {len(flags)}"
            )
        return [member for member, is_chosen in zip(members, flags, strict=True) if is_chosen]

    def _begin_all(self, beginnings: Mapping[int, tuple[Any, ...]]) -> None:
        """Ask each worker for its beginning, which a worker that replaces it is asked for, too."""
        for member in self._members:
            member.beginning = beginnings[member.index]
        self._ask_all(beginnings)

    def _ask_all(self, calls: Mapping[int, tuple[Any, ...]]) -> None:
        """Queue these calls for workers that are there, and wait for all of them."""
        asked = [
            (member, member.handle.request(*calls[member.index]))
            for member in self._members
            if member.index in calls and not member.starting
        ]
        for member, call in asked:
            try:
                member.handle.answer(call)
            except WorkerDied as death:
                self._replace(member, death, "worker_died")

    def _resize(self, frames: int) -> None:
        """Every worker collects that many frames per rollout from now on; nothing is in flight."""
        for member in self._members:
            self._await_start(member)
            member.share(frames)
        calls = [(member, member.handle.request("resize", frames)) for member in self._members]
        for member, call in calls:
            try:
                member.info = member.handle.answer(call)
            except WorkerDied as death:
                self._replace(member, death, "worker_died")
                self._await_start(member)

    def _worker_states(self) -> dict[int, WorkerState]:
        own = self._weights.own
        return {
            member.index: WorkerState(
                member.note.generators if member.note else None, own.get(member.index, {})
            )
            for member in self._members
        }

    def _current_weights(self) -> Weights:
        return weights_of(self._policy) or self._weights.newest

    def _check_weights(self, weights: Weights) -> None:
        if not self._remote.built_by_workers:
            for member in self._members:
                check_same(member.info.weights, weights)
        elif weights:
            self._weights.check(weights, self._members)
        elif self._weights.newest:
            raise ValueError(
                "state_dict: expected weights, as the workers were given some, got none: it was "
                "made while they had those that their policy_factory had built"
            )

    def _check_states(self, states: Mapping[int, WorkerState]) -> None:
        for member in self._members:
            info, state = member.info, states[member.index]
            check_generators(member.index, state, info.processes, info.num_envs)
            if state.policy:
                self._weights.check(state.policy, [member])

    def _resume_workers(self, state: CollectorState) -> None:
        self._settle()
        if state.policy and self._policy is not None:
            load_weights(weights_of(self._policy), state.policy)
        calls: dict[int, tuple[Any, ...]] = {}
        for member in self._members:
            own = state.workers[member.index].generators
            if own is None:
                seeds = self._seeds_for(member, state.batches)
                root = derived_seeds(1, state.entropy, state.batches)[0]
                calls[member.index] = ("set_seed", seeds, root)
            else:
                calls[member.index] = self._resumption(member, own, state.batches)
            member.note = None
            member.version = state.policy_version
        self._begin_all(calls)
        # Now that what was dropped has ended, which might have changed buffers of the policy.
        if state.policy or not any(member.info.weights for member in self._members):
            self._weights.send(state.policy, self._members, state.policy_version)
        for member in self._members:
            if own_policy := state.workers[member.index].policy:
                self._weights.send(own_policy, [member], state.policy_version, own=True)

    def _resumption(self, member: Member, generators: Any, moment: int) -> tuple[Any, ...]:
        return ("resume", generators, self._seeds_for(member, moment))

    def _seeds_for(self, member: Member, moment: int) -> list[int]:
        """Seeds of a worker's envs for a reset at some moment of the run."""
        return derived_seeds(member.info.num_seeds, self._entropy, moment, member.index)

    # Hooks

    def _pass_hook_on(self, name: str, hook: Callable[..., Any] | None) -> None:
        self._hook_sender.send(name, hook, self._members)

    def _begin_profile(self, config: ProfileConfig) -> None:
        for member in self._profiled(config):
            hook = ProfilerHook(config, member.index, self.post_collect_hook)
            self._hook_sender.send(POST, hook, [member], alone=True)

    def _end_profile(self, config: ProfileConfig) -> None:
        stop: Call = ("cascade_execute", ("post_collect_hook.stop",), {})
        for member in self._profiled(config):
            with contextlib.suppress(AttributeError):  # it has not begun
                self._ask({member.index: stop})
        self._hook_sender.send(POST, self.post_collect_hook, self._members)

    def _profiled(self, config: ProfileConfig) -> list[Member]:
        return [member for member in self._members if member.index in config.workers]

    # Weights

    def _update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        check_open(self._closed, None)
        if not self._ways.sends:
            return
        gifts = self._gifts(source, worker_ids)
        for weights, members in gifts:
            self._weights.check(weights, members)
        by_itself = self._remote.update_each or self._remote.update_interval
        self._overruled = self._policy_now() if by_itself and source is not None else None
        sent = self._push(gifts, wait, by_worker(source) is not None)
        if wait:
            for member, call in sent:
                member.handle.answer(call)

    def _take_received(self, source: Any) -> None:
        self._update(source, None, False)

    def _gifts(self, source: Any, worker_ids: int | Sequence[int] | None) -> list[Gift]:
        """Which weights go to which workers."""
        known = sorted(member.index for member in self._members)
        own = by_worker(source)
        if own is not None:
            check_worker_ids(list(own), known, "policy_or_weights")
            ids = check_worker_ids(list(own) if worker_ids is None else worker_ids, sorted(own))
            return [(weights_from(own[index]), [self._member(index)]) for index in ids]
        ids = check_worker_ids(worker_ids, known)
        if source is None and self._remote.built_by_workers and self._policy is None:
            raise no_weights_given()
        weights = weights_of(self._policy) if source is None else weights_from(source)
        return [(weights, [member for member in self._members if member.index in ids])]

    def _member(self, index: int) -> Member:
        return next(member for member in self._members if member.index == index)

    def _update_by(
        self,
        updater: Any,
        source: Any,
        worker_ids: int | Sequence[int] | None,
        others: Mapping[str, Any],
    ) -> None:
        if only_carries(updater):
            self._update(carried(updater, source), worker_ids, False)
            updater._call_post_hooks()
        else:
            super()._update_by(updater, source, worker_ids, others)

    @contextmanager
    def _one_version(self) -> Iterator[None]:
        self._shared_version = 0
        try:
            yield
        finally:
            self._shared_version = None

    def _update_weights(self) -> None:
        """Send what is due by itself: the caller's policy as it is now."""
        due: list[Member] = []
        if self._remote.update_each:
            due = self._members if self._remote.sync else [self._served] if self._served else []
        every = self._remote.update_interval
        late = [m for m in self._members if every and m.since_update >= every and m not in due]
        members = [member for member in (*due, *late) if member in self._members]
        if self._updater is not None and members:
            everyone = len(members) == len(self._members)
            ids = None if everyone else [member.index for member in members]
            self.update_policy_weights_(worker_ids=ids)
        elif self._ways.sends:
            self._push_policy(members)

    def _policy_now(self) -> Weights:
        return {name: value.clone() for name, value in weights_of(self._policy).items()}

    def _push_policy(self, members: Sequence[Member]) -> None:
        """Send the policy's weights, unless they are the ones that the workers were made with.

        Others that workers were given since stay until the policy's change.
        """
        weights = weights_of(self._policy) if members else {}
        if not weights:
            return
        untouched = self._policy_version == 0 and self._statistics.batches == 0
        if untouched and same_values(weights, self._first_weights):
            return
        if self._overruled is not None and same_values(weights, self._overruled):
            return
        self._overruled = None
        self._push([(weights, members)], False)

    def _push(
        self, gifts: Sequence[Gift], acknowledge: bool, own: bool = False
    ) -> list[tuple[Member, Any]]:
        """One more version for these workers; the calls that can be waited for.

        Args:
            own: each of them is to have its own weights.
        """
        with self._pushing:
            if not self._shared_version:
                self._count_version()
            if self._shared_version is not None:
                self._shared_version = self._policy_version
            return [
                sent
                for weights, members in gifts
                for sent in self._weights.send(
                    weights, members, self._policy_version, acknowledge, own
                )
            ]

    def _check_close_env(self, close_env: bool) -> None:
        if not close_env:
            raise RuntimeError(
                "close_env: expected True, as the environments end with the workers they are in"
            )

    def _shutdown(self, timeout: float | None, close_env: bool) -> None:
        self._force.close(timeout)
        self._engine.leave()
        self._assembly.close()


def places_of(member: Member) -> tuple[torch.device, torch.device | None]:
    """Where a worker's batches are to lie, and what ``td.device`` of them says."""
    devices = member.plan.spec.options.devices
    return devices.of_batches or member.info.device, devices.told


def _restarts_of(member: Member, note: RolloutNote | None) -> int:
    """How often a worker was replaced, or one of its own processes."""
    team = note and note.team
    return member.plan.spec.incarnation + (team.restarts if team else 0)


def _end_of(member: Member, text: str, cause: Exception | None = None) -> WorkerDied:
    """What is known of a worker that the collector itself gives up."""
    end = WorkerDied(text, member.index, member.incarnation, str(cause or ""))
    end.__cause__ = cause
    return end


def warn_of_silence(workers: Sequence[int]) -> None:
    """Say who is awaited."""
    warn_user(f"no rollout for {_SILENCE_SECONDS:.0f} s; waiting for workers {list(workers)}")
