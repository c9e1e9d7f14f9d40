"""TorchRL's AsyncBatchedCollector: batches from any ready environments, one policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from pycollect import checks as check
from pycollect._core import Uninterrupted
from pycollect.api.async_batched_arguments import (
    Chunks,
    check_backends,
    check_version_key,
    receiver,
    server_arguments,
    workers_entries,
)
from pycollect.api.binding import explained
from pycollect.api.multi import MultiaSyncDataCollector
from pycollect.arguments import check_flag, completed_by
from pycollect.data.layout import Key
from pycollect.driver.delivery import put
from pycollect.driver.flow import Part
from pycollect.driver.options import warn_of_rounding
from pycollect.driver.stream import Finished
from pycollect.errors import is_interrupt
from pycollect.worker.options import POST

_ENV_INDEX = "env_index"
_OWN_VERSION = ("collector", "policy_version")


@completed_by(MultiaSyncDataCollector)
class AsyncBatchedCollector(MultiaSyncDataCollector):
    """Collect in worker processes with central inference, by TorchRL's arguments.

    This is a :class:`MultiaSyncDataCollector` with ``inference="central"``. A batch joins rollouts
    of any workers, in the order in which they become ready. Arguments that only select an
    implementation in TorchRL have no effect.

    Args:
        create_env_fn: A list with one entry per environment. An entry is a callable that returns an
            environment, a Gymnasium id, or an environment that can be pickled.
        policy: A TensorDictModule, or an nn.Module or callable that takes tensors. The inference
            server has a copy, and gets changed weights before each batch (default: ``None``).
        policy_factory: Callable without arguments that returns the policy in the inference server.
            Replaces `policy`; one of the two is required (default: ``None``).
        frames_per_batch: Number of frames in a batch of all workers. It is rounded up to whole
            rollouts, with a warning.
        max_batch_size: Maximum number of environments in a policy call. ``None`` means 64 (default:
            ``None``).
        min_batch_size: Minimum number of environments in a policy call. ``None`` lets the server
            decide from the measured times of calls and steps (default: ``None``).
        server_timeout: Maximum number of seconds that a policy call waits for more requests.
            ``None`` means 0.01 with `min_batch_size`, otherwise no limit (default: ``None``).
        transport: ``None``, "auto" or "driver", all of which use shared memory (default: ``None``).
        device: Device on which the policy is called. Defaults to ``None``: the device of its
            parameters.
        backend, env_backend, policy_backend: ``None``, "threading" or "multiprocessing", all of
            which use processes (default: ``None``).
        env_exchange: Accepted without effect (default: "auto").
        envs_per_worker: Number of environments per process, which are stepped one after the other
            (default: 1).
        transition_chunk_size: Number of steps in a rollout. "auto" gives each environment an equal
            share of a batch, but at least 64 steps and at most a whole batch (default: "auto").
        replay_buffer: Object with an ``extend`` method. Batches are written to it, and the iterator
            yields ``None``. Defaults to ``None``: batches are returned.
        post_collect_hook: Function that this process calls with each batch, after `postproc`
            (default: ``None``).
        yield_completed_trajectories: Return one complete trajectory at a time, [F] (default:
            ``False``).
        weight_sync: WeightSyncScheme of TorchRL that receives weights from a sender in another
            process (default: ``None``).
        weight_sync_model_id: Model of `weight_sync` (default: "policy").
        verbose: Accepted without effect; see `stats()` (default: ``False``).
        create_env_kwargs: Keyword arguments for the callables of `create_env_fn`: a dict, or a list
            with one dict per environment (default: ``None``).
        worker_affinity: CPUs of each process: a list of lists, or a function of the worker's
            number. Defaults to ``None``: unchanged.
        driver_affinity: Must be ``None``; call ``os.sched_setaffinity`` instead.
        server_config: TorchRL's InferenceServerConfig, or an object with its attributes. It
            replaces `max_batch_size`, `min_batch_size` and `server_timeout` (default: ``None``).
        device_config: TorchRL's InferenceDeviceConfig, which replaces `device` (default: ``None``).
        policy_version: First value of `policy_version` (default: 0).
        policy_version_key: Key of the policy version that acted in each frame; ``None`` omits the
            entry (default: "policy_version").
        env_groups: With 2, a process steps one half of its `envs_per_worker` environments while the
            policy acts for the other half (default: 1).
        ...: See MultiaSyncDataCollector.

    Yields:
        TensorDicts, [frames_per_batch]. A batch contains rollouts of [T], each of a single
        environment, one after the other. In addition to the entries of other collectors,
        "env_index" is the index into `create_env_fn` of each frame's environment. Single
        trajectories have it only if `envs_per_worker` is 1.
    """

    @explained
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
        max_policy_lag: int | None = None,
        env_groups: int = 1,
    ) -> None:
        if policy is None and policy_factory is None:
            raise TypeError("policy: expected a policy or a policy_factory, got neither")
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
            trajs_per_write=1 if trajectories and replay_buffer is not None else None,
            traj_format="cat" if trajectories else "padded",
            drop_uncollected=not trajectories,
            update_after_each_batch=policy is not None,
            track_policy_version=policy_version_key is not None,
            weight_recv_schemes=receiver(weight_sync_model_id, weight_sync),
            inference="central",
            max_policy_lag=max_policy_lag,
            env_groups=env_groups,
            **server,
        )
        self.set_post_collect_hook(hook)
        warn_of_rounding(frames, self.frames_per_batch)

    @property
    def frames_per_batch(self) -> int:
        """Number of frames in a full batch, after rounding up."""
        return self._chunks.batch_frames

    requested_frames_per_batch = frames_per_batch

    @property
    def policy_version(self) -> int:
        """Number of weight updates, counted from the argument `policy_version`."""
        return self._first_version + super().policy_version

    @property
    def server_backend(self) -> str:
        """Kind of the inference server: always "process"."""
        return "process"

    def server_stats(self, *, reset: bool = False) -> dict[str, Any]:
        """Return the state of the inference server.

        Args:
            reset: Accepted without effect (default: ``False``).

        Returns:
            A dict with "pid", "restarts" and "failure", a description of the last failure or
            ``None``.
        """
        server: dict[str, Any] = self.stats()["server"]
        return server

    def _pass_hook_on(self, name: str, hook: Callable[..., Any] | None) -> None:
        """Pass the hook to the workers, except `post_collect_hook`, which runs in this process."""
        if name != POST:
            super()._pass_hook_on(name, hook)

    def __len__(self) -> int:
        """Return the total number of batches, including delivered ones, if every batch is full."""
        return -(-super().__len__() // self._chunks.number)

    def _deliver_frames(self) -> bool:
        """Finish a batch from the rollouts that became ready first."""
        self._gather()
        with self._delivering() as counted:
            with Uninterrupted():
                parts = self._flow.take_parts()
                self._count(_frames_of(parts), counted)
            with self._flow.statistics.timed("deliver"):
                td = self._finish(self._joined(parts), {}, counted)
                self._count_lags(parts)
                self._ready.append(Finished(td, counted))
        self._show_progress(sum(counted.values()))
        return True

    def _fill_with_rollouts(self) -> None:
        """Write a batch of the rollouts that became ready first to the replay buffer."""
        self._gather()
        with self._writing() as write:
            with Uninterrupted():
                parts = self._flow.take_parts()
                frames_of = _frames_of(parts)
                write.expect(frames_of)
            put(self._finish(self._joined(parts), {}, frames_of), self.replay_buffer)
            write.count(frames_of)
            self._count_lags(parts)

    def _count_lags(self, parts: Sequence[Part]) -> None:
        for frames_of, versions, _ in parts:
            self._flow.count_lag(versions, frames_of)

    def _gather(self) -> None:
        """Collect rollouts until a batch is full or no more are due.

        If collecting fails, rollouts that are already complete form a batch; the next call raises.
        """
        flow = self._flow
        while len(self._fresh_parts()) < self._chunks.number:
            held = sum(_frames_of(flow.parts).values())
            if held and not flow.more_needed and flow.ledger.in_flight == held:
                return
            flow.check_not_closed()
            try:
                batch, td = self._assemble(flow.uploads)
            except Exception as error:
                if flow.parts and not is_interrupt(error):
                    return
                raise
            with Uninterrupted():
                flow.claim()
                flow.parts.append((batch.frames_of, batch.versions, td))

    def _fresh_parts(self) -> Sequence[Part]:
        """Return the rollouts of the batch so far, without those that have become too old."""
        flow = self._flow
        stale = [part for part in flow.parts if flow.is_stale(part[1])]
        if stale:
            with Uninterrupted():
                flow.parts = [part for part in flow.parts if not any(part is old for old in stale)]
                for frames_of, *_ in stale:
                    self._lose_stale(frames_of)
        return flow.parts

    def _joined(self, parts: Sequence[Part]) -> TensorDictBase:
        """Concatenate rollouts to [N]; the frames of an environment stay adjacent."""
        flat = []
        for frames_of, _, td in parts:
            (worker,) = frames_of
            envs = td.shape[0] if td.ndim > 1 else 1
            frames = td.reshape(-1) if td.ndim > 1 else td
            place = frames.get(("next", "done")).device
            entries = torch.arange(envs, device=place).clamp_(max=self._envs_per_worker - 1)
            index = entries.repeat_interleave(td.shape[-1])  # a vector environment is one entry
            flat.append(frames.copy().set(_ENV_INDEX, worker * self._envs_per_worker + index))
        return torch.cat(flat, 0)

    def _finish(
        self, td: TensorDictBase, host: Mapping[Key, torch.Tensor], frames_of: Mapping[Any, int]
    ) -> TensorDictBase:
        """Add "env_index" and the policy version, and call the hook."""
        if self._flow.queue is not None and self._envs_per_worker == 1:
            (worker,) = frames_of
            place = td.get(("next", "done")).device
            td = td.copy().set(_ENV_INDEX, torch.full(td.shape, worker, device=place))
        if self._version_key is not None:
            version = td.get(_OWN_VERSION) + self._first_version
            td = td.exclude(_OWN_VERSION).set(self._version_key, version)
        td = super()._finish(td, host, frames_of)
        if self.post_collect_hook is not None:
            self.post_collect_hook(td)
        return td


def _frames_of(parts: Sequence[Part]) -> Counter[int]:
    total: Counter[int] = Counter()
    for frames_of, *_ in parts:
        total.update(frames_of)
    return total
