"""The arguments of a stream of batches, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from pycollect import checks as check
from pycollect.arguments import REQUIRED, argument, asked, flag, made_of
from pycollect.batch.cast import ObservationCast
from pycollect.errors import warn_user


@dataclass(frozen=True)
class StreamOptions:
    """Options of the stream, for all collectors.

    Attributes:
        sends: Whether a weight update changes the workers' weights.
        tracker: Object that counts policy versions too, such as TorchRL's PolicyVersion, or None.
    """

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
        False,
        "Return one padded row per trajectory; see :func:`split_trajectories`.",
    )
    drop_uncollected: bool = argument(
        False,
        check.check_drop,
        'Return flat batches [N] that contain only the cells marked in ("collector", "mask").',
        also=("split_trajs", "trajs_per_batch"),
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
        check.check_count,
        """With `trajs_per_batch` and `replay_buffer`, number of trajectories per write to the
        buffer. ``None`` writes all at once.""",
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
    track_traj_ids: bool = flag(
        True,
        'Record ("collector", "traj_ids").',
        in_kwargs=True,
    )
    replay_buffer: Any = argument(
        None,
        check.check_replay_buffer,
        """Object with an ``extend`` method. Batches are written to it, and the iterator yields
        ``None``. Defaults to ``None``: batches are returned.""",
    )
    extend_buffer: bool = flag(
        True,
        "If ``False``, each item of the replay buffer is one step, [] or [P].",
        in_kwargs=True,
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
    sends: bool = True
    tracker: Any = None


def warn_of_rounding(asked: int, real: int, among: str = "environments") -> None:
    """Warn if batches have more frames than requested, because `among` share them equally."""
    if asked != real:
        warn_user(
            f"frames_per_batch: {asked} frames cannot be divided equally among the {among}; "
            f"batches have {real} frames"
        )
