"""Options of a stream, and of workers in other processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from pycollect import checks as check
from pycollect.arguments import REQUIRED, argument, asked, checked, flag, made_of
from pycollect.data.cast import ObservationCast
from pycollect.data.compression import import_lz4
from pycollect.errors import warn_user


def check_joined(name: str, value: Any, sync: bool) -> str | int | None:
    """Return how sync rollouts are joined, "stack" for None; return None if async.

    Async collectors accept "stack" without effect, because programs choose the class by a flag.
    """
    if not sync:
        if value not in (None, "stack"):
            raise ValueError(
                f"{name}: expected None or 'stack' for an async collector, got {value!r}"
            )
        return None
    choice: str | int = check.check_choice(
        name, "stack" if value is None else value, ("stack", 0, -1)
    )
    return choice


def check_uneven(joined: str | int | None, uneven: bool, batched: bool) -> None:
    """Raise ValueError if rollouts of different lengths cannot be joined."""
    if uneven and batched and joined == 0:
        raise ValueError(
            "cat_results: expected 'stack' or -1, got 0; rollouts of several environments may "
            "differ in length with preemptive_threshold or a list of frames_per_batch"
        )


def check_ahead(name: str, value: Any, sync: bool) -> int:
    """Return the number of rollouts per worker beyond the batch being consumed."""
    if value is None:
        return 0 if sync else 2
    return check.check_not_negative(name, value)


_ROUNDING = 1e-9  # 0.7 * 10 is a little more than 7


@dataclass(frozen=True)
class Preemption:
    """Once enough workers are done, the others stop after their current step."""

    threshold: float  # share of the workers that must be done, 0 to 1
    min_fraction: float = 0.0  # share of its steps that every worker makes

    @classmethod
    def checked(cls, threshold: Any, min_fraction: Any, sync: bool) -> Preemption | None:
        """Check both arguments; return None without preemption."""
        if threshold is None:
            if min_fraction:
                raise ValueError(
                    "min_fraction: expected None without preemptive_threshold, got "
                    f"{min_fraction!r}; pass both or neither"
                )
            return None
        if not sync:
            raise ValueError(
                f"preemptive_threshold: expected None for an async collector, got {threshold!r}; "
                "async collectors never wait for slow workers"
            )
        least = 0.0 if min_fraction is None else min_fraction
        return cls(
            check.check_fraction("preemptive_threshold", threshold),
            check.check_fraction("min_fraction", least),
        )

    def enough(self, workers: int) -> int:
        """Return how many of `workers` must be done."""
        return math.ceil(self.threshold * workers - _ROUNDING)

    def min_steps(self, steps: int) -> int:
        """Return how many of `steps` every worker makes."""
        return max(1, math.ceil(self.min_fraction * steps - _ROUNDING))


def _check_timeout(name: str, value: Any) -> float | None:
    return None if value is None else check.check_seconds(name, value)


def _check_compress(name: str, value: Any) -> bool:
    if value:
        import_lz4(name)
    return bool(value)


@dataclass(frozen=True)
class RemoteOptions:
    """Management of workers in other processes, and the response to failures."""

    sync: bool  # whether a batch needs a rollout of every worker
    built_by_workers: bool = False  # a factory makes the policy in each worker; none is here
    uneven: bool = False  # whether the rollouts of a batch may have different numbers of steps
    padded: bool = False  # rollouts of different lengths all take the space of the longest
    joined: str | int | None = argument(
        None,
        check_joined,
        """How to join the rollouts: "stack" along a new first dimension, or concatenate along
        dimension 0 or -1. ``None`` means "stack".""",
        name="cat_results",
        also=("sync",),
        in_kwargs=True,
    )
    preemption: Preemption | None = made_of(
        Preemption.checked,
        preemptive_threshold=asked(
            None,
            """Share of the workers, 0 to 1, that must finish before the others are stopped after
            their current step. Of B workers, ``ceil(preemptive_threshold * B)`` must finish.
            ``None`` waits for all workers.""",
            accepts="float | None",
        ),
        min_fraction=asked(
            None,
            """With `preemptive_threshold`, share of its T steps that every worker makes before it
            is stopped. Each worker makes at least one step.""",
            accepts="float | None",
        ),
        also=("sync",),
    )
    timeout: float | None = argument(
        None,
        _check_timeout,
        """End and replace a worker that has made no step for this many seconds. ``None`` waits
        forever.""",
        name="worker_timeout",
    )
    ahead: int = argument(
        None,
        check_ahead,
        """Number of rollouts per worker, running or finished, beyond the batch being consumed. A
        batch is at most ``prefetch + 1`` policy versions old, counting the versions that its worker
        received. ``None`` means 0.""",
        name="prefetch",
        also=("sync",),
        in_kwargs=True,
    )
    update_each: bool = made_of(
        lambda *values: any(map(bool, values)),
        update_after_each_batch=asked(
            False,
            "Send the policy's current weights to all workers before each batch is collected.",
        ),
        update_at_each_batch=asked(False, "TorchRL's other name for `update_after_each_batch`."),
    )
    update_interval: int = argument(
        None,
        check.check_count,
        """Send a worker the policy's current weights at the latest after it has returned this many
        batches without an update. ``None`` never sends them automatically.""",
        name="max_weight_update_interval",
    )
    init_timeout: float = argument(
        120.0,
        check.check_seconds,
        """Number of seconds in which a worker must build its environments. Time in which it was
        runnable but other programs had the CPU does not count. A replacement that takes longer
        counts as a death.""",
        name="worker_init_timeout",
    )
    max_restarts: int = argument(
        3,
        check.check_count,
        """Number of times that a worker that died is replaced. A death no longer counts after 100
        delivered batches.""",
        name="max_worker_restarts",
    )
    restart_on_error: bool = flag(
        False, "Also replace a worker whose environment or policy raised an exception."
    )
    compress: bool = argument(
        False,
        _check_compress,
        """Compress rollouts from other nodes by LZ4, tensor by tensor; requires the `lz4` extra.
        Workers on this node share memory.""",
    )
    start_method: str = argument(
        "forkserver",
        partial(check.check_choice, allowed=("forkserver", "spawn")),
        """"forkserver" forks workers from one process per program, which has already imported the
        modules they need. Modules that start threads or open a GPU on import are left to the
        workers. "spawn" starts a new interpreter for each. If forking is impossible, workers are
        spawned, with a warning that names the reason.""",
    )

    @classmethod
    def checked(
        cls,
        given: Mapping[str, Any],
        *,
        sync: bool,
        built_by_workers: bool,
        separate: bool = False,
        uneven: bool = False,
    ) -> RemoteOptions:
        """Check the arguments; errors start with an argument's name.

        Args:
            separate: A replay buffer gets each rollout separately, whatever `cat_results` is.
            uneven: Workers have different shares of a batch.
        """
        options = checked(cls, given, sync=sync, built_by_workers=built_by_workers)
        return replace(
            options,
            joined="stack" if separate and sync else options.joined,
            uneven=sync and (options.preemption is not None or uneven),
        )

    @property
    def ragged(self) -> bool:
        """Whether the rollouts of a batch may take different numbers of steps in it."""
        return self.uneven and not self.padded

    @property
    def masked(self) -> bool:
        """Whether batches record which cells hold a frame, because some may not."""
        return self.uneven and self.joined == "stack"


@dataclass(frozen=True)
class StreamOptions:
    """Options of the stream, for all collectors."""

    frames_per_batch: int = argument(
        REQUIRED,
        check.check_positive,
        "Number of frames in a batch. It is rounded up to a multiple of P, with a warning.",
    )
    total_frames: int | None = argument(
        -1,
        check.check_total_frames,
        "Stop after at least this many frames. ``None`` or a negative number collects forever.",
    )
    init_random_frames: int = argument(
        None,
        check.check_count,
        """Take random actions until this many frames have been requested; items already in the
        replay buffer count.""",
        in_kwargs=True,
    )
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = argument(
        None,
        check.check_callable,
        "Function that is called with each batch; its result is returned instead.",
    )
    split_trajs: bool = flag(
        False, "Return one padded row per trajectory; see :func:`split_trajectories`."
    )
    drop_uncollected: bool = argument(
        False,
        check.check_drop,
        'Return flat batches [N] that contain only the cells marked in ("collector", "mask").',
        also=("split_trajs", "trajs_per_batch", "replay_write_mode"),
    )
    trajs_per_batch: int = argument(
        None,
        check.check_count,
        """Return batches of this many complete trajectories. Unfinished ones stay in memory, so set
        `max_frames_per_traj` if episodes may never end. With `replay_buffer`, every batch still
        collects `frames_per_batch` frames. All trajectories that it completes go to the buffer,
        flat, whatever their number. ``None`` returns batches of frames.""",
    )
    trajs_per_write: int = argument(
        None,
        check.check_trajs_per_write,
        """If complete trajectories go to `replay_buffer`, number of trajectories per write.
        ``None`` writes all at once.""",
        also=("replay_buffer", "trajs_per_batch", "replay_write_mode"),
    )
    replay_write_mode: str | None = argument(
        None,
        check.check_write_mode,
        """With `replay_buffer`, "rollout" writes each rollout as it was collected. "trajectory"
        writes only complete trajectories, flat: each batch collects `frames_per_batch` frames, all
        trajectories that it completes go to the buffer, and unfinished ones stay in memory.
        Excludes `trajs_per_batch`, which selects "trajectory", too. Defaults to ``None``:
        "rollout", or "trajectory" with `trajs_per_batch`.""",
        also=("replay_buffer", "trajs_per_batch"),
    )
    form: str = argument(
        "padded",
        check.check_form,
        """With `trajs_per_batch`, layout of a batch: "padded" is [N, T] with a mask, "cat" is [F],
        one trajectory after the other.""",
        name="traj_format",
        accepts="str | None",
        also=("trajs_per_batch",),
    )
    track_traj_ids: bool = flag(True, 'Record ("collector", "traj_ids").', in_kwargs=True)
    replay_buffer: Any = argument(
        None,
        check.check_replay_buffer,
        """Object with an ``extend`` method. Batches are written to it, and the iterator yields
        ``None``. Defaults to ``None``: batches are returned.""",
    )
    extend_buffer: bool = flag(
        True, "If ``False``, each item of the replay buffer is one step, [] or [P].", in_kwargs=True
    )
    max_policy_lag: int | None = argument(
        None,
        check.check_policy_lag,
        """Maximum number of policy versions by which a frame may be behind when it is taken for
        delivery, before `postproc`, or when it is written to the replay buffer, counted from the
        oldest weights of its rollout. Workers wait rather than start a rollout that could become
        older. If the learner updates more often than before, rollouts that have become too old are
        dropped and counted in `ledger()`. Weights then always go to all workers. ``None``
        sets no limit.""",
        also=("trajs_per_batch", "replay_write_mode"),
    )
    max_frames_per_update: int | None = argument(
        None,
        check.check_pace,
        """With `replay_buffer`, maximum number of frames that `start()` collects per call of
        `update_policy_weights_()`. `init_random_frames` and one more batch (or this number of
        frames, if that is more) are allowed before the first call. ``None`` collects as fast as
        possible.""",
        also=("replay_buffer", "weight_recv_schemes", *check.AUTOMATIC),
    )
    progress: bool = flag(False, "Show a progress bar.")
    cast: ObservationCast | None = made_of(
        ObservationCast.checked,
        observation_dtype=asked(
            None,
            """Cast observations to this dtype (or its name), at the root, under "next" and for the
            policy. A dict casts by observation key. Flags are never cast, and bool and complex
            observations only if the dict names them. Defaults to ``None``: the environment's
            dtypes.""",
        ),
        observation_scale=asked(
            None,
            """Multiply observations by this number after the cast, for example 1 / 255 for images.
            Integers become float32 if no dtype was given. A dict scales by observation key.""",
        ),
        in_kwargs=True,
    )
    sends: bool = True  # whether a weight update changes the workers' weights
    tracker: Any = None  # counts policy versions too, such as TorchRL's PolicyVersion

    @property
    def trajectories(self) -> int:
        """Number of complete trajectories in a batch, at least 1; 0 for batches of frames."""
        return self.trajs_per_batch or int(self.replay_write_mode == "trajectory")


def warn_of_rounding(requested: int, actual: int, among: str = "environments") -> None:
    """Warn if batches have more frames than requested, because `among` share them equally."""
    if requested != actual:
        warn_user(
            f"frames_per_batch: {requested} frames cannot be divided equally among the {among}; "
            f"batches have {actual} frames"
        )
