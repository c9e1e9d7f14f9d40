"""What a caller is told who fills a replay buffer in a way that may not be meant."""

from __future__ import annotations

from torch import nn

from pycollect.errors import warn_user
from pycollect.stream.options import StreamOptions


def warn_of_slices(options: StreamOptions, set_truncated: bool) -> None:
    """Warn where slices that are sampled by done flags would run from one worker to the next.

    In the buffer, rollouts of several workers follow each other, and few of them end with a done.
    """
    sampler = getattr(options.replay_buffer, "sampler", None)
    by_flags = not getattr(sampler, "_fetch_traj", True)  # a SliceSampler that was given an end_key
    if by_flags and not options.trajs_per_batch and not set_truncated:
        warn_user(
            "replay_buffer: its sampler finds trajectories by their done flags, but rollouts of "
            'several workers follow each other there; use traj_key=("collector", "traj_ids"), '
            "trajs_per_batch or set_truncated=True"
        )


def warn_of_training(options: StreamOptions) -> None:
    """Warn where `start` would run, beside the learner, modules that the learner may train.

    A value estimator, for one, switches off the gradients of its network while it runs.
    """
    postproc = options.postproc
    inside = vars(postproc).values() if isinstance(postproc, nn.Module) else ()
    modules = [one for one in (postproc, *inside) if isinstance(one, nn.Module)]
    if any(own.requires_grad for one in modules for own in one.parameters()):
        warn_user(
            "start: postproc has parameters, and runs in a thread beside this one, which may "
            "train them meanwhile; give it a copy (copy.deepcopy) of what is trained"
        )
