"""Whether what only a batch needs of a policy's outputs stays on the policy's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycollect.scheduler.options import RemoteOptions
from pycollect.scheduler.records import WorkerPlan
from pycollect.stream.options import StreamOptions


def why_nothing_stays(
    device: torch.device,
    plans: Sequence[WorkerPlan],
    stream: StreamOptions,
    options: RemoteOptions,
) -> str:
    """Why all of it comes down to be recorded; empty where it stays until it is delivered there.

    Args:
        device: of the policy, which this process calls for workers.
        plans: of these workers. Those on other nodes, which servers there call it for, have all
            of it recorded in any case.
    """
    places = {plan.spec.options.devices.batch_device for plan in plans}
    hooks = [plan.spec.options.post_collect_hook for plan in plans]
    reasons = {
        "batches lie on the CPU, as the policy does": device.type == "cpu",
        "batches lie on another device than the policy": places != {device},
        "workers do not wait for each other": not options.sync,
        "a hook in the workers is shown whole rollouts": any(hook is not None for hook in hooks),
        "batches are put together of trajectories, on the host": bool(stream.trajs_per_batch),
        "a replay buffer takes rollouts one by one": stream.replay_buffer is not None,
        "uncollected cells are cut out of batches, on the host": options.ragged
        and options.joined != "stack",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
