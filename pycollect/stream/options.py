"""The arguments of a stream of batches, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from pycollect import checks as check
from pycollect.batch.cast import ObservationCast
from pycollect.errors import warn_user
from pycollect.stream.weight_ways import AS_USUAL, WeightWays


@dataclass(frozen=True)
class StreamOptions:
    """What concerns the stream, whoever collects.

    Attributes:
        total_frames: None: without an end.
        init_random_frames: 0: none.
        trajs_per_batch: 0: batches are of frames.
        trajs_per_write: of trajectories that go to a replay buffer, how many at a time; 0: all that
            are complete.
        cast: what becomes of observations; None: they stay as they are.
        ways: how the policy comes by new weights.
    """

    frames_per_batch: int
    total_frames: int | None = None
    init_random_frames: int = 0
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    split_trajs: bool = False
    trajs_per_batch: int = 0
    trajs_per_write: int = 0
    traj_format: str = "padded"
    track_traj_ids: bool = True
    replay_buffer: Any = None
    extend_buffer: bool = True
    progress: bool = False
    cast: ObservationCast | None = None
    ways: WeightWays = AS_USUAL

    @classmethod
    def checked(
        cls,
        *,
        frames_per_batch: Any,
        total_frames: Any,
        init_random_frames: Any,
        postproc: Any,
        split_trajs: Any,
        trajs_per_batch: Any,
        trajs_per_write: Any,
        traj_format: Any,
        track_traj_ids: Any,
        replay_buffer: Any,
        extend_buffer: Any,
        progress: Any,
        observation_dtype: Any = None,
        observation_scale: Any = None,
        ways: WeightWays = AS_USUAL,
    ) -> StreamOptions:
        """Check each; the errors name the argument."""
        return cls(
            frames_per_batch=check.check_positive("frames_per_batch", frames_per_batch),
            total_frames=check.check_total_frames(total_frames),
            init_random_frames=check.check_count("init_random_frames", init_random_frames),
            postproc=check.check_callable("postproc", postproc),
            split_trajs=bool(split_trajs),
            trajs_per_batch=check.check_count("trajs_per_batch", trajs_per_batch),
            trajs_per_write=check.check_count("trajs_per_write", trajs_per_write),
            traj_format=check.check_traj_format(traj_format, trajs_per_batch),
            track_traj_ids=bool(track_traj_ids),
            replay_buffer=check.check_replay_buffer(replay_buffer),
            extend_buffer=bool(extend_buffer),
            progress=bool(progress),
            cast=ObservationCast.checked(observation_dtype, observation_scale),
            ways=ways,
        )


def warn_of_rounding(asked: int, real: int) -> None:
    """Say what a batch really holds, if that is not what was asked for."""
    if asked != real:
        warn_user(
            f"frames_per_batch={asked} is not divisible by the number of environments: "
            f"batches have {real} frames"
        )
