"""The arguments of a stream of batches, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from pycollect import checks as check
from pycollect.arguments import REQUIRED, argument, flag, made_of
from pycollect.batch.cast import ObservationCast
from pycollect.errors import warn_user
from pycollect.stream.weight_ways import WeightWays


@dataclass(frozen=True)
class StreamOptions:
    """What concerns the stream, whoever collects."""

    frames_per_batch: int = argument(REQUIRED, check.check_positive, "frames in one batch")
    total_frames: int | None = argument(-1, check.check_total_frames, "None: without an end")
    init_random_frames: int = argument(
        None, check.check_count, "random actions until so many were issued", in_kwargs=True
    )
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = argument(
        None, check.check_callable, "is called with each batch; its result is delivered"
    )
    split_trajs: bool = flag(False, "one row per trajectory")
    drop_uncollected: bool = argument(
        False,
        check.check_drop,
        "batches are flat, without cells that nothing was collected into",
        beside=("split_trajs", "trajs_per_batch"),
    )
    trajs_per_batch: int = argument(None, check.check_count, "0: batches are of frames")
    trajs_per_write: int = argument(
        None,
        check.check_count,
        "of trajectories that go to a replay buffer, how many at a time; 0: all that are complete",
    )
    form: str = argument(
        "padded",
        check.check_form,
        "of whole trajectories: rows, or one after the other",
        name="traj_format",
        beside=("trajs_per_batch",),
    )
    track_traj_ids: bool = flag(True, "batches have the ids", in_kwargs=True)
    replay_buffer: Any = argument(None, check.check_replay_buffer, "where batches go; None: none")
    extend_buffer: bool = flag(True, "its items are rows; False: single steps", in_kwargs=True)
    progress: bool = flag(False, "show a bar")
    cast: ObservationCast | None = made_of(
        ObservationCast.checked,
        "what becomes of observations; None: they stay as they are",
        observation_dtype=None,
        observation_scale=None,
        in_kwargs=True,
    )
    ways: WeightWays = made_of(
        WeightWays.checked,
        "how the policy comes by new weights",
        weight_updater=None,
        weight_sync_schemes=None,
        weight_recv_schemes=None,
        track_policy_version=False,
        worker_idx=None,
    )


def warn_of_rounding(asked: int, real: int, among: str = "environments") -> None:
    """Warn about the real size of batches if it is not `asked`, since all of `among` share it."""
    if asked != real:
        warn_user(
            f"frames_per_batch: {asked} is not divisible by the number of {among}; "
            f"batches have {real} frames"
        )
