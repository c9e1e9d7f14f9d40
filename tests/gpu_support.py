"""The device of the tests for GPUs: "cuda" on a machine that has it, otherwise "cpu".

On the CPU these tests compare the CPU with itself. A pass there shows that the test's own code
runs, so that no test fails on its first GPU because of itself. `stand_in_device` is another device
for them. Tests that use streams, graphs, pinned memory or the core's driver need a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if "stand_in_device" in sys.modules:  # a plugin of this run
    DEVICE = "standin"
else:
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs an NVIDIA GPU")
needs_device = pytest.mark.skipif(DEVICE == "cpu", reason="needs a device beside the CPU")


def counting_envs(device: str) -> Any:
    """Three of TorchRL's counting environments that lie on that device.

    Their `to` leaves tensors behind, so they are made there.
    """
    from torchrl.testing.mocking_classes import CountingBatchedEnv

    with torch.device(device):
        return CountingBatchedEnv(batch_size=[3], max_steps=torch.tensor([3, 1, 4]), device=device)


def counting_env(device: str, size: tuple[int, ...] = (3,)) -> Any:
    """TorchRL's counting environment on that device; its `to` moves all of it."""
    from torchrl.testing.mocking_classes import CountingEnv

    return CountingEnv(batch_size=size, max_steps=3).to(device)


def tensors_of(env: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a TorchRL environment without children holds: attributes and buffers."""
    for value in [*vars(env).values(), *env.buffers()]:
        if isinstance(value, torch.Tensor):
            yield value
