"""TorchRL's AsyncBatchedCollector: batches of whatever is ready, one policy for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from pycollect import checks as check
from pycollect._core import Uninterrupted
from pycollect.arguments import check_flag
from pycollect.batch.layout import Key
from pycollect.collectors.arguments.async_batched import (
    Chunks,
    check_backends,
    check_version_key,
    receiver,
    server_arguments,
    workers_entries,
)
from pycollect.collectors.arguments.given import telling
from pycollect.collectors.multi import MultiaSyncDataCollector
from pycollect.errors import is_interrupt
from pycollect.stream.buffer_delivery import put
from pycollect.stream.collector import Finished
from pycollect.stream.flow import Part
from pycollect.stream.options import warn_of_rounding
from pycollect.worker.hooks import POST

_ENV_INDEX = "env_index"
_OWN_VERSION = ("collector", "policy_version")


class AsyncBatchedCollector(MultiaSyncDataCollector):
    """Collects in processes of this machine, whose policy one process calls for all of them.

    A :class:`MultiaSyncDataCollector` with ``inference="central"``, with TorchRL's arguments, and
    its batches: of whichever workers are ready, one rollout after the other. What the arguments
    are that only say how TorchRL's goes about it is of no effect.

    Args:
        create_env_fn: a list of callables, one per environment; other entries will do, too.
        policy: as :class:`MultiaSyncDataCollector` has it; the process gets its weights before each
            batch, if they have changed.
        policy_factory: makes it in that process, in place of `policy`.
        frames_per_batch: frames in a batch, of all workers together. It is rounded up, with a
            warning, where so many do not make up whole rollouts.
        total_frames: a lower bound; None or a negative number: for ever.
        max_batch_size: environments in one call of the policy at the most; None: 64.
        min_batch_size: that such a call waits for; None: 1.
        server_timeout: seconds that it waits for them; None: 0.01.
        transport: None, "auto" or "driver": environments ask the process through shared memory.
        device: where the policy is called.
        backend, env_backend, policy_backend: None, "threading" or "multiprocessing", all of which
            are processes.
        env_exchange: without effect.
        envs_per_worker: environments that a process steps, one after the other.
        transition_chunk_size: steps of a rollout; "auto": so many that each environment has an
            equal share of a batch, but 64 at the least, and no more than a batch.
        reset_at_each_iter: reset all environments at the start of every rollout.
        postproc: called with each batch, its result is delivered.
        exploration_type: DETERMINISTIC, RANDOM, MODE or MEAN.
        replay_buffer: anything with ``extend``: batches go there, and the iterator yields None.
        post_collect_hook: called here with each batch, after `postproc`.
        yield_completed_trajectories: deliver single trajectories, [F], once they are complete.
        weight_sync: TorchRL's WeightSyncScheme, which brings weights from senders elsewhere.
        weight_sync_model_id: "policy".
        verbose: without effect; see `stats()`.
        create_env_kwargs: keyword arguments of the env callables, or one dict per environment.
        worker_affinity: CPUs of each process, a list of lists or a function of its number.
        driver_affinity: None; use ``os.sched_setaffinity``.
        server_config: TorchRL's InferenceServerConfig, of which the sizes and the time-out of a
            call are taken; or anything with attributes of these names.
        device_config: TorchRL's InferenceDeviceConfig, instead of `device`.
        policy_version: where it begins to count.
        policy_version_key: of the version of the policy that each frame was acted by; None: it is
            left out.
        env_groups: 2: a process steps one half of its `envs_per_worker` environments while the
            policy is called for the other half.

    Yields:
        TensorDicts, [frames_per_batch]: rollouts of [T] of single environments, one after the
        other, with "env_index" beside what other collectors' batches have: of which entry of
        `create_env_fn` each frame is. Single trajectories have it where `envs_per_worker` is 1.

    Raises:
        ValueError, TypeError: by the name of the argument.
        SharedMemoryError: processes cannot share memory here; it says why.
    """

    @telling
    def __init__(
        self,
        create_env_fn: Sequence[Any],
        *,
        policy: Any = None,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int,
        total_frames: int | None = -1,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        server_timeout: float | None = None,
        transport: Any = None,
        device: Any = None,
        backend: str | None = None,
        env_backend: str | None = None,
        env_exchange: str = "auto",
        envs_per_worker: int = 1,
        transition_chunk_size: int | str = "auto",
        policy_backend: str | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        exploration_type: InteractionType | str = InteractionType.RANDOM,
        replay_buffer: Any = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
        yield_completed_trajectories: bool = False,
        weight_sync: Any = None,
        weight_sync_model_id: str = "policy",
        verbose: bool = False,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        worker_affinity: Sequence[Sequence[int]] | Callable[[int], Sequence[int]] | None = None,
        driver_affinity: Sequence[int] | None = None,
        server_config: Any = None,
        device_config: Any = None,
        policy_version: int = 0,
        policy_version_key: Any = "policy_version",
        env_groups: int = 1,
    ) -> None:
        if policy is None and policy_factory is None:
            raise TypeError("policy: expected one, or a policy_factory, got neither")
        check_backends(transport, backend, env_backend, policy_backend, driver_affinity)
        sizes = {
            "min_batch_size": min_batch_size,
            "max_batch_size": max_batch_size,
            "server_timeout": server_timeout,
        }
        envs_per_worker = check.check_positive("envs_per_worker", envs_per_worker)
        server = server_arguments(server_config, device_config, device, sizes)
        entries = workers_entries(
            create_env_fn, create_env_kwargs, envs_per_worker, worker_affinity
        )
        frames = check.check_positive("frames_per_batch", frames_per_batch)
        self._chunks = Chunks.of(transition_chunk_size, frames, len(create_env_fn), envs_per_worker)
        self._envs_per_worker = envs_per_worker
        self._first_version = check.check_count("policy_version", policy_version)
        self._version_key = check_version_key(policy_version_key)
        hook = check.check_callable(POST, post_collect_hook)
        trajectories = check_flag("yield_completed_trajectories", yield_completed_trajectories)
        super().__init__(
            entries,
            policy,
            policy_factory=policy_factory,
            frames_per_batch=self._chunks.frames,
            total_frames=total_frames,
            reset_at_each_iter=reset_at_each_iter,
            postproc=postproc,
            exploration_type=exploration_type,
            replay_buffer=replay_buffer,
            trajs_per_batch=1 if trajectories else None,
            traj_format="cat" if trajectories else "padded",
            drop_uncollected=not trajectories,
            update_after_each_batch=policy is not None,
            track_policy_version=policy_version_key is not None,
            weight_recv_schemes=receiver(weight_sync_model_id, weight_sync),
            inference="central",
            env_groups=env_groups,
            **server,
        )
        self.set_post_collect_hook(hook)
        warn_of_rounding(frames, self.frames_per_batch)

    @property
    def frames_per_batch(self) -> int:
        """Frames in one full batch, after rounding up."""
        return self._chunks.batch_frames

    requested_frames_per_batch = frames_per_batch

    @property
    def policy_version(self) -> int:
        """What `policy_version` was at first, one more with each weight update."""
        return self._first_version + super().policy_version

    @property
    def server_backend(self) -> str:
        """Where the policy is called."""
        return "process"

    def server_stats(self, *, reset: bool = False) -> dict[str, Any]:
        """What is known of the process that calls the policy.

        Args:
            reset: without effect.

        Returns:
            Its "pid", "restarts", and its last "failure" in words, or None.
        """
        told: dict[str, Any] = self.stats()["server"]
        return told

    def _pass_hook_on(self, name: str, hook: Callable[..., Any] | None) -> None:
        """What is called with batches is called here."""
        if name != POST:
            super()._pass_hook_on(name, hook)

    def __len__(self) -> int:
        """The number of batches in all, delivered ones included, if every batch is full."""
        return -(-super().__len__() // self._chunks.number)

    def _frames(self) -> bool:
        """Finish a batch of the rollouts that were ready first."""
        self._gather()
        with self._delivering() as counted:
            with Uninterrupted():
                parts = self._flow.take_parts()
                self._count(_frames_of(parts), counted)
            with self._flow.statistics.timed("deliver"):
                td = self._finished(self._joined(parts), {}, counted)
                self._ready.append(Finished(td, counted))
        self._show_progress(sum(counted.values()))
        return True

    def _fill_with_rollouts(self) -> None:
        """Such a batch goes to the replay buffer."""
        self._gather()
        with self._filling() as filling:
            with Uninterrupted():
                parts = self._flow.take_parts()
                frames_of = _frames_of(parts)
                filling.expect(frames_of)
            put(self._finished(self._joined(parts), {}, frames_of), self.replay_buffer)
            filling.count(frames_of)

    def _gather(self) -> None:
        """Collect rollouts until there are enough for a batch, or there are no more.

        What was complete before something failed is a batch; the call after it raises.
        """
        flow = self._flow
        while len(flow.parts) < self._chunks.number:
            held = sum(_frames_of(flow.parts).values())
            if held and not flow.more_needed and flow.ledger.in_flight == held:
                return
            flow.check_not_closed()
            try:
                batch, td = self._assembled(flow.uploads)
            except Exception as error:
                if flow.parts and not is_interrupt(error):
                    return
                raise
            with Uninterrupted():
                flow.claim()
                flow.parts.append((batch.frames_of, td))

    def _joined(self, parts: Sequence[Part]) -> TensorDictBase:
        """One after the other, [N]: the frames of each environment follow each other."""
        flat = []
        for frames_of, td in parts:
            (worker,) = frames_of
            envs = td.shape[0] if td.ndim > 1 else 1
            own = td.reshape(-1) if td.ndim > 1 else td
            place = own.get(("next", "done")).device
            entries = torch.arange(envs, device=place).clamp_(max=self._envs_per_worker - 1)
            index = entries.repeat_interleave(td.shape[-1])  # a vector environment is one entry
            flat.append(own.copy().set(_ENV_INDEX, worker * self._envs_per_worker + index))
        return torch.cat(flat, 0)

    def _finished(
        self, td: TensorDictBase, host: Mapping[Key, torch.Tensor], frames_of: Mapping[Any, int]
    ) -> TensorDictBase:
        """What the caller gets; a single trajectory tells its environment where that is known."""
        if self._flow.queue is not None and self._envs_per_worker == 1:
            (worker,) = frames_of
            place = td.get(("next", "done")).device
            td = td.copy().set(_ENV_INDEX, torch.full(td.shape, worker, device=place))
        if self._version_key is not None:
            version = td.get(_OWN_VERSION) + self._first_version
            td = td.exclude(_OWN_VERSION).set(self._version_key, version)
        td = super()._finished(td, host, frames_of)
        if self.post_collect_hook is not None:
            self.post_collect_hook(td)
        return td


def _frames_of(parts: Sequence[Part]) -> Counter[int]:
    """Frames of each worker."""
    total: Counter[int] = Counter()
    for frames_of, _ in parts:
        total.update(frames_of)
    return total
