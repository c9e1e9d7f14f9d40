"""What a caller is told who fills a replay buffer in a way that may not be meant."""

from __future__ import annotations

from torch import nn

from pycollect.errors import warn_user
from pycollect.stream.options import StreamOptions


def warn_of_slices(options: StreamOptions, set_truncated: bool) -> None:
    """Warn if slices sampled by done flags would run from one worker's rollout to the next.

    In the buffer, rollouts of several workers follow each other, and few of them end with a done.
    """
    sampler = getattr(options.replay_buffer, "sampler", None)
    by_flags = not getattr(sampler, "_fetch_traj", True)  # a SliceSampler with an end_key
    if by_flags and not options.trajs_per_batch and not set_truncated:
        warn_user(
            "replay_buffer: its sampler finds trajectories by done flags, so it joins rollouts of "
            'different workers that end without one; use traj_key=("collector", "traj_ids"), '
            "trajs_per_batch or set_truncated=True"
        )


def warn_of_training(options: StreamOptions) -> None:
    """Warn if `start` would run modules in the background that the learner may train.

    For example, a value estimator switches off the gradients of its network while it runs.
    """
    postproc = options.postproc
    inside = vars(postproc).values() if isinstance(postproc, nn.Module) else ()
    modules = [one for one in (postproc, *inside) if isinstance(one, nn.Module)]
    if any(own.requires_grad for one in modules for own in one.parameters()):
        warn_user(
            "start: postproc has parameters and runs in a background thread, while this thread may "
            "train them; give postproc copies of trained modules (copy.deepcopy)"
        )
