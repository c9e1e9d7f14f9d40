"""The collectors that run workers in processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pycollect import checks as check
from pycollect.api import arguments as parse
from pycollect.api.binding import Arguments, explained
from pycollect.api.central import Central
from pycollect.api.choosing import Choosing, choose_sync
from pycollect.api.set_up import EngineOptions, SetUp, no_options
from pycollect.api.signatures import (
    MultiaSyncDataCollectorSignature,
    MultiSyncDataCollectorSignature,
)
from pycollect.api.single import SyncDataCollector
from pycollect.arguments import completed_by
from pycollect.compat.many_workers import Asking, ManyWorkers
from pycollect.compat.torchrl import TorchRLCollector
from pycollect.compat.weights import WorkerPipe
from pycollect.driver.delivery import warn_of_joins
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.policy_process import InWorkers
from pycollect.driver.scheduler import Scheduler
from pycollect.transport.channel import AnyBell
from pycollect.transport.engine import Engine
from pycollect.transport.processes.engine import ProcessEngine

EngineMaker = Callable[[RemoteOptions, AnyBell | None], Engine]
"""Makes the engine; this process waits on the bell, or on a new one for ``None``."""


class ScheduledCollector(TorchRLCollector, Asking, ManyWorkers):
    """A stream of batches from a scheduler, which drives workers through an engine.

    The engine is closed when the collector is shut down or cannot be made.
    """

    _source: Scheduler
    _frames_divided_among = "workers and their environments"

    def __init__(self, set_up: SetUp, engine: EngineMaker) -> None:
        template, plans = set_up.template, set_up.plans
        remote, central = template.remote, template.central
        self._template, self._remote = template, remote
        options, first = set_up.options, plans[0].spec.options
        if options.replay_buffer is not None:  # rows of different batches would differ in length
            options = replace(options, split_trajs=False)
        warn_of_joins(options, first.set_truncated, len(plans))
        flow = Flow(options)
        place = InWorkers if central is None else central.place(remote.start_method)
        bell = None if central is None else central.bell
        scheduler = Scheduler(flow, remote, plans, set_up.policy, engine(remote, bell), place)
        super().__init__(
            flow, scheduler, set_up.weights, first.pre_collect_hook, first.post_collect_hook
        )

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int = 1,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Start more workers, and wait until they are ready.

        They have the same arguments as the first workers. An async collector uses them at once. A
        sync collector includes them in the first batch that was not requested yet, and divides
        frames equally among all workers from then on.

        Args:
            create_env_fn: One entry, or a list with one entry per new worker.
            num_envs: Number of environments per worker, which are stepped as a batch, or the number
                of processes if workers have them (default: 1).
            policy: Policy with the same parameters as the collector's. Defaults to ``None``: the
                collector's own.
            collector_kwargs: Arguments of the new workers that replace the collector's: a dict, or
                a list with one dict per new worker. Defaults to ``None``: the collector's own
                `collector_kwargs`, if it has a single dict of them.

        Returns:
            The ids of the new workers.

        Raises:
            ValueError: An argument is invalid, or the new workers of a sync collector would return
                batches of another layout.
        """
        return self._add(create_env_fn, num_envs, policy, collector_kwargs)

    def _add(
        self,
        create_env_fn: Any,
        num_envs: int,
        policy: Any,
        collector_kwargs: Any,
        engine_options: EngineOptions = no_options,
    ) -> list[int]:
        """Start more workers; see `add_collectors`."""
        return self._source.members.add(
            partial(
                self._template.later_plans,
                create_env_fn,
                num_envs,
                policy,
                collector_kwargs,
                engine_options,
                self.policy,
            )
        )

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
        with self._flow.moving:
            self._flow.check_not_collecting("reset")
            self._flow.check_open()
            self._source.members.reset(reset_idx)

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

    def worker_policy_versions(self) -> dict[int, int]:
        """Return the policy version of the weights that each worker has.

        `policy_version` counts all updates; a worker that the last update left out is behind it.
        The workers reply after their current rollouts. With ``inference="central"``, workers that
        have no weights have `policy_version`.

        Returns:
            Versions by worker id.

        Raises:
            WorkerError: A worker died.
            TimeoutError: A worker did not reply within `worker_timeout`.
        """
        versions = zip(self._source.group.in_order, self.map_fn("get_policy_version"), strict=True)
        return {
            worker.index: self.policy_version if version is None else version
            for worker, version in versions
        }

    @property
    def remote_collectors(self) -> list[Any]:
        """Native handles of the workers, in order: processes or Ray actor handles."""
        return [worker.newest.native for worker in self._workers]


class MultiCollector(ScheduledCollector, metaclass=Choosing):
    """Create a sync or async collector with worker processes on this machine.

    ``MultiCollector(..., sync=True)`` returns a :class:`MultiSyncDataCollector`. With
    ``sync=False`` it returns a :class:`MultiaSyncDataCollector`.

    Args:
        create_env_fn: As for that class.
        policy: As for that class (default: ``None``).
        sync: Which of the two classes to create.
        arguments: Other arguments of that class, by name.
    """

    _choose = classmethod(choose_sync)

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, sync: bool, **arguments: Any
    ) -> None:
        raise TypeError("MultiCollector: derive from one of its two subclasses")

    def _start(self, sync: bool, given: Arguments) -> None:
        _check_collector_class(given["collector_class"])
        if given["num_sub_threads"] is not None:
            threads = check.check_positive("num_sub_threads", given["num_sub_threads"])
            given = given.instead(num_threads=threads)
        entries = parse.env_entries(given["create_env_fn"], "num_workers", given["num_workers"])
        frames, shares = given["frames_per_batch"], list[int]()
        if isinstance(frames, (list, tuple)):
            each = parse.one_each("frames_per_batch", frames, len(entries))
            shares = [check.check_positive("frames_per_batch", share) for share in each]
            given = given.instead(frames_per_batch=sum(shares))
        self._pipes: dict[int, WorkerPipe] = {}
        central = Central.of(given, len(entries), sync=sync)
        own = shares if sync else ()
        set_up = SetUp.of(given, entries, sync=sync, shares=own, central=central)
        ScheduledCollector.__init__(
            self, set_up, lambda remote, bell: ProcessEngine(remote.start_method, bell)
        )

    @property
    def pipes(self) -> list[WorkerPipe]:
        """One pipe per worker, for TorchRL weight updaters that send through them."""
        for worker in self._workers:
            give = partial(self._source.place.push_to_worker, worker)
            self._pipes.setdefault(worker.index, WorkerPipe(give))
        return [self._pipes[worker.index] for worker in self._workers]


@completed_by(SyncDataCollector)
class MultiSyncDataCollector(MultiSyncDataCollectorSignature, MultiCollector):
    """Collect in worker processes; each batch joins the rollouts of all workers.

    Workers write into the batch itself, in unnamed shared memory. They import the main script, so
    protect its entry point with ``if __name__ == "__main__":``. Workers may start processes of
    their own. They end when this process ends, even if it is killed.

    Args:
        create_env_fn: A list with one entry per worker, or one entry that is repeated `num_workers`
            times. An entry is a callable that returns an environment, a Gymnasium id, or an
            environment that can be pickled. A list of callables or ids as an entry makes a batch of
            P environments.
        policy: A TensorDictModule, or an nn.Module or callable that takes tensors. Each worker gets
            a copy. ``None`` samples random actions.
        frames_per_batch (int | Sequence[int]): Number of frames in a batch of all workers. It is
            divided equally, rounded up with a warning. A list sets the share of each worker; see
            below.
        num_workers (int | None = None): Number of workers. Required if `create_env_fn` is not a
            list.
        device: Default for `storing_device`, `env_device` and `policy_device`; each of the four may
            be a list with one device per worker. With ``None``, each has the default described
            below.
        create_env_kwargs: Keyword arguments for the callables of `create_env_fn`: a dict, or a list
            with one dict per worker.
        init_random_frames: Take random actions until this many frames of all workers have been
            requested; items already in the replay buffer count.
        policy_factory: Callable without arguments that returns the policy; each worker calls it.
            May be a list with one callable per worker. Replaces `policy`; only the factory must be
            picklable.
        replay_buffer: Object with an ``extend`` method. Rollouts are written to it, and the
            iterator yields ``None``. Each worker's rollout, [T] or [P, T], is written separately,
            in the order of workers, after `postproc`. `cat_results` and `split_trajs` then have no
            effect. Defaults to ``None``: batches are returned.
        init_fn: Function without arguments that each worker calls before it makes its environments.
        pre_collect_hook: Function without arguments that the worker calls before each rollout.
        post_collect_hook: Function that the worker calls with each of its rollouts, [T] or [P, T].
            Trajectory ids are still unique only within the worker.
        num_threads (int = 1): Number of torch threads in each worker. With ``inference="central"``,
            the policy has as many as this process.
        num_sub_threads (int | None = None): TorchRL's name for `num_threads`, which it overrides.
        collector_class (Any = None): What each worker runs: ``None``, SyncDataCollector or
            "single", which all mean the same.
        ...: See SyncDataCollector.

    Yields:
        TensorDicts. For B workers, `cat_results` "stack" gives [B, T] or [B, P, T], 0 gives [B*T]
        or [B*P, T], and -1 gives [B*T] or [P, B*T]. At most two of the batches that you hold are in
        shared memory. While you hold both, further batches are copied to private memory.

        With `preemptive_threshold` or unequal shares, the rollouts of a batch differ in length.
        "stack" pads them with zeros to the length T of the longest share. Padding has trajectory id
        -1. ("collector", "mask"), bool [B, T] or [B, P, T], is true for real frames. `cat_results`
        -1, or 0 with one environment per worker, concatenates rollouts along time without padding.
        Only real frames are counted.

    Raises:
        TypeError: An argument has the wrong type or an unknown name, or cannot be pickled.
        ValueError: An argument is invalid, a batch does not fit into memory, or `cat_results` is 0
            and rollouts of several environments may differ in length.
        SharedMemoryError: Processes cannot share memory on this system; the message explains why.
    """

    def _make(self, given: Arguments) -> None:
        self._start(True, given)


@completed_by(MultiSyncDataCollector)
class MultiaSyncDataCollector(MultiaSyncDataCollectorSignature, MultiCollector):
    """Collect in worker processes; return each worker's rollout as soon as it is ready.

    Args:
        frames_per_batch: Number of frames in a batch, which is one worker's rollout. It is rounded
            up with a warning. A list with one number per worker means their sum.
        update_after_each_batch: Send the policy's current weights to the worker that returned a
            batch, before its next rollout starts.
        prefetch: Number of rollouts per worker, running or finished, beyond the batch being
            consumed. A batch is at most ``prefetch + 1`` policy versions old, counting the versions
            that its worker received. ``None`` means 2.
        cat_results (str | None = None): ``None`` or "stack", without effect, because rollouts are
            not joined.
        inference: With "central", workers only step environments and one policy acts for all of
            them. It runs in a process of its own, an inference server, which serves the workers
            that are ready. The server has a copy of `policy`, or calls `policy_factory`, and takes
            weight updates before its next call. If it dies, it is replaced together with the
            workers. ``None`` gives each worker a copy of the policy.
        ...: See MultiSyncDataCollector.

    Yields:
        TensorDicts, [T] or [P, T], each from one worker. At most two of the batches that you hold
        of each worker are in shared memory. While you hold both, further batches of that worker are
        copied to private memory.

    Raises:
        ValueError: An argument is invalid, or a batch does not fit into memory.
    """

    def _make(self, given: Arguments) -> None:
        self._start(False, given)


@completed_by(MultiaSyncDataCollector)
class AsyncCollector(MultiaSyncDataCollector):
    """Collect in one background process.

    Args:
        create_env_fn: The entry of the only worker.
        arguments: Other arguments of :class:`MultiaSyncDataCollector`, by name.
        ...: See MultiaSyncDataCollector.

    Yields:
        TensorDicts, [T] or [P, T].
    """

    @explained
    def __init__(self, create_env_fn: Any, policy: Any = None, **arguments: Any) -> None:
        count = check.check_positive_or_none("num_workers", arguments.get("num_workers"))
        if count not in (None, 1):
            raise ValueError(
                f"num_workers: expected None or 1, got {count}; "
                "AsyncCollector has one worker; for several, use MultiaSyncDataCollector"
            )
        super().__init__([create_env_fn], policy, **arguments)


def _check_collector_class(value: Any) -> None:
    name = value if isinstance(value, str) else getattr(value, "__name__", value)
    if not check.is_one_of(name, (None, "single", "SyncDataCollector", "Collector")):
        raise ValueError(
            f"collector_class: expected None, SyncDataCollector or 'single', got {value!r}"
        )
