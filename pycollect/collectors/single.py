"""The collector that runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    """What a SyncDataCollector takes."""


class SyncDataCollector(CollectorBase, OneWorker, metaclass=Choosing):
    """Collects in this process; the policy is the caller's own, live.

    Args:
        create_env_fn: a callable that returns an environment, an environment, or a list of
            callables that are stepped one after the other as a batch of P envs.
        policy: a TensorDictModule, an nn.Module or callable over tensors, or None for random
            actions.
        frames_per_batch: frames in one batch; rounded up to a multiple of P, with a warning.
        total_frames: a lower bound; None or a negative number: for ever.
        device: for those of the three that follow which are not given.
        storing_device: where batches lie, and what `td.device` says; None: `device`, else where the
            environment does.
        env_device: where environments lie; None: where they are, or `device`. Those that give
            arrays stay on the CPU, whatever is said; their batches go there.
        policy_device: where the policy is called; None: `device`, or where its parameters are.
        create_env_kwargs: keyword arguments of the env callables.
        autoreset_mode: of a vector environment whose metadata does not tell it.
        env_groups: 2: while one half of the environments steps, the policy is called for the other.
            For each half the callable is called (or there is a list of two callables), and returns
            a vector environment that steps elsewhere: Gymnasium's AsyncVectorEnv, an EnvPool, ALE's
            AtariVectorEnv. P is the number of environments of both. Where one policy is called for
            all workers (``inference="central"``), they may step in their worker, too, and a longer
            list is cut in two.
        info_keys: entries of Gymnasium's info (strings, or tuples into nested dicts) to be
            recorded under "next". What the first step shows as a number or an array of numbers is
            a tensor, zeros where an info does not have it; anything else, and what that step does
            not show (with a warning), NonTensorData, None where an info does not have it. As a
            dict to dtypes, ``{("episode", "r"): torch.float32}``: what has one is a tensor in any
            case, of one number where the first step does not show it; a warning names what no info
            had when the environment first ends an episode. An integer that the dtype does not hold
            is an error.
        max_frames_per_traj: truncate and reset after so many steps; adds "step_count".
        init_random_frames: random actions until so many frames were issued.
        reset_at_each_iter: reset all environments at the start of every batch.
        set_truncated: flag the last frame of every env in every batch as truncated.
        policy_factory: called without arguments, returns the policy; instead of `policy`.
        policy_state: shapes of one env (or first values) of the policy's recurrent states by key,
            where neither a primer nor an LSTM, GRU or RNN layer of the policy tells them.
        postproc: called with each batch, its result is delivered.
        split_trajs: deliver one row per trajectory, see :func:`split_trajectories`.
        drop_uncollected: deliver flat batches [N] of the frames alone, without the cells that
            ("collector", "mask") tells of.
        trajs_per_batch: deliver batches of so many complete trajectories. Open ones wait here, in
            memory: where episodes may be endless, `max_frames_per_traj` bounds it. With
            `replay_buffer`, each batch of `frames_per_batch` is collected, and all trajectories
            that it completes go there, flat, whatever the number.
        trajs_per_write: of those, how many at a time; None: all at once.
        traj_format: of these: "padded", [N, T] with a mask, or "cat", one after the other, [F].
        exploration_type: DETERMINISTIC, RANDOM, MODE or MEAN.
        track_traj_ids: False: leave out ("collector", "traj_ids").
        track_policy_version: add ("collector", "policy_version").
        replay_buffer: anything with ``extend``: what is collected goes there, and the iterator
            yields None.
        extend_buffer: False: its items are single steps, [] or [P].
        init_fn: called without arguments before the environments are made.
        pre_collect_hook: called without arguments before each batch is collected.
        post_collect_hook: called with each batch that is about to be delivered.
        compact_obs: leave out ("next", key) of observations and recurrent states, which the next
            root has but at a trajectory's end; reward and flags stay.
        compile_policy: call the policy through ``torch.compile``; a dict: its arguments, and
            "warmup", the number of calls before (1).
        cudagraph_policy: replay the policy's modules as CUDA graphs; a dict: "warmup", the number
            of calls before (2). It is without effect, with a warning, where there is no CUDA.
        trust_policy: the policy is called with the TensorDict, whatever its parameters are named.
        observation_dtype: of the observations in a batch, root and next, and for the policy,
            instead of the environment's (a dtype or its name); or a dict by observation key. Flags
            and, unless they are named, bool and complex observations stay.
        observation_scale: a number that observations are multiplied by after that cast (float32 for
            integers where no dtype is given): 1 / 255 for frames; or a dict by observation key.
        num_threads: torch threads while it collects; None: as they are.
        progress: show a bar.
        num_collectors: collect in so many workers elsewhere, which makes a collector of another
            class: see `backend`. For each worker `create_env_fn` has an entry, or is repeated.
        sync: of these: wait for all workers and join their rollouts; else first ready, first
            served.
        backend: where these are: "process", a :class:`MultiSyncDataCollector` or
            :class:`MultiaSyncDataCollector` (the default with `num_collectors`), "ray", a
            :class:`RayCollector`, "distributed" or "submitit", a
            :class:`DistributedDataCollector`, "rpc", a :class:`RPCDataCollector`, or "direct", this
            class (the default without).
        backend_options: further arguments of that class.
        weight_updater: a WeightUpdaterBase of TorchRL's, or a callable that makes one: called for
            each update instead of giving the weights itself.
        weight_sync_schemes: TorchRL's, of the "policy" alone: has no effect, with a warning, but
            for a NoWeightSyncScheme, with which updates change no weights.
        weight_recv_schemes: TorchRL's, by model: bring weights from senders elsewhere.
        others: TorchRL's hints are accepted without effect; what is refused says why.

    Yields:
        TensorDicts of batch size [T] for one environment, [P, T] for a batch.
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
        """The frames of a batch, after rounding up."""
        return self._source.batch_frames

    @property
    def _worker_options(self) -> WorkerOptions:
        return self._worker.options

    def reset(self, index: Any = None) -> None:
        """Reset the environments. Rollouts in flight are dropped, where all are reset.

        Args:
            index: of P environments those that are reset, as a tensor of their batch dimensions is
                indexed: an int, several, a slice, a mask. Their open trajectories end, those of the
                others go on. None: all.

        Raises:
            RuntimeError: an index for one environment that is no batch, or for some that cannot be
                reset one by one.
            IndexError: there is no such environment.
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
        """One batch as it was collected: not split, not processed, in no replay buffer.

        It counts as delivered, as every other one.

        Returns:
            A TensorDict, [T] for one environment, [P, T] for a batch.

        Raises:
            RuntimeError: with `trajs_per_batch`, where its frames would be missing in others.
        """
        flow = self._flow
        if flow.queue is not None:
            raise RuntimeError("rollout: expected a collector without trajs_per_batch; use next()")
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
        """Zeros of the shape, the keys and the place of the next batch, without a step.

        With `set_truncated` its last flags are set. Split and processed as every batch.

        Returns:
            A TensorDict, [T] for one environment, [P, T] for a batch, unless it is split.
        """
        options = self._flow.options
        blank = self._source.blank()
        td = assembled(blank, options, self._flow.uploads)
        return finished(td, options, blank.tensors)


def _only_entry(create_env_fn: Any) -> Any:
    """The entry of the only worker: [a] is a, and [[a, b]] is [a, b], a batch, as [a, b] is."""
    if isinstance(create_env_fn, (list, tuple)) and len(create_env_fn) == 1:
        create_env_fn = create_env_fn[0]
    return check_entry(create_env_fn)
