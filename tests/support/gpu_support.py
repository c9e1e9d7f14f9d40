"""The device of the GPU tests: "cuda" if available, otherwise "cpu".

Without a GPU these tests compare the CPU with itself. A pass shows only that the test code runs.
`stand_in_device` is another device for them. Tests that use streams, graphs, pinned memory or the
core's driver need a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if "stand_in_device" in sys.modules:  # loaded as a pytest plugin
    DEVICE = "standin"
else:
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs an NVIDIA GPU")
needs_device = pytest.mark.skipif(DEVICE == "cpu", reason="needs a device other than the CPU")


def counting_envs(device: str) -> Any:
    """Return three of TorchRL's counting environments on this device.

    They are created there, because their `to` does not move all tensors.
    """
    from torchrl.testing.mocking_classes import CountingBatchedEnv

    with torch.device(device):
        return CountingBatchedEnv(batch_size=[3], max_steps=torch.tensor([3, 1, 4]), device=device)


def counting_env(device: str, size: tuple[int, ...] = (3,)) -> Any:
    """Return TorchRL's counting environment on this device; its `to` moves all tensors."""
    from torchrl.testing.mocking_classes import CountingEnv

    return CountingEnv(batch_size=size, max_steps=3).to(device)


def tensors_of(env: Any) -> Iterator[torch.Tensor]:
    """Return all attributes and buffers of a childless TorchRL environment that are tensors."""
    for value in [*vars(env).values(), *env.buffers()]:
        if isinstance(value, torch.Tensor):
            yield value
