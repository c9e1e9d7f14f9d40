"""The memory that a worker records from, and the room that it records into."""

from __future__ import annotations

import os

import numpy as np
import torch

from pycollect._core import Placement, copy
from pycollect.batch.frame import BatchLeaves, NoLeaves
from pycollect.batch.layout import Key, torch_dtype
from pycollect.devices import CPU
from pycollect.envs.base import Arrays, EnvBatch


def placement_of(leaves: BatchLeaves | NoLeaves, envs: int, steps: int) -> Placement:
    """Return the placement of a rollout; ValueError if it is larger than this machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        placement = Placement(leaves.layout(), 1, envs, steps)
    except ValueError as error:  # of the slab's size, in bytes
        raise ValueError(f"frames_per_batch: {envs * steps} frames: {error}") from None
    if placement.bytes > memory:
        raise ValueError(
            f"frames_per_batch: {envs * steps} frames take {placement.bytes} bytes, but this "
            f"machine has {memory}; use a smaller frames_per_batch"
        )
    return placement


def current_tensors(env: EnvBatch) -> dict[Key, torch.Tensor]:
    """Memory for the current observation, [*obs] for one env, [P, *obs] for a batch.

    Where the env is for what stays there, else on the CPU, whatever torch's default device is.
    """
    batch = (env.num_envs,) if env.batched else ()
    return {
        leaf.key: torch.zeros(
            (*batch, *leaf.shape),
            dtype=torch_dtype(leaf.dtype),
            device=env.device if leaf.key in env.staying else CPU,
        )
        for leaf in env.observation
    }


def fill(current: dict[Key, torch.Tensor], observation: Arrays) -> None:
    """Write an observation into that memory."""
    arrays = observation if isinstance(observation, tuple) else (observation,)
    for tensor, array in zip(current.values(), arrays, strict=False):  # step_only leaves follow
        if tensor.device.type != "cpu":
            tensor.copy_(array)
        else:
            copy(tensor, array if isinstance(array, torch.Tensor) else np.asarray(array))
