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
    """Options of the stream, for all collectors."""

    frames_per_batch: int = argument(REQUIRED, check.check_positive, "Number of frames in a batch.")
    total_frames: int | None = argument(-1, check.check_total_frames, "Minimum number of frames.")
    init_random_frames: int = argument(
        None, check.check_count, "Number of frames with random actions at first.", in_kwargs=True
    )
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = argument(
        None, check.check_callable, "Function that each batch goes through."
    )
    split_trajs: bool = flag(False, "Whether batches have one trajectory per row.")
    drop_uncollected: bool = argument(
        False,
        check.check_drop,
        "Whether batches are flat, without uncollected cells.",
        beside=("split_trajs", "trajs_per_batch"),
    )
    trajs_per_batch: int = argument(None, check.check_count, "Trajectories per batch; 0: frames.")
    trajs_per_write: int = argument(
        None,
        check.check_count,
        "Number of trajectories per write to a replay buffer; 0 for all complete ones.",
    )
    form: str = argument(
        "padded",
        check.check_form,
        'Layout of batches of whole trajectories: "padded" or "cat".',
        name="traj_format",
        beside=("trajs_per_batch",),
    )
    track_traj_ids: bool = flag(True, "Whether batches have trajectory ids.", in_kwargs=True)
    replay_buffer: Any = argument(None, check.check_replay_buffer, "The replay buffer, or None.")
    extend_buffer: bool = flag(
        True, "Whether rollouts are written whole; else as single steps.", in_kwargs=True
    )
    progress: bool = flag(False, "Whether to show a progress bar.")
    cast: ObservationCast | None = made_of(
        ObservationCast.checked,
        "Cast of observations, or None.",
        observation_dtype=None,
        observation_scale=None,
        in_kwargs=True,
    )
    ways: WeightWays = made_of(
        WeightWays.checked,
        "Ways of weight updates.",
        weight_updater=None,
        weight_sync_schemes=None,
        weight_recv_schemes=None,
        track_policy_version=False,
        worker_idx=None,
    )


def warn_of_rounding(asked: int, real: int, among: str = "environments") -> None:
    """Warn if batches have more frames than requested, because `among` share them equally."""
    if asked != real:
        warn_user(
            f"frames_per_batch: {asked} frames cannot be divided equally among the {among}; "
            f"batches have {real} frames"
        )
