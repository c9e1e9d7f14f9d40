"""The collector that runs in the calling process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tensordict import TensorDictBase

from pycollect import checks as check
from pycollect._core import Uninterrupted
from pycollect.api import arguments as parse
from pycollect.api.arguments import check_devices
from pycollect.api.binding import Arguments
from pycollect.api.choosing import Choosing, check_none_chosen, choose_backend
from pycollect.api.signatures import SyncDataCollectorSignature
from pycollect.arguments import checked, completed_by
from pycollect.compat.one_worker import OneWorker
from pycollect.compat.torchrl import TorchRLCollector
from pycollect.compat.weight_options import WeightOptions
from pycollect.driver.delivery import assemble, finish
from pycollect.driver.flow import Flow
from pycollect.driver.in_process import InProcess
from pycollect.driver.options import StreamOptions
from pycollect.envs.make import check_entry
from pycollect.worker.options import WorkerOptions
from pycollect.worker.worker import Worker


@completed_by()
class SyncDataCollector(
    SyncDataCollectorSignature, TorchRLCollector, OneWorker, metaclass=Choosing
):
    """Collect batches in the calling process.

    The policy is the caller's own object, so an optimizer step changes the next action. It is
    copied only if `policy_device` is not its own device.

    `num_collectors` and `backend` return a collector of another class instead, with workers in
    other processes.

    Args:
        create_env_fn (Any): A callable that returns an environment, a Gymnasium id or an
            environment. A list of callables or ids makes a batch of P environments, which are
            stepped one after the other. Environments are Gymnasium's (also vector environments),
            PettingZoo's, TorchRL's or compiled ones. The agents of a PettingZoo environment form
            groups, for example ``("agent", "observation")`` of shape ``[..., agents,
            *observation]``.
        policy (Any = None): A TensorDictModule, or an nn.Module or callable that takes tensors.
            ``None`` samples random actions.
        device (Any = None): Default for `storing_device`, `env_device` and `policy_device`. With
            ``None``, each of these has the default described below.
        storing_device (Any = None): Device of the returned batches, and the value of ``td.device``.
            Defaults to `device`; if that is ``None``, batches stay on the environment's device.
        env_device (Any = None): Device of the environments. Defaults to `device`; if that is
            ``None``, they stay on their own device. Environments that return NumPy arrays always
            run on the CPU, and their batches go to this device.
        policy_device (Any = None): Device on which the policy is called. Defaults to `device`; if
            that is ``None``, the device of its parameters.
        create_env_kwargs (Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None): Keyword
            arguments for the callables of `create_env_fn`.
        policy_factory (Callable[[], Any] | Sequence[Callable[[], Any]] | None = None): Callable
            without arguments that returns the policy. Replaces `policy`.
        num_collectors (int | None = None): Number of workers in other processes. The returned
            collector has another class; see `backend`. Each worker has its own entry of
            `create_env_fn`, or all share the same entry.
        sync (bool | None = None): With `num_collectors`, wait for all workers and join their
            rollouts. If false, each rollout is returned as soon as it is ready.
        backend (str | None = None): Class that is returned. "process":
            :class:`MultiSyncDataCollector` or :class:`MultiaSyncDataCollector`, the default with
            `num_collectors`. "ray": :class:`RayCollector`. "distributed" or "submitit":
            :class:`DistributedDataCollector`. "rpc": :class:`RPCDataCollector`. "direct": this
            class, the default without `num_collectors`.
        backend_options (Mapping[str, Any] | None = None): Further arguments of that class.
        others: Further arguments of TorchRL's collectors. Hints are accepted and have no effect; an
            argument that cannot be supported raises an error with the reason.

    Yields:
        TensorDicts of batch size [T] for one environment, [P, T] for a batch of P environments.

    Raises:
        TypeError: An argument has the wrong type or an unknown name.
        ValueError: An argument has an invalid value, or two arguments exclude each other.
    """

    _source: InProcess
    _choose = classmethod(choose_backend)

    def _make(self, given: Arguments) -> None:
        check_none_chosen(type(self), given)
        (arguments,) = parse.of_each_worker(given, 1)
        devices = check_devices(arguments)
        stream, weights = checked(StreamOptions, given), checked(WeightOptions, given)
        options = checked(WorkerOptions, arguments, devices=devices, stays=True)
        options = replace(options, frames=stream.frames_per_batch)
        if stream.replay_buffer is not None and not stream.extend_buffer:  # its items are steps
            stream = replace(stream, split_trajs=False)
        flow = Flow(weights.stream(stream))
        (source,), is_factory = parse.policy_sources([arguments], given["policy"])
        env_kwargs = check.check_named("create_env_kwargs", arguments["create_env_kwargs"])
        entry = given["create_env_fn"]
        if isinstance(entry, (list, tuple)) and len(entry) == 1:  # else a list is a batch
            entry = entry[0]
        entry = check_entry(entry)
        parse.check_groups(entry, options.env_groups)
        policy = check.built_policy(source) if is_factory else source
        self._worker = Worker(0, entry, env_kwargs, policy, options)
        hooks = options.pre_collect_hook, options.post_collect_hook
        source = InProcess(flow, self._worker, policy, is_factory, hooks[1])
        TorchRLCollector.__init__(self, flow, source, weights, *hooks)

    @property
    def requested_frames_per_batch(self) -> int:
        """Number of frames in a batch, after rounding up."""
        return self._source.batch_frames

    @property
    def _worker_options(self) -> WorkerOptions:
        return self._worker.options

    def reset(self, index: Any = None) -> None:
        """Reset environments. A full reset also drops rollouts in flight.

        Args:
            index: Which of the P environments to reset: an index into their batch dimension, such
                as an int, a list, a slice or a mask. Their open trajectories end; the others
                continue. ``None`` resets all (default: ``None``).

        Raises:
            RuntimeError: An index was given for a single environment, or the environments cannot be
                reset one by one.
            IndexError: The index is out of range.
        """
        with self._flow.moving:
            self._flow.check_not_collecting("reset")
            self._flow.check_open()
            with self._flow.policy_stream.ordered():
                if index is None:
                    self._drop("reset")
                    self._worker.reset()
                else:
                    self._source.reset(index)

    def rollout(self) -> TensorDictBase:
        """Collect one batch and return it without post-processing.

        The batch is not split, not passed to `postproc` and not written to the replay buffer. Its
        frames count as delivered.

        Returns:
            A TensorDict, [T] for one environment, [P, T] for a batch.

        Raises:
            RuntimeError: The collector assembles complete trajectories (`trajs_per_batch`,
                `replay_write_mode`), which would lack these frames.
        """
        flow = self._flow
        if flow.queue is not None:
            raise RuntimeError(
                "rollout: not available if complete trajectories are assembled; use next()"
            )
        with flow.moving:
            flow.check_not_collecting("rollout")
            flow.check_not_closed()
            return self._within(self._raw)

    def _raw(self) -> TensorDictBase:
        batch, td = self._assemble(self._flow.uploads)
        with self._delivering() as counted, Uninterrupted():
            self._flow.claim()
            self._count(batch.frames_of, counted)
        return td

    def fake_tensordict(self) -> TensorDictBase:
        """Return a batch of zeros with the keys, shapes and device of a real one.

        No environment is stepped. The batch is split and post-processed like a real one. With
        `set_truncated`, its last flags are set.

        Returns:
            A TensorDict, [T] for one environment, [P, T] for a batch, unless `split_trajs` or
            `postproc` changes its shape.
        """
        options = self._flow.options
        blank = self._source.blank()
        td = assemble(blank, options, self._flow.uploads)
        return finish(td, options, blank.tensors)
