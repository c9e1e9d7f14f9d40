"""The collector that runs in the calling process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from pycollect import checks as check
from pycollect._core import Uninterrupted
from pycollect.arguments import checked
from pycollect.collectors.arguments import workers as parse
from pycollect.collectors.arguments.devices import check_devices
from pycollect.collectors.arguments.given import Given, takes
from pycollect.collectors.arguments.names import check_others
from pycollect.collectors.choice import Choosing, check_none_chosen
from pycollect.envs import check_entry
from pycollect.envs.info import AskedInfo
from pycollect.policy import build
from pycollect.stream.collector import CollectorBase
from pycollect.stream.delivery import assembled, finished
from pycollect.stream.flow import Flow
from pycollect.stream.in_process import InProcess
from pycollect.stream.options import StreamOptions
from pycollect.worker.one_worker import OneWorker
from pycollect.worker.options import WorkerOptions
from pycollect.worker.worker import Worker


def _arguments(
    create_env_fn: Any,
    policy: Any = None,
    *,
    frames_per_batch: int,
    total_frames: int | None = -1,
    device: Any = None,
    storing_device: Any = None,
    env_device: Any = None,
    policy_device: Any = None,
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    autoreset_mode: Any = None,
    final_observation: Literal["unknown"] | None = None,
    env_groups: int = 1,
    info_keys: AskedInfo | None = None,
    max_frames_per_traj: int | None = None,
    init_random_frames: int | None = None,
    reset_at_each_iter: bool = False,
    set_truncated: bool = False,
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
    policy_state: Mapping[Any, Any] | None = None,
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
    split_trajs: bool = False,
    drop_uncollected: bool = False,
    trajs_per_batch: int | None = None,
    trajs_per_write: int | None = None,
    traj_format: str | None = "padded",
    exploration_type: InteractionType | str = InteractionType.RANDOM,
    track_traj_ids: bool = True,
    track_policy_version: bool = False,
    replay_buffer: Any = None,
    extend_buffer: bool = True,
    init_fn: Callable[[], Any] | None = None,
    pre_collect_hook: Callable[[], Any] | None = None,
    post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
    compact_obs: bool = False,
    compile_policy: bool | Mapping[str, Any] | None = None,
    cudagraph_policy: bool | Mapping[str, Any] | None = None,
    trust_policy: bool | None = None,
    observation_dtype: Any = None,
    observation_scale: Any = None,
    num_threads: int | None = None,
    progress: bool = False,
    num_collectors: int | None = None,
    sync: bool | None = None,
    backend: str | None = None,
    backend_options: Mapping[str, Any] | None = None,
    weight_updater: Any = None,
    weight_sync_schemes: Mapping[str, Any] | None = None,
    weight_recv_schemes: Mapping[str, Any] | None = None,
    **others: Any,
) -> None:
    """Define the signature of SyncDataCollector."""


class SyncDataCollector(CollectorBase, OneWorker, metaclass=Choosing):
    """Collect batches in the calling process.

    The policy is the caller's own object, so an optimizer step changes the next action. It is
    copied only if `policy_device` is not its own device.

    `num_collectors` and `backend` return a collector of another class instead, whose workers run in
    other processes.

    Args:
        create_env_fn: A callable that returns an environment, a Gymnasium id or an environment. A
            list of callables or ids makes a batch of P environments, which are stepped one after
            the other. Environments are Gymnasium's (also vector environments), PettingZoo's,
            TorchRL's or compiled ones. The agents of a PettingZoo environment form groups, for
            example ``("agent", "observation")`` of shape ``[..., agents, *observation]``.
        policy: A TensorDictModule, or an nn.Module or callable that takes tensors. ``None`` samples
            random actions (default: ``None``).
        frames_per_batch: Number of frames in a batch. It is rounded up to a multiple of P, with a
            warning.
        total_frames: Stop after at least this many frames. ``None`` or a negative number collects
            forever (default: -1).
        device: Default for `storing_device`, `env_device` and `policy_device`. With ``None``, each
            of these has the default described below (default: ``None``).
        storing_device: Device of the returned batches, and the value of ``td.device``. Defaults to
            `device`; if that is ``None``, batches stay on the environment's device.
        env_device: Device of the environments. Defaults to `device`; if that is ``None``, they stay
            on their own device. Environments that return NumPy arrays always run on the CPU, and
            their batches go to this device.
        policy_device: Device on which the policy is called. Defaults to `device`; if that is
            ``None``, the device of its parameters.
        create_env_kwargs: Keyword arguments for the callables of `create_env_fn` (default:
            ``None``).
        autoreset_mode: Autoreset mode of a vector environment whose metadata does not contain one:
            "NEXT_STEP", "SAME_STEP", "DISABLED" or Gymnasium's enum. Defaults to ``None``: the mode
            in the metadata.
        final_observation: "unknown" for a vector environment that resets in the same step and does
            not return the last observation of an episode, as many simulators on GPUs. The entry
            ("next", "observation_valid"), bool [P, T, 1], is then False in frames whose ("next",
            "observation") belongs to the next episode. Defaults to ``None``: an error names the
            environment when such an episode ends.
        env_groups: With 2, one half of the environments steps while the policy acts for the other
            half. `create_env_fn` is called once per half, or is a list of two callables. Each call
            returns a vector environment that steps in other threads or processes, such as
            AsyncVectorEnv, EnvPool or AtariVectorEnv. P counts the environments of both halves.
            With ``inference="central"``, the environments may also step in their worker, and a
            longer list is cut in two (default: 1).
        info_keys: Entries of Gymnasium's ``info`` to record under "next": strings, or tuples for
            nested dicts. A number or numeric array in the first step becomes a tensor, which is
            zero in steps without that entry. Other entries become NonTensorData, which is ``None``
            in steps without them. An entry that the first step lacks also becomes NonTensorData,
            with a warning. To record it as a tensor, pass a dict of dtypes,
            ``{("episode", "r"): torch.float32}``; it is a scalar if the first step lacks it. A
            warning names entries that no step of the first episode has. An integer that does not
            fit its dtype is an error. Defaults to ``None``: nothing is recorded.
        max_frames_per_traj: Truncate and reset a trajectory after this many steps, and record
            "step_count". ``None`` or 0 sets no limit (default: ``None``).
        init_random_frames: Take random actions until this many frames have been requested; items
            already in the replay buffer count (default: ``None``).
        reset_at_each_iter: Reset all environments at the start of every rollout (default:
            ``False``).
        set_truncated: Set the truncated flag of each environment's last frame in every rollout
            (default: ``False``).
        policy_factory: Callable without arguments that returns the policy. Replaces `policy`
            (default: ``None``).
        policy_state: Recurrent states of the policy by key: the shape for one environment, or the
            first value. Needed only if no primer and no LSTM, GRU or RNN layer of the policy
            defines them (default: ``None``).
        postproc: Function that is called with each batch; its result is returned instead (default:
            ``None``).
        split_trajs: Return one padded row per trajectory; see :func:`split_trajectories` (default:
            ``False``).
        drop_uncollected: Return flat batches [N] that contain only the cells marked in
            ("collector", "mask") (default: ``False``).
        trajs_per_batch: Return batches of this many complete trajectories. Unfinished ones stay in
            memory, so set `max_frames_per_traj` if episodes may never end. With `replay_buffer`,
            every batch still collects `frames_per_batch` frames. All trajectories that it completes
            go to the buffer, flat, whatever their number. ``None`` returns batches of frames
            (default: ``None``).
        trajs_per_write: With `trajs_per_batch` and `replay_buffer`, number of trajectories per
            write to the buffer. ``None`` writes all at once (default: ``None``).
        traj_format: With `trajs_per_batch`, layout of a batch: "padded" is [N, T] with a mask,
            "cat" is [F], one trajectory after the other (default: "padded").
        exploration_type: How actions are drawn from the policy: DETERMINISTIC, RANDOM, MODE or
            MEAN, as an ExplorationType or its name (default: RANDOM).
        track_traj_ids: Record ("collector", "traj_ids") (default: ``True``).
        track_policy_version: Record ("collector", "policy_version"). TorchRL's PolicyVersion is
            also accepted, and is incremented with each weight update (default: ``False``).
        replay_buffer: Object with an ``extend`` method. Batches are written to it, and the iterator
            yields ``None``. Defaults to ``None``: batches are returned.
        extend_buffer: If ``False``, each item of the replay buffer is one step, [] or [P] (default:
            ``True``).
        init_fn: Function without arguments that is called before the environments are made
            (default: ``None``).
        pre_collect_hook: Function without arguments that is called before each batch is collected
            (default: ``None``).
        post_collect_hook: Function that is called with each batch before it is returned (default:
            ``None``).
        compact_obs: Omit ("next", key) of observations and recurrent states. The next step's root
            entry is the same, except at the end of a trajectory, whose last observation is lost.
            Rewards and flags are always recorded (default: ``False``).
        compile_policy: Call the policy through ``torch.compile``. A dict contains its arguments,
            and "warmup": the number of calls before compilation, 1 by default (default: ``None``).
        cudagraph_policy: Replay the policy's modules as CUDA graphs. A dict contains "warmup": the
            number of calls before capture, 2 by default. Without CUDA this has no effect, with a
            warning (default: ``None``).
        trust_policy: Call the policy with the TensorDict, whatever the names of its parameters
            (default: ``None``).
        observation_dtype: Cast observations to this dtype (or its name), at the root, under "next"
            and for the policy. A dict casts by observation key. Flags are never cast, and bool and
            complex observations only if the dict names them. Defaults to ``None``: the
            environment's dtypes.
        observation_scale: Multiply observations by this number after the cast, for example 1 / 255
            for images. Integers become float32 if no dtype was given. A dict scales by observation
            key (default: ``None``).
        num_threads: Number of torch threads while collecting. Defaults to ``None``: unchanged.
        progress: Show a progress bar (default: ``False``).
        num_collectors: Number of workers in other processes. The returned collector has another
            class; see `backend`. Each worker has its own entry of `create_env_fn`, or all share the
            same entry (default: ``None``).
        sync: With `num_collectors`, wait for all workers and join their rollouts. If false, each
            rollout is returned as soon as it is ready (default: ``None``).
        backend: Class that is returned. "process": :class:`MultiSyncDataCollector` or
            :class:`MultiaSyncDataCollector`, the default with `num_collectors`. "ray":
            :class:`RayCollector`. "distributed" or "submitit": :class:`DistributedDataCollector`.
            "rpc": :class:`RPCDataCollector`. "direct": this class, the default without
            `num_collectors`.
        backend_options: Further arguments of that class (default: ``None``).
        weight_updater: A WeightUpdaterBase of TorchRL, or a callable that returns one. Each weight
            update calls it instead of sending the weights itself (default: ``None``).
        weight_sync_schemes: Weight sync schemes of TorchRL, by model; only "policy" is allowed.
            With NoWeightSyncScheme, updates change no weights. Other schemes have no effect, with a
            warning (default: ``None``).
        weight_recv_schemes: Weight sync schemes of TorchRL, by model, that receive weights from
            senders in other processes (default: ``None``).
        others: Further arguments of TorchRL's collectors. Hints are accepted and have no effect; an
            argument that cannot be supported raises an error with the reason.

    Yields:
        TensorDicts of batch size [T] for one environment, [P, T] for a batch of P environments.

    Raises:
        TypeError: An argument has the wrong type or an unknown name.
        ValueError: An argument has an invalid value, or two arguments exclude each other.
    """

    _source: InProcess

    @takes(_arguments)
    def __init__(self, given: Given) -> None:
        check_none_chosen(type(self), given)
        check_others(type(self).__name__, given.known, given.others)
        (own,) = parse.of_each_worker(given, 1)
        places = check_devices(own)
        stream = checked(StreamOptions, given)
        frames = stream.frames_per_batch
        options = checked(WorkerOptions, own, frames=frames, devices=places, stays=True)
        flow = Flow(stream)
        (source,), is_ours = parse.policy_sources([own], given["policy"])
        env_kwargs = check.check_env_kwargs(own["create_env_kwargs"])
        entry = _only_entry(given["create_env_fn"])
        parse.check_groups(entry, options.env_groups)
        policy = build(source) if is_ours else source
        self._worker = Worker(0, entry, env_kwargs, policy, options)
        hooks = options.pre_collect_hook, options.post_collect_hook
        super().__init__(flow, InProcess(flow, self._worker, policy, is_ours, hooks[1]), *hooks)

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
            self._flow.check_open()
            with self._flow.policy_stream.between():
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
            RuntimeError: The collector was made with `trajs_per_batch`, whose trajectories would
                lack these frames.
        """
        flow = self._flow
        if flow.queue is not None:
            raise RuntimeError("rollout: not available with trajs_per_batch; use next()")
        with flow.moving:
            flow.check_not_closed()
            return self._within(self._raw)

    def _raw(self) -> TensorDictBase:
        batch, td = self._assembled(self._flow.uploads)
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
        td = assembled(blank, options, self._flow.uploads)
        return finished(td, options, blank.tensors)


def _only_entry(create_env_fn: Any) -> Any:
    """Return the worker's entry: ``[a]`` becomes a; ``[a, b]`` and ``[[a, b]]`` are a batch."""
    if isinstance(create_env_fn, (list, tuple)) and len(create_env_fn) == 1:
        create_env_fn = create_env_fn[0]
    return check_entry(create_env_fn)
